"""Make the virtual environment that the Makefile works in.

A torch that the running interpreter can import is used as it is, whatever its build, with everything else that the
interpreter has; one of another version than --torch is refused. Otherwise torch is installed. tools/requirements.py
installs what is missing.
"""

import argparse
import importlib.util
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DEFAULT = "2.13.0"


def installed_torch() -> str | None:
    try:
        import torch  # noqa: F401  importable, not only listed

        return version("torch")
    except (ImportError, PackageNotFoundError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", help=f"version that is needed, not any; {DEFAULT} is installed where there is none")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    python = folder / "bin" / "python"
    torch = installed_torch()
    if torch and arguments.torch not in (None, torch, torch.partition("+")[0]):
        sys.exit(f"{sys.executable} has torch {torch}, not {arguments.torch}: name a Python without torch by PYTHON=")

    if not python.exists():
        # Some systems ship venv without ensurepip; the pip of the running interpreter serves as well.
        venv.create(folder, with_pip=importlib.util.find_spec("ensurepip") is not None, symlinks=True)
    if torch is not None:
        # Not --system-site-packages: that shows the base interpreter's packages even when this one is itself a venv.
        site_packages = next(folder.glob("lib/python3*/site-packages"))
        outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site_packages / "outer.pth").write_text("\n".join(outer) + "\n")

    (folder / "constraints.txt").write_text(f"torch=={torch or arguments.torch or DEFAULT}\n")
    requirements = Path(__file__).with_name("requirements.py")
    sys.exit(subprocess.run([python, requirements, "--optional", "test", "lint"]).returncode)


if __name__ == "__main__":
    main()
