"""Find the CUDA toolkit, for setup.py and the tests."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from torch.utils import cpp_extension

# One of each generation, as torch writes them: code for 8.0 serves 8.6 and 8.9, that for 10.0 not the 12.0 of desktops.
ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0", "12.0")


def find_cuda_toolkit() -> Path | None:
    """Return the toolkit's root, the folder with bin/nvcc and include/cuda_runtime.h, or None.

    The first one counts of CUDA_HOME, what torch found, what nvcc says of itself, and the usual place.
    """
    candidates = [os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME]
    nvcc = shutil.which("nvcc")
    if nvcc:
        # nvcc on the path may be a wrapper in another place; its dry run names the real root.
        dry_run = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
        candidates += re.findall(r"^#\$ TOP=(.*)$", dry_run.stderr, flags=re.MULTILINE)
    candidates.append("/usr/local/cuda")
    for candidate in filter(None, candidates):
        root = Path(candidate).resolve()
        if (root / "bin/nvcc").exists() and (root / "include/cuda_runtime.h").exists():
            return root
    return None


def known_architectures(toolkit: Path) -> str:
    """Return the value of TORCH_CUDA_ARCH_LIST that compiles for all that a toolkit can, with PTX for later ones."""
    command = [toolkit / "bin/nvcc", "--list-gpu-arch"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return ";".join(each for each in ARCHITECTURES if f"compute_{each.replace('.', '')}" in listed) + "+PTX"
