"""pad_circular: values, format, the adjoint, errors."""

import pytest
import torch
from activations import assert_as_stock, assert_differentiable, assert_like, channels_last, sliced
from torch.nn import functional

ours = torch.ops.nhwc.pad_circular
CASES = [
    *(((2, 5, 8, 9), (1, 2, 3, 0)), ((2, 5, 8, 9), (9, 9, 8, 1)), ((2, 5, 8, 9), (-1, 2, 3, -2))),
    *(((1, 1, 8, 9), (1, 2, 3, 1)), ((2, 3, 1, 1), (1, 1, 0, 1)), ((2, 3, 4, 4), (0, 0, 0, 0))),
    *(((2, 3, 5, 6, 7), (1, 2, 3, 4, 5, 1)), ((2, 3, 5, 6, 7), (1, -2, 3, 3, -3, 1)), ((2, 3, 7), (3, 2))),
]


def stock(x, pad):
    return functional.pad(x, pad, mode="circular")


@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize(("shape", "pad"), CASES, ids=str)
def test_values_and_gradients(shape, pad, arrange):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.randn(shape).to(dtype)
        assert_like(lambda x: ours(x, pad), lambda x: stock(x, pad), values, dtype, arrange)
        assert torch.equal(ours(arrange(values), pad), stock(values, pad))
    integers = torch.randint(0, 9, shape)
    assert torch.equal(ours(arrange(integers), pad), stock(integers, pad))


@pytest.mark.parametrize(
    ("shape", "pad"), [((2, 2, 3, 4), (1, 2, -1, 2)), ((1, 2, 2, 3, 3), (1, 1, 2, 0, 1, -1))], ids=str
)
def test_derivatives_and_contract(shape, pad):
    assert_differentiable(lambda x: ours(x, pad), torch.randn(shape))
    padded = channels_last(torch.randn(stock(torch.empty(shape), pad).shape).double())
    adjoint = torch.ops.nhwc.native_pad_circular_backward
    assert_differentiable(lambda x: adjoint(x, pad), padded)
    values = channels_last(torch.randn(shape)).requires_grad_()
    for operator in (ours, torch.ops.nhwc.native_pad_circular):
        torch.library.opcheck(operator.default, (values, pad))
    torch.library.opcheck(adjoint.default, (padded, pad))


def test_anything_else_is_pytorchs_own():
    assert_as_stock(lambda x: ours(x, (1, 2, 0, 1)), lambda x: stock(x, (1, 2, 0, 1)), torch.randn(2, 3, 4, 5))
    # More than what a negative number has left.
    assert ours(channels_last(torch.randn(2, 3, 4, 3)), (3, -2, 0, 0)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ((6, 0, 0, 0), "wrapping around more than once"),
        ((-6, 0, 0, 0), "Negative padding value is resulting in an empty dimension"),
        ((1, 1), "Padding size 2 is not supported for 4D input"),
        ((1, 1, 1), "Padding length must be divisible by 2"),
    ],
)
def test_errors_are_pytorchs(pad, message):
    for function in (ours, stock):
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            function(channels_last(torch.randn(2, 3, 4, 5)), pad)
