"""Wheels, installations, and the errors of builds and imports."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from selection import some_of

import torch_nhwc as nhwc

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the sources, with the objects of the last build."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, env=os.environ | {"TORCH_NHWC_LABEL": "1"})
    (path,) = folder.glob("*.whl")
    return path


def test_one_wheel_serves_every_python_and_names_its_torch(wheel):
    version = f"{nhwc.__version__}+torch{torch.__version__.replace('+', '.')}"
    assert wheel.name.startswith(f"torch_nhwc-{version}-cp310-abi3-linux")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {version}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert f"\nRequires-Dist: torch=={torch.__version__.split('+')[0]}\n" in metadata
    for name in ("libtorch_nhwc.abi3.so", "build_info.json", "py.typed", "include/torch_nhwc/ops.h"):
        assert f"torch_nhwc/{name}" in names
    assert not [name for name in names if name.startswith(("test", "csrc", "benchmarks", "tools"))]


def test_an_installed_wheel_works_outside_of_the_sources(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site_packages,) = tmp_path.glob("venv/lib/python3*/site-packages")
    python = tmp_path / "venv/bin/python"
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", site_packages, wheel], check=True)
    torchs = {str(Path(module.__file__).parent.parent) for module in (torch, pytest)}
    (site_packages / "torch.pth").write_text("\n".join(torchs))
    script = f"""
import pathlib, torch, torch_nhwc
assert pathlib.Path(torch_nhwc.__file__).is_relative_to({str(tmp_path)!r})
assert torch_nhwc.convert_weight(torch.randn(4, 3, 3, 3)).stride() == (27, 1, 9, 3)
(folder,) = torch_nhwc.cpp_extension.include_paths()
assert pathlib.Path(folder, "torch_nhwc", "filter_transpose.h").exists()
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, "-c", script], check=True, cwd=tmp_path, env=environment)


@pytest.mark.exhaustive
def test_an_audited_wheel_runs_on_many_systems_and_brings_no_library_of_torch(wheel, tmp_path):
    pytest.importorskip("auditwheel")
    # `make wheel` says which libraries are left out.
    (options,) = re.findall(r"^wheel:.*?auditwheel repair .*?\\\n(.*?)\n", (ROOT / "Makefile").read_text(), re.S | re.M)
    command = [sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", tmp_path, *shlex.split(options)]
    subprocess.run(command, check=True)
    (audited,) = tmp_path.glob("*-cp310-abi3-manylinux_*.whl")
    libraries = [name for name in zipfile.ZipFile(audited).namelist() if ".so" in name]
    assert libraries == ["torch_nhwc/libtorch_nhwc.abi3.so"]


def test_an_sdist_has_all_that_a_build_needs(tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "egg_info",
        "--egg-base",
        tmp_path,
        "sdist",
        "--dist-dir",
        tmp_path,
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    (sdist,) = tmp_path.glob(f"torch?nhwc-{nhwc.__version__}.tar.gz")  # by the version of setuptools
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [ROOT / name for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "tools/cuda_toolkit.py")]
    needed += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    needed += [path for path in (ROOT / "torch_nhwc").rglob("*") if path.suffix in (".py", ".h", ".cmake", ".typed")]
    assert not {str(path.relative_to(ROOT)) for path in needed} - names


def import_copy(package):
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", "import torch_nhwc"]
    return subprocess.run(command, capture_output=True, text=True, cwd=package.parent, env=environment)


@pytest.mark.parametrize(("key", "other"), [("torch", "2.99.0"), ("cuda", "99.9")])
def test_a_library_for_another_torch_ends_in_one_sentence_naming_both(package_copy, key, other):
    record = package_copy / "build_info.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {key: other}))
    run = import_copy(package_copy)
    assert ("type `pip install torch==2.99.0`, or" in run.stderr) == (key == "torch")
    built = other if key == "torch" else f"{nhwc.cpp_extension.build_info()['torch']} with CUDA {other}"
    assert (
        run.stderr.strip()
        .splitlines()[-1]
        .startswith(
            f"ImportError: torch_nhwc was built for torch {built}, but torch {torch.__version__} is imported here: type"
        )
    )


def test_a_package_without_its_library_says_what_to_type(package_copy):
    for library in package_copy.glob("libtorch_nhwc*.so"):
        library.unlink()
    run = import_copy(package_copy)
    assert "operator library is not built: type `pip install --no-build-isolation .`" in run.stderr


def run_setup(folder, **environment):
    command = [sys.executable, "setup.py", "--name"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | environment)


def test_a_build_that_sees_no_torch_says_what_to_type(tmp_path):
    # As in an isolated build: an interpreter with setuptools and without torch.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    run = run_setup(ROOT, PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == (
        "torch_nhwc is built against the torch you use, and this build sees none: "
        "type `pip install torch==2.13.0 setuptools ninja && pip install --no-build-isolation .`"
    )


