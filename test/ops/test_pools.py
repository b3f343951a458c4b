"""Pools and nearest upsampling of volumes, with every argument, by PyTorch's own."""

import itertools

import pytest
import torch
from activations import assert_like, channels_last, sliced
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


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_upsample_nearest3d(mode):
    for sizes in ({"size": [3, 9, 13]}, {"scale_factor": [2.0, 2.0, 2.0]}, {"scale_factor": [1.5, 2.3, 0.7]}):
        agrees(
            lambda x: nhwc.upsample_nearest3d(x, sizes.get("size"), sizes.get("scale_factor"), exact=mode != "nearest"),
            lambda x: functional.interpolate(x, mode=mode, **sizes),
        )


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
