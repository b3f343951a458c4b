"""A plan says what is done: by `convert_` with the same arguments, and with the plan itself."""

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason


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
    refused = {"flattening": Reason.FLATTENING_OPTIMIZER, "coded": Reason.STATE_IN_THE_WAY}.get(scene)
    assert refused is None or plan.rows[0].reason is refused
    report = nhwc.convert_(model, optimizer=optimizer, storage=storage)
    assert report.plan == plan
    report.revert()
    report = nhwc.convert_(model, plan=plan, optimizer=optimizer)
    assert (report.plan, report.plan.digest, report.plan.storage) == (plan, plan.digest, storage)
    del held


def test_storage_and_the_format_of_the_inputs_are_the_plans_unless_the_call_says_otherwise():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    plan = nhwc.plan(model, storage="fresh", input_format="channels_last")
    read = Plan.from_json(plan.to_json())
    assert (read.storage, read.input_format) == ("fresh", "channels_last")
    report = nhwc.convert_(model, plan=read)
    assert report.outcomes == (nhwc.Outcome.COPIED,)
    assert len(model._forward_pre_hooks) == 1
    other = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert nhwc.convert_(other, plan=read, storage="auto").outcomes == (nhwc.Outcome.IN_PLACE,)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("verb", [nhwc.plan, nhwc.convert_])
def test_a_torchscript_module_takes_no_hook_for_its_inputs(verb):
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(RuntimeError, match="takes no hook that converts its inputs to channels-last"):
        verb(scripted, input_format="channels_last")
    assert scripted.state_dict()["0.weight"].is_contiguous()
