"""Whole networks in training on small inputs: converted, every gradient is right, where PyTorch's are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import right_models
from right_models import NETWORKS
from selection import exhaustive, some_of

FAST = "DynUNet"


def errors(name, way, *dtypes):
    """Return the errors of gradients that a process finds whose fresh memory holds garbage."""
    script = Path(right_models.__file__)
    path = os.pathsep.join([str(script.parent), *sys.path])
    variables = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": path}
    command = [sys.executable, script, name, way, "0", *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(each) for each in done.stdout.split()]


@pytest.mark.parametrize("name", some_of([name for name in NETWORKS if name != "convolution"], FAST))
def test_gradients_of_a_converted_network(name):
    in_float32, in_bfloat16 = errors(name, "converted", "float32", "bfloat16")
    assert in_float32 < 1e-4
    assert in_bfloat16 < 2 * NETWORKS[name].reference


@pytest.mark.parametrize("name", ["convolution", exhaustive("DynUNet of 4 levels")])
def test_gradients_of_a_network_that_is_converted_and_compiled(name):
    """The script asserts that inductor gets no operator of ours but those by kernels."""
    (in_bfloat16,) = errors(name, "compiled", "bfloat16")
    assert in_bfloat16 < 2 * NETWORKS[name].reference
