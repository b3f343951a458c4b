"""Derivatives of convert_weight by every route that PyTorch has."""

import functools
import warnings

import pytest
import torch
from selection import exhaustive
from torch.func import grad, hessian, jvp, vmap

import torch_nhwc as nhwc

CL = torch.channels_last


def leaves(device="cpu"):
    """Leaf weights by name: each memory format, ambiguous sizes, several ranks."""
    make = functools.partial(torch.randn, device=device)
    return {
        "contiguous": make(4, 3, 3, 3),
        "channels_last": make(4, 3, 3, 3).to(memory_format=CL),
        "3d": make(4, 3, 3, 2, 3),
        "3d_channels_last": make(4, 3, 3, 2, 3).to(memory_format=torch.channels_last_3d),
        "1x1": make(4, 3, 1, 1),
        "1x1_channels_last": nhwc.convert_weight(make(4, 3, 1, 1)),
        "one_channel": make(4, 1, 3, 3),
        "one_channel_channels_last": nhwc.convert_weight(make(4, 1, 3, 3)),
        "sliced": make(4, 6, 3, 3)[:, ::2],
    }


@pytest.mark.parametrize("memory_format", [None, torch.contiguous_format])
@pytest.mark.parametrize("name", leaves())
def test_gradcheck_of_every_order_and_mode(name, memory_format, device):
    weight = leaves(device)[name].double().requires_grad_()

    def convert(w):
        return nhwc.convert_weight(w, memory_format)

    assert torch.autograd.gradcheck(
        convert, (weight,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda w: convert(w) ** 3, (weight,), check_fwd_over_rev=True)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", leaves())
def test_the_gradient_is_taken_without_a_copy(name, dtype, device):
    """It arrives in the leaf's dtype and strides, or contiguous for a slice; AccumulateGrad takes that very tensor."""
    weight = leaves(device)[name].requires_grad_()
    arrived = []
    weight.register_hook(lambda g: arrived.append((g.data_ptr(), g.dtype)))
    out = nhwc.convert_weight(weight, dtype=dtype)
    scale = torch.randn(weight.shape, device=device).to(out.dtype)
    (out * scale).sum().backward()
    assert arrived == [(weight.grad.data_ptr(), weight.dtype)]
    assert torch.equal(weight.grad, scale.to(weight.dtype))
    strides = (27, 9, 3, 1) if name == "sliced" else weight.stride()
    expected = {d: s for d, s in enumerate(strides) if weight.shape[d] != 1}
    assert {d: s for d, s in enumerate(weight.grad.stride()) if weight.shape[d] != 1} == expected


def test_no_graph_where_none_is_asked_for(device):
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    assert nhwc.convert_weight(weight).grad_fn.name() == "ConvertWeightBackward"
    with torch.no_grad():
        assert nhwc.convert_weight(weight).grad_fn is None
    with torch.inference_mode():
        assert nhwc.convert_weight(weight).is_inference()
    assert nhwc.convert_weight(weight.detach()).grad_fn is None


def test_torch_func_transforms(device):
    weight = torch.randn(2, 3, 2, 2, dtype=torch.double, device=device)

    def cubes(w):
        return (nhwc.convert_weight(w) ** 3).sum()

    assert torch.allclose(grad(cubes)(weight), 3 * weight**2)
    value, tangent = jvp(nhwc.convert_weight, (weight,), (2 * weight,))
    assert torch.equal(value, weight)
    assert torch.equal(tangent, 2 * weight)
    assert value.stride() == (12, 1, 6, 3)
    expected = torch.diag(6 * weight.flatten())
    assert torch.allclose(hessian(cubes)(weight).reshape(24, 24), expected)


def test_vmap_is_one_call_in_canonical_strides(device):
    weights = torch.randn(5, 4, 3, 3, 3, dtype=torch.double, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it falls back to a loop
        out = vmap(nhwc.convert_weight)(weights)
        assert torch.equal(out, weights)
        assert out[0].stride() == (27, 1, 9, 3)
        moved = weights.movedim(0, 3)
        assert torch.equal(vmap(nhwc.convert_weight, in_dims=3)(moved), weights)
        twice = vmap(vmap(lambda w: nhwc.convert_weight(w, dtype=torch.float32)))(
            weights[None].expand(2, -1, -1, -1, -1, -1)
        )
        assert twice.dtype == torch.float32
        assert twice[0, 0].stride() == (27, 1, 9, 3)
        lists = vmap(lambda w: nhwc.convert_weights([w, 2 * w])[1])(weights)
        assert torch.equal(lists, 2 * weights)
        shifts = torch.randn(3, 2, dtype=torch.double, device=device)
        nested = vmap(lambda w: vmap(lambda s: nhwc.convert_weight(w) + s.sum())(shifts))(weights)
        assert torch.equal(nested, weights[:, None] + shifts.sum(1).view(1, 3, 1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="expected a 4D or 5D weight, got 3D"):
        vmap(nhwc.convert_weight)(weights[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", exhaustive("inductor")])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_compiled_autograd(backend, dtype):
    weight = torch.randn(4, 3, 3, 3).to(memory_format=CL).requires_grad_()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        (nhwc.convert_weight(weight, torch.contiguous_format, dtype=dtype) ** 2).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())
    assert weight.grad.stride() == weight.stride()


def test_autocast_leaves_the_dtype_to_the_argument(device):
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert nhwc.convert_weight(weight).dtype == torch.float32
        out = torch.nn.functional.conv2d(torch.randn(1, 3, 5, 5, device=device), nhwc.convert_weight(weight))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad.dtype == torch.float32
