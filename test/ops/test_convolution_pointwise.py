"""Convolutions of one tap with few inputs or outputs, by kernels of this library."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients
from convolution_cases import way_of

from torch_nhwc import functional

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CHANNELS = [(inputs, outputs) for inputs in range(1, 6) for outputs in range(1, 5)]
CHANNELS += [(7, 3), (8, 2), (12, 1), (16, 4), (17, 2), (24, 3), (31, 1), (32, 2), (40, 3), (64, 4), (65, 4), (256, 2)]
CHANNELS += [(2, 5), (1, 7), (3, 8), (4, 15), (2, 16), (3, 17), (4, 40), (1, 256)]


def operands(shape, outputs, dtype):
    x, w, b = torch.randn(shape), torch.randn(outputs, shape[1], *[1] * (len(shape) - 2)), torch.randn(outputs)
    return [channels_last(x).to(dtype), channels_last(w).to(dtype), b.to(dtype)]


@DTYPES
@pytest.mark.parametrize("sizes", [(23, 29), (9, 8, 8), (513, 1)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), CHANNELS)
def test_results_and_gradients(inputs, outputs, sizes, dtype):
    name = "conv2d" if len(sizes) == 2 else "conv3d"
    leaves = operands((2, inputs, *sizes), outputs, dtype)
    is_single = inputs == 1 or (outputs == 1 and inputs <= 4)  # which PyTorch is as fast with
    if dtype == torch.float32:
        assert (way_of(name, leaves[0], leaves[1].requires_grad_(), leaves[2], ()) == "kernels") is not is_single
    got = gradients(getattr(functional, name), leaves)
    real = gradients(getattr(F, name), [each.double().contiguous() for each in leaves])
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for ours, exact in zip(got, real):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() <= tolerance * exact.norm().clamp(min=1e-3)
    assert_in_format(got[0])
    assert_in_format(got[1])
    assert got[2].stride() == leaves[1].stride()


@DTYPES
@pytest.mark.parametrize("sizes", [(33, 37), (9, 13, 11)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 2), (2, 16), (3, 3)])
def test_transposed(inputs, outputs, sizes, dtype):
    name = f"conv_transpose{len(sizes)}d"
    x, w, b = operands((2, inputs, *sizes), outputs, dtype)
    leaves = [x, channels_last(w.transpose(0, 1)), b]
    if dtype == torch.float32:
        assert way_of(name, x, leaves[1].requires_grad_(), b, ()) == "kernels"
    got = gradients(getattr(functional, name), leaves)
    real = gradients(getattr(F, name), [each.double().contiguous() for each in leaves])
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for ours, exact in zip(got, real):
        assert (ours.double() - exact).norm() <= tolerance * exact.norm()
    assert_in_format(got[0])
    assert_in_format(got[1])


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 2), (5, 2), (8, 3), (16, 4), (24, 1), (3, 9)])
def test_what_is_not_finite_stays_in_its_pixel(inputs, outputs):
    x, w, b = operands((1, inputs, 33, 35), outputs, torch.float32)
    x[0, :, 4, 5] = torch.inf
    x[0, 0, 7, 7] = torch.nan
    w = w.abs() + 0.1
    got, real = functional.conv2d(x, w, b), F.conv2d(x.contiguous(), w.contiguous(), b)
    torch.testing.assert_close(got, real, equal_nan=True)
    assert got[0, :, 4, 5].isposinf().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_large_activations_of_some_threads(threads):
    torch.set_num_threads(threads)
    leaves = operands((1, 16, 130, 131), 3, torch.float32)
    got = gradients(functional.conv2d, leaves)
    for ours, exact in zip(got, gradients(F.conv2d, [each.double().contiguous() for each in leaves])):
        assert (ours.double() - exact).norm() <= 2e-6 * exact.norm()
