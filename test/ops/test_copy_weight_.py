"""copy_weight_: values into memory that is there already."""

import functools

import pytest
import reference
import torch
from reference import SHAPES, SOURCES, arrange, random_weight
from selection import exhaustive
from torch.autograd import forward_ad

import torch_nhwc as nhwc

CL = torch.channels_last


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_copy(shape, source, device):
    weight = arrange(random_weight(shape, device=device), source)
    for memory_format in (torch.contiguous_format, reference.channels_last_of(weight)):
        for dtype in (torch.float32, torch.float16):
            out = torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
            pointer = out.data_ptr()
            assert nhwc.ops.copy_weight_(out, weight) is out
            assert out.data_ptr() == pointer
            reference.assert_same(out, reference.convert_weight(weight, memory_format, dtype))


@pytest.mark.parametrize("inference", [False, True])
def test_it_tells_autograd_that_the_values_changed(inference, device):
    out, weight = (torch.randn(4, 3, 3, 3, device=device) for _ in range(2))
    product = out * torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    version = out._version
    with torch.inference_mode(inference):
        nhwc.ops.copy_weight_(out, weight)
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_large_weights_go_past_the_caches_with_the_same_bits(device):
    weight = torch.randn(1024, 512, 3, 3, device=device)
    out = torch.zeros_like(weight, memory_format=CL)  # resident
    nhwc.ops.copy_weight_(out, weight)
    assert torch.equal(out, weight)
    half = torch.zeros_like(weight, memory_format=CL, dtype=torch.bfloat16)
    nhwc.ops.copy_weight_(half, weight)
    assert torch.equal(half, weight.bfloat16())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", exhaustive("inductor")])
def test_it_compiles(backend, device):
    weight = torch.randn(8, 4, 3, 3, device=device)
    out = torch.zeros(8, 4, 3, 3, device=device).to(memory_format=CL)

    @torch.compile(backend=backend, fullgraph=True)
    def function(out, weight):
        torch.ops.nhwc.copy_weight_(out, weight * 2)
        return out + 1

    assert torch.equal(function(out, weight), weight * 2 + 1)
    assert torch.equal(out, weight * 2)


def test_bad_arguments_raise_and_change_nothing(device):
    weight = torch.randn(4, 3, 3, 3, device=device)
    zeros = functools.partial(torch.zeros, device=device)
    expected = "expected a tensor of the weight's shape and device, contiguous or channels-last, got"
    for out in (zeros(4, 3, 3, 2), zeros(4, 6, 3, 3)[:, ::2], zeros(4, 3, 3, 3, device="meta")):
        with pytest.raises(RuntimeError, match=expected):
            nhwc.ops.copy_weight_(out, weight)
        assert out.is_meta or not out.any()
    memory = torch.randn(112, device=device)
    for start in (0, 4):
        with pytest.raises(RuntimeError, match="expected memory that does not overlap the weight's"):
            nhwc.ops.copy_weight_(memory[start : start + 108].view(4, 3, 3, 3), memory[:108].view(4, 3, 3, 3))
    with pytest.raises(TypeError, match="expected a cast between floating types"):
        nhwc.ops.copy_weight_(zeros(4, 3, 3, 3, dtype=torch.int32), weight)
    with pytest.raises(TypeError, match=r"^copy_weight_: expected a weight to be a tensor, got ndarray$"):
        nhwc.ops.copy_weight_(zeros(4, 3, 3, 3), weight.cpu().numpy())
    for arguments in (
        (zeros(4, 3, 3, 3), weight.clone().requires_grad_()),
        (weight.clone().requires_grad_(), weight),
    ):
        with pytest.raises(RuntimeError, match="expected tensors that need no gradient: call it under"):
            nhwc.ops.copy_weight_(*arguments)
        with torch.no_grad():
            nhwc.ops.copy_weight_(*arguments)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        with pytest.raises(RuntimeError, match="expected tensors that need no gradient"):
            nhwc.ops.copy_weight_(zeros(4, 3, 3, 3), dual)
