"""Optimizers that a conversion was given align their state behind `load_state_dict`."""

import copy
import importlib
import pickle
import warnings

import pytest
import torch
from guarding import unguarded
from torch import nn

import torch_nhwc as nhwc

KINDS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def trained(make):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    optimizer = make(model.parameters())
    model(torch.randn(2, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def strides(model, optimizer):
    return {value.stride() for value in optimizer.state[model[0].weight].values() if value.dim()}


@pytest.mark.parametrize("kind", KINDS)
def test_h45_what_is_loaded_lies_as_the_parameters(kind):
    model, optimizer = trained(KINDS[kind])
    checkpoint = copy.deepcopy(optimizer.state_dict())
    report = nhwc.convert_(model, optimizer=optimizer)
    with unguarded(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(checkpoint)
    assert strides(model, optimizer) == {(27, 1, 9, 3)}
    for key, value in checkpoint["state"][0].items():
        assert torch.equal(optimizer.state[model[0].weight][key], value)

    report.revert()
    in_format = copy.deepcopy(checkpoint)
    in_format["state"][0] = {
        key: value.to(memory_format=torch.channels_last) if value.dim() else value
        for key, value in checkpoint["state"][0].items()
    }
    optimizer.load_state_dict(in_format)
    assert strides(model, optimizer) == {(27, 9, 3, 1)}  # a checkpoint from before the revert


def test_a_second_conversion_adds_no_hook_and_takes_none_away():
    model, optimizer = trained(KINDS["fused"])
    report = nhwc.convert_(model, optimizer=optimizer)
    nhwc.convert_(model, optimizer=optimizer).revert()
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    report.revert()
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_a_conversion_that_fails_or_is_only_planned_leaves_no_hook(monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    model, optimizer = trained(KINDS["fused"])
    nhwc.convert_(model, optimizer=optimizer, dry_run=True)
    nhwc.plan(model, optimizer=optimizer)
    monkeypatch.setattr("torch_nhwc.converting.commit.lay_out_weights_", fails)
    with pytest.raises(MemoryError):
        nhwc.convert_(model, optimizer=optimizer)
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_the_optimizer_pickles_and_its_copies_are_others():
    model, optimizer = trained(KINDS["fused"])
    nhwc.convert_(model, optimizer=optimizer)
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert not other._optimizer_load_state_dict_post_hooks


def test_state_that_cannot_follow_is_a_warning():
    model, optimizer = trained(KINDS["SGD"])
    nhwc.convert_(model, optimizer=optimizer)
    checkpoint = optimizer.state_dict()
    loaded = torch.zeros(8, 3, 3, 3, requires_grad=True) * 2
    checkpoint["state"][0]["momentum_buffer"] = loaded
    with pytest.warns(UserWarning, match="what it holds .* cannot be laid out as they are.*not a leaf"):
        optimizer.load_state_dict(checkpoint)
    assert optimizer.state[model[0].weight]["momentum_buffer"] is loaded


def test_what_accelerate_has_wrapped_aligns_as_well():
    accelerate = importlib.import_module("accelerate")
    model, optimizer = trained(KINDS["fused"])
    checkpoint = copy.deepcopy(optimizer.state_dict())
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    report = nhwc.convert_(model, optimizer=wrapped)
    wrapped.load_state_dict(checkpoint)
    assert strides(model, optimizer) == {(27, 1, 9, 3)}
    report.revert()
    wrapped.load_state_dict(checkpoint)
    assert strides(model, optimizer) == {(27, 9, 3, 1)}


def test_a_wrapper_with_slots_is_taken():
    class Wrapper:
        __slots__ = ("optimizer", "param_groups", "state")

    model, optimizer = trained(KINDS["fused"])
    wrapper = Wrapper()
    wrapper.optimizer, wrapper.param_groups, wrapper.state = optimizer, optimizer.param_groups, optimizer.state
    report = nhwc.convert_(model, optimizer=wrapper)
    assert strides(model, optimizer) == {(27, 1, 9, 3)}
    report.revert()
    assert strides(model, optimizer) == {(27, 9, 3, 1)}
