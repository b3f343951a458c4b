"""The compiled operator library: where it is, what it was built for, and loading it."""

import json
from pathlib import Path
from typing import TypedDict

import torch

PACKAGE = Path(__file__).parent.resolve()
REBUILD = "`pip install --no-build-isolation .` in the sources of torch_nhwc"


class BuildInfo(TypedDict):
    """What the library was built with. Versions are those that the tools call themselves."""

    torch: str
    cuda: str | None
    cuda_architectures: str | None
    cxx_compiler: str
    cuda_compiler: str | None
    python: str
    platform: str


def library_path() -> Path:
    """Finds the operator library's file.

    Linking it, `dlopen` or `torch.ops.load_library` makes the operators known; it needs no Python.

    Raises:
        ImportError: it was never built.

    Example:
        >>> torch_nhwc.library_path().suffix
        '.so'
    """
    for path in PACKAGE.glob("libtorch_nhwc*.so"):
        return path
    raise ImportError(f"torch_nhwc's operator library is not built: type {REBUILD}")


def build_info() -> BuildInfo:
    """Tells what the library was built with.

    Example:
        >>> torch_nhwc.build_info()["torch"].split("+")[0] == torch.__version__.split("+")[0]
        True
    """
    library_path()
    info: BuildInfo = json.loads((PACKAGE / "build_info.json").read_text())
    return info


def load() -> None:
    """Makes `torch.ops.nhwc` known to PyTorch.

    Raises:
        ImportError: the library was built for another torch than the one imported here.
    """
    built = build_info()
    # Builds of one version differ after the plus sign; only a library with CUDA code cares for that part.
    same_version = built["torch"].split("+")[0] == torch.__version__.split("+")[0]
    same_cuda = built["cuda"] in (None, torch.version.cuda)
    if not (same_version and same_cuda):
        with_cuda = "" if same_cuda else f" with CUDA {built['cuda']}"
        raise ImportError(
            f"torch_nhwc was built for torch {built['torch']}{with_cuda}, but torch {torch.__version__} is imported "
            f"here: type {REBUILD}"
        )
    torch.ops.load_library(library_path())  # type: ignore[no-untyped-call, unused-ignore]
