"""Contiguous state dicts, from a function or from hooks, and the ways to save and load a converted model."""

import copy
import dataclasses
import gc
import pickle
import types
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from guarding import unguarded
from tied_network import converted, train
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.checkpoint import contiguous_checkpoints_, contiguous_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")


def hooked():
    model, plan = converted()
    return model, plan, contiguous_checkpoints_(model)


def is_contiguous(state):
    return all(tensor.is_contiguous() for tensor in state.values())


@pytest.mark.parametrize("is_model", [True, False], ids=["of the model", "of its state dict"])
def test_h03_contiguous_state_dicts_hold_the_same_numbers_and_ties(is_model):
    model, plan = converted()
    plain = model.state_dict()
    state = contiguous_state_dict(model if is_model else plain)
    assert list(state) == list(plain)
    assert state._metadata == plain._metadata
    for name, tensor in plain.items():
        assert state[name].is_contiguous(), name
        assert torch.equal(state[name], tensor), name
        assert (state[name].data_ptr() == tensor.data_ptr()) == tensor.is_contiguous(), name
    assert not plain["head.weight"].is_contiguous()  # whatever the layer
    assert state["tied.weight"].data_ptr() == state["block.weight"].data_ptr() != state["stem.weight"].data_ptr()
    assert nhwc.check(model, plan) == []


def test_nested_state_dicts_of_optimizers_become_contiguous_and_still_load():
    model, _ = converted()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, 2)
    plain = optimizer.state_dict()
    state = contiguous_state_dict({"optimizer": plain, "more": [(plain, 3), None]})
    assert state["optimizer"]["param_groups"] == plain["param_groups"]
    assert state["more"][0][1] == 3
    assert state["more"][1] is None
    for index, entry in plain["state"].items():
        for key, tensor in entry.items():
            ours = state["optimizer"]["state"][index][key]
            assert ours.is_contiguous(), (index, key)
            assert torch.equal(ours, tensor)
    assert not all(is_contiguous(entry) for entry in plain["state"].values())
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("is_saved_raw", [True, False])
def test_a_fused_optimizer_of_a_plain_model_is_right_with_contiguous_state_alone(is_saved_raw):
    """As in a process without this package, where nothing aligns the state."""
    model, plain = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)
    nhwc.convert_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer, 2)
    state = optimizer.state_dict() if is_saved_raw else contiguous_state_dict(optimizer.state_dict())
    stepped = []
    for is_fused in (True, False):
        plain.load_state_dict(model.state_dict())
        resumed = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=is_fused)
        given = copy.deepcopy(state)
        given["param_groups"][0].update(fused=is_fused)
        resumed.load_state_dict(given)
        with unguarded():
            train(plain, resumed, 2)
        stepped.append(plain.weight.detach().clone())
    assert torch.allclose(*stepped, rtol=1e-4, atol=1e-5) != is_saved_raw


class Named(NamedTuple):
    weight: torch.Tensor
    step: int


@dataclasses.dataclass(frozen=True)
class Fields:
    weight: torch.Tensor
    inner: Any = None


class History(list):
    """A list with an attribute."""


def test_every_container_in_a_state_dict_is_made_again():
    def tensors(state):
        fields, mappings = state["list"][0], (state["read_only"]["w"], state["ordered"]["weight"])
        return [state["named"].weight, fields.weight, fields.inner.weight, *mappings, *state["history"]]

    model, _ = converted()
    weight, ordered = model.block.weight.detach(), model.state_dict()
    state = {
        "named": Named(weight, 3),
        "list": [Fields(weight, Named(weight, 4)), "text"],
        "read_only": types.MappingProxyType({"w": weight}),
        "ordered": OrderedDict(weight=weight),
        "model": ordered,
        "history": History([weight]),
    }
    state["history"].length = 7
    contiguous = contiguous_state_dict(state)
    assert not any(each.is_contiguous() for each in tensors(state))
    assert all(each.is_contiguous() and torch.equal(each, weight) for each in tensors(contiguous))
    assert len({each.data_ptr() for each in tensors(contiguous)}) == 1  # aliases stay
    assert (type(contiguous["named"]), contiguous["named"].step) == (Named, 3)
    assert (type(contiguous["list"][0]), type(contiguous["list"][0].inner)) == (Fields, Named)
    assert contiguous["list"][1] == "text"
    assert (type(contiguous["history"]), contiguous["history"].length) == (History, 7)
    assert contiguous["model"]._metadata == ordered._metadata


