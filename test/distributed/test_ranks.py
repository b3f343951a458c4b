"""Two and three ranks on one machine: what differs between them is named, and training in format is training.

Each world is launched once, as processes that run this file: every rank runs all the scenarios in turn and writes down
how each one ended, and each is a test here. A rank that waits in vain is ended by a timeout, which fails the rest.
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_nhwc as nhwc

SCENARIOS = {}
LAUNCH_SECONDS = 150
WAIT = timedelta(seconds=20)


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """One channel, depthwise, 1x1, grouped, transposed and 3D."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv2d(6, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.volume = nn.Conv3d(2, 3, 3, padding=1)

    def forward(self, x):
        x = self.up(self.grouped(self.pointwise(self.depthwise(self.stem(x)).relu()).relu()))
        return self.volume(x.unflatten(1, (2, 2)))


def network(seed=0):
    torch.manual_seed(seed)
    return Net()


def converted(seed=0):
    model = network(seed)
    nhwc.convert_(model)
    return model


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def strides(model):
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


def check_everywhere(model, plan, **options):
    """Return the words of `check`, after seeing that all ranks have got the same."""
    said = [str(each) for each in nhwc.check(model, plan, process_group=dist.group.WORLD, **options)]
    heard = [None] * world()
    dist.all_gather_object(heard, said)
    assert heard == [said] * world(), heard
    return said


