"""A plan says what is done: by `convert_` with the same arguments, and with the plan itself."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torch_nhwc as nhwc
from torch_nhwc import Action, Plan, Reason


def trained(make_optimizer):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    optimizer = make_optimizer(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


def coded(model, optimizer):
    """State in codes of a byte, which no layout can be given."""
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(4, 3, 3, 3, dtype=torch.int8)


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("storage", ["auto", "fresh", "reuse", "detach"])
@pytest.mark.parametrize("scene", ["plain", "flattening", "coded", "held gradient"])
def test_the_rows_are_those_of_the_conversion(scene, storage):
    model, optimizer = trained(torch.optim.LBFGS if scene == "flattening" else torch.optim.Adam)
    if scene == "coded":
        coded(model, optimizer)
    held = model[0].weight.grad.detach() if scene == "held gradient" else None
    plan = nhwc.plan(model, optimizer=optimizer, storage=storage)
    without = nhwc.plan(model, storage=storage)
    refused = {"flattening": Reason.FLATTENING_OPTIMIZER, "coded": Reason.STATE_IN_THE_WAY}.get(scene)
    assert refused is None or plan.rows[0].reason is refused
    dry = nhwc.convert_(model, optimizer=optimizer, storage=storage, dry_run=True)
    applied = nhwc.convert_(model, plan=plan, optimizer=optimizer, dry_run=True)
    assert plan.rows == dry.plan.rows == applied.plan.rows
    assert plan.digest == dry.plan.digest == applied.plan.digest
    assert without.rows == nhwc.convert_(model, storage=storage, dry_run=True).plan.rows
    report = nhwc.convert_(model, plan=plan, optimizer=optimizer)
    assert report.plan.rows == plan.rows
    assert report.plan.storage == storage
    del held


def test_storage_and_the_format_of_the_inputs_are_the_plans_unless_the_call_says_otherwise():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    plan = nhwc.plan(model, storage="fresh", input_format="channels_last")
    read = Plan.from_json(plan.to_json())
    assert (read.storage, read.input_format) == ("fresh", "channels_last")
    report = nhwc.convert_(model, plan=read)
    assert report.outcomes == (nhwc.Outcome.FRESH,)
    assert len(model._forward_pre_hooks) == 1
    other = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert nhwc.convert_(other, plan=read, storage="auto").outcomes == (nhwc.Outcome.REUSED,)


def test_restoring_takes_no_part_of_a_plan_but_its_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    report = nhwc.convert_(model, input_format="channels_last")
    for key in list(model._forward_pre_hooks):
        del model._forward_pre_hooks[key]
    model[0].weight.data = model[0].weight.data.contiguous()
    restored = nhwc.restore_(model, report.plan)
    assert model[0].weight.stride() == (27, 1, 9, 3)
    assert not model._forward_pre_hooks
    assert (restored.plan.storage, restored.plan.input_format) == ("auto", "channels_last")


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("verb", [nhwc.plan, nhwc.convert_])
def test_a_torchscript_module_takes_no_hook_for_its_inputs(verb):
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(RuntimeError, match="takes no hook that brings its inputs into channels-last"):
        verb(scripted, input_format="channels_last")
    assert scripted.state_dict()["0.weight"].is_contiguous()


@pytest.mark.parametrize("verb", [nhwc.plan, nhwc.convert_])
def test_storage_is_one_of_four_or_none(verb):
    with pytest.raises(ValueError, match="expected storage to be one of auto, fresh, reuse, detach, got ''"):
        verb(nn.Conv2d(3, 4, 3), storage="")
    verb(nn.Conv2d(3, 4, 3), storage=None)


def test_a_plan_of_another_storage_is_no_plan():
    text = nhwc.plan(nn.Conv2d(3, 4, 3)).to_json()
    with pytest.raises(ValueError, match=r"expected what Plan.to_json writes: .*storage 'somewhere'"):
        Plan.from_json(text.replace('"auto"', '"somewhere"'))


@pytest.mark.parametrize("average", [copy.deepcopy, AveragedModel])
def test_averaged_copies_of_what_wraps_a_model_follow(average):
    wrapped = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3)))
    averaged = average(wrapped)
    report = nhwc.convert_(wrapped, ema=averaged)
    assert [row.label for row in report.companions] == ["ema"]


def test_an_optimizer_may_hold_a_weight_that_is_no_registered_parameter():
    layer = nn.Conv2d(3, 4, 3)
    del layer.weight
    layer.weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9)
    layer(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    report = nhwc.convert_(layer, optimizer=optimizer)
    assert [row.action for row in report.plan.rows] == [Action.CONVERT]
    assert {row.label for row in report.companions} == {"grad", "momentum_buffer"}


@pytest.mark.filterwarnings("ignore:torch_nhwc")
def test_there_is_no_remark_on_instance_norm_where_nothing_changes():
    model, optimizer = trained(torch.optim.LBFGS)
    model.append(nn.InstanceNorm2d(4))
    assert not nhwc.convert_(model, optimizer=optimizer).remarks
