"""What other C++ needs to include the public headers, for `torch.utils.cpp_extension.load_inline` and build scripts."""

from torch_nhwc.library import PACKAGE

cmake_prefix_path = str(PACKAGE / "share" / "cmake")
"""For CMAKE_PREFIX_PATH, beside `torch.utils.cmake_prefix_path`: `find_package(torch_nhwc)` looks here."""


def include_paths() -> list[str]:
    """Names the folders for `extra_include_paths`: there lie `torch_nhwc/filter_transpose.h` and `torch_nhwc/ops.h`.

    Example:
        >>> (pathlib.Path(torch_nhwc.include_paths()[0]) / "torch_nhwc/ops.h").exists()
        True
    """
    return [str(PACKAGE / "include")]


def extra_cflags() -> list[str]:
    """Gives the flags for `extra_cflags`: the filter transpose wants optimisation, which the default build leaves out.

    Example:
        >>> torch_nhwc.extra_cflags()
        ['-O3']
    """
    return ["-O3"]


def extra_cuda_cflags() -> list[str]:
    """Gives the flags for `extra_cuda_cflags`.

    Example:
        >>> torch_nhwc.extra_cuda_cflags()
        ['-O3']
    """
    return ["-O3"]
