# The version is that of the headers, which promise that a version replaces older ones of the same major version, and
# before 1.0 of the same minor version.
file(READ "${CMAKE_CURRENT_LIST_DIR}/../../../include/torch_nhwc/version.h" header)
foreach(part IN ITEMS MAJOR MINOR PATCH)
  string(REGEX MATCH "TORCH_NHWC_VERSION_${part} ([0-9]+)" match "${header}")
  set(${part} ${CMAKE_MATCH_1})
endforeach()
set(PACKAGE_VERSION "${MAJOR}.${MINOR}.${PATCH}")

if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
if(NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION
   AND PACKAGE_FIND_VERSION_MAJOR EQUAL MAJOR
   AND (MAJOR GREATER 0 OR PACKAGE_FIND_VERSION_MINOR EQUAL MINOR))
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
