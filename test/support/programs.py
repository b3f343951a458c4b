"""Packages of programs that need a torchvision, which not every torch has: the extra `programs`."""

import importlib
import os

import pytest

PROGRAMS = "nnunetv2", "timm", "torchvision", "ultralytics"


def imported(package):
    """Import a package; without it the test is skipped, or fails where `TORCH_NHWC_REQUIRE_PROGRAMS` is 1."""
    if os.environ.get("TORCH_NHWC_REQUIRE_PROGRAMS") == "1":
        return importlib.import_module(package)
    return pytest.importorskip(package)
