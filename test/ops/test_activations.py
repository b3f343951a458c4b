"""Operators on activations: PyTorch's own values, gradients, derivatives, errors and contracts, in channels-last."""

import itertools

import pytest
import torch
from activations import (
    assert_like,
    channels_last,
    sliced,
)
from torch.nn import functional

nhwc = torch.ops.nhwc
every_arrangement = pytest.mark.parametrize("arrange", [channels_last, sliced])


SAVING = {
    "gelu": ((2, 4, 4, 5, 6), (), nhwc.gelu),
    "conv3d": ((2, 4, 4, 5, 6), (6, 4, 1, 1, 1), nhwc.conv3d),
    "conv2d": ((2, 4, 9, 8), (4, 1, 5, 5), lambda x, w: nhwc.conv2d(x, w, None, [1, 1], [2, 2], [1, 1], 4)),
    "batch_norm": ((2, 4, 20, 20), (4,), lambda x, w: nhwc.batch_norm(x, None, None, w, None, True)),
}


@pytest.mark.parametrize("changed", [0, 1], ids=["input", "weight"])
@pytest.mark.parametrize("name", SAVING)
def test_a_change_in_place_of_what_is_saved_is_an_error(name, changed):
    shape, weight, call = SAVING[name]
    saved = [each.requires_grad_() * 1 for each in (channels_last(torch.randn(shape)), torch.randn(weight))]
    saved = saved[: 1 + bool(weight)]
    out = call(*saved)
    saved[min(changed, len(saved) - 1)].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def circular(x, pad):
    return functional.pad(x, pad, mode="circular")


@every_arrangement
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 3, 2, 3, 4), (3, 7, 9), (1, 1, 4, 4), (2, 5, 1, 1, 1)], ids=str)
def test_gelu(shape, arrange, approximate):
    stock = lambda x: functional.gelu(x, approximate=approximate)  # noqa: E731
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert_like(lambda x: nhwc.gelu(x, approximate=approximate), stock, 3 * torch.randn(shape), dtype, arrange)


PADS = [
    *(((2, 5, 8, 9), (1, 2, 3, 0)), ((2, 5, 8, 9), (9, 9, 8, 1)), ((2, 5, 8, 9), (-1, 2, 3, -2))),
    *(((1, 1, 8, 9), (1, 2, 3, 1)), ((2, 3, 1, 1), (1, 1, 0, 1)), ((2, 3, 4, 4), (0, 0, 0, 0))),
    *(((2, 3, 5, 6, 7), (1, 2, 3, 4, 5, 1)), ((2, 3, 5, 6, 7), (1, -2, 3, 3, -3, 1)), ((2, 3, 7), (3, 2))),
]


@every_arrangement
@pytest.mark.parametrize(("shape", "pad"), PADS, ids=str)
def test_pad_circular(shape, pad, arrange):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.randn(shape).to(dtype)
        assert_like(lambda x: nhwc.pad_circular(x, pad), lambda x: circular(x, pad), values, dtype, arrange)
        assert torch.equal(nhwc.pad_circular(arrange(values), pad), circular(values, pad))
    integers = torch.randint(0, 9, shape)
    assert torch.equal(nhwc.pad_circular(arrange(integers), pad), circular(integers, pad))


def test_pad_circular_takes_more_than_what_a_negative_number_has_left():
    assert nhwc.pad_circular(channels_last(torch.randn(2, 3, 4, 3)), (3, -2, 0, 0)).shape == (2, 3, 4, 4)


SHAPES = [(2, 5, 6, 7, 8), (1, 1, 5, 6, 7), (2, 3, 6, 1, 5), (1, 4, 4, 4, 4)]
WINDOWS = [
    *(([2, 2, 2],), ([3, 1, 2], [2, 1, 3]), ([3, 3, 3], [2, 2, 2], [1, 1, 1]), ([2, 3, 1], [3, 2, 2], [1, 0, 0], True)),
    *(([3, 3, 3], [2, 2, 2], [1, 1, 1], True, False), ([2, 1, 3], [], [0, 0, 1], False, False)),
    *(([2, 2, 3], [2, 2, 2], [1, 1, 0], True, True, 5), ([2, 2, 2], [], [0, 0, 0], False, True, -3)),
]
SIZES = [[1, 1, 1], [3, 3, 3], [2, 5, 1], [7, 9, 4]]


def agrees(operator, reference, arrange=channels_last):
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        try:
            reference(torch.randn(shape))
        except RuntimeError:
            with pytest.raises(RuntimeError):
                operator(channels_last(torch.randn(shape)))
            continue
        assert_like(operator, reference, torch.rand(shape) + 0.1, dtype, arrange)


@every_arrangement
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_avg_pool3d(window, arrange):
    def stock(x):
        return functional.avg_pool3d(x, window[0], window[1] if len(window) > 1 and window[1] else None, *window[2:])

    agrees(lambda x: nhwc.avg_pool3d(x, *window), stock, arrange)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_adaptive_pools(size):
    agrees(lambda x: nhwc.adaptive_avg_pool3d(x, size), lambda x: functional.adaptive_avg_pool3d(x, size))
    stock = lambda x: functional.adaptive_max_pool3d(x, size, return_indices=True)  # noqa: E731
    for arrange in (channels_last, sliced):
        agrees(lambda x: nhwc.adaptive_max_pool3d(x, size), stock, arrange)
    values = torch.randint(0, 2, (2, 5, 6, 7, 8)).float()  # maxima that are equal, and ones that are no number
    values[0, :, 1::2, ::3, 2] = values[1, 2] = torch.nan
    values[1, 1] = -torch.inf
    (out, indices), (expected, expected_indices) = nhwc.adaptive_max_pool3d(channels_last(values), size), stock(values)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arrange", [channels_last, torch.Tensor.contiguous])
@pytest.mark.parametrize(
    ("kernel", "arguments"), [((1, 1, 1), {}), ((3, 1, 1), {"stride": [2, 1, 2], "padding": [1, 0, 0]})]
)
def test_the_weights_gradient_has_its_strides(kernel, arguments, arrange, dtype):
    weight = arrange(torch.randn(6, 4, *kernel)).to(dtype).requires_grad_()
    nhwc.conv3d(channels_last(torch.randn(2, 4, 5, 6, 7)).to(dtype), weight, **arguments).sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_products_are_as_precise_as_settings_require_of_convolutions():
    weight, volume = torch.randn(3, 4, 1, 1, 1), channels_last(torch.randn(2, 4, 5, 6, 7))
    before = torch.get_float32_matmul_precision()
    try:
        for operator in ("aten::linear", "aten::conv2d"):
            with torch.profiler.profile() as profile:
                nhwc.conv3d(volume, weight)
            assert operator in {event.key for event in profile.key_averages()}
            torch.set_float32_matmul_precision("medium")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", [(2, 1, 3, 4, 5), (2, 4, 1, 1, 1), (1, 4, 2, 1, 3)])
def test_conv3d_of_one_channel_and_of_one_voxel(shape):
    for weight in (torch.randn(outputs, shape[1], 1, 1, 1) for outputs in (1, 3)):
        assert_like(
            lambda x: nhwc.conv3d(x, weight), lambda x: functional.conv3d(x, weight.double()), torch.randn(shape)
        )
