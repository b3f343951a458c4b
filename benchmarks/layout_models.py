"""Whole models on activations, small enough that a step takes a fraction of a second: how each is made and called."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.running import tensors_in


class LayoutModel(NamedTuple):
    """A model with random weights, the shape of its input, and what else its `forward` takes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    extra: Callable[[int], dict[str, Tensor]] = lambda batch: {}

    def extra_inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the other arguments, the floating-point ones in a dtype."""
        extra = self.extra(batch)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in extra.items()}

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the first tensor of the model's output."""
        return first_tensor(model(x, **self.extra_inputs(len(x), x.dtype)))


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of an output, whatever contains it."""
    return next(tensor for _, tensor in tensors_in(output))


def channels_last(x: Tensor) -> Tensor:
    """Return the same values in canonical channels-last strides, even if one channel or one voxel leaves a choice."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def classifier(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return what makes one of transformers' image classifiers."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        made_config = getattr(transformers, f"{name}Config")(**config)
        return getattr(transformers, f"{name}ForImageClassification")(made_config)

    return make


def network(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of a class in a module, which is imported when the model is made."""
    return lambda: getattr(importlib.import_module(module), name)(*arguments, **options)


def efficientnet_b0() -> nn.Module:
    """Return a model with PyTorch's initial weights: with those of transformers the activations vanish."""
    size = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224, "hidden_dim": 1280}
    model = classifier("EfficientNet", **size)()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
    return model


unet2d = network(
    "diffusers",
    "UNet2DModel",
    sample_size=32,
    block_out_channels=(64, 128, 256),
    layers_per_block=1,
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    norm_num_groups=32,
)
unet2d_condition = network(
    "diffusers",
    "UNet2DConditionModel",
    sample_size=32,
    block_out_channels=(64, 128, 256),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=64,
    attention_head_dim=8,
)
autoencoder_blocks = {
    "block_out_channels": (64, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
vae_kl = network("diffusers", "AutoencoderKL", layers_per_block=1, **autoencoder_blocks)
vq_model = network("diffusers", "VQModel", **autoencoder_blocks)
video_channels = (32, 64, 64, 64)
video_autoencoder = network(
    "diffusers", "AutoencoderKLCogVideoX", block_out_channels=video_channels, layers_per_block=1
)
segresnet3d = network(
    "monai.networks.nets.segresnet", "SegResNet", spatial_dims=3, init_filters=16, in_channels=1, out_channels=2
)
dynunet3d = network(
    "monai.networks.nets.dynunet",
    "DynUNet",
    *(3, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2]),
    norm_name="instance",
    filters=[16, 32, 64, 128],
)
unet3d_bn = network("monai.networks.nets.unet", "UNet", 3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, norm="batch")
basic_unet3d = network("monai.networks.nets.basic_unet", "BasicUNet", 3, 1, 2, features=(16, 16, 32, 64, 128, 16))
attention_unet3d = network("monai.networks.nets.attentionunet", "AttentionUnet", 3, 1, 2, (16, 32, 64), (2, 2))


def timestep(batch: int) -> dict[str, Tensor]:
    """Return the time that a diffusion model takes."""
    return {"timestep": torch.ones(batch, dtype=torch.long)}


def condition(batch: int) -> dict[str, Tensor]:
    """Return the time and the text that a conditional diffusion model takes."""
    return {**timestep(batch), "encoder_hidden_states": torch.ones(batch, 8, 64)}


MODELS = {
    "resnet50": LayoutModel(classifier("ResNet"), (4, 3, 224, 224)),
    "convnext_t": LayoutModel(classifier("ConvNext"), (2, 3, 224, 224)),
    "mobilenet_v2": LayoutModel(classifier("MobileNetV2"), (4, 3, 224, 224)),
    "regnet_y": LayoutModel(classifier("RegNet"), (2, 3, 224, 224)),
    "efficientnet_b0": LayoutModel(efficientnet_b0, (4, 3, 224, 224)),
    "poolformer": LayoutModel(classifier("PoolFormer"), (2, 3, 224, 224)),
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