def batches(steps):
    """Return the whole batch of every step, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2 * world(), 2, 6, 6, generator=generator) for _ in range(steps)]


def own_part(batch):
    return batch[2 * rank() : 2 * rank() + 2]


def loss_of(model, batch):
    return (model(batch) - 0.5).square().mean()


def trained(model, steps, part=lambda batch: batch, after_backward=None):
    """Return the gradients of every step of plain SGD."""
    history = []
    for step, batch in enumerate(batches(steps)):
        model.zero_grad()
        loss_of(model, part(batch)).backward()
        history.append([parameter.grad.detach().clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        if after_backward is not None:
            after_backward(step)
    return history


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def stepped(model, optimizer, steps, part=lambda batch: batch):
    for batch in steps:
        optimizer.zero_grad()
        loss_of(model, part(batch)).backward()
        optimizer.step()


def normed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, affine=True)
    )


def assert_equal_on_all_ranks(tensors):
    for tensor in tensors:
        mine = tensor.detach().contiguous()
        theirs = [torch.empty_like(mine) for _ in range(world())]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, each) for each in theirs)


# Raw collectives, and the check across ranks.


@scenario
def h01_raw_collectives_between_layouts_permute_until_check_says_empty():
    values = torch.arange(4 * 3 * 9, dtype=torch.float32).view(4, 3, 3, 3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(values)
    plan = nhwc.plan(model, preserve=False)
    if rank() != 0:
        nhwc.convert_(model, plan=plan)

    # What plain PyTorch does: memory is sent and added up in its own order, without an error.
    received = model[0].weight.detach().clone()
    dist.broadcast(received, 0)
    assert torch.equal(received, values) == (rank() == 0)
    total = model[0].weight.detach().clone()
    dist.all_reduce(total)
    assert not torch.equal(total, values * world())

    assert check_everywhere(model, plan) == ["rank 0: '0.weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)"]
    nhwc.convert_(model, plan=plan)
    assert check_everywhere(model, plan) == []
    dist.broadcast(received := model[0].weight.detach().clone(), 0)
    assert torch.equal(received, values)
    dist.all_reduce(total := model[0].weight.detach().clone())
    assert torch.equal(total, values * world())


@scenario
def h05_one_weight_or_state_that_drifted_on_one_rank_is_all_that_is_named():
    culprit = world() - 1
    model = network()
    optimizer = momentum(model)
    stepped(model, optimizer, batches(1))
    plan = nhwc.convert_(model, optimizer=optimizer).plan
    if rank() == culprit:
        model.volume.weight.data = model.volume.weight.data.contiguous()
        state = optimizer.state[model.grouped.weight]
        state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    assert check_everywhere(model, plan, optimizer=optimizer) == [
        f"rank {culprit}: 'volume.weight' has strides (54, 27, 9, 3, 1), expected (54, 1, 18, 6, 2)",
        f"rank {culprit}: momentum_buffer of 'grouped.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)",
    ]
    nhwc.training.restore_(model, plan, optimizer=optimizer)
    assert check_everywhere(model, plan, optimizer=optimizer) == []


@scenario
def h30_ranks_that_planned_differently_are_named_with_the_site():
    is_odd = rank() == world() - 1

    def said(model, **options):
        texts = check_everywhere(model, nhwc.convert_(model, **{"preserve": False, **(options if is_odd else {})}).plan)
        assert all(text.startswith(f"rank {world() - 1}: ") for text in texts)
        return [text.partition(": ")[2] for text in texts]

    volume = "plan of 'volume.weight' is (3, 2, 3, 3, 3) of torch.float32"
    expected = "on rank 0 (3, 2, 3, 3, 3) of torch.float32 to strides (54, 1, 18, 6, 2)"
    assert said(network(), memory_format=torch.channels_last) == [f"{volume} to strides None, {expected}"]
    only_volumes = {"each_forward": True, "filter_fn": lambda _, path: path == "volume"}
    assert f"{volume}, converted in each forward, {expected}" in said(network(), **only_volumes)
    inputs = "'plan' is for inputs in channels_last, on rank 0 for inputs in any format"
    assert said(network(), input_format="channels_last") == [inputs]
    layers = "plan of '1' is GroupNorm, replaced, on rank 0 without such a site"
    assert layers in said(normed(), preserve=True)

    model = network()
    if is_odd:
        model.extra = nn.Conv2d(3, 4, 3)
        model.stem = nn.Conv2d(1, 5, 3)
    stem, extra = said(model)
    assert stem.startswith("plan of 'stem.weight' is (5, 1, 3, 3)")
    assert extra.startswith("plan of 'extra.weight' is ")
    assert extra.endswith("on rank 0 without such a site")


@scenario
def a_rank_whose_model_differs_from_its_plan_is_an_error_on_all_ranks():
    culprit = world() - 1
    model = network()
    plan = nhwc.convert_(model).plan
    if rank() == culprit:
        model.extra = nn.Conv2d(3, 4, 3)
    message = f"rank {culprit}: the model differs from the plan: the plan does not know 'extra.weight'"
    with pytest.raises(ValueError, match=message):
        nhwc.check(model, plan, process_group=dist.group.WORLD)
    if rank() == culprit:
        del model.extra
    assert check_everywhere(model, plan) == []


@scenario
def check_takes_a_group_of_some_ranks_and_refuses_the_others():
    group = dist.new_group([world() - 1])
    model = network()
    plan = nhwc.convert_(model).plan
    if rank() == world() - 1:
        model.stem.weight.data = model.stem.weight.data.contiguous()
        [found] = nhwc.check(model, plan, process_group=group)
        assert (found.rank, found.site) == (0, "stem.weight")
    else:
        with pytest.raises(ValueError, match="this rank is not in the process group"):
            nhwc.check(model, plan, process_group=group)


# DDP.


@scenario
def ddp_trains_a_converted_model_as_one_process_trains_an_unconverted_one():
    reference = trained(network(), 6)
    for gradient_as_bucket_view in (False, True):
        model = network()
        report = nhwc.convert_(model)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.set_warn_always(True)  # not only once in a process
            ours = trained(wrapped, 6, own_part)
            torch.set_warn_always(False)
        for step, expected in zip(ours, reference):
            assert_equal_on_all_ranks(step)
            torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-6)
        assert_equal_on_all_ranks(model.parameters())
        assert check_everywhere(wrapped, report.plan) == check_everywhere(model, report.plan) == []  # gradients too
        assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.dim() > 3)


@scenario
def ddp_trains_a_converted_model_with_its_fused_optimizer_and_saved_state():
    reference, model = network(), network()
    nhwc.convert_(model)
    wrapped = DistributedDataParallel(model)
    expected, ours = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (reference, model))
    for steps in (batches(6)[:3], batches(6)[3:]):
        stepped(reference, expected, steps)
        stepped(wrapped, ours, steps, own_part)
        torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-3, atol=1e-4)
        ours.load_state_dict(copy.deepcopy(expected.state_dict()))  # saved from the contiguous model
        assert nhwc.training.align_optimizer_(model, ours)
    assert_equal_on_all_ranks(model.parameters())


@scenario
def h05_ddp_refuses_mixed_ranks_late_and_one_by_one_and_check_names_them_all_at_once():
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = network()
    plan = nhwc.plan(model, preserve=False)
    if rank() == 0:
        nhwc.convert_(model, plan=plan)
    # What plain PyTorch does: rank 0 waits for the others, which have raised.
    with pytest.raises(RuntimeError, match="Timed out" if rank() == 0 else "appears not to match strides of the same"):
        DistributedDataParallel(model, process_group=group)
    said = check_everywhere(model, plan)
    assert {text.split(":")[0] for text in said} == {f"rank {index}" for index in range(1, world())}
    nhwc.convert_(model, plan=plan)
    DistributedDataParallel(model)


@scenario
def h31_converting_after_ddp_permutes_gradients_in_plain_pytorch_and_is_refused_by_us():
    expected = trained(network(), 5)
    index = [name for name, _ in network().named_parameters()].index("grouped.weight")

    def stock(step):
        if step == 1:
            nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)

    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trained(DistributedDataParallel(model), 5, own_part, stock)
    torch.testing.assert_close(plain[1][index], expected[1][index], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain[2][index], expected[2][index], rtol=1e-2)

    def refused(step):
        if step == 1:
            for each, reason in ((wrapped, nhwc.Reason.DDP), (model, nhwc.Reason.WRAPPED)):
                with pytest.warns(UserWarning, match=r"convert first, then make the optimizer, then wrap"):
                    report = nhwc.convert_(each)  # the module inside is no way around it
                assert {row.reason for row in report.plan.rows} == {reason}

    model = network()
    wrapped = DistributedDataParallel(model)
    ours = trained(wrapped, 5, own_part, refused)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


# What reads DDP's buckets, where gradients and parameters have contiguous strides.


def decay(state, bucket):
    """Pair gradients with their parameters, as a communication hook does."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters()):
        gradient.add_(parameter.detach())
    return ddp_comm_hooks.default.allreduce_hook(state, bucket)


