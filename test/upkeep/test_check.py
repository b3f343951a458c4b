"""What has left its format since a conversion is named."""

import copy

import pytest
import torch
from tied_network import SITES, converted, network, said, train
from torch import nn

import torch_nhwc as nhwc


def test_check_names_every_companion_that_has_left_the_format():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    averaged = copy.deepcopy(model)
    plan = nhwc.convert_(model, optimizer=optimizer, ema=averaged).plan
    model.block.weight.grad = torch.randn(4, 4, 3, 3)
    state = optimizer.state[model.volume.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
    averaged.block.weight.data = averaged.block.weight.data.contiguous()
    found = nhwc.check(model, plan, optimizer=optimizer, ema=averaged)
    assert {(each.site, each.what) for each in found} == {
        ("block.weight", "grad"),
        ("tied.weight", "grad"),  # which is the same tensor
        ("volume.weight", "exp_avg_sq"),
        ("block.weight", "ema"),
        ("tied.weight", "ema"),
    }
    assert "grad of 'block.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said(found)
    assert "exp_avg_sq of 'volume.weight' has strides (18, 9, 9, 3, 1), expected (18, 1, 18, 6, 2)" in said(found)
    nhwc.restore_(model, plan, optimizer=optimizer, ema=averaged)
    assert nhwc.check(model, plan, optimizer=optimizer, ema=averaged) == []


def test_one_site_that_has_left_is_the_only_one_named():
    model, plan = converted()
    model.volume.weight.data = model.volume.weight.data.contiguous()
    assert said(nhwc.check(model, plan)) == [
        "'volume.weight' has strides (18, 9, 9, 3, 1), expected (18, 1, 18, 6, 2)",
    ]


def test_canonical_strides_are_asked_for_even_where_a_format_is_ambiguous():
    model, plan = converted()
    model.pointwise.weight.data = model.pointwise.weight.data.as_strided((4, 6, 1, 1), (6, 1, 1, 1))
    assert model.pointwise.weight.is_contiguous(memory_format=torch.channels_last)
    assert said(nhwc.check(model, plan)) == ["'pointwise.weight' has strides (6, 1, 1, 1), expected (6, 1, 6, 6)"]


@pytest.mark.parametrize("memory_format", [None, torch.channels_last, torch.channels_last_3d, torch.contiguous_format])
def test_check_asks_for_what_the_plan_says_and_for_nothing_else(memory_format):
    model = network()
    plan = nhwc.plan(model, memory_format, filter_fn=lambda module, path: path != "stem")
    nhwc.convert_(model, plan=plan)
    assert nhwc.check(model, plan) == []
    other = network(1)
    named = {each.site for each in nhwc.check(other, plan)}
    wanted = {
        name for name in SITES if name != "stem" and (name == "volume" or memory_format != torch.channels_last_3d)
    }
    wanted -= {"volume"} if memory_format == torch.channels_last else set()
    assert named == (set() if memory_format == torch.contiguous_format else {f"{name}.weight" for name in wanted})


def test_check_looks_inside_of_what_was_wrapped_since():
    model, plan = converted()
    compiled = torch.compile(model, backend="eager")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert nhwc.check(compiled, plan) == nhwc.check(averaged, plan) == []
    assert nhwc.check(averaged, nhwc.plan(averaged)) == []  # a plan of the wrapper is one as well
    averaged.module.volume.weight.data = averaged.module.volume.weight.data.contiguous()
    assert said(nhwc.check(averaged, plan)) == said(nhwc.check(averaged.module, plan)) != []


@pytest.mark.parametrize("call", [nhwc.check, nhwc.restore_], ids=lambda function: function.__name__)
def test_a_model_that_differs_from_the_plan_is_an_error_that_names_the_site(call):
    _, plan = converted()
    larger, missing, more = network(), network(), network()
    larger.block = nn.Conv2d(4, 8, 3)
    missing.stem = nn.Identity()
    more.extra = nn.Conv2d(3, 4, 3)
    for model, message in (
        (larger, r"'block.weight' is \(8, 4, 3, 3\) of torch.float32, the plan has \(4, 4, 3, 3\)"),
        (missing, "it has no 'stem.weight'"),
        (more, "the plan does not know 'extra.weight'"),
    ):
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ValueError, match=message):
            call(model, plan)
        assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize("call", [nhwc.check, nhwc.restore_], ids=lambda function: function.__name__)
def test_what_is_no_plan_is_an_error_that_says_what_to_pass(call):
    model = network()
    report = nhwc.convert_(model)
    with pytest.raises(TypeError, match=r"^expected a Plan, got Report: pass report.plan$"):
        call(model, report)
    with pytest.raises(TypeError, match=r"^expected a Plan, got str$"):
        call(model, report.plan.to_json())


def test_lazy_layers_are_checked_once_they_have_a_shape():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 3))
    plan = nhwc.convert_(model).plan
    assert nhwc.check(model, plan) == []
    model(torch.randn(1, 3, 8, 8))
    assert nhwc.check(model, plan) == []
    nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    assert said(nhwc.check(model, plan))[0] == "'0.weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)"
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_a_parametrized_layer_that_lost_its_last_step_is_named():
    def make():
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))

    model = make()
    plan = nhwc.convert_(model).plan
    assert plan.rows[0].reason is nhwc.Reason.COPIED_EACH_FORWARD
    assert nhwc.check(model, plan) == []
    other = make()
    other.load_state_dict(model.state_dict(), assign=True)  # every tensor is in format, the effective weight is not
    assert other[0].weight.stride() != (27, 1, 9, 3)
    assert any("has lost the step that copies it" in text for text in said(nhwc.check(other, plan)))
    nhwc.restore_(other, plan)
    assert nhwc.check(other, plan) == []
    assert other[0].weight.stride() == (27, 1, 9, 3)
