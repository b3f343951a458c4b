"""convert_weight_ and convert_weights_: values, identity, gradients, refusals, all or nothing."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_nhwc as nhwc
from torch_nhwc import Outcome

STRIDES = (27, 1, 9, 3)


def parameter(shape=(4, 3, 3, 3), device="cpu", **options):
    return nn.Parameter(torch.randn(shape, device=device), **options)


def test_identity_hooks_and_version_survive(device):
    layer = nn.Conv2d(3, 4, 3, device=device)
    weight, version = layer.weight, layer.weight._version
    seen = []
    weight.register_hook(lambda g: seen.append(g.stride()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.stride()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    nhwc.convert_weight_(weight)
    assert layer.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight._version == version
    before = weight.detach().clone()
    layer(torch.randn(2, 3, 8, 8, device=device)).sum().backward()
    optimizer.step()
    assert len(seen) == 2
    assert seen[1] == STRIDES
    torch.testing.assert_close(weight, before - 0.1 * weight.grad)


def test_the_gradient_of_a_kept_weight_joins_it_where_it_can(device):
    weight = nn.Parameter(nhwc.convert_weight(torch.randn(4, 3, 3, 3, device=device)))
    weight.grad = torch.randn(4, 3, 3, 3, device=device)
    pointer = weight.data_ptr()
    assert nhwc.convert_weight_(weight) == Outcome.UNCHANGED
    assert weight.data_ptr() == pointer
    assert weight.grad.stride() == STRIDES
    weight.grad = torch.randn(8, 3, 3, 3, device=device)[:4]
    assert nhwc.convert_weight_(weight) == Outcome.UNCHANGED
    assert weight.grad.is_contiguous()


def test_a_gradient_that_cannot_follow_refuses_the_weight(device):
    sliced, in_graph, of_another_shape = (parameter(shape, device) for shape in (*[(4, 3, 3, 3)] * 2, (12, 3, 3)))
    of_another_shape.grad = torch.randn(12, 3, 3, device=device)
    of_another_shape.data = torch.randn(4, 3, 3, 3, device=device)
    sliced.grad = torch.randn(8, 3, 3, 3, device=device)[2:6]
    in_graph.grad = torch.randn(4, 3, 3, 3, device=device, requires_grad=True) * 2
    for weight in (sliced, in_graph, of_another_shape):
        good = parameter(device=device)
        for storage in ("auto", "fresh", "reuse"):
            with pytest.raises(
                RuntimeError, match=r"weight 1 of 2: the weight has a gradient that cannot follow.*set .grad to None"
            ):
                nhwc.convert_weights_([good, weight], storage=storage)
        assert good.is_contiguous()
        assert weight.is_contiguous()
        assert weight.grad.is_contiguous()


def test_a_weight_converted_in_inference_mode_still_trains(device):
    weight = parameter(device=device)
    with torch.inference_mode():
        nhwc.convert_weight_(weight, storage="fresh")
        gradient_free = parameter(device=device, requires_grad=False)
        nhwc.convert_weight_(gradient_free)
    assert not weight.is_inference()
    (weight**2).sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    assert gradient_free.is_inference()  # it was made there, and stays what it was
    assert gradient_free.stride() == STRIDES


def test_a_released_storage_raises(device):
    for size in (0, 100):
        weight = parameter(device=device)
        with torch.no_grad():
            weight.untyped_storage().resize_(size)
        for call in (nhwc.convert_weight, nhwc.convert_weight_):
            with pytest.raises(
                RuntimeError, match=f"storage is released or cut short: it has {size} bytes and needs 432"
            ):
                call(weight)


@pytest.mark.parametrize("function", [nhwc.convert_weights, nhwc.convert_weights_, nhwc.ops.plan_weights])
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (parameter(), r"one tensor of shape \(4, 3, 3, 3\)"),
        (nn.Conv2d(3, 4, 3), "a module: use convert_"),
    ],
)
def test_what_is_no_list_of_weights_raises(function, value, got):
    with pytest.raises(TypeError, match=f"expected a list of weights, got {got}"):
        function(value)


def test_outcomes_are_those_of_the_header():
    header = (Path(nhwc.cpp_extension.include_paths()[0]) / "torch_nhwc/ops.h").read_text()
    pairs = re.findall(r"^  (\w+) = (-?\d+),", header, flags=re.MULTILINE)
    assert {name.upper(): int(value) for name, value in pairs} == {outcome.name: outcome.value for outcome in Outcome}


def test_unknown_storage_raises():
    with pytest.raises(ValueError, match="expected storage to be 'auto', 'fresh', 'reuse' or 'detach', got 'quick'"):
        nhwc.convert_weight_(parameter(), storage="quick")


def refused_weights():
    yield "non-leaf", parameter() * 1, "is not a leaf of the autograd graph"
    yield "non-leaf in format", nhwc.convert_weight(parameter()), "is not a leaf of the autograd graph"
    yield (
        "conjugate view",
        torch.randn(4, 3, 3, 3, dtype=torch.complex64).conj(),
        "is a lazy conjugate or negative view",
    )
    with FakeTensorMode():
        fake = torch.randn(4, 3, 3, 3)
    yield "fake", fake, "is traced, fake, functional"


@pytest.mark.parametrize("name", [name for name, _, _ in refused_weights()])
def test_refusals_come_before_anything_is_touched(name, device):
    ((weight, message),) = [(weight, message) for each, weight, message in refused_weights() if each == name]
    good, restrides = parameter(device=device), parameter((4, 3, 1, 1), device)
    good.sum().backward()
    before = [(t.stride(), t.data_ptr()) for t in (good, good.grad, restrides)]
    with pytest.raises(RuntimeError, match=f"nhwc::convert_weights_, weight 2 of 3: the weight {message}"):
        nhwc.convert_weights_([good, restrides, weight])
    assert nhwc.ops.plan_weights([good, weight])[1].is_refusal
    assert [(t.stride(), t.data_ptr()) for t in (good, good.grad, restrides)] == before
    assert nhwc.convert_weights_([good, restrides]) == [Outcome.IN_PLACE, Outcome.RESTRIDED]


def test_under_tracing_modes_and_transforms_it_raises():
    weight = parameter()
    for mode in (FakeTensorMode(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode, pytest.raises(RuntimeError, match="or a tracer is active"):
            nhwc.convert_weight_(weight)
    with pytest.raises(RuntimeError, match="or a tracer is active"):
        make_fx(lambda x: (torch.ops.nhwc.convert_weight_(weight), x * 2)[1])(torch.randn(3))
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        weights = torch.randn((2, 4, 3, 3, 3) if transform is torch.func.vmap else (4, 3, 3, 3))
        with pytest.raises(RuntimeError, match="is traced, fake, functional"):
            transform(lambda w: torch.ops.nhwc.convert_weight_(w))(weights)
    assert weight.is_contiguous()


def test_out_of_memory_changes_nothing(device):
    good = parameter(device=device)
    view = good.detach()
    huge = torch.empty(1, dtype=torch.uint8, device=device).expand(2**30, 2**6, 2**3, 2**3)  # would be 4 TiB
    with pytest.raises(RuntimeError, match=r"memory|alloc"):
        nhwc.convert_weights_([good, huge], storage="fresh")
    assert good.is_contiguous()
    assert good.data_ptr() == view.data_ptr()


@pytest.mark.cuda
def test_pinned_memory_stays_pinned():
    for storage in ("auto", "fresh"):
        weight = nn.Parameter(torch.randn(4, 3, 3, 3).pin_memory())
        outcome = nhwc.convert_weight_(weight, storage=storage)
        assert outcome == (Outcome.COPIED if storage == "fresh" else Outcome.COPIED_FOREIGN)
        assert weight.is_pinned()
        assert weight.stride() == STRIDES
