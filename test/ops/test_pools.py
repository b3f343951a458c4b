"""Pools and nearest upsampling of volumes, with every argument, by PyTorch's own."""

import itertools

import pytest
import torch
from activations import assert_as_stock, assert_differentiable, assert_in_format, assert_like, channels_last, sliced
from selection import some_of
from torch.nn import functional

nhwc = torch.ops.nhwc
SHAPES = [(2, 5, 6, 7, 8), (1, 1, 5, 6, 7), (2, 3, 6, 1, 5), (1, 4, 4, 4, 4)]
WINDOWS = [
    *(([2, 2, 2],), ([3, 1, 2], [2, 1, 3]), ([3, 3, 3], [2, 2, 2], [1, 1, 1]), ([2, 3, 1], [3, 2, 2], [1, 0, 0], True)),
    *(([3, 3, 3], [2, 2, 2], [1, 1, 1], True, False), ([2, 1, 3], [], [0, 0, 1], False, False)),
    *(([2, 2, 3], [2, 2, 2], [1, 1, 0], True, True, 5), ([2, 2, 2], [], [0, 0, 0], False, True, -3)),
]
SIZES = [[1, 1, 1], [3, 3, 3], [2, 5, 1], [7, 9, 4]]


def agrees(operator, reference, arrange=channels_last, dtypes=(torch.float32, torch.bfloat16)):
    for shape, dtype in itertools.product(SHAPES, dtypes):
        try:
            reference(torch.randn(shape))
        except RuntimeError:
            with pytest.raises(RuntimeError):
                operator(channels_last(torch.randn(shape)))
            continue
        assert_like(operator, reference, torch.rand(shape) + 0.1, dtype, arrange)


@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_avg_pool3d(window, arrange):
    def stock(x):
        return functional.avg_pool3d(x, window[0], window[1] if len(window) > 1 and window[1] else None, *window[2:])

    agrees(lambda x: nhwc.avg_pool3d(x, *window), stock, arrange)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_adaptive_pools(size):
    agrees(lambda x: nhwc.adaptive_avg_pool3d(x, size), lambda x: functional.adaptive_avg_pool3d(x, size))
    stock = lambda x: functional.adaptive_max_pool3d(x, size, return_indices=True)  # noqa: E731
    agrees(lambda x: nhwc.adaptive_max_pool3d(x, size), stock)
    agrees(lambda x: nhwc.adaptive_max_pool3d(x, size), stock, sliced)


def test_equal_maxima_and_not_a_number():
    for size in SIZES:
        values = torch.randint(0, 2, (2, 5, 6, 7, 8)).float()
        values[0, :, 1::2, ::3, 2] = values[1, 2] = torch.nan
        values[1, 1] = -torch.inf
        out, indices = nhwc.adaptive_max_pool3d(channels_last(values), size)
        expected, expected_indices = functional.adaptive_max_pool3d(values, size, return_indices=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("norm", [2.0, 3.0, 1.5])
def test_lp_pool3d(norm):
    for window, stride, ceil in (([2, 1, 2], [], False), ([3, 1, 2], [2, 1, 2], True)):
        agrees(
            lambda x: nhwc.lp_pool3d(x, norm, window, stride, ceil),
            lambda x: functional.lp_pool3d(x, norm, window, stride or None, ceil),
        )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_upsample_nearest3d(mode):
    for sizes in ({"size": [3, 9, 13]}, {"scale_factor": [2.0, 2.0, 2.0]}, {"scale_factor": [1.5, 2.3, 0.7]}):
        agrees(
            lambda x: nhwc.upsample_nearest3d(x, sizes.get("size"), sizes.get("scale_factor"), exact=mode != "nearest"),
            lambda x: functional.interpolate(x, mode=mode, **sizes),
        )


CALLS = {
    "avg_pool3d": (([2, 2, 2],), lambda x: functional.avg_pool3d(x, 2)),
    "adaptive_avg_pool3d": (([2, 3, 2],), lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 2))),
    "adaptive_max_pool3d": (([2, 3, 2],), lambda x: functional.adaptive_max_pool3d(x, (2, 3, 2), True)),
    "lp_pool3d": ((2.0, [2, 2, 2]), lambda x: functional.lp_pool3d(x, 2.0, 2)),
    "upsample_nearest3d": (([5, 6, 7],), lambda x: functional.interpolate(x, (5, 6, 7))),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_anything_else_is_pytorchs_own(name):
    arguments, stock = CALLS[name]
    operator = lambda x: getattr(nhwc, name)(x, *arguments)  # noqa: E731
    assert_as_stock(operator, stock, torch.rand(2, 3, 4, 5, 6))
    if name != "upsample_nearest3d":
        # Four dimensions are one volume, in whatever memory.
        assert_as_stock(operator, stock, channels_last(torch.rand(3, 4, 5, 6)))
    for values in (torch.rand(3, 4), channels_last(torch.ones(2, 3, 4, 5, 6, dtype=torch.complex64))):
        with pytest.raises((RuntimeError, NotImplementedError, IndexError, ValueError)):
            operator(values)


@pytest.mark.parametrize("name", some_of(CALLS, "adaptive_max_pool3d", "upsample_nearest3d"))
def test_derivatives_and_contract(name):
    arguments, _stock = CALLS[name]
    assert_differentiable(lambda x: getattr(nhwc, name)(x, *arguments), torch.rand(2, 2, 4, 4, 5) + 0.5)
    values = channels_last(torch.rand(2, 3, 4, 5, 6)).requires_grad_()
    torch.library.opcheck(getattr(nhwc, name).default, (values, *arguments))


@every_call
def test_autocast(name):
    arguments, stock = CALLS[name]
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            values = channels_last(torch.rand(2, 3, 4, 5, 6)).to(dtype)
            out = getattr(nhwc, name)(values, *arguments)
            expected = stock(values)
            if isinstance(out, tuple):
                out, expected = out[0], expected[0]
            assert out.dtype == expected.dtype
            assert_in_format(out)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (([0, 2, 2],), "stride should not be zero"),
        (([2, 2, 2], [0, 1, 1]), "stride"),
        (([2, 2, 2], [1, 1, 1], [2, 0, 0]), "pad should be at most half"),
        (([2, 2, 2], [], [0, 0, 0], False, True, 0), "divisor must be not zero"),
        (([9, 2, 2],), "smaller than kernel size"),
        (([2, 2],), "kernel_size"),
    ],
)
def test_errors(window, message):
    for function in (nhwc.avg_pool3d, torch._C._nn.avg_pool3d):
        with pytest.raises(RuntimeError, match=message):
            function(channels_last(torch.rand(2, 3, 4, 5, 6)), *window)


def test_the_output_can_be_changed_in_place():
    values = channels_last(torch.randn(2, 3, 4, 4, 4)).requires_grad_()
    out = nhwc.avg_pool3d(values, [2, 2, 2])
    assert not out._is_view()
    functional.relu_(out).sum().backward()
    expected = values.detach().contiguous().requires_grad_()
    functional.relu_(functional.avg_pool3d(expected, 2)).sum().backward()
    torch.testing.assert_close(values.grad, expected.grad)


def test_torchscript():
    @torch.jit.script
    def scripted(x):
        return torch.ops.nhwc.avg_pool3d(x, [2, 2, 2])

    values = torch.randn(2, 3, 4, 4, 4)
    torch.testing.assert_close(scripted(channels_last(values)), functional.avg_pool3d(values, 2))
