"""Build the operator library against the torch of the running interpreter. pyproject.toml has the metadata.

Environment:
    TORCH_NHWC_CUDA: 1 builds the CUDA sources and fails where that is impossible, 0 leaves them out. Unset, they are
        built when torch was built for CUDA and a toolkit is found.
    TORCH_NHWC_WERROR: 1 makes a compiler's warnings errors, as `make lint` and CI do. Unset or 0, an installation does
        not fail because a newer compiler has a new warning.
    CUDA_HOME: The CUDA toolkit, if it is not found automatically.
    TORCH_CUDA_ARCH_LIST: As everywhere with torch. Unset and without a visible GPU, the architectures of
        tools/cuda_toolkit.py that the toolkit supports.
    TORCH_NHWC_LABEL: 1 adds the torch's version to the package's as a local label, and requires that version, as `make
        wheel` does. Wheels for two versions of torch then have two names.
    MAX_JOBS: The number of compilers that run at a time.
"""

import copy
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "torch_nhwc is built against the torch you use, and this build sees none: "
        "type `pip install torch==2.13.0 setuptools ninja && pip install --no-build-isolation .`"
    )

from torch.utils import cpp_extension

ROOT = Path(__file__).parent.resolve()
FOLDERS_OF_MANY = ("cpu", "ops", "convolution")
sys.path.insert(0, str(ROOT / "tools"))

from cuda_toolkit import find_cuda_toolkit, known_architectures  # noqa: E402


def switch(name: str, on: str, off: str) -> str:
    """Return the value of an environment variable that is "1", "0" or unset (empty)."""
    choice = os.environ.get(name, "").strip()
    if choice not in ("", "0", "1"):
        sys.exit(f"{name} is 1 ({on}) or 0 ({off}), got {choice!r}")
    return choice


def wants_cuda(home: Path | None) -> bool:
    choice = switch("TORCH_NHWC_CUDA", "with CUDA", "without")
    possible = torch.version.cuda is not None and home is not None
    if choice == "1" and not possible:
        missing = "this torch was built without CUDA" if torch.version.cuda is None else "no CUDA toolkit was found"
        sys.exit(f"TORCH_NHWC_CUDA=1, but {missing}: install a CUDA build of torch and set CUDA_HOME to the toolkit")
    return possible and choice != "0"


def cuda_architectures(toolkit: Path) -> str:
    """Return the value for TORCH_CUDA_ARCH_LIST, without which torch fails where no GPU is visible."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not chosen and torch.cuda.is_available():
        chosen = ";".join(
            sorted({"{}.{}".format(*torch.cuda.get_device_capability(d)) for d in range(torch.cuda.device_count())})
        )
    return chosen or known_architectures(toolkit)


def first_line(*command: str) -> str:
    """Return a tool's own description of its version, or why it cannot be run."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError as error:
        return str(error)
    return next((line for line in lines if "release" in line), lines[0] if lines else "unknown")


HAS_LABEL = switch("TORCH_NHWC_LABEL", "the version names the torch", "it does not") == "1"
HOME = find_cuda_toolkit()
WITH_CUDA = wants_cuda(HOME)
WARNINGS_ARE_ERRORS = switch("TORCH_NHWC_WERROR", "warnings are errors", "they are not") == "1"
if WITH_CUDA:
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(HOME)
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_architectures(HOME)


class BuildExtension(cpp_extension.BuildExtension.with_options(use_ninja=True)):
    """torch's, with a folder of objects for each kind of build, and a record of the build next to the library."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Wheels, editable and in-place builds share objects. Builds with other flags do not: each would undo the other.
        flavour = ("cuda" if WITH_CUDA else "cpu") + ("-werror" if WARNINGS_ARE_ERRORS else "")
        self.build_temp = str(ROOT / "build" / f"objects-torch-{torch.__version__}-{flavour}")

    def build_extension(self, ext) -> None:
        """Compile the sources of a folder as one: alone, each would take most of its time for torch's headers."""
        units, groups = [], {name: [] for name in (*FOLDERS_OF_MANY, "others")}
        for source in map(Path, ext.sources):
            folder = source.parent.name
            # A source for one instruction set chooses it for all that follows.
            if source.suffix == ".cu" or folder == "isa":
                units.append(str(source))
            else:
                groups[folder if folder in groups else "others"].append(source)
        for name, sources in groups.items():
            unit = Path(os.path.relpath(self.build_temp), f"{name}.cpp")
            text = "".join(f'#include "{source.relative_to("csrc")}"\n' for source in sources)
            if not unit.exists() or unit.read_text() != text:
                unit.parent.mkdir(parents=True, exist_ok=True)
                unit.write_text(text)
            units.append(str(unit))
        ext = copy.copy(ext)  # the sources of an sdist stay what they are
        ext.depends, ext.sources = ext.sources, units
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        record = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda if WITH_CUDA else None,
            "cuda_architectures": os.environ["TORCH_CUDA_ARCH_LIST"] if WITH_CUDA else None,
            "cxx_compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
            "cuda_compiler": first_line(str(HOME / "bin/nvcc"), "--version") if WITH_CUDA else None,
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        package = ROOT if self.inplace else Path(self.build_lib)
        target = package / "torch_nhwc" / "build_info.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=2) + "\n")


class EggInfo(egg_info):
    """setuptools', with the label, which as an option would lose to the setup.cfg that every sdist has."""

    def finalize_options(self) -> None:
        if HAS_LABEL:
            self.tag_build = f"+torch{torch.__version__.replace('+', '.')}"  # PEP 440 allows one plus sign
        super().finalize_options()


def extension():
    # As system directories, so that the compiler warns of our sources alone.
    headers = cpp_extension.include_paths("cuda" if WITH_CUDA else "cpu")
    system = [flag for folder in headers for flag in ("-isystem", folder)]
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if WARNINGS_ARE_ERRORS else [])]
    other = ROOT / "csrc" / ("no_cuda" if WITH_CUDA else "cuda")
    sources = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "csrc").rglob("*.c*"))
        if path.suffix in (".cpp", ".cu") and path.parent != other
    ]
    flags = {"cxx": ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fopenmp", *warnings, *system]}
    kind = cpp_extension.CppExtension
    if WITH_CUDA:
        kind = cpp_extension.CUDAExtension
        flags["nvcc"] = ["-std=c++20", "-O3", "-Xcompiler", ",".join([*warnings, "-fvisibility=hidden"]), *system]
        if WARNINGS_ARE_ERRORS:
            flags["nvcc"] += ["--Werror", "all-warnings"]
    return kind(
        "torch_nhwc.libtorch_nhwc",
        sources,
        include_dirs=[str(ROOT / "torch_nhwc/include"), str(ROOT / "csrc")],
        extra_compile_args=flags,
        # Without a soname of its own, linkers and CMake would not take the library by its path.
        extra_link_args=["-s", "-fopenmp", "-Wl,-soname,libtorch_nhwc.abi3.so"],
        py_limited_api=True,
    )


setup(
    install_requires=[f"torch=={torch.__version__.split('+')[0]}" if HAS_LABEL else "torch>=2.11"],
    license="BSD-3-Clause",  # here, because the form in pyproject.toml changed between versions of setuptools
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension, "egg_info": EggInfo},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
