"""Models as people have them: where nothing is wrong, nothing is said to be; what is wrong in PyTorch is found."""

import copy
import importlib
import itertools

import pytest
import torch
from comparison import quiet
from torch import nn

import torch_nhwc as nhwc


def resnet():
    transformers = importlib.import_module("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "labels": torch.tensor([0, 1]),
    }


def resnet50():
    transformers = importlib.import_module("transformers")
    return transformers.ResNetModel(transformers.ResNetConfig()), torch.randn(2, 3, 64, 64)


def unet2d():
    diffusers = importlib.import_module("diffusers")
    blocks = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    model = diffusers.UNet2DModel(down_block_types=down, up_block_types=up, **blocks)
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": 3}


def dynunet():
    networks = importlib.import_module("monai.networks.nets")
    model = networks.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 8, 16], deep_supervision=True)
    return model, torch.randn(2, 1, 16, 16, 16)


def segresnet():
    networks = importlib.import_module("monai.networks.nets")
    return networks.SegResNet(3, 8, 1, 2, dropout_prob=0.2), torch.randn(2, 1, 16, 16, 16)


def vit():
    transformers = importlib.import_module("transformers")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return transformers.ViTModel(config), torch.randn(2, 3, 224, 224)


def made(make, dtype, training):
    torch.manual_seed(0)
    with quiet():
        model, inputs = make()
        model = model.to(dtype).train(training)

    def cast(value):
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real else value

    inputs = {name: cast(value) for name, value in inputs.items()} if isinstance(inputs, dict) else cast(inputs)
    return model, inputs


MODELS = [resnet, unet2d, dynunet, segresnet, vit]
CASES = [
    *itertools.product(MODELS, (torch.float32, torch.bfloat16), (True, False)),
    (resnet50, torch.bfloat16, True),  # in float32 by benchmarks/bench_verify.py
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("make", "dtype", "training"), CASES)
def test_nothing_differs_where_layers_are_exchanged_or_there_are_none_to_exchange(make, dtype, training):
    before, inputs = made(make, dtype, training)
    with quiet():
        report = nhwc.convert_(after := copy.deepcopy(before), preserve=True, input_format="channels_last")
    verification = nhwc.verify(before, after, inputs)
    assert verification, str(verification)
    assert report.model is after


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", [unet2d, segresnet])
def test_the_group_norms_of_pytorch_are_found_and_nothing_else(make, training):
    before, inputs = made(make, torch.float32, training)
    with quiet():
        report = nhwc.convert_(after := copy.deepcopy(before), input_format="channels_last")
    verification = nhwc.verify(before, report, inputs)
    assert {type(before.get_submodule(row.path)) for row in verification.differing} == {nn.GroupNorm}
    assert all(row.before_differs for row in verification.differing)
    assert after is report.model
