"""softmax and log_softmax over channels: values, format, derivatives, dtypes, errors."""

import math

import pytest
import torch
from activations import assert_as_stock, assert_differentiable, assert_like, channels_last, sliced
from torch.nn import functional

OPERATORS = {
    "softmax": (torch.ops.nhwc.softmax, functional.softmax),
    "log_softmax": (torch.ops.nhwc.log_softmax, functional.log_softmax),
}
both = pytest.mark.parametrize(("operator", "reference"), OPERATORS.values(), ids=OPERATORS)
SHAPES = [(2, 3, 5, 7), (2, 2, 3, 4, 5), (3, 17, 11), (1, 1, 4, 4), (2, 6, 1, 1, 1), (2, 40, 9, 9), (1, 300, 5, 5)]


@both
@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(operator, reference, shape, arrange):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        values = 4 * torch.randn(shape)
        for dim in (1, 1 - len(shape)):
            assert_like(lambda x: operator(x, dim), lambda x: reference(x, dim), values, dtype, arrange)


@both
def test_every_number_of_channels(operator, reference):
    for channels in [*range(2, 34), 63, 64, 65, 127, 255, 256, 257, 512]:
        values = 10 * torch.randn(2, channels, 5, 7)
        out = operator(channels_last(values), 1).double()
        expected = reference(values.double(), 1)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6 if expected.min() < 0 else 0)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_every_number_of_channels(dtype, log):
    native, native_backward = torch.ops.nhwc.native_softmax, torch.ops.nhwc.native_softmax_backward
    for channels in [*range(1, 36), 63, 64, 65, 128, 129, 256, 300]:
        gradient = channels_last(torch.randn(1, channels, 7, 11)).to(dtype)
        gradient[0, channels // 2, 3, 5] = math.nan  # of one row, and not of its neighbours
        output = native(channels_last(torch.randn(1, channels, 7, 11)).to(dtype), log)
        ours = native_backward(gradient, output, log)
        exact, outputs = gradient.double(), output.double()
        sums = (exact if log else exact * outputs).sum(1, keepdim=True)
        expected = exact - outputs.exp() * sums if log else (exact - sums) * outputs
        scale = float(exact.nan_to_num().abs().max())
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        assert ours.stride() == output.stride()


def test_bad_input_of_the_operators_below():
    values = channels_last(torch.randn(1, 4, 3, 3))
    with pytest.raises(RuntimeError, match=r"with elements, got one of shape \[2, 0, 3, 3\]"):
        torch.ops.nhwc.native_softmax(torch.empty(2, 0, 3, 3), False)
    for gradient in (values.half(), values[..., :1]):
        with pytest.raises(RuntimeError, match=r"expected a gradient of shape \[1, 4, 3, 3\] and Float, as the output"):
            torch.ops.nhwc.native_softmax_backward(gradient, values, False)


@both
def test_extremes(operator, reference):
    inf, nan = math.inf, math.nan
    rows = [[0, inf, 1], [-inf, 0, 1], [-inf, -inf, -inf], [nan, 0, 1], [1, 2, nan], [inf, inf, 0], [-inf, nan, inf]]
    rows += [[3e38, -3e38, 0], [0, -87.5, -100], [0, -103, -110], [1e-40, 0, -1e-40], [88, -88, 0]]
    values = torch.tensor(rows * 5, dtype=torch.float32).t()[None, :, None].contiguous()
    for channels in (3, 117):  # of which the others take no part
        wide = torch.cat([values, torch.full((1, channels - 3, *values.shape[2:]), -inf)], dim=1)
        torch.testing.assert_close(
            operator(channels_last(wide), 1), reference(wide, 1), rtol=2e-6, atol=2e-45, equal_nan=True
        )


@both
def test_anything_else_is_pytorchs_own(operator, reference):
    assert_as_stock(lambda x: operator(x, 1), lambda x: reference(x, 1), torch.randn(2, 3, 4, 5))
    assert_as_stock(lambda x: operator(x, 1), lambda x: reference(x, 1), channels_last(torch.randn(2, 3, 0, 5)))
    for dim in (0, 2, -1):
        values = channels_last(torch.randn(2, 3, 4, 5))
        assert_as_stock(lambda x: operator(x, dim), lambda x: reference(x, dim), values)
    with pytest.raises(IndexError, match="Dimension out of range"):
        operator(channels_last(torch.randn(2, 3, 4, 5)), 4)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        operator(channels_last(torch.ones(2, 3, 4, 5, dtype=torch.long)), 1)


@both
def test_dtype(operator, reference):
    values = channels_last(torch.randn(2, 3, 4, 5)).bfloat16()
    out = operator(values, 1, dtype=torch.float32)
    torch.testing.assert_close(out, reference(values.float(), 1))
    assert operator(values.long(), 1, dtype=torch.float32).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for each in (values, values.float()):
            assert operator(each, 1).dtype == reference(each, 1).dtype


@both
def test_derivatives(operator, reference):
    assert_differentiable(lambda x: operator(x, 1), torch.randn(2, 3, 2, 2))


@both
def test_contract(operator, reference):
    for dtype in (torch.float32, torch.bfloat16):
        values = channels_last(torch.randn(2, 3, 4, 5)).to(dtype).requires_grad_()
        torch.library.opcheck(operator.default, (values, 1))
        for log in (False, True):
            torch.library.opcheck(torch.ops.nhwc.native_softmax.default, (values, log))
            others = values.detach(), values.detach(), log
            torch.library.opcheck(torch.ops.nhwc.native_softmax_backward.default, others)


def test_torchscript():
    @torch.jit.script
    def scripted(x):
        return torch.ops.nhwc.softmax(x, 1)

    values = channels_last(torch.randn(2, 3, 4, 5))
    torch.testing.assert_close(scripted(values), values.softmax(1))


@both
def test_the_result_may_change_no_earlier_than_the_backward(operator, reference):
    values = channels_last(torch.randn(2, 3, 4, 5)).requires_grad_()
    out = operator(values, 1)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@both
def test_many_rows_on_two_threads(operator, reference):
    values = torch.randn(2, 5, 120, 131)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_like(lambda x: operator(x, 1), lambda x: reference(x, 1), values)
    finally:
        torch.set_num_threads(before)
