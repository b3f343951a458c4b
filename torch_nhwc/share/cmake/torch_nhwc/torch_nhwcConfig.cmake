# Finds LibTorch and defines the target torch_nhwc::torch_nhwc: the operator library and its headers.
get_filename_component(torch_nhwc_PACKAGE "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
file(GLOB torch_nhwc_LIBRARY "${torch_nhwc_PACKAGE}/libtorch_nhwc*.so")
if(NOT torch_nhwc_LIBRARY)
  set(torch_nhwc_FOUND FALSE)
  set(torch_nhwc_NOT_FOUND_MESSAGE
      "torch_nhwc's operator library is not built: type `pip install --no-build-isolation .` in its sources")
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(Torch)

# LibTorch's binary interface changes with every version; the part after the plus sign does not matter here.
file(READ "${torch_nhwc_PACKAGE}/build_info.json" torch_nhwc_BUILD_INFO)
string(JSON torch_nhwc_TORCH_VERSION GET "${torch_nhwc_BUILD_INFO}" torch)
string(REGEX REPLACE "[+].*" "" torch_nhwc_TORCH_VERSION "${torch_nhwc_TORCH_VERSION}")
if(NOT Torch_VERSION VERSION_EQUAL torch_nhwc_TORCH_VERSION)
  set(torch_nhwc_FOUND FALSE)
  set(torch_nhwc_NOT_FOUND_MESSAGE
      "torch_nhwc was built for torch ${torch_nhwc_TORCH_VERSION}, but LibTorch ${Torch_VERSION} was found")
  return()
endif()

if(NOT TARGET torch_nhwc::torch_nhwc)
  add_library(torch_nhwc::torch_nhwc SHARED IMPORTED)
  set_target_properties(
    torch_nhwc::torch_nhwc
    PROPERTIES
      IMPORTED_LOCATION "${torch_nhwc_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${torch_nhwc_PACKAGE}/include"
      INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}"
      # The headers need no symbol of the library, so a linker would drop it, and with it the operators.
      INTERFACE_LINK_OPTIONS "LINKER:--push-state,--no-as-needed,${torch_nhwc_LIBRARY},--pop-state")
  # The C++ standard that torch's own headers need, which its package does not set.
  if(Torch_VERSION VERSION_LESS 2.12)
    set_property(TARGET torch_nhwc::torch_nhwc PROPERTY INTERFACE_COMPILE_FEATURES cxx_std_17)
  else()
    set_property(TARGET torch_nhwc::torch_nhwc PROPERTY INTERFACE_COMPILE_FEATURES cxx_std_20)
  endif()
endif()
