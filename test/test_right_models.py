"""Whole networks in training on small inputs: converted, every gradient is right, where PyTorch's are not."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import right_models
from onednn import CPU_HAS_AVX512
from right_models import NETWORKS
from selection import exhaustive, some_of

FAST = "DynUNet"
WRONG = [FAST, "BasicUNet", "UNet with kernels of 5", "UNet with kernels of 7"]  # in PyTorch


def errors(name, way, *dtypes, **environment):
    """Return the errors of gradients that a process finds whose fresh memory holds garbage; `None` if it dies."""
    script = Path(right_models.__file__)
    path = os.pathsep.join([str(script.parent), *sys.path])
    variables = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": path, **environment}
    command = [sys.executable, script, name, way, "0", *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode < 0:  # a signal
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(each) for each in done.stdout.split()]


@pytest.mark.parametrize("name", some_of([name for name in NETWORKS if name != "convolution"], FAST))
def test_gradients_of_a_converted_network(name):
    in_float32, in_bfloat16 = errors(name, "converted", "float32", "bfloat16")
    assert in_float32 < 1e-4
    assert in_bfloat16 < 2 * NETWORKS[name].reference


@pytest.mark.skipif(not CPU_HAS_AVX512, reason="a CPU with AVX-512")
@pytest.mark.parametrize("name", some_of(WRONG, FAST))
def test_pytorch_s_gradients_are_wrong_with_avx512(name):
    """If this fails, PyTorch has mended it: `mended_in` of faults.cpp wants its version."""
    found = errors(name, "contiguous", "bfloat16", ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")  # with AMX fewer are wrong
    assert found is None or math.isnan(found[0]) or found[0] > 1e6


@pytest.mark.parametrize("name", ["convolution", exhaustive("DynUNet of 4 levels")])
def test_gradients_of_a_network_that_is_converted_and_compiled(name):
    """The script asserts that inductor gets no operator of ours but those by kernels."""
    (in_bfloat16,) = errors(name, "compiled", "bfloat16")
    assert in_bfloat16 < 2 * NETWORKS[name].reference
