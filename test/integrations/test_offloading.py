"""Models from `from_pretrained`, and models that accelerate offloads."""

import importlib
import os
import warnings
from functools import partial

import pytest
import safetensors.torch
import torch
from comparison import strides_at_convolutions
from torch import nn

import torch_nhwc as nhwc

# Tiny models from folders: nothing is fetched, or tried to be.
os.environ["HF_HUB_OFFLINE"] = "1"


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
    """Return a function that makes a model, one that was saved, its input, and the folder."""
    torch.manual_seed(0)
    make, x = request.param()
    model = make().eval()
    model.save_pretrained(tmp_path / "saved")
    return make, model, x, tmp_path / "saved"


@pytest.mark.exhaustive  # importing diffusers and transformers takes seconds
def test_a_model_from_pretrained_converts_is_saved_and_is_loaded(pretrained, tmp_path):
    _, original, x, folder = pretrained
    model = type(original).from_pretrained(folder)
    report = nhwc.convert_(model)
    assert nhwc.check(model, report.plan) == []
    assert report.new_bytes == report.plan.bytes_to_move  # its memory was not its own, but that of the file
    torch.testing.assert_close(first_output(model, x), first_output(original, x), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    other = type(original).from_pretrained(tmp_path / "again")
    for name, tensor in original.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    nhwc.training.restore_(other, report.plan)
    assert nhwc.check(other, report.plan) == []


@pytest.mark.exhaustive
def test_a_pretrained_folder_loads_in_format_without_from_pretrained(pretrained):
    make, original, x, folder = pretrained
    with torch.device("meta"):
        model = make()
    plan = nhwc.plan(model)
    [file] = folder.glob("*.safetensors")
    state = nhwc.checkpoint.convert_state_dict(safetensors.torch.load_file(file), plan)
    model.load_state_dict(state, assign=True)
    assert {deviation.what for deviation in nhwc.check(model, plan)} <= {"layer"}  # a state dict has no layers
    nhwc.training.restore_(model, plan)
    assert nhwc.check(model.eval(), plan) == []
    torch.testing.assert_close(first_output(model, x), first_output(original, x), rtol=1e-4, atol=1e-4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 4, 3)))


STRIDES = {False: [(27, 9, 3, 1), (54, 9, 3, 1)], True: [(27, 1, 9, 3), (54, 1, 18, 6)]}


@pytest.fixture
def accelerate():
    return importlib.import_module("accelerate")


def cpu_offloaded(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offloaded(accelerate, model, path):
    return accelerate.disk_offload(model, path, execution_device="cpu")


def offloaded_by_the_block(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Sequential"])


def dispatched(accelerate, model, path):
    devices = {"0": "cpu", "1": "cpu", "2": "disk"}
    return accelerate.dispatch_model(model, devices, offload_dir=path, main_device="cpu", force_hooks=True)


# The layers whose weights are elsewhere, and those of them that get them back contiguous.
OFFLOADS = {
    cpu_offloaded: ({"0", "2.0"}, set()),
    offloaded_by_the_block: ({"0", "2.0"}, set()),
    disk_offloaded: ({"0", "2.0"}, {"0", "2.0"}),
    dispatched: ({"2.0"}, {"2.0"}),
}


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_offloaded_weights_are_refused_with_a_reason_and_the_rest_converts(offload, accelerate, tmp_path):
    model, x = network().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    model = offload(accelerate, model, tmp_path)
    with pytest.warns(UserWarning, match="convert before offloading to the CPU"):
        report = nhwc.convert_(model)
    refused = {row.path for row in report.rows if row.reason is nhwc.Reason.OFFLOADED}
    assert refused == OFFLOADS[offload][0]
    torch.testing.assert_close(model(x), expected)
    assert nhwc.check(model, report.plan) == []


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_a_converted_model_is_offloaded_in_format_except_to_disk(offload, accelerate, tmp_path):
    model, x = network().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    report = nhwc.convert_(model)
    model = offload(accelerate, model, tmp_path)
    torch.testing.assert_close(model(x), expected)
    _, lost = OFFLOADS[offload]
    assert strides_at_convolutions(model, x) == [
        STRIDES[path not in lost][index] for index, path in enumerate(("0", "2.0"))
    ]
    with pytest.raises(RuntimeError, match=r"Report.revert: '[\w.]+': its values are kept elsewhere"):
        report.revert()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again = nhwc.convert_(model)
    assert {row.path for row in again.rows if row.reason is nhwc.Reason.OFFLOADED} == OFFLOADS[offload][0]
    assert sum("from a disk they come back contiguous" in str(each.message) for each in warned) == 1


def test_a_model_made_with_init_empty_weights_is_planned_and_loaded(accelerate):
    with accelerate.init_empty_weights():
        model = network()
    plan = nhwc.plan(model, preserve=False)
    assert {row.reason for row in plan.rows} == {nhwc.Reason.META}
    for name, tensor in nhwc.checkpoint.convert_state_dict(network().state_dict(), plan).items():
        accelerate.utils.set_module_tensor_to_device(model, name, "cpu", value=tensor)
    assert nhwc.check(model, plan) == []
