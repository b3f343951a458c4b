"""Install what the project needs into the environment of the running interpreter, and name what cannot be found.

That is torch, what builds the library, and our own extras: those that are named must be complete; of those after
--optional, what pip finds is enough, as on a machine without a network. Installed packages stay as they are.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

BUILD_REQUIREMENTS = ["torch", "setuptools>=64", "wheel", "ninja>=1.11"]
# nnU-Net's networks, for the tests; what they require brings torchvision, which nothing here needs.
WITHOUT_DEPENDENCIES = {"test": ["dynamic-network-architectures>=0.4"]}
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements_of(extras: Iterable[str]) -> list[str]:
    """Return the requirements of our own extras, without installing the package itself."""
    table = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    requirements: list[str] = []
    for extra in extras:
        for requirement in table[extra]:
            if requirement.startswith("torch-nhwc["):
                requirements += requirements_of(requirement[len("torch-nhwc[") : -1].split(","))
            else:
                requirements.append(requirement)
    return requirements


def missing(requirements: Iterable[str]) -> list[str]:
    def is_installed(text: str) -> bool:
        requirement = Requirement(text)
        try:
            return requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            return False

    return [requirement for requirement in dict.fromkeys(requirements) if not is_installed(requirement)]


def pip_install(requirements: list[str], *options: str, is_silent: bool = False) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    constraints = str(Path(sys.prefix) / "constraints.txt")
    subprocess.run([*pip, "--constraint", constraints, *requirements], capture_output=is_silent)


def install(requirements: list[str]) -> list[str]:
    """Install requirements, and return those that cannot be found."""
    pip_install(requirements)  # which says itself why it fails
    # pip installs all or nothing, and what it does not find must not keep the others away.
    for requirement in missing(requirements):
        pip_install([requirement], "--retries", "0", "--timeout", "5", is_silent=True)
    return missing(requirements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", help="extras that must be complete")
    parser.add_argument("--optional", nargs="*", default=[], help="extras of which what pip finds is enough")
    arguments = parser.parse_args()
    needed = BUILD_REQUIREMENTS + requirements_of(arguments.extras)
    left = install(needed + requirements_of(arguments.optional))
    for extra in {*arguments.extras, *arguments.optional} & WITHOUT_DEPENDENCIES.keys():
        for requirement in missing(WITHOUT_DEPENDENCIES[extra]):
            pip_install([requirement], "--no-deps", "--retries", "0", "--timeout", "5", is_silent=True)
        left += missing(WITHOUT_DEPENDENCIES[extra])
    if missing(needed):
        sys.exit(f"missing: {', '.join(missing(needed))}: make it again where pip finds them")
    if left:
        print(f"going on without {', '.join(left)}: pip does not find them here", file=sys.stderr)


if __name__ == "__main__":
    main()
