"""Softmax and log-softmax over the channels: by kernels of this library up to some channels, by PyTorch's from then on.

The choice of an instruction set is made once in a process, so each level is checked in a process of its own: this file
is also that program.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import (
    assert_as_accurate,
    assert_in_format,
    assert_like,
    channels_last,
)
from selection import some_of
from test_cpu_levels import LEVELS, check_program_at

from torch_nhwc import functional

NAMES = ["softmax", "log_softmax"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHANNELS = [1, 2, 3, 4, 5, 7, 8, 14, 16, 17, 21, 31, 32, 33, 64, 65]
SIZES = [(23, 29), (9, 8, 8), (513, 1), (1, 1), (3, 1, 2), (16, 16)]  # tiles that are whole, and parts of them
every_function = pytest.mark.parametrize("name", NAMES)


def functions(name):
    """Return the function of ours and PyTorch's, over the channels."""
    return [lambda x, of=of: getattr(of, name)(x, 1) for of in (functional, F)]


def check(name, channels, sizes, dtype):
    assert_like(*functions(name), torch.randn(2, channels, *sizes), dtype)


def nodes_of(out):
    """Return the names of the nodes of the graph behind an output, without those of leaves."""
    node, names = out.grad_fn, []
    while node is not None and "AccumulateGrad" not in node.name():
        names.append(node.name())
        node = node.next_functions[0][0]
    return names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
@every_function
def test_results_and_gradients(name, channels, dtype):
    for sizes in SIZES:
        check(name, channels, sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [2, 5, 16, 31])
@every_function
def test_results_and_gradients_are_as_accurate_as_pytorchs(name, channels, dtype):
    shape = (1, channels, 160, 160)
    assert_as_accurate(*functions(name), [4 * torch.randn(shape).to(dtype)], torch.randn(shape).to(dtype), factor=1.3)


@pytest.mark.levels
@pytest.mark.parametrize("level", some_of(LEVELS, "baseline"))
def test_each_level(level):
    check_program_at(level, __file__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [2, 5, 31])
@every_function
def test_what_is_not_finite_is_as_in_pytorch(name, channels, dtype):
    values = torch.randn(1, channels, 9, 10).to(dtype)
    values[0, :, 0, 0], values[0, :, 0, 1] = torch.inf, -torch.inf
    values[0, 0, 1], values[0, 1, 2], values[0, 1, 3] = -torch.inf, torch.inf, torch.nan
    values[0, 1:, 4] = -torch.inf
    values[0, 0, 5], values[0, 0, 6] = 3e4, -3e4
    ours, theirs = functions(name)
    got, expected = ours(channels_last(values)), theirs(values)
    torch.testing.assert_close(got, expected, equal_nan=True)
    torch.testing.assert_close(got.exp(), expected.exp(), equal_nan=True)


def test_powers_underflow_gradually():
    differences = torch.linspace(-120, 0, 4096).view(1, 1, 64, 64)
    values = torch.cat([differences, torch.zeros_like(differences)], 1)
    got, exact = functional.softmax(channels_last(values), 1).double(), F.softmax(values.double(), 1)
    least = 2.0**-149  # the smallest number of float32
    assert ((got - exact).abs() <= 3e-7 * exact.abs() + least).all()
    assert (got[exact < least / 4] == 0).all()


@pytest.mark.parametrize("threads", [1, 2])
@every_function
def test_large_activations_of_some_threads(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(name, 3, (260, 261), torch.float32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@every_function
def test_another_dtype_of_the_result(name, dtype):
    values = torch.randn(2, 5, 7, 6).bfloat16()
    given, expected = channels_last(values).requires_grad_(), values.clone().requires_grad_()
    outputs = getattr(functional, name)(given, 1, dtype=dtype), getattr(F, name)(expected, 1, dtype=dtype)
    assert outputs[0].dtype == outputs[1].dtype == dtype
    torch.testing.assert_close(*outputs)
    assert_in_format(outputs[0])
    gradient = torch.randn(values.shape).to(dtype)
    for output in outputs:
        output.backward(gradient)
    torch.testing.assert_close(given.grad, expected.grad, rtol=2e-2, atol=2e-3)
    assert_in_format(given.grad)


@every_function
def test_a_gradient_by_the_kernels_is_one_node(name):
    x = channels_last(torch.randn(2, 5, 7, 6)).requires_grad_()
    out = functions(name)[0](x)
    assert nodes_of(out) == [{"softmax": "NhwcSoftmaxBackward", "log_softmax": "NhwcLogSoftmaxBackward"}[name]]


@every_function
def test_modes_see_pytorchs_operators(name):
    x = channels_last(torch.randn(2, 5, 7, 6))
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        functions(name)[0](x)
    assert f"aten._{name}.default" in seen


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in NAMES:
        for width in (2, 3, 5, 8, 16, 31, 64):
            for kind in DTYPES:
                check(each, width, (23, 29), kind)
