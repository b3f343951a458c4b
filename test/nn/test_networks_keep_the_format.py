"""Whole networks of other packages, of one channel and a batch of 1: every activation is channels-last."""

import re

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc

VOLUME = (1, 1, 16, 16, 16)


def dynunet():
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16], res_block=True)


def segresnet():
    from monai.networks.nets import SegResNet

    return SegResNet(init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,))


def unetr():
    from monai.networks.nets import UNETR

    return UNETR(1, 2, VOLUME[2:], feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2)


def plain(volume):
    return volume


def meta_tensor(volume):
    from monai.data import MetaTensor

    return MetaTensor(volume, meta={"name": "a scan"})


def assert_channels_last(trace, model, contiguous_inputs=""):
    """No convolution writes a contiguous activation, and none reads one, except for those of the given paths."""
    convolutions = {path for path, each in model.named_modules() if isinstance(each, nn.modules.conv._ConvNd)}
    rows = [row for row in trace.modules if row.path in convolutions]
    assert len(rows) > 5
    assert not [str(row) for row in rows if "contiguous" in {each.format for each in row.outputs}]
    is_allowed = re.compile(contiguous_inputs).fullmatch
    read = [row for row in rows if "contiguous" in {each.format for each in row.inputs}]
    assert not [str(row) for row in read if not is_allowed(row.path)]
    assert not [str(row) for row in trace.mixed if not is_allowed(row.path)]


@pytest.mark.parametrize("wrap", [plain, meta_tensor])
@pytest.mark.parametrize("make", [dynunet, segresnet, unetr])
def test_networks_of_monai_train_in_channels_last(make, wrap):
    network = make().train()
    volume = torch.randn(VOLUME)
    expected = network(volume)
    nhwc.convert_(network, input_format="channels_last_3d")
    with nhwc.trace(network) as trace:
        output = network(wrap(volume))
        output.square().mean().backward()
    assert_channels_last(trace, network)
    # A result of a subclass is a view in PyTorch, and the backward of an activation in place copies its gradient.
    assert not [str(loss) for loss in trace.losses if wrap is plain or loss.phase == "forward"]
    assert type(output) is type(wrap(volume))
    torch.testing.assert_close(output.as_subclass(torch.Tensor), expected, rtol=1e-3, atol=1e-4)


def wan():
    from diffusers import AutoencoderKLWan

    statistics = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return AutoencoderKLWan(8, None, 4, [1, 2], 1, temperal_downsample=[False], **statistics)


def hunyuan_video():
    from diffusers import AutoencoderKLHunyuanVideo

    widths = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    return AutoencoderKLHunyuanVideo(latent_channels=4, **widths)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "contiguous_inputs"),
    [
        # PyTorch's upsampling loses the format of a single frame, which the model takes out of the video.
        (wan, r"post_quant_conv|.*\.resample\.1"),
        # Each residual block calls `contiguous`, and each upsampling separates the first frame.
        (hunyuan_video, r"post_quant_conv|.*\.(conv1|upsamplers\.0\.conv)\.conv"),
    ],
)
def test_video_decoders_of_diffusers_decode_in_channels_last(make, contiguous_inputs):
    """By `decode`, which calls no hook of the model: the first convolution reads contiguous latents."""
    vae = make().eval()
    latents = torch.randn(1, 4, 2, 4, 4)
    expected = vae.decode(latents).sample
    nhwc.convert_(vae)
    with nhwc.trace(vae) as trace:
        output = vae.decode(latents).sample
    assert_channels_last(trace, vae, contiguous_inputs)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
