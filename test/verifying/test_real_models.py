"""Models as people have them: where nothing is wrong, nothing is said to be; what is wrong in PyTorch is found."""

import copy
import importlib
import itertools

import pytest
import torch
from comparison import quiet

import torch_nhwc as nhwc


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


CASES = itertools.product((unet2d, dynunet, segresnet), (torch.float32, torch.bfloat16), (True, False))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("make", "dtype", "training"), CASES)
def test_nothing_differs_where_layers_are_replaced_or_there_are_none_to_replace(make, dtype, training):
    before, inputs = made(make, dtype, training)
    with quiet():
        report = nhwc.convert_(after := copy.deepcopy(before), preserve=True, input_format="channels_last")
    verification = nhwc.verify(before, after, inputs)
    assert verification, str(verification)
    assert report.model is after
