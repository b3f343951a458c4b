"""Contiguous state dicts, and every way by which a converted model is saved and comes back."""

import types

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from selection import some_of
from tied_network import LAST, assert_equal_values, converted, network, strides, train
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")


@pytest.mark.parametrize("source", ["module", "state dict"])
def test_h03_safetensors_refuses_a_converted_model_and_takes_the_contiguous_state_dict(source, tmp_path):
    model, plan = converted()
    del model.tied.weight  # safetensors refuses ties, too, contiguous or not
    model.tied.weight = nn.Parameter(model.block.weight.detach().clone())
    with pytest.raises(ValueError, match="non contiguous tensor"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = checkpoint.contiguous_state_dict(model if source == "module" else model.state_dict())
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].is_contiguous()
    assert nhwc.check(model, plan) == []


def test_a_contiguous_state_dict_copies_only_what_is_not_contiguous_and_keeps_aliases_and_metadata():
    model, _ = converted()
    state, plain = checkpoint.contiguous_state_dict(model), model.state_dict()
    assert list(state) == list(plain)
    assert state._metadata == plain._metadata
    for name, tensor in plain.items():
        assert state[name].is_contiguous(), name
        assert torch.equal(state[name], tensor), name
        assert (state[name].data_ptr() == tensor.data_ptr()) == tensor.is_contiguous(), name
    assert not plain["head.weight"].is_contiguous()  # whatever the layer
    assert state["tied.weight"].data_ptr() == state["block.weight"].data_ptr() != state["stem.weight"].data_ptr()


def test_nested_state_dicts_of_optimizers_become_contiguous_and_still_load():
    model, _ = converted()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, 2)
    plain = optimizer.state_dict()
    state = checkpoint.contiguous_state_dict(
        {"optimizer": plain, "model": model.state_dict(), "more": [(plain, 3), None]}
    )
    assert state["optimizer"]["param_groups"] == plain["param_groups"]
    assert state["more"][0][1] == 3
    assert state["more"][1] is None
    for index, entry in plain["state"].items():
        for key, tensor in entry.items():
            ours = state["optimizer"]["state"][index][key]
            assert ours.is_contiguous(), (index, key)
            assert torch.equal(ours, tensor)
    assert any(not tensor.is_contiguous() for entry in plain["state"].values() for tensor in entry.values())
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("kind", ["dict", "mapping proxy", "meta", "sparse", "expanded", "parameters"])
def test_any_mapping_and_any_tensor_goes_into_a_contiguous_state_dict(kind):
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    state = {
        "dict": {"a": weight},
        "mapping proxy": types.MappingProxyType({"a": weight}),
        "meta": {"a": weight.to("meta"), "b": weight.to("meta")},
        "sparse": {"a": torch.eye(3).to_sparse()},
        "expanded": {"a": torch.randn(3, 1).expand(3, 4)},
        "parameters": {"a": nn.Parameter(weight)},
    }[kind]
    ours = checkpoint.contiguous_state_dict(state)
    assert len({id(tensor) for tensor in ours.values()}) == len(state)
    for name, tensor in state.items():
        assert ours[name].layout != torch.strided or ours[name].is_contiguous()
        assert ours[name].shape == tensor.shape
        assert tensor.is_meta or torch.equal(ours[name].to_dense(), tensor.to_dense())


def by_torch_save_assigned(model, path):
    torch.save(model.state_dict(), path / "model.pt")
    other = network(1)
    other.load_state_dict(torch.load(path / "model.pt", weights_only=True, mmap=True), assign=True)
    return other


def by_torch_save_whole(model, path):
    torch.save(model, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=False)


def by_safetensors_file(model, path):
    state = checkpoint.contiguous_state_dict(model)
    del state["tied.weight"]
    safetensors.torch.save_file(state, path / "model.safetensors")
    loaded = safetensors.torch.load_file(path / "model.safetensors")
    other = network(1)
    other.load_state_dict({**loaded, "tied.weight": loaded["block.weight"]})
    return other


def by_distributed_checkpoint(model, path):
    dcp.save({"model": checkpoint.contiguous_state_dict(model)}, checkpoint_id=path / "checkpoint", no_dist=True)
    other = network(1)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path / "checkpoint", no_dist=True)
    other.load_state_dict(state["model"])
    return other


# How a model gets through, and whether it is in format by that alone.
ROUND_TRIPS = {
    by_torch_save_assigned: True,
    by_torch_save_whole: True,
    by_safetensors_file: False,
    by_distributed_checkpoint: False,
}


FAST = by_torch_save_assigned, by_safetensors_file


@pytest.mark.parametrize("round_trip", some_of(ROUND_TRIPS, *FAST), ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_converted_model_comes_back_and_is_in_format_or_can_be_brought_there(round_trip, tmp_path):
    model, plan = converted()
    model(torch.randn(2, 2, 6, 6))  # running statistics
    other = round_trip(model, tmp_path)
    assert_equal_values(other, model)
    assert (nhwc.check(other, plan) == []) == ROUND_TRIPS[round_trip]
    nhwc.training.restore_(other, plan)
    assert nhwc.check(other, plan) == []
    assert strides(other) == strides(model) == LAST
    assert_equal_values(other, model)
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(other(x), model(x))
    again = [p.data_ptr() for p in other.parameters()]
    nhwc.training.restore_(other, plan)
    assert [p.data_ptr() for p in other.parameters()] == again


def test_contiguous_state_dict_takes_no_optimizer():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(TypeError, match=r"expected a model or a state dict, got SGD: pass its state_dict\(\)"):
        checkpoint.contiguous_state_dict(optimizer)
    with pytest.raises(TypeError, match="expected a model or a state dict, got list"):
        checkpoint.contiguous_state_dict([1])