def is_close(one, other):
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(one, other, strict=True))


@scenario
def h44_a_communication_hook_that_reads_gradients_gets_them_permuted_and_each_forward_is_right():
    def communicated(convert):
        model = network()
        convert(model)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, decay)
        return [each for step in trained(wrapped, 2, own_part) for each in step]

    expected = communicated(lambda model: None)
    assert not is_close(communicated(nhwc.convert_), expected)
    assert is_close(communicated(lambda model: nhwc.convert_(model, each_forward=True)), expected)


def with_zero(convert, optimizer_type, zero_first=False, **options):
    """Return the parameters after three steps, and what `check` says when it is given the optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    plan = convert(model)

    def zero():
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_type, lr=0.01, **options)

    optimizer = zero() if zero_first else None
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer or zero()
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(wrapped, own_part(batch)).backward()
        optimizer.step()
    said = [] if plan is None else nhwc.check(wrapped, plan, optimizer=optimizer)
    return [parameter.detach() for parameter in model.parameters()], said


@scenario
def h44_zero_with_parameters_as_views_of_buckets_steps_wrong_or_loses_the_conversion_and_is_named():
    for zero_first in (False, True):
        run = partial(with_zero, optimizer_type=torch.optim.AdamW, zero_first=zero_first)
        expected, _ = run(lambda model: None, parameters_as_bucket_view=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DDP sees that strides differ
            got, said = run(lambda model: nhwc.convert_(model).plan, parameters_as_bucket_view=True)
        assert is_close(got, expected) == zero_first  # wrong after DDP, whose buckets are channels-last by then
        assert len([each for each in said if each.what == "weight"]) == 6  # all are lost
        [named] = [each for each in said if each.site == ""]
        assert str(named).startswith("'ZeroRedundancyOptimizer' keeps its parameters in contiguous buckets")
        for options, views in (({"each_forward": True}, True), ({}, False)):
            got, said = run(lambda model: nhwc.convert_(model, **options).plan, parameters_as_bucket_view=views)
            assert is_close(got, expected)
            assert said == []


@scenario
def h44_zero_refuses_weights_in_its_buckets_and_its_state_follows_without_them():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True)
    with pytest.warns(UserWarning, match="keeps it in a flat, contiguous bucket.*each_forward=True"):
        report = nhwc.convert_(model, optimizer=optimizer, storage="detach")
    assert {row.reason for row in report.plan.rows} == {nhwc.Reason.BUCKET_VIEW}

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    stepped(model, optimizer, batches(1))
    report = nhwc.convert_(model, optimizer=optimizer)
    assert [each for each in report.companions if each.label == "exp_avg"]  # those that this rank has
    assert check_everywhere(model, report.plan, optimizer=optimizer) == []


# FSDP.


def fsdp1(model, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


@scenario
def a_model_that_was_converted_first_trains_under_fsdp1_in_format():
    reference = network()
    stepped(reference, momentum(reference), batches(5))
    for use_orig_params in (True, False):
        model = network()
        plan = nhwc.convert_(model).plan
        wrapped = fsdp1(model, use_orig_params)
        seen = {}

        def look(name, seen, module, _):
            seen[name] = module.weight.stride()

        for name, module in wrapped.module.named_children():
            module.register_forward_pre_hook(partial(look, name, seen))
        stepped(wrapped, momentum(wrapped), batches(5), own_part)
        # With one channel both formats are one, and FSDP1 takes the other strides.
        several = [row for row in plan.rows if row.shape[1] > 1]
        assert {row.path: seen[row.path] for row in several} == {row.path: row.target_strides for row in several}
        state = wrapped.state_dict()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@scenario
def h39_fsdp1_loads_the_optimizer_state_of_channels_last_weights_permuted_and_of_contiguous_ones_right():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def is_loaded(convert):
        states = []
        for seed in (0, 1):
            model = network(seed)
            convert(model)
            wrapped = fsdp1(model, True)
            optimizer = momentum(wrapped)
            if states:
                to_load = FullyShardedDataParallel.optim_state_dict_to_load(wrapped, optimizer, states[0])
                optimizer.load_state_dict(to_load)
            else:
                stepped(wrapped, optimizer, batches(3), own_part)
            states.append(FullyShardedDataParallel.optim_state_dict(wrapped, optimizer))
        saved, loaded = (each["state"]["grouped.weight"]["momentum_buffer"] for each in states)
        return torch.allclose(loaded, saved)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert is_loaded(lambda model: None)
        assert not is_loaded(nhwc.convert_)
        assert is_loaded(lambda model: nhwc.convert_(model, each_forward=True))


@scenario
def h04_fsdp2_is_refused_and_refuses_a_converted_model_itself():
    mesh = dist.init_device_mesh("cpu", (world(),))
    with pytest.raises((NotImplementedError, RuntimeError), match="non-contiguous"):
        fully_shard(converted(), mesh=mesh)
    model = network()
    fully_shard(model, mesh=mesh)
    before = [(id(p), p.stride(), p.to_local().data_ptr()) for p in model.parameters()]
    with pytest.warns(UserWarning, match="FSDP2 takes only contiguous parameters: each_forward=True"):
        report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} == {nhwc.Reason.FSDP2}
    assert [(id(p), p.stride(), p.to_local().data_ptr()) for p in model.parameters()] == before
    loss_of(model, own_part(batches(1)[0])).backward()


# Checkpoints of all ranks.


@scenario
def a_distributed_checkpoint_of_a_converted_model_loads_into_either_layout():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = converted()
    dcp.save({"model": get_model_state_dict(DistributedDataParallel(model))}, checkpoint_id=folder[0])
    for target in (network(1), converted(1)):
        state = {"model": get_model_state_dict(target)}
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(target, state["model"])
        for name, parameter in model.named_parameters():
            assert torch.equal(target.get_parameter(name), parameter), name


def loaded(model, state):
    """Return the names whose tensors equal those of `network()` after rank 0 has broadcast a state dict to a model."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state) if rank() == 0 else {}, options=options)
    got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name for name, tensor in network().state_dict().items() if torch.equal(got[name], tensor)}


