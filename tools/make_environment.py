"""Makes the virtual environment that the Makefile works in.

A torch that the running interpreter can import is used as it is, whatever its build, and no other one is downloaded.
Otherwise the version named by --torch is installed.
"""

import argparse
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUILD_REQUIREMENTS = ["setuptools>=64", "wheel", "ninja>=1.11"]


def installed_torch() -> str | None:
    try:
        import torch  # noqa: F401  importable, not only listed

        return version("torch")
    except (ImportError, PackageNotFoundError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", required=True, help="version to install where there is none")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    python = folder / "bin" / "python"

    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    torch = installed_torch()
    if torch is not None:
        # Not --system-site-packages: that shows the base interpreter's packages even when this one is itself a venv.
        site_packages = next(folder.glob("lib/python3*/site-packages"))
        outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site_packages / "outer.pth").write_text("\n".join(outer) + "\n")

    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch or arguments.torch}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    subprocess.run([*pip, "torch", *BUILD_REQUIREMENTS], check=True)
    subprocess.run([*pip, *extras("test", "lint")], check=True)


def extras(*names: str) -> list[str]:
    """The requirements of our own extras, without installing the package itself."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    table = project["optional-dependencies"]
    requirements: list[str] = []
    for name in names:
        for requirement in table[name]:
            if requirement.startswith("torch-nhwc["):
                requirements += extras(*requirement[len("torch-nhwc[") : -1].split(","))
            else:
                requirements.append(requirement)
    return requirements


if __name__ == "__main__":
    main()
