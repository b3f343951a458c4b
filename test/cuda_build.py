"""What C++ programs need beside torch where the library was built for CUDA."""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def toolkit():
    """The CUDA toolkit that setup.py would use, or None."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from cuda_toolkit import find_cuda_toolkit
    finally:
        sys.path.pop(0)
    return find_cuda_toolkit()


def library(name):
    """A CUDA library by its name, from the toolkit or from the packages that torch brings along."""
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for root in filter(None, (toolkit(), packages)):
        for path in sorted(root.rglob(f"lib{name}.so*")):
            return path
    return None


def environment():
    """The environment for programs: a linked library's own needs are not found by the program's search path."""
    folders = [Path(torch.__file__).parent / "lib"]
    if torch.version.cuda:
        folders.append(library("cudart").parent)
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