@scenario
def h43_a_channels_last_checkpoint_is_permuted_by_broadcasting_it_and_a_contiguous_one_is_not():
    everything = set(network().state_dict())
    # The others have one order in both formats.
    permuted = ("stem.weight", "grouped.weight", "up.weight", "volume.weight")
    mesh = dist.init_device_mesh("cpu", (world(),))
    model = network()
    report = nhwc.convert_(model)
    assert nhwc.Reason.BROADCAST.value in report.remarks
    as_it_is = model.state_dict()

    for convert in (lambda model: None, nhwc.convert_):
        target = network(1 + rank())
        convert(target)
        assert loaded(target, as_it_is) == (everything if rank() == 0 else everything.difference(permuted))
    assert check_everywhere(target, report.plan) == [
        f"rank {index}: '{name}' has the values of rank 0 in another order, as a broadcast between layouts leaves "
        "them: load torch_nhwc.checkpoint.contiguous_state_dict(checkpoint) instead of a channels-last one"
        for index in range(1, world())
        for name in permuted
    ]
    sharded = network(1)
    fully_shard(sharded, mesh=mesh)
    assert loaded(sharded, as_it_is) == everything.difference(permuted)  # on all ranks

    nhwc.checkpoint.contiguous_checkpoints_(model)
    assert nhwc.convert_(model).remarks == ()
    for saved in (
        get_model_state_dict(DistributedDataParallel(model)),
        nhwc.checkpoint.contiguous_state_dict(as_it_is),
    ):
        assert loaded(target, saved) == everything
        assert check_everywhere(target, report.plan) == []
        sharded = network(1)
        fully_shard(sharded, mesh=mesh)
        assert loaded(sharded, saved) == everything


