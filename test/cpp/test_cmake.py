"""find_package(torch_nhwc): its versions, and its errors."""

import json
import subprocess
from pathlib import Path

import cmake_build
import pytest
import torch

import torch_nhwc as nhwc

PACKAGE = Path(nhwc.__file__).parent
MINOR, _, _ = nhwc.__version__.rpartition(".")


def configure(folder, *arguments, package=PACKAGE):
    """Configure a project that looks for the package and prints the version that it found."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\n"
        "project(looking LANGUAGES CXX)\n"
        f"find_package(torch_nhwc {' '.join(arguments)} REQUIRED)\n"
        'message(STATUS "found version ${torch_nhwc_VERSION}")\n'
    )
    prefixes = [torch.utils.cmake_prefix_path, str(package / "share/cmake")]
    command = cmake_build.configure(folder, folder / "build", prefixes)
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout + " ".join(run.stderr.split())  # which CMake wraps


@pytest.mark.parametrize("arguments", [[], [MINOR], [nhwc.__version__, "EXACT"]], ids=" ".join)
def test_the_version_is_the_packages(arguments, tmp_path):
    assert f"found version {nhwc.__version__}\n" in configure(tmp_path, *arguments)


@pytest.mark.parametrize("version", ["99.0", f"{MINOR}.99", f"{nhwc.__version__}.1"])
def test_a_later_version_is_not_found(version, tmp_path):
    output = configure(tmp_path, version)
    assert f"torch_nhwcConfig.cmake, version: {nhwc.__version__}" in output
    assert "found version" not in output


def test_a_library_for_another_torch_ends_in_one_sentence_naming_both(package_copy, tmp_path):
    record = package_copy / "build_info.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"torch": "2.99.0+cpu"}))
    here = torch.__version__.split("+")[0]
    assert f"torch_nhwc was built for torch 2.99.0, but LibTorch {here} was found" in configure(
        tmp_path, package=package_copy
    )


def test_a_package_without_its_library_says_what_to_type(package_copy, tmp_path):
    for library in package_copy.glob("libtorch_nhwc*.so"):
        library.unlink()
    output = configure(tmp_path, package=package_copy)
    assert "operator library is not built: type `pip install --no-build-isolation .`" in output