# Hooks.

HOLDERS = {
    "itself": (lambda model: model, ""),
    "a parent": (lambda model: nn.ModuleDict({"model": model, "other": nn.Conv2d(3, 3, 3)}), "model."),
    "deepcopy": (copy.deepcopy, ""),
    "pickle": (lambda model: pickle.loads(pickle.dumps(model)), ""),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_state_dicts_of_whatever_holds_a_hooked_model_are_contiguous(holder):
    make, prefix = HOLDERS[holder]
    model, plan, _ = hooked()
    saved = make(model).state_dict()
    state = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    assert is_contiguous(state)
    for name, tensor in contiguous_state_dict(converted()[0]).items():
        assert torch.equal(state[name], tensor), name
    assert state["tied.weight"].data_ptr() == state["block.weight"].data_ptr() != state["stem.weight"].data_ptr()
    assert nhwc.check(model, plan) == []  # the model stays as it is


def test_the_hook_is_installed_once_copies_have_their_own_and_keep_vars_gives_the_parameters():
    model, _, handle = hooked()
    assert all(model.state_dict(keep_vars=True)[name] is each for name, each in model.named_parameters())
    again = contiguous_checkpoints_(model)
    assert again.id == handle.id
    copied = copy.deepcopy(model)
    contiguous_checkpoints_(copied).remove()
    assert not is_contiguous(copied.state_dict())
    assert is_contiguous(model.state_dict())
    again.remove()
    handle.remove()
    assert not is_contiguous(model.state_dict())


def average(model):
    """Update a model through its state dict, as frameworks update an averaged copy."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(0.9)


def test_a_write_to_a_copied_state_dict_warns_once():
    plain, _ = converted()
    expected = plain.volume.weight.detach() * 0.9
    average(plain)
    torch.testing.assert_close(plain.volume.weight.detach(), expected)  # what PyTorch's state dicts do

    model, _, handle = hooked()
    before = model.volume.weight.detach().clone()
    for _ in range(2):
        with pytest.warns(UserWarning, match="of a state dict was written to") as warned:
            average(model)
        assert len(warned) == 1
    assert torch.equal(model.volume.weight, before)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average(model)
    torch.testing.assert_close(model.volume.weight.detach(), expected)


def test_a_state_dict_that_is_written_to_and_loaded_does_not_warn():
    model, _, _ = hooked()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = model.state_dict()
        with torch.no_grad():
            for tensor in state.values():
                tensor.zero_()
        nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": tensor for name, tensor in state.items()})
        del state, tensor
        state = model.state_dict()
        state["volume.weight"] = torch.ones_like(state["volume.weight"])
        model.load_state_dict(state)
        del state
        with torch.inference_mode():
            assert not model.state_dict()["block.weight"].is_inference()
        gc.collect()
    assert not warned
    assert torch.equal(model.volume.weight, torch.ones_like(model.volume.weight))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_other_objects_are_refused():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(TypeError, match=r"expected a model or a state dict, got SGD: pass its state_dict\(\)"):
        contiguous_state_dict(optimizer)
    with pytest.raises(TypeError, match="expected a model or a state dict, got list"):
        contiguous_state_dict([1])
    with pytest.raises(TypeError, match="expected a model or an optimizer, got dict"):
        contiguous_checkpoints_({})
    with pytest.raises(RuntimeError, match="takes no hook: use contiguous_state_dict"):
        contiguous_checkpoints_(torch.jit.script(nn.Conv2d(3, 3, 3)))
