"""Converting a state dict while a checkpoint is loaded."""

import copy

import pytest
import safetensors.torch
import torch
from selection import some_of
from snapshots import network
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import checkpoint

MOVES = {"first.weight", "blocks.1.weight", "volume.weight"}


def on_meta():
    with torch.device("meta"):
        return network()


def from_safetensors(state, path):
    safetensors.torch.save_file(checkpoint.contiguous_state_dict(state), path / "model.safetensors")
    return safetensors.torch.load_file(path / "model.safetensors")


def from_a_mapped_file(state, path):
    torch.save(state, path / "model.pt")
    return torch.load(path / "model.pt", mmap=True, weights_only=True)


def from_one_flat_buffer(state, path):
    flat = torch.cat([tensor.reshape(-1).double() for tensor in state.values()]).float()
    parts = flat.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape).to(tensor.dtype) for part, (name, tensor) in zip(parts, state.items())}


SOURCES = [from_safetensors, from_a_mapped_file, from_one_flat_buffer]


def strides(model):
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("was_converted", [False, True], ids=["contiguous", "converted"])
@pytest.mark.parametrize(
    "source", some_of(SOURCES, from_safetensors, from_one_flat_buffer), ids=lambda function: function.__name__
)
def test_a_meta_model_loads_in_format_and_only_weights_that_move_are_copied(source, was_converted, tmp_path):
    original = network()
    expected = copy.deepcopy(original)
    nhwc.convert_(expected)
    state = source((expected if was_converted else original).state_dict(), tmp_path)
    before = {name: (tensor.data_ptr(), tensor.stride(), tensor.clone()) for name, tensor in state.items()}

    model = on_meta()
    plan = nhwc.plan(model, preserve=False)
    model.load_state_dict(checkpoint.convert_state_dict(state, plan), assign=True)

    assert nhwc.check(model, plan) == []
    assert strides(model) == strides(expected)
    moved = set() if was_converted and source is not from_safetensors else MOVES
    if source is from_one_flat_buffer:  # weights that change are moved out of it
        moved = {row.full_name for row in plan.rows}
    for name, tensor in model.state_dict().items():
        pointer, stride, values = before[name]
        assert torch.equal(tensor, values), name
        assert (tensor.data_ptr() != pointer) == (name in moved), name
        # The state dict is left as it was.
        assert state[name].stride() == stride
        assert torch.equal(state[name], values)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("memory_format", ["channels_last", "channels_last_3d", "contiguous_format"])
def test_the_plan_says_which_entries_are_converted(memory_format):
    plan = nhwc.plan(on_meta(), memory_format, filter_fn=lambda _, path: path != "blocks.0")
    source = network()
    nhwc.convert_(source, None if memory_format == "contiguous_format" else torch.contiguous_format)
    state = checkpoint.convert_state_dict(source.state_dict(), plan)
    expected = network()
    nhwc.convert_(expected, memory_format, filter_fn=lambda _, path: path != "blocks.0")
    for name, stride in strides(expected).items():
        if name != "blocks.0.weight":
            assert state[name].stride() == stride
    assert state["blocks.0.weight"].data_ptr() == source["blocks"][0].weight.data_ptr()


def test_metadata_and_other_entries_stay():
    source = network().state_dict()
    source["epoch"] = 3
    state = checkpoint.convert_state_dict(source, nhwc.plan(on_meta()))
    assert type(state) is type(source)
    assert state._metadata == source._metadata
    assert list(state) == list(source)
    assert state["epoch"] == 3
    assert state["norm.weight"] is source["norm.weight"]


def test_ties_stay_ties_in_memory():
    def tied():
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        model[1].weight = model[0].weight
        return model

    with torch.device("meta"):
        plan = nhwc.plan(tied())
    state = checkpoint.convert_state_dict(tied().state_dict(), plan)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert state["0.weight"].stride() == state["1.weight"].stride() == (36, 1, 12, 4)


def test_another_shape_raises_an_error_that_names_the_entry():
    state = network().state_dict()
    state["blocks.1.weight"] = torch.randn(8, 4, 3, 3)
    with pytest.raises(ValueError, match=r"'blocks.1.weight' is \(8, 4, 3, 3\), the plan has \(8, 2, 3, 3\)"):
        checkpoint.convert_state_dict(state, nhwc.plan(on_meta()))


def test_other_arguments_raise_an_error_that_says_what_to_pass():
    model = network()
    report = nhwc.convert_(model)
    with pytest.raises(TypeError, match=r"^expected a Plan, got Report: pass report.plan$"):
        checkpoint.convert_state_dict(model.state_dict(), report)
    message = r"^expected a state dict, names and tensors, got ModuleDict: pass model.state_dict\(\)$"
    with pytest.raises(TypeError, match=message):
        checkpoint.convert_state_dict(model, report.plan)
    with pytest.raises(TypeError, match=r"^expected a state dict, names and tensors, got str$"):
        checkpoint.convert_state_dict("model.pt", report.plan)


def test_a_state_dict_of_another_model_raises_an_error_with_the_expected_name():
    plan, state = nhwc.plan(on_meta()), network().state_dict()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    start = "^the state dict holds none of the plan's weights: expected 'first.weight'"
    with pytest.raises(ValueError, match=f"{start}$"):
        checkpoint.convert_state_dict({"model": state, "epoch": 3}, plan)
    message = f"{start}, got 'module.first.weight': remove the prefix 'module.' from its names$"
    with pytest.raises(ValueError, match=message):
        checkpoint.convert_state_dict(wrapped, plan)
    with torch.device("meta"):
        plan_of_wrapper = nhwc.plan(nn.ModuleDict({"module": network()}))
    message = "expected 'module.first.weight', got 'first.weight': add the prefix 'module.' to its names$"
    with pytest.raises(ValueError, match=message):
        checkpoint.convert_state_dict(state, plan_of_wrapper)
    with pytest.warns(UserWarning, match="filter_fn returns false"):
        nothing_planned = nhwc.plan(on_meta(), filter_fn=lambda *_: False)
    assert checkpoint.convert_state_dict({"epoch": 3}, nothing_planned) == {"epoch": 3}
