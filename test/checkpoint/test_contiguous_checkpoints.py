"""State dicts that come out contiguous whoever asks for them, and who is told that they are copies."""

import copy
import gc
import pickle
import warnings

import pytest
import safetensors.torch
import torch
from selection import exhaustive
from tied_network import assert_equal_values, converted
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

import torch_nhwc as nhwc
from torch_nhwc import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
HOLDERS = {
    "itself": (lambda model: model, ""),
    "a parent": (lambda model: nn.ModuleDict({"model": model, "other": nn.Conv2d(3, 3, 3)}), "model."),
    "DataParallel": (DataParallel, "module."),
    "compiled": (lambda model: torch.compile(model, backend="eager"), "_orig_mod."),
    "averaged": (AveragedModel, "module."),
    "deepcopy": (copy.deepcopy, ""),
    "pickle": (lambda model: pickle.loads(pickle.dumps(model)), ""),
}


def hooked():
    model, plan = converted()
    return model, plan, checkpoint.contiguous_checkpoints_(model)


def is_contiguous(state):
    return all(tensor.is_contiguous() for tensor in state.values())


@pytest.mark.parametrize("holder", [exhaustive(name) if name == "compiled" else name for name in HOLDERS])
def test_state_dicts_of_whatever_holds_the_model_are_contiguous(holder, tmp_path):
    make, prefix = HOLDERS[holder]
    model, plan, _ = hooked()
    expected = checkpoint.contiguous_state_dict(converted()[0])
    saved = make(model).state_dict()
    state = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    assert is_contiguous(state)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert state["tied.weight"].data_ptr() == state["block.weight"].data_ptr() != state["stem.weight"].data_ptr()
    assert nhwc.check(model, plan) == []  # the model stays as it is
    untied = {name: tensor for name, tensor in state.items() if not name.startswith("tied")}
    safetensors.torch.save_file(untied, tmp_path / "model.safetensors")
    torch.save(saved, tmp_path / "model.pt")
    assert is_contiguous(torch.load(tmp_path / "model.pt"))


def test_contiguous_tensors_and_those_of_keep_vars_are_the_model_s_own_and_the_metadata_stays():
    model, _, _ = hooked()
    plain, _ = converted()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state._metadata == plain.state_dict()._metadata
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert (state[name].data_ptr() == parameter.data_ptr()) == parameter.is_contiguous(), name
        assert model.state_dict(keep_vars=True)[name] is parameter


@pytest.mark.parametrize("assign", [False, True])
def test_a_contiguous_state_dict_loads_back_into_the_format_unless_it_is_assigned(assign):
    model, plan, _ = hooked()
    other, _, _ = hooked()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict(), assign=assign)
    assert bool(nhwc.check(other, plan)) == assign
    nhwc.training.restore_(other, plan)
    assert nhwc.check(other, plan) == []
    assert_equal_values(other, model)


def test_a_second_call_gives_the_hook_that_is_there_and_copies_have_their_own():
    model, _, handle = hooked()
    again = checkpoint.contiguous_checkpoints_(model)
    assert again.id == handle.id
    assert len(model._state_dict_hooks) == 1
    copied = copy.deepcopy(model)
    checkpoint.contiguous_checkpoints_(copied).remove()
    assert not is_contiguous(copied.state_dict())
    assert is_contiguous(model.state_dict())
    again.remove()
    handle.remove()
    assert not is_contiguous(model.state_dict())
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks


def test_state_dicts_of_optimizers_are_contiguous_and_load():
    model, plan = converted()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 2, 6, 6)).sum().backward()
    optimizer.step()
    handle = checkpoint.contiguous_checkpoints_(optimizer)
    assert checkpoint.contiguous_checkpoints_(optimizer).id == handle.id
    state = optimizer.state_dict()
    assert all(tensor.is_contiguous() for entry in state["state"].values() for tensor in entry.values())
    assert nhwc.check(model, plan, optimizer=optimizer) == []  # its own is as it was
    optimizer.load_state_dict(state)
    nhwc.training.align_optimizer_(model, optimizer)
    assert nhwc.check(model, plan, optimizer=optimizer) == []
    handle.remove()
    state = optimizer.state_dict()
    assert not all(tensor.is_contiguous() for entry in state["state"].values() for tensor in entry.values())


def test_what_is_no_module_or_takes_no_hook_is_refused():
    with pytest.raises(TypeError, match="expected a model or an optimizer, got dict"):
        checkpoint.contiguous_checkpoints_({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Conv2d(3, 3, 3))
    with pytest.raises(RuntimeError, match="takes no hook: use contiguous_state_dict"):
        checkpoint.contiguous_checkpoints_(scripted)


def average(model):
    """As frameworks update an averaged copy by its state dict."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(0.9)


def test_whoever_writes_to_a_copy_is_told_once_for_each_state_dict():
    plain, _ = converted()
    expected = plain.volume.weight.detach() * 0.9
    average(plain)
    torch.testing.assert_close(plain.volume.weight.detach(), expected)  # what PyTorch's state dicts do

    model, _, handle = hooked()
    before = model.volume.weight.detach().clone()
    for _ in range(2):
        with pytest.warns(UserWarning, match="of a state dict was written to") as told:
            average(model)
        assert len(told) == 1
    assert torch.equal(model.volume.weight, before)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average(model)
    torch.testing.assert_close(model.volume.weight.detach(), expected)


def test_what_is_written_and_loaded_is_nothing_to_say():
    model, _, _ = hooked()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = model.state_dict()
        with torch.no_grad():
            for tensor in state.values():
                tensor.zero_()
        nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": tensor for name, tensor in state.items()})
        del state, tensor
        state = model.state_dict()  # names are given other tensors
        state["volume.weight"] = torch.ones_like(state["volume.weight"])
        model.load_state_dict(state)
        del state
        with torch.inference_mode():
            assert not model.state_dict()["block.weight"].is_inference()
        gc.collect()
    assert not told
    assert torch.equal(model.volume.weight, torch.ones_like(model.volume.weight))
