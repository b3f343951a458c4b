"""Derivatives of convert_weight by every route that PyTorch has."""

import functools
import warnings

import pytest
import torch
from selection import exhaustive
from torch.func import vmap

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
