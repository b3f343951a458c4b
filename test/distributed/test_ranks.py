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
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
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
    """The words of `check`, after seeing that all ranks have got the same."""
    said = [str(each) for each in nhwc.check(model, plan, process_group=dist.group.WORLD, **options)]
    heard = [None] * world()
    dist.all_gather_object(heard, said)
    assert heard == [said] * world(), heard
    return said


def batches(steps):
    """The whole batch of every step, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2 * world(), 2, 6, 6, generator=generator) for _ in range(steps)]


def own_part(batch):
    return batch[2 * rank() : 2 * rank() + 2]


def loss_of(model, batch):
    return (model(batch) - 0.5).square().mean()


def trained(model, steps, part=lambda batch: batch, after_backward=None):
    """The gradients of every step of plain SGD."""
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
    plan = nhwc.plan(model)
    if rank() != 0:
        nhwc.convert_(model, plan=plan)

    # What plain PyTorch does: memory is sent and added up as it lies, without an error.
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
def plans_have_the_same_digest_whatever_the_layouts_of_the_ranks_are():
    model = network(rank())
    if rank() == 0:
        nhwc.convert_(model)
    plan = nhwc.plan(model)
    digests = [None] * world()
    dist.all_gather_object(digests, plan.digest)
    assert len(set(digests)) == 1


@scenario
def equal_ranks_have_nothing_to_list():
    model = network(rank())  # the values differ, which is not the layout's business
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    report = nhwc.convert_(model, optimizer=optimizer)
    assert check_everywhere(model, report.plan, optimizer=optimizer) == []


@scenario
def h05_an_unconverted_rank_is_named_with_every_site_on_it():
    for culprit in (0, world() - 1):
        model = network()
        plan = nhwc.plan(model)
        if rank() != culprit:
            nhwc.convert_(model)
        said = check_everywhere(model, plan)
        assert len(said) == len(plan.rows)
        assert all(text.startswith(f"rank {culprit}: ") for text in said)
        assert f"rank {culprit}: 'grouped.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said


@scenario
def h05_one_weight_or_state_that_drifted_on_one_rank_is_all_that_is_named():
    culprit = world() - 1
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    plan = nhwc.convert_(model, optimizer=optimizer).plan
    if rank() == culprit:
        model.volume.weight.data = model.volume.weight.data.contiguous()
        state = optimizer.state[model.grouped.weight]
        state["exp_avg"] = state["exp_avg"].contiguous()
    assert check_everywhere(model, plan, optimizer=optimizer) == [
        f"rank {culprit}: 'volume.weight' has strides (54, 27, 9, 3, 1), expected (54, 1, 18, 6, 2)",
        f"rank {culprit}: exp_avg of 'grouped.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)",
    ]
    nhwc.restore_(model, plan, optimizer=optimizer)
    assert check_everywhere(model, plan, optimizer=optimizer) == []


@scenario
def h30_ranks_that_converted_by_different_plans_are_named_with_the_site():
    culprit = world() - 1
    model = network()
    plan = nhwc.convert_(model, torch.channels_last if rank() == culprit else None).plan
    said = check_everywhere(model, plan)
    assert {text.split("'")[1] for text in said} == {"volume.weight"}
    assert all(text.startswith(f"rank {culprit}: plan of '") for text in said)
    assert any(
        "to strides None, on rank 0 (3, 2, 3, 3, 3) of torch.float32 to strides (54, 1, 18, 6, 2)" in t for t in said
    )


@scenario
def a_layer_that_one_rank_left_out_is_named():
    culprit = 0
    model = network()
    plan = nhwc.convert_(model, filter_fn=lambda _, path: not (path == "grouped" and rank() == culprit)).plan
    said = check_everywhere(model, plan)
    # The plan of most ranks is the one to compare with; of two, rank 0's.
    odd = culprit if world() > 2 else 1
    assert len(said) == 1, said
    assert said[0].startswith(f"rank {odd}: plan of 'grouped.weight' is ")


@scenario
def a_rank_with_more_layers_is_named_and_nobody_hangs():
    culprit = world() - 1
    model = network()
    if rank() == culprit:
        model.extra = nn.Conv2d(3, 4, 3)
        model.stem = nn.Conv2d(1, 5, 3)
    plan = nhwc.convert_(model).plan
    said = check_everywhere(model, plan)
    assert [text.split("'")[1] for text in said] == ["stem.weight", "extra.weight"]
    assert all(text.startswith(f"rank {culprit}: plan of '") for text in said)
    assert said[1].endswith("on rank 0 without such a site")


@scenario
def a_rank_whose_model_differs_from_its_plan_is_an_error_on_all_ranks():
    culprit = world() - 1
    model = network()
    plan = nhwc.convert_(model).plan
    if rank() == culprit:
        model.extra = nn.Conv2d(3, 4, 3)
    for what, optimizer in (("model", None), ("argument", "no optimizer" if rank() == culprit else None)):
        if what == "argument" and rank() == culprit:
            del model.extra
        expected = (
            f"rank {culprit}: the model differs from the plan: the plan does not know 'extra.weight'"
            if what == "model"
            else f"rank {culprit}: expected an optimizer, or a list of them, got str"
        )
        with pytest.raises(ValueError, match=expected):
            nhwc.check(model, plan, optimizer=optimizer, process_group=dist.group.WORLD)
    assert check_everywhere(model, plan) == []


@scenario
def check_takes_a_group_of_some_ranks_and_refuses_the_others():
    group = dist.new_group([0, 1])
    model = network()
    plan = nhwc.convert_(model).plan
    if rank() < 2:
        if rank() == 1:
            model.stem.weight.data = model.stem.weight.data.clone(memory_format=torch.contiguous_format)
        [found] = nhwc.check(model, plan, process_group=group)
        assert (found.rank, found.site) == (1, "stem.weight")
    else:
        with pytest.raises(ValueError, match="this rank is not in the process group"):
            nhwc.check(model, plan, process_group=group)


# DDP.


def train_wrapped(gradient_as_bucket_view):
    reference = trained(network(), 6)
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
    assert check_everywhere(wrapped, report.plan) == check_everywhere(model, report.plan) == []  # gradients as well
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.dim() > 3)


@scenario
def ddp_trains_a_converted_model_as_one_process_trains_an_unconverted_one():
    train_wrapped(False)


@scenario
def ddp_trains_a_converted_model_with_gradients_as_views_of_buckets():
    train_wrapped(True)


@scenario
def h05_a_3d_layer_of_one_tap_warns_after_any_converter_where_pytorch_does_not_use_onednn():
    def warned(convert):
        torch.manual_seed(0)
        model = nn.Conv3d(3, 4, 1, dtype=torch.float64)
        convert(model)
        wrapped = DistributedDataParallel(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.set_warn_always(True)
            wrapped(torch.ones(1, 3, 4, 4, 4, dtype=torch.float64)).sum().backward()
            torch.set_warn_always(False)
        assert model.weight.grad.flatten().tolist() == [64.0] * 12
        return [str(each.message).splitlines()[1] for each in caught]

    # Its gradient kernel writes contiguous strides, which DDP compares in dimensions of size 1, too. No byte differs.
    expected = ["grad.sizes() = [4, 3, 1, 1, 1], strides() = [3, 1, 1, 1, 1]"]
    assert warned(lambda model: nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)) == expected
    assert warned(nhwc.convert_) == expected


@scenario
def ddp_trains_a_converted_model_with_its_fused_optimizer_and_saved_state():
    batch = batches(6)
    reference = network()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    model = network()
    nhwc.convert_(model)
    wrapped = DistributedDataParallel(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # which the guard sees, and aligns when loaded

    def step(module, optimizer, part):
        optimizer.zero_grad()
        loss_of(module, part).backward()
        optimizer.step()

    for part in batch[:3]:
        step(reference, expected, part)
        step(wrapped, ours, own_part(part))
    ours.load_state_dict(copy.deepcopy(expected.state_dict()))  # saved from the contiguous model
    assert not nhwc.align_(model, ours)
    for part in batch[3:]:
        step(reference, expected, part)
        step(wrapped, ours, own_part(part))
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-3, atol=1e-4)
    assert_equal_on_all_ranks(model.parameters())


@scenario
def h05_ddp_refuses_mixed_ranks_late_and_one_by_one_and_check_names_them_all_at_once():
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = network()
    plan = nhwc.plan(model)
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
def h31_converting_behind_ddp_permutes_gradients_in_plain_pytorch_and_is_refused_by_us():
    expected = trained(network(), 5)
    layers = [index for index, (name, _) in enumerate(network().named_parameters()) if name == "grouped.weight"]

    def stock(step):
        if step == 1:
            nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)

    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trained(DistributedDataParallel(model), 5, own_part, stock)
    for index in layers:
        torch.testing.assert_close(plain[1][index], expected[1][index], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(plain[2][index], expected[2][index], rtol=1e-2)

    def refused(step):
        if step == 1:
            before = strides(model)
            with pytest.warns(UserWarning, match=r"convert first, then make the optimizer, then wrap"):
                report = nhwc.convert_(wrapped)
            assert {row.reason for row in report.plan.rows} == {nhwc.Reason.DDP}
            with pytest.warns(UserWarning, match="post hooks, as DDP and FSDP leave there"):
                report = nhwc.convert_(model)  # the module inside is no way around it
            assert {row.reason for row in report.plan.rows} == {nhwc.Reason.WRAPPED}
            with pytest.raises(RuntimeError, match="DistributedDataParallel has wrapped it"):
                nhwc.convert_(wrapped, strict=True)
            assert strides(model) == before

    model = network()
    wrapped = DistributedDataParallel(model)
    ours = trained(wrapped, 5, own_part, refused)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@scenario
def h30_ddp_without_its_first_synchronisation_mixes_layouts_silently_and_check_says_so():
    def mixed():
        model = network()
        plan = nhwc.plan(model)
        if rank() == 0:
            nhwc.convert_(model, plan=plan)
        return model, plan

    expected = trained(network(), 2)
    model, plan = mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trained(DistributedDataParallel(model, init_sync=False), 2, own_part)
    assert not torch.allclose(plain[0][6], expected[0][6], rtol=1e-2)  # grouped.weight: permuted, without an error

    model, plan = mixed()
    said = check_everywhere(model, plan)
    assert {text.split(":")[0] for text in said} == {f"rank {index}" for index in range(1, world())}
    nhwc.convert_(model, plan=plan)
    assert check_everywhere(model, plan) == []
    ours = trained(DistributedDataParallel(model, init_sync=False), 2, own_part)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


# What reads DDP's buckets, where gradients and parameters are in contiguous strides.


def decay(state, bucket):
    """A communication hook that pairs gradients with their parameters."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters()):
        gradient.add_(parameter.detach())
    return ddp_comm_hooks.default.allreduce_hook(state, bucket)


