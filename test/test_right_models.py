"""Whole networks in training on small inputs: converted, every gradient is right, where PyTorch's are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import right_models
from right_models import NETWORKS
from selection import exhaustive

FAST = "DynUNet"
OTHERS = [name for name in NETWORKS if name not in (FAST, "convolution")]


def errors(names, way, *dtypes):
    """Return the errors of each network's gradients, which one process finds whose fresh memory holds garbage."""
    script = Path(right_models.__file__)
    path = os.pathsep.join([str(script.parent), *sys.path])
    variables = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": path}
    command = [sys.executable, script, ",".join(names), way, "0", *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return [[float(each) for each in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("names", [[FAST], exhaustive(OTHERS)], ids=["one network", "the others"])
def test_gradients_of_converted_networks(names):
    found = errors(names, "converted", "float32", "bfloat16")
    for name, (in_float32, in_bfloat16) in zip(names, found, strict=True):
        assert in_float32 < 1e-4, name
        assert in_bfloat16 < 2 * NETWORKS[name].reference, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["convolution", "DynUNet of 4 levels"])
def test_gradients_of_a_network_that_is_converted_and_compiled(name):
    """The script asserts that inductor gets no operator of ours but those by kernels."""
    ((in_bfloat16,),) = errors([name], "compiled", "bfloat16")
    assert in_bfloat16 < 2 * NETWORKS[name].reference
