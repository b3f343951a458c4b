"""What other C++ needs to include the public headers, for `torch.utils.cpp_extension.load_inline` and build scripts."""

from torch_nhwc.ops.library import PACKAGE, BuildInfo, build_info, library_path

__all__ = [
    "BuildInfo",
    "build_info",
    "cmake_prefix_path",
    "extra_cflags",
    "extra_cuda_cflags",
    "include_paths",
    "library_path",
]

cmake_prefix_path = str(PACKAGE / "share" / "cmake")
"""The folder for `CMAKE_PREFIX_PATH` in which `find_package(torch_nhwc)` looks, next to torch's own."""


def include_paths() -> list[str]:
    """Return the folders for `extra_include_paths`, which hold `torch_nhwc/filter_transpose.h` and `torch_nhwc/ops.h`.

    Example:
        >>> (pathlib.Path(torch_nhwc.cpp_extension.include_paths()[0]) / "torch_nhwc/ops.h").exists()
        True
    """
    return [str(PACKAGE / "include")]


def extra_cflags() -> list[str]:
    """Return the flags for `extra_cflags`: the filter transpose needs optimisation, which is off by default.

    Example:
        >>> torch_nhwc.cpp_extension.extra_cflags()
        ['-O3']
    """
    return ["-O3"]


def extra_cuda_cflags() -> list[str]:
    """Return the flags for `extra_cuda_cflags`.

    Example:
        >>> torch_nhwc.cpp_extension.extra_cuda_cflags()
        ['-O3']
    """
    return ["-O3"]
