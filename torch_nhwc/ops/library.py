"""Where the compiled operator library is, what it was built for, and how it is loaded."""

import json
from pathlib import Path
from typing import TypedDict

import torch

PACKAGE = Path(__file__).parent.parent.resolve()
REBUILD = "`pip install --no-build-isolation .` in the sources of torch_nhwc"


class BuildInfo(TypedDict):
    """What the library was built with. The versions are the tools' own descriptions of themselves."""

    torch: str
    cuda: str | None
    cuda_architectures: str | None
    cxx_compiler: str
    cuda_compiler: str | None
    python: str
    platform: str


def library_path() -> Path:
    """Return the path of the operator library.

    Linking it, `dlopen` or `torch.ops.load_library` registers the operators; the library needs no Python.

    Raises:
        ImportError: The library was never built.

    Example:
        >>> torch_nhwc.cpp_extension.library_path().suffix
        '.so'
    """
    for path in PACKAGE.glob("libtorch_nhwc*.so"):
        return path
    raise ImportError(f"torch_nhwc's operator library is not built: type {REBUILD}")


def build_info() -> BuildInfo:
    """Return what the library was built with.

    Raises:
        ImportError: The library was never built.

    Example:
        >>> torch_nhwc.cpp_extension.build_info()["torch"].split("+")[0] == torch.__version__.split("+")[0]
        True
    """
    library_path()
    info: BuildInfo = json.loads((PACKAGE / "build_info.json").read_text())
    return info


def load() -> None:
    """Register the operators of `torch.ops.nhwc`.

    Raises:
        ImportError: The library was built for another torch than the imported one.
    """
    built = build_info()
    # Builds of one version differ after the plus sign, which matters only to a library with CUDA code.
    same_version = built["torch"].split("+")[0] == torch.__version__.split("+")[0]
    same_cuda = built["cuda"] in (None, torch.version.cuda)
    if not (same_version and same_cuda):
        with_cuda = "" if same_cuda else f" with CUDA {built['cuda']}"
        install = "" if same_version else f"`pip install torch=={built['torch'].split('+')[0]}`, or "
        raise ImportError(
            f"torch_nhwc was built for torch {built['torch']}{with_cuda}, but torch {torch.__version__} is imported "
            f"here: type {install}{REBUILD}"
        )
    torch.ops.load_library(library_path())  # type: ignore[no-untyped-call, unused-ignore]
