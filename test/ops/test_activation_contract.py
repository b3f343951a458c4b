"""What all operators on activations have in common: derivatives, opcheck, TorchScript, autocast, other formats."""

import pytest
import torch
from activations import assert_as_stock, assert_differentiable, assert_in_format, channels_last, first
from selection import some_of
from torch.nn import functional

nhwc = torch.ops.nhwc
VOLUME, IMAGE = (2, 4, 4, 5, 6), (2, 4, 4, 5)
KERNEL, BIAS = torch.randn(6, 4, 1, 1, 1), torch.randn(6)

# The shape of an activation, further arguments, and PyTorch's function of the activation.
CALLS = {
    "avg_pool3d": (VOLUME, ([2, 2, 2],), lambda x: functional.avg_pool3d(x, 2)),
    "adaptive_avg_pool3d": (VOLUME, ([2, 3, 2],), lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 2))),
    "adaptive_max_pool3d": (VOLUME, ([2, 3, 2],), lambda x: functional.adaptive_max_pool3d(x, (2, 3, 2), True)),
    "upsample_nearest3d": (VOLUME, ([5, 6, 7],), lambda x: functional.interpolate(x, (5, 6, 7))),
    "conv3d": (
        VOLUME,
        (KERNEL, BIAS, [2, 1, 1]),
        lambda x: functional.conv3d(x, KERNEL.to(x), BIAS.to(x), (2, 1, 1)),
    ),
    "gelu": (IMAGE, (), functional.gelu),
    "pad_circular": (IMAGE, ([1, 2, 0, 1],), lambda x: functional.pad(x, (1, 2, 0, 1), mode="circular")),
    "group_norm": (IMAGE, (2,), lambda x: functional.group_norm(x, 2)),
    "instance_norm": (IMAGE, (), functional.instance_norm),
}
every_operator = pytest.mark.parametrize("name", CALLS)


def prepared(name, values):
    """Return the operator's further arguments in the dtype of the activation."""
    return [each.to(values) if isinstance(each, torch.Tensor) else each for each in CALLS[name][1]]


def call(name, values):
    return getattr(nhwc, name)(values, *prepared(name, values))


@pytest.mark.parametrize("name", some_of(CALLS, "adaptive_max_pool3d", "conv3d", "gelu", "pad_circular"))
def test_every_derivative_is_right(name):
    shape = CALLS[name][0]
    assert_differentiable(lambda x: call(name, x), torch.rand(shape) + 0.5)


@every_operator
def test_opcheck(name):
    values = channels_last(torch.rand(CALLS[name][0])).requires_grad_()
    # Schemas with optional buffers that are written are not for functionalization.
    checks = {"test_utils": ("test_schema", "test_autograd_registration")} if name == "instance_norm" else {}
    torch.library.opcheck(getattr(nhwc, name).default, (values, *prepared(name, values)), **checks)


@every_operator
def test_other_formats_are_pytorchs_own(name):
    shape, _, stock = CALLS[name]
    assert_as_stock(lambda x: call(name, x), stock, torch.rand(shape))
    if name not in ("upsample_nearest3d", "pad_circular", "group_norm", "instance_norm"):
        assert_as_stock(lambda x: call(name, x), stock, torch.rand(shape[1:]))


@every_operator
def test_autocast_gives_the_dtype_of_pytorchs_own(name):
    shape, _, stock = CALLS[name]
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            values = channels_last(torch.rand(shape)).to(dtype)
            out = first(call(name, values))
            assert out.dtype == first(stock(values)).dtype
            assert_in_format(out)


@every_operator
def test_torchscript_gives_the_same(name):
    shape, _, stock = CALLS[name]
    values = torch.rand(shape)
    constants = "".join(f", {each!r}" for each in CALLS[name][1] if not isinstance(each, torch.Tensor))
    tensors = [each for each in CALLS[name][1] if isinstance(each, torch.Tensor)]
    names = "".join(f", t{index}" for index in range(len(tensors)))
    unit = torch.jit.CompilationUnit(f"def run(x{names}):\n  return torch.ops.nhwc.{name}(x{names}{constants})\n")
    out = first(unit.run(channels_last(values), *tensors))
    torch.testing.assert_close(out, first(stock(values)))
    assert_in_format(out)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("adaptive_max_pool3d", "conv3d")])
def test_the_output_is_no_view_and_may_be_changed_in_place(name):
    shape, _, stock = CALLS[name]
    values = channels_last(torch.randn(shape)).requires_grad_()
    out = call(name, values)
    assert not out._is_view()
    functional.relu_(out).square().sum().backward()
    expected = values.detach().contiguous().requires_grad_()
    functional.relu_(stock(expected)).square().sum().backward()
    torch.testing.assert_close(values.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gelu", "conv3d"])
def test_a_change_of_a_saved_input_in_place_is_an_error(name):
    inner = channels_last(torch.randn(CALLS[name][0])).requires_grad_() * 1
    kernel = KERNEL.clone().requires_grad_()
    out = nhwc.gelu(inner) if name == "gelu" else nhwc.conv3d(inner, kernel)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
