"""The models of the command line: built in, from a saved file, or from a function of the user's."""

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.cli.inputs import InputShape, moved, random_inputs
from torch_nhwc.running.inputs import arguments_of, call


@dataclass(frozen=True)
class Example:
    """A model with what it is called with."""

    name: str
    model: nn.Module
    inputs: Any
    """A tensor, a tuple of positional arguments, a dict of keyword ones, or `None` where they are not known."""

    @property
    def like(self) -> Tensor:
        """A tensor on the model's device and in its dtype."""
        return next((each for each in self.model.parameters() if each.is_floating_point()), torch.empty(0))

    def prepared(
        self, device: str | None = None, dtype: torch.dtype | None = None, shapes: Sequence[InputShape] = ()
    ) -> "Example":
        """This with its model on a device and in a dtype, and its inputs there; random inputs where shapes are given.

        Floating inputs take the dtype of the model, but for random ones whose shape comes with another.
        """
        self.model.to(device=device, dtype=dtype)
        if shapes:
            return replace(self, inputs=random_inputs(shapes, self.like))
        return (
            self if self.inputs is None else replace(self, inputs=moved(self.inputs, self.like.device, self.like.dtype))
        )

    def expect_to_run(self) -> None:
        """Has lazy layers get their shapes.

        Raises:
            ValueError: there are no inputs.
        """
        if self.inputs is None:
            raise ValueError(f"{self.name} comes without inputs: name a shape with --input-shape, such as 1,3,224,224")
        if any(map(is_lazy, self.model.parameters())):
            with torch.no_grad():
                call(self.model, self.inputs)


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


def load(
    built_in: str | None, factory: str | None, torchscript: str | None, pickled: str | None, allow_pickle: bool
) -> Example:
    """The one model that is named.

    Raises:
        ValueError: none or several are named, or it cannot be had.
    """
    if sum(each is not None for each in (built_in, factory, torchscript, pickled)) != 1:
        raise ValueError("name one model, by --model, --factory, --torchscript or --pickle")
    if factory is not None:
        return load_factory(factory)
    if torchscript is not None:
        return load_torchscript(torchscript)
    return load_built_in(built_in or "") if pickled is None else load_pickle(pickled, allow_pickle)


def load_built_in(name: str) -> Example:
    """One of `MODELS`; a ValueError where it is none, or its package is missing."""
    if name not in MODELS:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {name!r}")
    try:
        return MODELS[name]()
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: type `pip install 'torch-nhwc[models]'`") from error


def load_torchscript(path: str) -> Example:
    """A saved TorchScript model; a ValueError where it cannot be loaded."""
    try:
        model = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call, unused-ignore]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a TorchScript archive: {str(error).splitlines()[0]}") from error
    return Example(path, model, None)


def load_pickle(path: str, is_allowed: bool) -> Example:
    """A whole module that torch.save wrote; a ValueError where it is not allowed, or cannot be loaded.

    The module of its class may lie in the current folder.
    """
    if not is_allowed:
        raise ValueError(f"--pickle: loading {path} runs whatever code is in it: trust it by --allow-pickle")
    look_here_for_modules()
    try:
        model = torch.load(path, map_location="cpu", weights_only=False)
    except (AttributeError, EOFError, ImportError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--pickle: {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"--pickle: expected a whole module in {path}, got a {kind}: a factory can load a state dict")
    return Example(path, model, None)


def load_factory(factory: str) -> Example:
    """What `module:callable` makes: a model, or a model and its inputs; a ValueError otherwise.

    The module may lie in the current folder.
    """
    module_name, _, function_name = factory.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"--factory: expected module:callable, with a module as import names it, got {factory!r}")
    look_here_for_modules()
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--factory: expected module:callable, got {factory!r}: {error}") from error
    except SystemExit as error:
        raise ValueError(f"--factory: the module {module_name} ends the program ({error!r})") from error
    if isinstance(function, nn.Module) or not callable(function):
        kind = type(function).__name__
        raise ValueError(f"--factory: expected module:callable, a function that returns a model, got a {kind}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"--factory: {factory} has to work without arguments: {error}") from error
    except ValueError:  # one without a signature
        pass
    try:
        made = function()
    except SystemExit as error:
        raise ValueError(f"--factory: {factory} ends the program ({error!r})") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--factory: expected {factory} to return a module, or a module and its inputs")
    try:
        arguments_of(model, inputs)
    except TypeError as error:
        raise ValueError(f"--factory: {error}") from error
    return Example(factory, model, inputs)


def look_here_for_modules() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
