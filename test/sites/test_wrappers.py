"""Models that are wrapped or compiled already, and optimizers that need contiguous parameters."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_nhwc as nhwc


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3))


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def sharded(model):
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model


WRAPPERS = {
    "DDP": (DistributedDataParallel, nhwc.Reason.DDP),
    "FSDP1": (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), nhwc.Reason.FSDP1),
    "FSDP1 with original parameters": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
        nhwc.Reason.FSDP1,
    ),
    "FSDP2": (sharded, nhwc.Reason.FSDP2),
    "DeepSpeed": (lambda model: DeepSpeedEngine(model), nhwc.Reason.ENGINE),
    "torch.compile": (lambda model: torch.compile(model, backend="eager"), nhwc.Reason.COMPILED),
    "Module.compile": (compiled_in_place, nhwc.Reason.COMPILED),
}


def layout(model):
    return [(p.data_ptr(), p.stride()) for p in model.parameters() if type(p) is nn.Parameter]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_wrapped_is_refused_with_its_reason_and_the_rest_of_the_model_converts(name):
    wrap, reason = WRAPPERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = wrap(network())
    model = nn.ModuleDict({"free": nn.Conv2d(3, 4, 3), "wrapped": wrapped})
    before = layout(wrapped)
    with pytest.warns(UserWarning, match="weights refused: 'wrapped"):
        report = nhwc.convert_(model)
    rows = {row.full_name: row for row in report.plan.rows}
    assert rows.pop("free.weight").action is nhwc.planning.Action.CONVERT
    assert model["free"].weight.stride() == (27, 1, 9, 3)
    assert len(rows) == 3
    for row in rows.values():
        assert (row.action, row.reason) == (nhwc.planning.Action.REFUSE, reason)
    assert layout(wrapped) == before
    with pytest.raises(RuntimeError, match=r"nothing was changed, since strict=True"):
        nhwc.convert_(wrapped, strict=True)


class DeepSpeedEngine(nn.Module):
    """Known by its name and its package."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["DDP", "torch.compile", "Module.compile"])
def test_what_was_converted_before_it_was_wrapped_is_in_order(name):
    model = network()
    nhwc.convert_(model)
    wrapped = WRAPPERS[name][0](model)
    before = layout(model)
    report = nhwc.convert_(wrapped, strict=True)
    assert {row.reason for row in report.plan.rows} == {nhwc.Reason.IN_FORMAT}
    assert layout(model) == before


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_weight_that_is_tied_to_a_compiled_layer_is_left_wherever_it_comes_first(compiled_first):
    compiled, free = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
    free.weight = compiled.weight
    compiled.compile(backend="eager")
    model = nn.Sequential(*([compiled, free] if compiled_first else [free, compiled]))
    with pytest.warns(UserWarning, match="compiled"):
        report = nhwc.convert_(model)
    assert free.weight.is_contiguous()
    assert {row.action for row in report.plan.rows} == {nhwc.planning.Action.REFUSE}


# Optimizers that need contiguous parameters: their weights are refused, and the optimizer goes on.


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, which it has under one name or the other."""

    def __init__(self, optimizer, name):
        setattr(self, name, optimizer)
        self.defaults = {}

    param_groups = property(lambda self: vars(self).get("optimizer", vars(self).get("base_optimizer")).param_groups)
    state = property(lambda self: {})


@pytest.mark.parametrize("names", [(), ("optimizer",), ("base_optimizer", "optimizer")], ids=str)
def test_h07_lbfgs_refuses_its_weights_that_would_move_and_steps_on(names):
    model, free = network(), nn.Conv2d(3, 4, 3)
    given = optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for name in names:
        given = Lookahead(given, name)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(UserWarning, match="the optimizer takes a view"):
        report = nhwc.convert_(nn.ModuleList([model, free]), optimizer=given)
    assert {row.full_name: row.reason for row in report.plan.rows} == {
        "0.0.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "0.3.weight": None,  # 1x1: no bytes move
        "0.4.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "1.weight": None,
    }
    optimizer.step(closure)

    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # what plain PyTorch does
        optimizer.step(closure)