class Stream(contextlib.nullcontext):
    """Stands in for an accelerator's, which PyTorch wants for optimizers in the backward."""

    def wait_stream(self, stream):
        pass


def register(hook, state=None):
    return lambda wrapped: wrapped.register_comm_hook(state, hook)


def optimizer_in_backward(wrapped):
    """DDP registers the hook itself where parameters have such optimizers."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, views = wrapped.module, wrapped.gradient_as_bucket_view
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    return DistributedDataParallel(model, gradient_as_bucket_view=views)


READS_GRADIENTS = (
    "reads bucket.gradients(), where channels-last gradients are permuted: use bucket.buffer(), or convert by "
    "each_forward=True"
)
COMPRESSED = ddp_comm_hooks.default.fp16_compress_wrapper
# By what DDP has: whether it steps itself, and for which of gradient_as_bucket_view=False and True it is wrong.
COMMUNICATION = {
    "none": (lambda wrapped: None, False, ()),
    "allreduce": (register(ddp_comm_hooks.default.allreduce_hook), False, ()),
    "float16": (register(ddp_comm_hooks.default.fp16_compress_hook), False, ()),
    "PyTorch's in C++": (
        lambda wrapped: wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        False,
        (),
    ),
    "no communication": (register(ddp_comm_hooks.debugging.noop_hook), False, ()),
    "local SGD": (
        lambda wrapped: register(post_localSGD_hook, PostLocalSGDState(None, None, 100))(wrapped),
        False,
        (),
    ),
    "own": (register(decay), False, (False, True)),
    "own, compressed": (register(COMPRESSED(decay)), False, (False, True)),
    "fused optimizer": (
        lambda wrapped: wrapped._register_fused_optim(torch.optim.SGD, lr=0.05),
        True,
        (False, True),
    ),
    "optimizer in the backward": (optimizer_in_backward, True, (False,)),
}


def communicated(name, views, convert):
    """The parameters after two steps, and what `check` says of what is around the model."""
    make, steps_itself, _ = COMMUNICATION[name]
    model = network()
    plan = convert(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    wrapped = make(wrapped) if make is optimizer_in_backward else (make(wrapped), wrapped)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(wrapped, own_part(batch)).backward()
        if not steps_itself:
            optimizer.step()
    said = [] if plan is None else nhwc.check(wrapped, plan)
    return [parameter.detach() for parameter in model.parameters()], [each for each in said if each.site == ""]


def is_close(one, other):
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(one, other, strict=True))


@scenario
def h44_communication_hooks_that_read_gradients_one_by_one_get_them_permuted_and_are_named():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch.accelerator, "current_stream", Stream)
        for name, (_, _, wrong) in COMMUNICATION.items():
            for views in (False, True) if wrong else (True,):
                expected, _ = communicated(name, views, lambda model: None)
                got, said = communicated(name, views, lambda model: nhwc.convert_(model).plan)
                assert is_close(got, expected) == (views not in wrong), (name, views)
                said = [str(each).partition(" ")[2] for each in said]
                assert said == [READS_GRADIENTS] * (views in wrong), (name, views)
                if wrong:
                    got, said = communicated(name, views, lambda model: nhwc.convert_(model, each_forward=True).plan)
                    assert is_close(got, expected), (name, views)
                    assert not said, (name, views)


@scenario
def h44_power_sgd_approximates_channels_last_gradients_as_well_as_contiguous_ones():
    def error_of(convert):
        torch.manual_seed(0)
        layer = nn.Conv2d(16, 16, 3, bias=False)
        convert(layer)
        wrapped = DistributedDataParallel(layer)
        state = PowerSGDState(None, 4, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=False)
        wrapped.register_comm_hook(state, powerSGD_hook)
        assert not nhwc.check(wrapped, nhwc.plan(layer))
        x = torch.randn(8, 16, 6, 6, generator=torch.Generator().manual_seed(rank()))
        for _ in range(12):
            layer.zero_grad()
            (wrapped(x) - 1).square().mean().backward()
        layer.weight.grad, approximated = None, layer.weight.grad.contiguous()
        (layer(x) - 1).square().mean().backward()
        exact = layer.weight.grad.contiguous()
        dist.all_reduce(exact)
        return ((approximated - exact / world()).norm() / exact.norm() * world()).item()

    torch.set_warn_always(False)
    contiguous, channels_last = error_of(lambda layer: None), error_of(nhwc.convert_)
    assert 0.01 < contiguous < 1
    assert channels_last < 1.05 * contiguous


def with_zero(convert, optimizer_type, zero_first=False, **options):
    """The parameters after three steps, and what `check` says when it is given the optimizer."""
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
    for optimizer_type in (torch.optim.SGD, torch.optim.AdamW):
        for zero_first in (False, True):
            run = partial(with_zero, optimizer_type=optimizer_type, zero_first=zero_first)
            expected, _ = run(lambda model: None, parameters_as_bucket_view=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DDP sees that strides differ
                got, said = run(lambda model: nhwc.convert_(model).plan, parameters_as_bucket_view=True)
            assert is_close(got, expected) == zero_first  # after DDP, whose buckets are channels-last by then: wrong
            assert {each.site for each in said if each.what == "weight"} == {
                f"{layer}.weight" for layer in ("stem", "depthwise", "pointwise", "grouped", "up", "volume")
            }  # lost
            [named] = [each for each in said if each.site == ""]
            assert str(named).startswith("'ZeroRedundancyOptimizer' keeps its parameters in contiguous buckets")
            for convert, views in (
                (lambda model: nhwc.convert_(model, each_forward=True).plan, True),
                (lambda model: nhwc.convert_(model).plan, False),
            ):
                got, said = run(convert, parameters_as_bucket_view=views)
                assert is_close(got, expected)
                assert said == []


@scenario
def h44_zero_refuses_weights_in_its_buckets_and_its_state_follows_without_them():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True)
    for storage in ("auto", "detach"):
        with pytest.warns(UserWarning, match="keeps it in a flat bucket.*each_forward=True"):
            report = nhwc.convert_(model, optimizer=optimizer, storage=storage)
        assert {row.reason for row in report.plan.rows} == {nhwc.Reason.BUCKET_VIEW}

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    stepped(model, optimizer, batches(1))
    report = nhwc.convert_(model, optimizer=optimizer)
    followed = [each.site for each in report.companions if each.label == "exp_avg"]
    heard = [None] * world()
    dist.all_gather_object(heard, followed)
    everywhere = [name for names in heard for name in names]  # each on the rank that has it
    assert sorted(everywhere) == sorted(row.full_name for row in report.plan.rows)
    assert check_everywhere(model, report.plan, optimizer=optimizer) == []
    for name in {"grouped.weight", "up.weight", "volume.weight"}.intersection(followed):
        state = optimizer.optim.state[model.get_parameter(name)]
        state["exp_avg"] = state["exp_avg"].contiguous()
        said = nhwc.check(model, report.plan, optimizer=optimizer)
        assert [(each.site, each.what) for each in said] == [(name, "exp_avg")]
        assert [row.site for row in nhwc.align_(model, optimizer)] == [name]


# FSDP.


def fsdp1(model, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def refused_by_fsdp1(use_orig_params):
    model = fsdp1(network(), use_orig_params)
    before = [(id(p), p.data_ptr(), p.stride(), p.detach().clone()) for p in model.parameters()]
    with pytest.warns(UserWarning, match="FullyShardedDataParallel keeps its weight in a flat buffer"):
        report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} == {nhwc.Reason.FSDP1}
    for parameter, (identity, pointer, stride, values) in zip(model.parameters(), before):
        assert (id(parameter), parameter.data_ptr(), parameter.stride()) == (identity, pointer, stride)
        assert torch.equal(parameter, values)


@scenario
def fsdp1_is_refused_and_not_touched():
    refused_by_fsdp1(True)


@scenario
def fsdp1_with_flat_parameters_is_refused_and_not_touched():
    refused_by_fsdp1(False)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def stepped(model, optimizer, steps, part=lambda batch: batch):
    for batch in steps:
        optimizer.zero_grad()
        loss_of(model, part(batch)).backward()
        optimizer.step()


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
        resumed = fsdp1(converted(1), use_orig_params)
        resumed.load_state_dict(state)
        x = own_part(batches(1)[0])
        torch.testing.assert_close(resumed(x), wrapped(x))


@scenario
def h39_fsdp1_loads_the_optimizer_state_of_channels_last_weights_permuted_and_of_contiguous_ones_right():
    from torch.distributed.fsdp import FullyShardedDataParallel

    reference = network()
    expected = momentum(reference)
    stepped(reference, expected, batches(3))
    flat = reference.grouped.weight

    def loaded(convert):
        def wrap(seed):
            model = network(seed)
            convert(model)
            return (wrapped := fsdp1(model, True)), momentum(wrapped)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model, optimizer = wrap(0)
            stepped(model, optimizer, batches(3), own_part)
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            saved = state["state"]["grouped.weight"]["momentum_buffer"]
            torch.testing.assert_close(saved, expected.state[flat]["momentum_buffer"], rtol=1e-4, atol=1e-6)
            other, other_optimizer = wrap(1)
            to_load = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, state)
            other_optimizer.load_state_dict(to_load)
            state = FullyShardedDataParallel.optim_state_dict(other, other_optimizer)
        return torch.allclose(state["state"]["grouped.weight"]["momentum_buffer"], saved)

    assert loaded(lambda model: None)
    assert not loaded(lambda model: nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last))
    assert not loaded(nhwc.convert_)  # our weights lie as the stock converter's
    assert loaded(lambda model: nhwc.convert_(model, each_forward=True))
    assert "loads optimizer state of channels-last weights permuted" in nhwc.Reason.FSDP1.value


@scenario
def h04_fsdp2_is_refused_behind_and_refuses_itself_a_converted_model():
    mesh = dist.init_device_mesh("cpu", (world(),))
    with pytest.raises((NotImplementedError, RuntimeError), match="non-contiguous"):
        fully_shard(converted(), mesh=mesh)
    model = network()
    fully_shard(model, mesh=mesh)
    before = [(id(p), p.stride(), p.to_local().data_ptr()) for p in model.parameters()]
    with pytest.warns(UserWarning, match="FSDP2 takes contiguous parameters only: each_forward=True takes it as it is"):
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
    plan = nhwc.plan(model)
    for kind, saved in (
        ("contiguous", nhwc.contiguous_state_dict(model)),
        ("as it is", get_model_state_dict(DistributedDataParallel(model))),
    ):
        path = os.path.join(folder[0], kind)
        dcp.save({"model": saved}, checkpoint_id=path)
        for target in (network(1), converted()):
            with torch.no_grad():
                target.volume.weight.zero_()
            state = {"model": get_model_state_dict(target)}
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(target, state["model"])
            for name, parameter in model.named_parameters():
                assert torch.equal(target.get_parameter(name), parameter), (kind, name)
            nhwc.restore_(target, plan)
            assert check_everywhere(target, plan) == []


def loaded(model, state):
    """Whether a model has the weights of `network()` after it was broadcast a state dict from rank 0."""
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
        "them: load contiguous_state_dict(checkpoint) instead of a channels-last one"
        for index in range(1, world())
        for name in permuted
    ]
    sharded = network(1)
    fully_shard(sharded, mesh=mesh)
    assert loaded(sharded, as_it_is) == everything.difference(permuted)  # on all ranks

    nhwc.contiguous_checkpoints_(model)
    assert nhwc.convert_(model).remarks == ()
    for saved in (model.state_dict(), DistributedDataParallel(model).module.state_dict(), get_model_state_dict(model)):
        assert loaded(target, saved) == everything
        assert check_everywhere(target, report.plan) == []
        sharded = network(1)
        fully_shard(sharded, mesh=mesh)
        assert loaded(sharded, saved) == everything
    assert loaded(target, nhwc.contiguous_state_dict(as_it_is)) == everything


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
    nhwc.contiguous_checkpoints_(optimizer)
    assert is_loaded(get_optimizer_state_dict(trained, optimizer, options=options))


@scenario
def a_model_whose_checkpoints_are_contiguous_saves_and_loads_under_what_wraps_it():
    expected = network().state_dict()
    for wrap in (DistributedDataParallel, partial(fsdp1, use_orig_params=True), partial(fsdp1, use_orig_params=False)):
        model = converted()
        nhwc.contiguous_checkpoints_(model)
        wrapped = wrap(model)
        state = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
        assert {name: tensor.is_contiguous() for name, tensor in state.items()} == dict.fromkeys(expected, True)
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save({"model": get_model_state_dict(wrapped)}, checkpoint_id=folder[0])
            with torch.no_grad():
                for parameter in wrapped.parameters():
                    parameter.zero_()
            read = {"model": get_model_state_dict(wrapped)}
            dcp.load(read, checkpoint_id=folder[0])
            set_model_state_dict(wrapped, read["model"])
            del read
        # What is read into a state dict reaches the model by loading it.
        assert not [each for each in caught if "contiguous_checkpoints_" in str(each.message)]
        for name, tensor in get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True)).items():
            assert torch.equal(tensor, expected[name]), name


# Exchanged layers.


def normed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, affine=True)
    )


def train_with_layers_exchanged(wrap, **options):
    """The model as one process trains it without, and the wrapped one with exchanged layers after the same steps."""
    alone, model = normed(), normed()
    trained(alone, 3)
    plan = nhwc.convert_(model, preserve=True, input_format="channels_last", **options).plan
    assert check_everywhere(model, plan) == []
    assert len({*gathered(plan.digest)}) == 1
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(wrapped, own_part(batch)).backward()
        optimizer.step()
    names = [type(module).__name__ for module in wrapped.modules()]
    assert "PreservingGroupNorm" in names
    assert "PreservingInstanceNorm2d" in names
    return alone, wrapped


def gathered(value):
    heard = [None] * world()
    dist.all_gather_object(heard, value)
    return heard


@scenario
def ddp_trains_a_model_with_exchanged_layers_as_one_process_trains_it_without():
    alone, wrapped = train_with_layers_exchanged(DistributedDataParallel)
    for got, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@scenario
def fsdp1_trains_a_model_with_exchanged_layers():
    from torch.distributed.fsdp import FullyShardedDataParallel

    alone, wrapped = train_with_layers_exchanged(lambda model: fsdp1(model, True))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for got, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@scenario
def fsdp2_trains_a_model_with_exchanged_layers_and_contiguous_weights():
    mesh = dist.init_device_mesh("cpu", (world(),))

    def shard(model):
        fully_shard(model[2], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    no_weights = {"filter_fn": lambda module, _: not isinstance(module, nn.Conv2d)}
    alone, wrapped = train_with_layers_exchanged(shard, **no_weights)
    for got, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-4, atol=1e-5)


@scenario
def drop_ins_convert_dtensors_with_their_local_tensors():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (world(),))
    for placement in (Replicate(), Shard(0), Shard(1)):
        layer = nn.Conv2d(5, 6, 3, bias=False)
        values = torch.arange(6 * 5 * 9, dtype=torch.float32).view(6, 5, 3, 3)
        layer.weight = weight = nn.Parameter(distribute_tensor(values.clone(), mesh, [placement]))
        nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
        local = weight._local_tensor  # to_local gives a view, which has strides of its own where a rank has one channel
        assert layer.weight is weight
        assert weight.stride() == (45, 1, 15, 5)
        assert local.stride() == torch.empty(local.shape, memory_format=torch.channels_last).stride()
        assert torch.equal(weight.full_tensor(), values)


@scenario
def a_rank_that_exchanged_other_layers_is_named():
    model = normed()
    is_last = rank() == dist.get_world_size() - 1
    keep = (lambda module, path: path != "1") if is_last else None
    plan = nhwc.convert_(model, preserve=True, filter_fn=keep).plan
    said = check_everywhere(model, plan)
    assert any("plan of '1' is GroupNorm, kept, on rank 0 GroupNorm, exchanged" in each for each in said), said


# Weights that are converted in each forward.


def losses_and_weights(convert_before, convert_behind, wrap, full):
    """Of three steps with AdamW, of a model that one function changes before it is wrapped and another behind."""
    model = network()
    convert_before(model)
    wrapped = wrap(model)
    convert_behind(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    losses = []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(wrapped, own_part(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, full(wrapped), wrapped


def nothing(model):
    pass


def convert_in_each_forward(model):
    report = nhwc.convert_(model, each_forward=True, input_format="channels_last", strict=True)
    assert {row.action for row in report.plan.rows} == {nhwc.Action.EACH_FORWARD}
    assert len({*gathered(report.plan.digest)}) == 1
    assert check_everywhere(model, report.plan) == []


def assert_trains_as_without(wrap, full):
    expected_losses, expected, _ = losses_and_weights(nothing, nothing, wrap, full)
    for order in ((convert_in_each_forward, nothing), (nothing, convert_in_each_forward)):
        losses, state, wrapped = losses_and_weights(*order, wrap, full)
        torch.testing.assert_close(losses, expected_losses)
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
            assert tensor.is_contiguous()
        kinds = [type(module).__name__ for module in wrapped.modules()]
        assert sum("EachForward" in kind for kind in kinds) == 6, kinds


@scenario
def fsdp2_trains_with_weights_converted_in_each_forward_before_and_behind_it():
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
def fsdp1_and_ddp_train_with_weights_converted_in_each_forward_before_and_behind_them():
    for use_orig_params in (True, False):
        assert_trains_as_without(lambda model: fsdp1(model, use_orig_params), lambda model: model.state_dict())
    assert_trains_as_without(DistributedDataParallel, lambda model: model.state_dict())


@scenario
def the_guide_s_recipes_with_a_process_group_run_on_all_ranks():
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    recipes = [code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "init_process_group" in code]
    recipes = [code for code in recipes if "torch.compile" not in code]  # which takes long
    assert len(recipes) == 5
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)  # the group that is there
        patch.setattr(dist, "destroy_process_group", lambda: None)
        for code in recipes:
            exec(code, {})


@scenario
def a_rank_that_converts_other_weights_in_each_forward_is_named():
    model = network()
    is_last = rank() == world() - 1
    filter_fn = (lambda _, path: path != "up") if is_last else None
    plan = nhwc.convert_(model, each_forward=True, filter_fn=filter_fn).plan
    said = check_everywhere(model, plan)
    assert any("plan of 'up.weight' is" in each and "converted in each forward" in each for each in said), said


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
    os._exit(0)  # what a broken group leaves behind may wait for ever


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
