"""Converting while a checkpoint is loaded, models from `from_pretrained`, and offloaded ones."""

import copy
import importlib
import os
import warnings
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.nn.functional as nnf
from selection import some_of
from torch import nn

import torch_nhwc as nhwc

# Tiny models from folders: nothing is to be fetched, not even tried.
os.environ["HF_HUB_OFFLINE"] = "1"


class Net(nn.Module):
    """2D and 3D, one channel, depthwise, 1x1 and tied layers, and what is no site."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv2d(6, 4, 1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.volume = nn.Conv3d(2, 3, (1, 3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        x = self.block(self.pointwise(self.depthwise(self.norm(self.stem(x)))))
        return self.head(self.volume(x.unflatten(1, (2, 2))).mean((2, 3, 4)))


MOVES = {"stem.weight", "block.0.weight", "volume.weight"}


def network(seed=0):
    torch.manual_seed(seed)
    return Net()


def on_meta():
    with torch.device("meta"):
        return Net()


def from_safetensors(state, path):
    safetensors.torch.save_file(nhwc.contiguous_state_dict(state), path / "model.safetensors")
    return safetensors.torch.load_file(path / "model.safetensors")


def from_a_mapped_file(state, path):
    torch.save(state, path / "model.pt")
    return torch.load(path / "model.pt", mmap=True, weights_only=True)


def from_a_file(state, path):
    torch.save(state, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=True)


def from_memory(state, path):
    return dict(state)


def from_one_flat_buffer(state, path):
    flat = torch.cat([tensor.reshape(-1).double() for tensor in state.values()]).float()
    parts = flat.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape).to(tensor.dtype) for part, (name, tensor) in zip(parts, state.items())}


SOURCES = [from_safetensors, from_a_mapped_file, from_a_file, from_memory, from_one_flat_buffer]


def strides(model):
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("was_converted", [False, True], ids=["contiguous", "converted"])
@pytest.mark.parametrize(
    "source", some_of(SOURCES, from_safetensors, from_one_flat_buffer), ids=lambda function: function.__name__
)
def test_a_meta_model_is_loaded_in_format_and_only_what_has_to_move_is_copied(source, was_converted, tmp_path):
    original = network()
    expected = copy.deepcopy(original)
    nhwc.convert_(expected)
    state = source((expected if was_converted else original).state_dict(), tmp_path)
    before = {name: (tensor.data_ptr(), tensor.stride(), tensor.clone()) for name, tensor in state.items()}

    model = on_meta()
    plan = nhwc.plan(model)
    model.load_state_dict(nhwc.convert_state_dict(state, plan), assign=True)

    assert nhwc.check(model, plan) == []
    assert strides(model) == strides(expected)
    moved = set() if was_converted and source is not from_safetensors else MOVES
    if source is from_one_flat_buffer:  # what changes leaves it
        moved = {row.full_name for row in plan.rows}
    for name, tensor in model.state_dict().items():
        pointer, stride, values = before[name]
        assert torch.equal(tensor, values), name
        assert (tensor.data_ptr() != pointer) == (name in moved), name
        # The state dict is left as it was.
        assert state[name].stride() == stride
        assert torch.equal(state[name], values)
    assert all(parameter.requires_grad for parameter in model.parameters())
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("source", [from_safetensors, from_a_mapped_file], ids=lambda function: function.__name__)
def test_one_call_writes_every_weight_once_and_nothing_else_is_copied(source, tmp_path):
    state = source(network().state_dict(), tmp_path)
    model = on_meta()
    plan = nhwc.plan(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.load_state_dict(nhwc.convert_state_dict(state, plan), assign=True)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["nhwc::lay_out_weights_"] == 1
    assert not {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "nhwc::convert_weight"} & set(
        counts
    )


def test_the_digest_is_that_of_a_plan_of_the_loaded_model():
    assert nhwc.plan(on_meta()).digest == nhwc.plan(network()).digest
    converted = network()
    assert nhwc.convert_(converted).plan.digest == nhwc.plan(on_meta()).digest


def test_a_meta_model_that_was_converted_stays_in_format_through_to_empty_and_load_state_dict():
    model = on_meta()
    plan = nhwc.convert_(model).plan
    model.to_empty(device="cpu")
    model.load_state_dict(network().state_dict())
    assert nhwc.check(model, plan) == []
    assert torch.equal(model.volume.weight, network().volume.weight)


@pytest.mark.parametrize("memory_format", ["channels_last", "channels_last_3d", "contiguous_format"])
def test_the_plan_says_which_entries_are_converted(memory_format):
    plan = nhwc.plan(on_meta(), memory_format, filter_fn=lambda _, path: path != "depthwise")
    source = network()
    nhwc.convert_(source, None if memory_format == "contiguous_format" else torch.contiguous_format)
    state = nhwc.convert_state_dict(source.state_dict(), plan)
    expected = network()
    nhwc.convert_(expected, memory_format, filter_fn=lambda _, path: path != "depthwise")
    for name, stride in strides(expected).items():
        if name != "depthwise.weight":
            assert state[name].stride() == stride
    assert state["depthwise.weight"].data_ptr() == source.depthwise.weight.data_ptr()


def test_the_metadata_and_what_is_no_site_pass_through():
    source = network().state_dict()
    source["epoch"] = 3
    state = nhwc.convert_state_dict(source, nhwc.plan(on_meta()))
    assert type(state) is type(source)
    assert state._metadata == source._metadata
    assert list(state) == list(source)
    assert state["epoch"] == 3
    assert state["norm.weight"] is source["norm.weight"]


def test_part_of_a_state_dict_converts_as_far_as_it_goes():
    state = {"volume.weight": torch.randn(3, 2, 1, 3, 3), "stranger.weight": torch.randn(3, 2, 3, 3)}
    converted = nhwc.convert_state_dict(state, nhwc.plan(on_meta()))
    assert converted["volume.weight"].stride() == (18, 1, 18, 6, 2)
    assert converted["stranger.weight"] is state["stranger.weight"]


def test_ties_stay_ties_in_memory():
    def tied():
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        model[1].weight = model[0].weight
        return model

    with torch.device("meta"):
        plan = nhwc.plan(tied())
    state = nhwc.convert_state_dict(tied().state_dict(), plan)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert state["0.weight"].stride() == state["1.weight"].stride() == (36, 1, 12, 4)


def test_another_dtype_is_kept():
    state = network().bfloat16().state_dict()
    model = on_meta()
    plan = nhwc.plan(model)
    model.load_state_dict(nhwc.convert_state_dict(state, plan), assign=True)
    assert model.volume.weight.dtype == torch.bfloat16
    assert nhwc.check(model, plan) == []


def test_another_shape_is_an_error_that_names_the_entry():
    state = network().state_dict()
    state["block.0.weight"] = torch.randn(8, 4, 3, 3)
    with pytest.raises(ValueError, match=r"'block.0.weight' is \(8, 4, 3, 3\), the plan has \(4, 4, 3, 3\)"):
        nhwc.convert_state_dict(state, nhwc.plan(on_meta()))


def test_what_is_no_state_dict_or_no_plan_is_an_error_that_says_what_to_pass():
    model = network()
    report = nhwc.convert_(model)
    with pytest.raises(TypeError, match=r"^expected a Plan, got Report: pass report.plan$"):
        nhwc.convert_state_dict(model.state_dict(), report)
    message = r"^expected a state dict, names and tensors, got Net: pass model.state_dict\(\)$"
    with pytest.raises(TypeError, match=message):
        nhwc.convert_state_dict(model, report.plan)
    with pytest.raises(TypeError, match=r"^expected a state dict, names and tensors, got str$"):
        nhwc.convert_state_dict("model.pt", report.plan)


def test_a_state_dict_without_any_site_is_an_error_that_names_what_was_expected():
    plan, state = nhwc.plan(on_meta()), network().state_dict()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    start = "^the state dict holds none of the plan's weights: expected 'stem.weight'"
    with pytest.raises(ValueError, match=f"{start}$"):
        nhwc.convert_state_dict({"model": state, "epoch": 3}, plan)
    message = f"{start}, got 'module.stem.weight': take the prefix 'module.' off its names$"
    with pytest.raises(ValueError, match=message):
        nhwc.convert_state_dict(wrapped, plan)
    with torch.device("meta"):
        plan_of_wrapper = nhwc.plan(nn.ModuleDict({"module": Net()}))
    message = "expected 'module.stem.weight', got 'stem.weight': put the prefix 'module.' before its names$"
    with pytest.raises(ValueError, match=message):
        nhwc.convert_state_dict(state, plan_of_wrapper)
    nothing_planned = nhwc.plan(on_meta(), filter_fn=lambda *_: False)
    assert nhwc.convert_state_dict({"epoch": 3}, nothing_planned) == {"epoch": 3}


def test_lazy_layers_load_in_format():
    def lazy():
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 3))

    trained = lazy()
    trained(torch.randn(1, 3, 8, 8))
    model = lazy()
    plan = nhwc.plan(model)
    model.load_state_dict(nhwc.convert_state_dict(trained.state_dict(), plan), assign=True)
    assert nhwc.check(model, plan) == []
    assert model[0].weight.stride() == (27, 1, 9, 3)
    assert torch.equal(model[0].weight, trained[0].weight)


# Models of other libraries.


def resnet():
    transformers = importlib.import_module("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return partial(transformers.ResNetModel, config), torch.randn(1, 3, 32, 32)


def autoencoder():
    diffusers = importlib.import_module("diffusers")
    make = partial(
        diffusers.AutoencoderKL,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=2,
        sample_size=8,
    )
    return make, torch.randn(1, 3, 16, 16)


def first_output(model, x):
    with torch.no_grad():
        return model.eval()(x)[0]


@pytest.fixture(params=[resnet, autoencoder], ids=lambda function: function.__name__)
def pretrained(request, tmp_path):
    """How a model is made, one that was saved, its input, and the folder."""
    torch.manual_seed(0)
    make, x = request.param()
    model = make().eval()
    model.save_pretrained(tmp_path / "saved")
    return make, model, x, tmp_path / "saved"


@pytest.mark.exhaustive  # importing diffusers and transformers takes seconds
def test_from_pretrained_then_convert_says_truthfully_that_the_memory_was_not_its_own(pretrained):
    _, original, x, folder = pretrained
    model = type(original).from_pretrained(folder)
    foreseen = nhwc.convert_(model, dry_run=True)
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    report = nhwc.convert_(model)
    assert nhwc.check(model, report.plan) == []
    assert foreseen.plan.digest == report.plan.digest
    elsewhere = {nhwc.Outcome.FRESH_FOREIGN, nhwc.Outcome.FRESH_HELD}
    for row, outcome in zip(report.plan.rows, report.outcomes):
        assert outcome in (elsewhere if row.action is nhwc.Action.CONVERT else {nhwc.Outcome.RESTRIDED})
        is_elsewhere = model.get_parameter(row.full_name).data_ptr() != pointers[row.full_name]
        assert is_elsewhere == (outcome in elsewhere), row.full_name
    assert report.new_bytes == report.plan.bytes_to_move
    assert "to new storage (" in str(report)
    torch.testing.assert_close(first_output(model, x), first_output(original, x), rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_a_converted_model_is_saved_by_save_pretrained_and_comes_back(pretrained, tmp_path):
    _, original, _, folder = pretrained
    model = type(original).from_pretrained(folder)
    plan = nhwc.convert_(model).plan
    model.save_pretrained(tmp_path / "again")
    other = type(original).from_pretrained(tmp_path / "again")
    for name, tensor in original.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    nhwc.restore_(other, plan)
    assert nhwc.check(other, plan) == []


@pytest.mark.exhaustive
def test_a_pretrained_folder_loads_in_format_without_from_pretrained(pretrained):
    make, original, x, folder = pretrained
    with torch.device("meta"):
        model = make()
    plan = nhwc.plan(model)
    [file] = folder.glob("*.safetensors")
    model.load_state_dict(nhwc.convert_state_dict(safetensors.torch.load_file(file), plan), assign=True)
    assert nhwc.check(model.eval(), plan) == []
    torch.testing.assert_close(first_output(model, x), first_output(original, x), rtol=1e-4, atol=1e-4)


# Offloading, by accelerate.


@pytest.fixture
def accelerate():
    return importlib.import_module("accelerate")


@pytest.fixture
def weights_in_convolutions(monkeypatch):
    """The strides of the weights that reach conv2d, while a test runs."""
    seen = []
    conv2d = nnf.conv2d

    def look(x, weight, *arguments):
        seen.append(weight.stride())
        return conv2d(x, weight, *arguments)

    monkeypatch.setattr(nnf, "conv2d", look)
    return seen


def cpu_offloaded(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offloaded(accelerate, model, path):
    return accelerate.disk_offload(model, path, execution_device="cpu")


def offloaded_by_the_block(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Sequential"])


def dispatched(accelerate, model, path):
    devices = {name: "disk" if name == "block" else "cpu" for name, _ in model.named_children()}
    return accelerate.dispatch_model(model, devices, offload_dir=path, main_device="cpu", force_hooks=True)


OFFLOADS = {
    cpu_offloaded: {"stem", "depthwise", "pointwise", "block.0", "volume"},
    disk_offloaded: {"stem", "depthwise", "pointwise", "block.0", "volume"},
    offloaded_by_the_block: {"stem", "depthwise", "pointwise", "block.0", "volume"},
    dispatched: {"block.0"},
}


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_offloaded_weights_are_refused_with_a_reason_and_the_rest_converts(offload, accelerate, tmp_path):
    model, x = network().eval(), torch.randn(2, 2, 6, 6)
    expected = model(x)
    model = offload(accelerate, model, tmp_path)
    with pytest.warns(UserWarning, match="convert before offloading to the CPU"):
        report = nhwc.convert_(model)
    refused = {row.path for row in report.plan.rows if row.reason is nhwc.Reason.OFFLOADED}
    assert refused == {row.path for row in report.plan.rows if row.action is nhwc.Action.REFUSE} == OFFLOADS[offload]
    torch.testing.assert_close(model(x), expected)
    assert nhwc.check(model, report.plan) == []


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_a_model_that_was_converted_first_is_offloaded_in_format_except_to_disk(
    offload, accelerate, weights_in_convolutions, tmp_path
):
    model, x = network().eval(), torch.randn(2, 2, 6, 6)
    expected = model(x)
    weights_in_convolutions.clear()
    nhwc.convert_(model)
    model = offload(accelerate, model, tmp_path)
    torch.testing.assert_close(model(x), expected)
    assert weights_in_convolutions == [
        (18, 1, 6, 2) if offload is not disk_offloaded else (18, 9, 3, 1),
        (9, 1, 3, 1) if offload is not disk_offloaded else (9, 9, 3, 1),
        (6, 1, 6, 6) if offload is not disk_offloaded else (6, 1, 1, 1),
        (36, 1, 12, 4) if offload not in (disk_offloaded, dispatched) else (36, 9, 3, 1),
    ]


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_the_report_on_an_offloaded_model_says_in_which_format_forward_sees_it(
    offload, accelerate, weights_in_convolutions, tmp_path
):
    model, x = network().eval(), torch.randn(2, 2, 6, 6)
    nhwc.convert_(model)
    model = offload(accelerate, model, tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = nhwc.convert_(model)
    refused = {row.path for row in report.plan.rows if row.reason is nhwc.Reason.OFFLOADED}
    assert refused == (OFFLOADS[offload] if offload in (disk_offloaded, dispatched) else set())
    assert sum("from a disk they come back contiguous" in str(each.message) for each in warned) == bool(refused)
    model(x)
    names = ["stem", "depthwise", "pointwise", "block.0"]
    wanted = {row.path: row.target_strides for row in report.plan.rows}
    as_planned = [name for name, seen in zip(names, weights_in_convolutions) if seen == wanted[name]]
    assert as_planned == [name for name in names if name not in refused]
    assert nhwc.check(model, report.plan) == []


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_a_conversion_is_not_reverted_while_the_model_is_offloaded(offload, accelerate, tmp_path):
    model, x = network().eval(), torch.randn(2, 2, 6, 6)
    report = nhwc.convert_(model)
    model = offload(accelerate, model, tmp_path)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"Report.revert: '[\w.]+': its values are kept elsewhere"):
        report.revert()
    torch.testing.assert_close(model(x), expected)


def test_a_model_made_with_init_empty_weights_is_planned_and_loaded(accelerate):
    with accelerate.init_empty_weights():
        model = Net()
    plan = nhwc.plan(model)
    assert {row.reason for row in plan.rows} == {nhwc.Reason.META}
    assert plan.digest == nhwc.plan(network()).digest
    state = nhwc.convert_state_dict(network().state_dict(), plan)
    for name, tensor in state.items():
        accelerate.utils.set_module_tensor_to_device(model, name, "cpu", value=tensor)
    assert nhwc.check(model, plan) == []


class PutsBack:
    """What accelerate leaves on a module, by structure, for where it is not installed."""

    def __init__(self, offload=True, place_submodules=False, hooks=None):
        self.offload, self.place_submodules = offload, place_submodules
        if hooks is not None:
            self.hooks = hooks


@pytest.mark.parametrize("wraps", [False, True], ids=["one hook", "several hooks"])
@pytest.mark.parametrize("place_submodules", [False, True], ids=["layer by layer", "by the block"])
def test_offloading_is_recognised_by_its_structure(place_submodules, wraps):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Conv2d(3, 4, 3))
    block = model[0].to("meta")
    hook = PutsBack(True, place_submodules)
    (block if place_submodules else block[0])._hf_hook = PutsBack(hooks=[hook]) if wraps else hook
    model._hf_hook = PutsBack(offload=False, place_submodules=True)  # moves inputs and outputs only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [nhwc.Reason.OFFLOADED, None]
    assert model[1].weight.stride() == (27, 1, 9, 3)