@scenario
def h43_the_state_of_an_optimizer_is_permuted_by_broadcasting_it_and_a_contiguous_one_is_not():
    def trained_and_saved():
        model = converted()
        stepped(model, optimizer := momentum(model), batches(1))
        return model, optimizer

    def is_loaded(saved):
        model, other = trained_and_saved()
        for state in other.state.values():
            state["momentum_buffer"].zero_()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, other, saved if rank() == 0 else {}, options=options)
        got = [other.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        expected = [optimizer.state[parameter]["momentum_buffer"] for parameter in trained.parameters()]
        return all(map(torch.equal, got, expected))

    trained, optimizer = trained_and_saved()
    options = StateDictOptions(full_state_dict=True)
    assert is_loaded(get_optimizer_state_dict(trained, optimizer, options=options)) == (rank() == 0)
    nhwc.checkpoint.contiguous_checkpoints_(optimizer)
    assert is_loaded(get_optimizer_state_dict(trained, optimizer, options=options))


# Replaced layers.


@scenario
def a_model_with_replaced_layers_trains_under_what_wraps_it_as_one_process_trains_it_without():
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = dist.init_device_mesh("cpu", (world(),))

    def shard(model):
        fully_shard(model[2], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    alone = normed()
    trained(alone, 3)
    for wrap in (DistributedDataParallel, partial(fsdp1, use_orig_params=True), shard):
        model = normed()
        no_weights = (lambda module, _: not isinstance(module, nn.Conv2d)) if wrap is shard else None
        plan = nhwc.convert_(model, preserve=True, input_format="channels_last", filter_fn=no_weights).plan
        assert check_everywhere(model, plan) == []
        wrapped = wrap(model)
        stepped(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05), batches(3), own_part)
        names = [type(module).__name__ for module in wrapped.modules()]
        assert "PreservingGroupNorm" in names
        assert "PreservingInstanceNorm2d" in names
        is_fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(wrapped) if is_fsdp1 else contextlib.nullcontext():
            for got, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
                got = got.full_tensor() if wrap is shard else got
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# Weights that are converted in each forward.


def convert_in_each_forward(model):
    report = nhwc.convert_(model, each_forward=True, input_format="channels_last", strict=True)
    assert {row.action for row in report.plan.rows} == {nhwc.planning.Action.EACH_FORWARD}
    assert check_everywhere(model, report.plan) == []


def assert_trains_as_without(wrap, full):
    """Train a model that is converted before it is wrapped, and one that is converted after."""
    states = []
    for is_before, is_after in ((False, False), (True, False), (False, True)):
        model = network()
        if is_before:
            convert_in_each_forward(model)
        wrapped = wrap(model)
        if is_after:
            convert_in_each_forward(wrapped)
        stepped(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2), batches(3), own_part)
        kinds = [type(module).__name__ for module in wrapped.modules()]
        assert sum("EachForward" in kind for kind in kinds) == 6 * (is_before or is_after), kinds
        states.append(full(wrapped))
        for name, tensor in states[-1].items():
            torch.testing.assert_close(tensor, states[0][name], rtol=1e-4, atol=1e-5)
            assert tensor.is_contiguous()


