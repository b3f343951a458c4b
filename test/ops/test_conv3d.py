"""conv3d: every argument, by PyTorch's own."""

import itertools

import pytest
import torch
from activations import assert_differentiable, assert_like, channels_last, sliced
from selection import some_of
from torch.nn import functional

ours = torch.ops.nhwc.conv3d
KERNELS = {
    "one tap": ((1, 1, 1), {}),
    "one tap, stride": ((1, 1, 1), {"stride": [2, 1, 3]}),
    "one tap, dilation": ((1, 1, 1), {"dilation": [2, 2, 2]}),
    "one tap, padding": ((1, 1, 1), {"padding": [1, 0, 0]}),
    "one tap, groups": ((1, 1, 1), {"groups": 2, "stride": [1, 2, 2]}),
    "one tap, a channel a group": ((1, 1, 1), {"groups": 4}),
    "plane": ((1, 3, 2), {"stride": [2, 2, 1], "padding": [0, 1, 1], "dilation": [1, 1, 2]}),
    "plane, groups": ((1, 3, 3), {"groups": 2}),
    "plane, padding along depth": ((1, 3, 3), {"padding": [1, 1, 1]}),
    "depth": ((3, 1, 1), {"stride": [2, 1, 2], "padding": [1, 0, 0], "dilation": [2, 1, 1]}),
    "volume": ((2, 3, 2), {"stride": [1, 2, 1], "padding": [1, 1, 0]}),
}


def inputs(kernel, arguments, bias=True, inputs=4, outputs=6):
    groups = arguments.get("groups", 1)
    if groups == inputs:
        outputs = 2 * inputs
    weight = torch.randn(outputs, inputs // groups, *kernel) / (inputs * torch.tensor(kernel).prod()) ** 0.5
    return weight, torch.randn(outputs) if bias else None


@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients(name, arrange):
    kernel, arguments = KERNELS[name]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for bias in (True, False):
            weight, added = (each if each is None else each.to(dtype) for each in inputs(kernel, arguments, bias))
            weight.requires_grad_()
            expected = weight.detach().double().requires_grad_()
            assert_like(
                lambda x: ours(x, weight, added, **arguments),
                lambda x: functional.conv3d(x, expected, None if added is None else added.double(), **arguments),
                torch.randn(2, 4, 5, 6, 7),
                dtype,
                arrange,
            )
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
            scale = tolerance * float(expected.grad.abs().max())
            torch.testing.assert_close(weight.grad.double(), expected.grad, rtol=tolerance, atol=scale)


@pytest.mark.parametrize("arrange", [channels_last, torch.Tensor.contiguous])
def test_the_weights_gradient_has_its_strides(arrange):
    for dtype, name in itertools.product((torch.float32, torch.bfloat16), ("one tap", "depth")):
        kernel, arguments = KERNELS[name]
        weight = arrange(inputs(kernel, arguments)[0].to(dtype)).requires_grad_()
        ours(channels_last(torch.randn(2, 4, 5, 6, 7)).to(dtype), weight, **arguments).sum().backward()
        assert weight.grad.stride() == weight.stride()


def test_products_are_as_precise_as_settings_require_of_convolutions():
    weight, volume = torch.randn(3, 4, 1, 1, 1), channels_last(torch.randn(2, 4, 5, 6, 7))
    before = torch.get_float32_matmul_precision()
    try:
        for operator in ("aten::linear", "aten::conv2d"):
            with torch.profiler.profile() as profile:
                ours(volume, weight)
            assert operator in {event.key for event in profile.key_averages()}
            torch.set_float32_matmul_precision("medium")
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_channel_and_one_voxel():
    for shape in ((2, 1, 3, 4, 5), (2, 4, 1, 1, 1), (1, 4, 2, 1, 3)):
        for outputs in (1, 3):
            weight, bias = torch.randn(outputs, shape[1], 1, 1, 1), torch.randn(outputs)
            assert_like(
                lambda x: ours(x, weight, bias),
                lambda x: functional.conv3d(x, weight.double(), bias.double()),
                torch.randn(shape),
            )


@pytest.mark.parametrize(
    ("weight", "arguments", "message"),
    [
        (torch.randn(4, 2, 1, 1, 1), {}, "expected input.* to have 2 channels, but got 3"),
        (torch.randn(4, 3, 1, 1), {}, "expected|Expected"),
        (torch.randn(4, 3, 1, 1, 1), {"bias": torch.randn(3)}, "to be 1-dimensional with 4 elements"),
        (torch.randn(4, 3, 1, 1, 1), {"stride": [0, 1, 1]}, "non-positive stride"),
        (torch.randn(4, 3, 1, 1, 1).bfloat16(), {}, "should be the same|expected scalar type"),
        (torch.randn(4, 3, 9, 1, 1), {}, "Kernel size can't be greater than actual input size"),
    ],
)
def test_errors_are_pytorchs(weight, arguments, message):
    for function in (ours, functional.conv3d):
        with pytest.raises(RuntimeError, match=message):
            function(channels_last(torch.randn(2, 3, 4, 5, 6)), weight, **arguments)


@pytest.mark.parametrize("name", some_of(["one tap", "one tap, stride", "depth"], "depth"))
def test_derivatives_and_contract(name):
    kernel, arguments = KERNELS[name]
    weight, bias = (each.double() for each in inputs(kernel, arguments))
    assert_differentiable(lambda x: ours(x, weight, bias, **arguments), torch.randn(1, 4, 5, 3, 3))
    values = channels_last(torch.randn(2, 4, 5, 5, 5)).double().requires_grad_()
    torch.autograd.gradgradcheck(
        lambda w, b: ours(values[:1, :, :, :3, :3], w, b, **arguments),
        (weight.requires_grad_(), bias.requires_grad_()),
        fast_mode=True,
    )
    torch.library.opcheck(ours.default, (values, weight, bias), arguments)