PRINT_FLAGS = """
import os, runpy, setuptools
setuptools.setup = lambda **options: print(options["ext_modules"][0].extra_compile_args)
for os.environ["TORCH_NHWC_WERROR"] in ("", "0", "1"):
    runpy.run_path("setup.py")
"""


def test_a_warning_ends_a_build_only_where_that_is_requested():
    command = [sys.executable, "-c", PRINT_FLAGS]
    flags = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    assert all("-Wall" in each for each in flags)
    assert ["error" in each.lower() for each in flags] == [False, False, True]


@pytest.mark.exhaustive
def test_the_cuda_switch_is_checked():
    run = run_setup(ROOT, TORCH_NHWC_CUDA="yes")
    assert "TORCH_NHWC_CUDA is 1 (with CUDA) or 0 (without), got 'yes'" in run.stderr
    if torch.version.cuda is None:
        run = run_setup(ROOT, TORCH_NHWC_CUDA="1")
        assert "TORCH_NHWC_CUDA=1, but this torch was built without CUDA" in run.stderr
    assert run_setup(ROOT, TORCH_NHWC_CUDA="0").returncode == 0


@pytest.mark.parametrize(
    ("listed", "architectures"),
    [("80 86 89 90", "8.0;9.0+PTX"), ("75 80 90 100 120", "7.5;8.0;9.0;10.0;12.0+PTX"), ("90 100 103", "9.0;10.0+PTX")],
)
def test_without_a_gpu_the_toolkit_says_what_to_compile_for(listed, architectures, tmp_path, monkeypatch):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\ntest "$1" = --list-gpu-arch && printf "compute_%s\\n" {listed}\n')
    nvcc.chmod(0o755)
    monkeypatch.syspath_prepend(ROOT / "tools")
    from cuda_toolkit import known_architectures

    assert known_architectures(tmp_path) == architectures


WITHOUT_ENSUREPIP = """
import importlib.util, runpy
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "ensurepip" else find_spec(name, *package)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("has_ensurepip", some_of([True, False], False))
def test_an_environment_without_a_network_takes_what_is_there_and_names_what_is_missing(has_ensurepip, tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace("test = [", 'test = ["of-our-own-invention>=3",', 1))
    script = str(tmp_path / "tools/make_environment.py")
    program = [script] if has_ensurepip else ["-c", WITHOUT_ENSUREPIP.format(script=script)]
    environment = os.environ | {"PIP_NO_INDEX": "1"}

    def run(*command):
        return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)

    made = run(sys.executable, *program, tmp_path / "venv")
    assert made.returncode == 0, made.stderr
    others = r"(, dynamic-network-architectures>=0\.4)?"  # where it is not there already
    left_out = rf"going on without of-our-own-invention>=3{others}: pip does not find them here\n\Z"
    assert re.search(left_out, made.stderr)
    python, requirements = tmp_path / "venv/bin/python", tmp_path / "tools/requirements.py"
    assert run(python, "-c", "import torch, pytest; print(torch.__version__)").stdout.strip() == torch.__version__
    assert (tmp_path / "venv/bin/pip").exists() == has_ensurepip
    assert run(python, requirements, "lint").returncode == 0
    failed = run(python, requirements, "test")
    assert failed.returncode == 1
    assert failed.stderr.endswith("missing: of-our-own-invention>=3: make it again where pip finds them\n")


def test_an_environment_for_another_torch_than_the_interpreter_has_is_refused(tmp_path):
    command = [sys.executable, ROOT / "tools/make_environment.py", tmp_path / "venv", "--torch", "2.0.0"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert f" has torch {torch.__version__}, not 2.0.0: name a Python without torch by PYTHON=" in run.stderr
    assert not (tmp_path / "venv").exists()