@scenario
def fsdp2_trains_with_weights_converted_in_each_forward_before_and_after_it():
    mesh = dist.init_device_mesh("cpu", (world(),))

    def shard(model):
        for layer in (model.stem, model.grouped, model.up, model.volume):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    options = StateDictOptions(full_state_dict=True)
    assert_trains_as_without(shard, lambda model: get_model_state_dict(model, options=options))
    model = shard(network())
    report = nhwc.convert_(model, each_forward=True)
    assert type(model.stem).__name__ == "FSDPEachForwardConv2d"
    report.revert()
    assert [type(layer).__name__ for layer in (model.stem, model.depthwise)] == ["FSDPConv2d", "Conv2d"]
    loss_of(model, own_part(batches(1)[0])).backward()


@scenario
def fsdp1_and_ddp_train_with_weights_converted_in_each_forward_before_and_after_them():
    for use_orig_params in (True, False):
        assert_trains_as_without(lambda model: fsdp1(model, use_orig_params), lambda model: model.state_dict())
    assert_trains_as_without(DistributedDataParallel, lambda model: model.state_dict())


@scenario
def a_flat_buffer_trains_with_weights_converted_in_each_forward():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    buffer = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    buffer.grad = torch.zeros_like(buffer)
    parts = zip(parameters, buffer.detach().split(sizes), buffer.grad.split(sizes))
    for parameter, values, gradient in parts:
        parameter.data, parameter.grad = values.view(parameter.shape), gradient.view(parameter.shape)

    nhwc.convert_(model, each_forward=True, input_format="channels_last", strict=True)
    optimizer = torch.optim.AdamW([buffer])
    model(torch.randn(4, 3, 16, 16)).square().mean().backward()
    dist.all_reduce(buffer.grad)
    optimizer.step()
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in parameters]), buffer)


@scenario
def the_documents_programs_with_a_process_group_run_on_all_ranks():
    page = (Path(__file__).parents[2] / "docs/distributed.md").read_text()
    programs = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_process_group" in code]
    assert len(programs) == 2
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)  # the group that is there
        patch.setattr(dist, "destroy_process_group", lambda: None)
        for code in programs:
            exec(code, {})


def main(index, size, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=size, timeout=WAIT)
    ended = {}
    for name, function in SCENARIOS.items():
        try:
            function()
            ended[name] = None
        except BaseException:
            ended[name] = traceback.format_exc()
        Path(folder, f"{index}.json").write_text(json.dumps(ended))
        if ended[name] is not None:
            break  # the ranks are out of step
        dist.barrier()
    os._exit(0)  # the threads of a broken group may wait for ever


class World:
    """What every rank wrote down, and said."""

    def __init__(self, size, folder):
        self.size = size
        said = [folder / f"{index}.txt" for index in range(size)]
        ranks = []
        for index, path in enumerate(said):
            command = [sys.executable, __file__, str(index), str(size), str(folder / "store"), str(folder)]
            with open(path, "w") as file:  # a pipe that nobody reads would fill up
                ranks.append(subprocess.Popen(command, stdout=file, stderr=file))
        end = time.monotonic() + LAUNCH_SECONDS
        self.in_time = True
        for process in ranks:
            try:
                process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.in_time = False
                process.kill()
                process.wait()
        self.said = [path.read_text() for path in said]
        results = [folder / f"{index}.json" for index in range(size)]
        self.ended = [json.loads(path.read_text()) if path.exists() else {} for path in results]


THREE = pytest.param(3, marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[2, THREE], ids=["two ranks", "three ranks"])
def ranks(request, tmp_path_factory):
    return World(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCENARIOS)
def test(ranks, name):
    for index, ended in enumerate(ranks.ended):
        if name not in ended:
            pytest.fail(f"rank {index} did not come here; its last words: {ranks.said[index][-2000:]}", pytrace=False)
    failures = [f"rank {index}: {ended[name]}" for index, ended in enumerate(ranks.ended) if ended[name] is not None]
    if failures:  # of all ranks: one that stops makes the others fail at their next collective
        pytest.fail("\n".join(failures), pytrace=False)


def test_no_rank_hangs_and_none_warns_of_strides(ranks):
    assert ranks.in_time
    for said in ranks.said:
        assert "grad.sizes()" not in said
        assert "strides" not in said


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
