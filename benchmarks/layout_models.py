"""Whole models on activations, small enough that a step takes a fraction of a second: how each is made and called."""

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.running.containers import tensors_in

MODES = ("inference", "training")
CONTIGUOUS, FULL, PRESERVED = "contiguous", "full", "preserved"
Copies = dict[str, tuple[nn.Module, Tensor]]


class LayoutModel(NamedTuple):
    """A model with random weights, the shape of its input, and what else its `forward` takes.

    A model that `decodes` is an autoencoder of which only the decoder is measured, in inference, as one that does not
    train is.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    extra: Callable[[int], dict[str, Tensor]] = lambda batch: {}
    decodes: bool = False
    trains: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that are measured."""
        return MODES if self.trains and not self.decodes else MODES[:1]

    def extra_inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the other arguments, the floating-point ones in a dtype."""
        extra = self.extra(batch)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in extra.items()}

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the first tensor of the model's output."""
        if self.decodes:
            return model.decode(x).sample
        return first_tensor(model(x, **self.extra_inputs(len(x), x.dtype)))


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of an output, whatever contains it."""
    return next(tensor for _, tensor in tensors_in(output))


def channels_last(x: Tensor) -> Tensor:
    """Return the same values in canonical channels-last strides, even if one channel or one voxel leaves a choice."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def layouts(measured: LayoutModel, model: nn.Module, x: Tensor) -> Copies:
    """Return the copies of a model, each with its input. Latents stay contiguous, since no hook converts them."""
    converted = {name: copy.deepcopy(model) for name in (FULL, PRESERVED)}
    for name, each in converted.items():
        nhwc.convert_(each, preserve=name == PRESERVED)
    given = x if measured.decodes else channels_last(x)
    return {CONTIGUOUS: (model, x), **{name: (each, given) for name, each in converted.items()}}


def replaced(before: nn.Module, after: nn.Module) -> dict[str, int]:
    """Count the layers of each class that have another class after the conversion."""
    pairs = zip(before.modules(), after.modules(), strict=True)
    return dict(Counter(type(a).__name__ for a, b in pairs if type(a) is not type(b)))


def inference(measured: LayoutModel, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return measured.call(model, x)


def training(measured: LayoutModel, model: nn.Module, x: Tensor) -> Tensor:
    """Take a step without the optimizer's part, and return the loss."""
    loss = measured.call(model, x).float().square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def difference(result: Tensor, reference: Tensor) -> float:
    """Return the largest difference of two elements, in units of the largest one of the reference."""
    return ((result - reference).abs().max() / reference.abs().max()).item()


STEPS = dict(zip(MODES, (inference, training)))


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


def dynunet(*filters: int) -> Callable[[], nn.Module]:
    """Return what makes a 3D DynUNet with instance norm and so many filters at each level."""
    halvings = [2] * (len(filters) - 1)
    sizes = ([3] * len(filters), [1, *halvings], halvings)
    return network("monai.networks.nets.dynunet", "DynUNet", 3, 1, 2, *sizes, norm_name="instance", filters=filters)


dynunet3d = dynunet(16, 32, 64, 128)
unet3d_bn = network("monai.networks.nets.unet", "UNet", 3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, norm="batch")
basic_unet3d = network("monai.networks.nets.basic_unet", "BasicUNet", 3, 1, 2, features=(16, 16, 32, 64, 128, 16))
attention_unet3d = network("monai.networks.nets.attentionunet", "AttentionUnet", 3, 1, 2, (16, 32, 64), (2, 2))


def mednext(kernel: int) -> Callable[[], nn.Module]:
    """Return what makes a MedNeXt whose depthwise kernels have this size."""
    return network("monai.networks.nets.mednext", "create_mednext", "S", 3, 1, 2, kernel)


def nnunet(name: str, **blocks: list[int]) -> Callable[[], nn.Module]:
    """Return what makes one of nnU-Net's networks.

    The package is installed by `pip install --no-deps dynamic-network-architectures`: it requires torchvision, which
    these networks do not need.
    """
    return network(
        *("dynamic_network_architectures.architectures.unet", name),
        **blocks,
        input_channels=1,
        n_stages=5,
        features_per_stage=[32, 64, 128, 256, 320],
        conv_op=nn.Conv3d,
        kernel_sizes=[[3] * 3] * 5,
        strides=[[1] * 3] + [[2] * 3] * 4,
        num_classes=3,
        n_conv_per_stage_decoder=[1] * 4,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
    )


wan = network(
    "diffusers",
    "AutoencoderKLWan",
    base_dim=32,
    z_dim=4,
    dim_mult=[1, 2, 2],
    num_res_blocks=1,
    temperal_downsample=[False, True],
)
ltx = network(
    "diffusers",
    "AutoencoderKLLTXVideo",
    latent_channels=16,
    block_out_channels=(32, 64, 128, 128),
    decoder_block_out_channels=(32, 64, 128, 128),
    layers_per_block=(1,) * 5,
    decoder_layers_per_block=(1,) * 5,
)
hunyuan = network(
    "diffusers",
    "AutoencoderKLHunyuanVideo",
    latent_channels=4,
    block_out_channels=(32, 64, 128, 128),
    layers_per_block=1,
)


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
    "mednext3d_k3": LayoutModel(mednext(3), (1, 1, 32, 32, 32)),
    "mednext3d_k5": LayoutModel(mednext(5), (1, 1, 32, 32, 32)),
    "plain_conv_unet3d": LayoutModel(nnunet("PlainConvUNet", n_conv_per_stage=[2] * 5), (1, 1, 64, 64, 64)),
    "residual_encoder_unet3d": LayoutModel(
        nnunet("ResidualEncoderUNet", n_blocks_per_stage=[1, 3, 4, 6, 6]), (1, 1, 64, 64, 64)
    ),
    "wan_decoder": LayoutModel(wan, (1, 4, 3, 16, 16), decodes=True),
    "ltx_decoder": LayoutModel(ltx, (1, 16, 4, 8, 8), decodes=True),
    "hunyuan_decoder": LayoutModel(hunyuan, (1, 4, 3, 8, 8), decodes=True),
}
ONE_IMAGE = {
    f"{name}_{pixels}px": LayoutModel(MODELS[name].make, (1, 3, pixels, pixels), trains=False)
    for name in ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y", "convnext_t")
    for pixels in (64, 128, 224)
}
