"""Whole models on activations, small enough that a step takes a fraction of a second: how each is made and called."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_nhwc.running.outputs import first_tensor


class LayoutModel(NamedTuple):
    """A model with random weights, the shape of its input, and what else its `forward` takes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    extra: Callable[[int], dict[str, Tensor]] = lambda batch: {}

    def input_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """With a batch of two in 3D and float32: a single sample may go PyTorch's slow path, in every format."""
        is_slow = len(self.shape) == 5 and dtype == torch.float32
        batch = max(2, self.shape[0]) if is_slow else self.shape[0]
        return (batch, *self.shape[1:])

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        """The first tensor of what the model returns."""
        extra = {
            name: value.to(x.dtype) if value.is_floating_point() else value
            for name, value in self.extra(len(x)).items()
        }
        return first_tensor(model(x, **extra))


def channels_last(x: Tensor) -> Tensor:
    """The same values in canonical channels-last strides, also where one channel or one voxel leaves a choice."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig())


def convnext_t() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig())


def mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config())


def regnet_y() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    return RegNetForImageClassification(RegNetConfig())


def efficientnet_b0() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280)
    model = EfficientNetForImageClassification(config)
    for module in model.modules():  # PyTorch's first weights, since with its own the activations vanish
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
    return model


def poolformer() -> nn.Module:
    from transformers import PoolFormerConfig, PoolFormerForImageClassification

    return PoolFormerForImageClassification(PoolFormerConfig())


def unet2d() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128, 256),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=32,
    )


def unet2d_condition() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
    )


def vae_kl() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
    )


def vq_model() -> nn.Module:
    from diffusers import VQModel

    return VQModel(
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def video_autoencoder() -> nn.Module:
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(block_out_channels=(32, 64, 64, 64), layers_per_block=1)


def segresnet3d() -> nn.Module:
    from monai.networks.nets.segresnet import SegResNet

    return SegResNet(spatial_dims=3, init_filters=16, in_channels=1, out_channels=2)


def dynunet3d() -> nn.Module:
    from monai.networks.nets.dynunet import DynUNet

    filters = [16, 32, 64, 128]
    return DynUNet(3, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2], norm_name="instance", filters=filters)


def unet3d_bn() -> nn.Module:
    from monai.networks.nets.unet import UNet

    return UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, norm="batch")


def basic_unet3d() -> nn.Module:
    from monai.networks.nets.basic_unet import BasicUNet

    return BasicUNet(3, 1, 2, features=(16, 16, 32, 64, 128, 16))


def attention_unet3d() -> nn.Module:
    from monai.networks.nets.attentionunet import AttentionUnet

    return AttentionUnet(3, 1, 2, (16, 32, 64), (2, 2))


def timestep(batch: int) -> dict[str, Tensor]:
    return {"timestep": torch.ones(batch, dtype=torch.long)}


def condition(batch: int) -> dict[str, Tensor]:
    return {**timestep(batch), "encoder_hidden_states": torch.ones(batch, 8, 64)}


MODELS = {
    "resnet50": LayoutModel(resnet50, (4, 3, 224, 224)),
    "convnext_t": LayoutModel(convnext_t, (2, 3, 224, 224)),
    "mobilenet_v2": LayoutModel(mobilenet_v2, (4, 3, 224, 224)),
    "regnet_y": LayoutModel(regnet_y, (2, 3, 224, 224)),
    "efficientnet_b0": LayoutModel(efficientnet_b0, (4, 3, 224, 224)),
    "poolformer": LayoutModel(poolformer, (2, 3, 224, 224)),
    "unet2d": LayoutModel(unet2d, (2, 3, 32, 32), timestep),
    "unet2d_condition": LayoutModel(unet2d_condition, (2, 4, 32, 32), condition),
    "vae_kl": LayoutModel(vae_kl, (1, 3, 128, 128)),
    "vq_model": LayoutModel(vq_model, (1, 3, 64, 64)),
    "video_autoencoder": LayoutModel(video_autoencoder, (1, 3, 5, 32, 32)),
    "segresnet3d": LayoutModel(segresnet3d, (1, 1, 48, 48, 48)),
    "dynunet3d": LayoutModel(dynunet3d, (1, 1, 48, 48, 48)),
    "unet3d_bn": LayoutModel(unet3d_bn, (1, 1, 48, 48, 48)),
    "basic_unet3d": LayoutModel(basic_unet3d, (1, 1, 48, 48, 48)),
    "attention_unet3d": LayoutModel(attention_unet3d, (1, 1, 48, 48, 48)),
}

# What a prototype gained over contiguous, by model, dtype and mode, on a machine with AMX: the bar there is 5 % less.
GAINS_WITH_AMX = {
    ("segresnet3d", "bfloat16", "training"): 1.69,
    ("segresnet3d", "bfloat16", "inference"): 2.26,
    ("segresnet3d", "float32", "training"): 1.16,
    ("segresnet3d", "float32", "inference"): 1.18,
    ("dynunet3d", "bfloat16", "training"): 1.58,
    ("dynunet3d", "bfloat16", "inference"): 1.91,
    ("dynunet3d", "float32", "training"): 1.35,
    ("dynunet3d", "float32", "inference"): 1.24,
    ("vae_kl", "bfloat16", "training"): 1.44,
    ("vae_kl", "bfloat16", "inference"): 1.99,
    ("unet2d", "bfloat16", "training"): 1.10,
    ("unet2d", "bfloat16", "inference"): 1.44,
}
