"""The models of the demo: built in, from a TorchScript archive, or from a function of the user's."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Example:
    """A model with the tensor that it is called with."""

    name: str
    model: nn.Module
    input: Tensor


def resnet50() -> Example:
    """ResNet-50 as transformers builds it, random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig())
    return Example("ResNet-50 (transformers)", model, torch.randn(2, 3, 224, 224))


def unet3d(width: int = 32) -> Example:
    """A 3D UNet with residual units as monai builds it, random weights; the outermost layers have `width` channels."""
    from monai.networks.nets.unet import UNet

    channels = [width << depth for depth in range(5)]
    model = UNet(3, 1, 2, channels=channels, strides=(2, 2, 2, 2), num_res_units=2)
    return Example("3D UNet (monai)", model, torch.randn(1, 1, 64, 64, 64))


def video_autoencoder(widths: Sequence[int] = (64, 128, 128, 256), layers_per_block: int = 1) -> Example:
    """A CogVideoX autoencoder as diffusers builds it, a small one by default, random weights."""
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX(block_out_channels=tuple(widths), layers_per_block=layers_per_block)
    return Example("CogVideoX autoencoder (diffusers)", model, torch.randn(1, 3, 5, 64, 64))


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": resnet50,
    "unet3d": unet3d,
    "video-autoencoder": video_autoencoder,
}


def load_torchscript(path: str, input_shape: Sequence[int]) -> Example:
    """A saved TorchScript model with a random input; a ValueError where it cannot be loaded."""
    try:
        model = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call, unused-ignore]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a TorchScript archive: {str(error).splitlines()[0]}") from error
    return Example(path, model, torch.randn(*input_shape))


def load_factory(factory: str, input_shape: Sequence[int] | None) -> Example:
    """A model from `module:callable`, which returns the model, or the model and its input; a ValueError otherwise."""
    module_name, _, function_name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"expected module:callable, got {factory!r}: {error}") from error
    made = function()
    model, example_input = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(example_input, Tensor | None):
        raise ValueError(f"expected {factory} to return a module, or a module and its input tensor")
    if example_input is None:
        if input_shape is None:
            raise ValueError(f"{factory} returns no input: name its shape with --input-shape, such as 1,3,224,224")
        example_input = torch.randn(*input_shape)
    return Example(factory, model, example_input)
