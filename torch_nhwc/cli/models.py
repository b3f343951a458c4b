"""The models of the command line: built-in ones, and those that a user's function makes."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from torch_nhwc.running.calls import arguments_of, call
from torch_nhwc_cli.options import InputShape, ModelOptions


class Example(NamedTuple):
    """A model with its inputs."""

    name: str
    model: nn.Module
    inputs: Any
    """A tensor, a tuple of positional arguments, a dict of keyword arguments, or `None` if they are not known."""

    @property
    def like(self) -> Tensor:
        """A tensor on the model's device and in its dtype."""
        return next((each for each in self.model.parameters() if each.is_floating_point()), torch.empty(0))

    def require_inputs(self) -> None:
        """Check that the model can run, and initialize lazy layers.

        Raises:
            ValueError: There are no inputs.
        """
        if self.inputs is None:
            shape = f"such as {_shape_for(self.model)}"
            raise ValueError(f"{self.name} comes without inputs: give a shape by --input-shape, {shape}")
        if self.is_lazy:
            with torch.no_grad():
                call(self.model, self.inputs)

    @property
    def is_lazy(self) -> bool:
        """Return whether layers have no weights before the first call."""
        return any(map(is_lazy, self.model.parameters()))


def load_example(named: ModelOptions) -> Example:
    """Return the model that the options name, with its inputs, on a device and in a dtype.

    Floating-point inputs get the dtype of the model, except random ones whose shape comes with another dtype.

    Raises:
        ValueError: An option is not valid.
    """
    torch.manual_seed(0)
    example = _built_in(named.built_in) if named.built_in is not None else _made_by(named.factory or "")
    if named.device is not None or named.dtype is not None:  # a model's own `to` may warn, or do more than PyTorch's
        dtype = None if named.dtype is None else getattr(torch, named.dtype)
        example.model.to(device=named.device, dtype=dtype)
    like = example.like
    if named.input_shapes:
        return example._replace(inputs=random_inputs(named.input_shapes, like))

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)

    return example._replace(inputs=tree_map_only(Tensor, move, example.inputs))


def random_inputs(shapes: Sequence[InputShape], like: Tensor) -> Any:
    """Return random inputs of some shapes: a tensor or a tuple without names, or a dict.

    They are on the device of a tensor, and in its dtype if none is named. Integers are 0 or 1.
    """
    tensors = []
    for shape in shapes:
        dtype = like.dtype if shape.dtype is None else getattr(torch, shape.dtype)
        values = torch.randn(shape.sizes) if dtype.is_floating_point else torch.randint(0, 2, shape.sizes)
        tensors.append(values.to(like.device, dtype))
    if shapes[0].name is not None:
        return {shape.name: tensor for shape, tensor in zip(shapes, tensors)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def import_from_here() -> None:
    """Let modules in the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def resnet50() -> Example:
    """Make ResNet-50 as transformers builds it, with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig())
    return Example("ResNet-50 (transformers)", model, torch.randn(2, 3, 224, 224))


def unet3d() -> Example:
    """Make a 3D UNet with residual units as monai builds it."""
    from monai.networks.nets.unet import UNet

    model = UNet(3, 1, 2, channels=(32, 64, 128, 256, 512), strides=(2, 2, 2, 2), num_res_units=2)
    return Example("3D UNet (monai)", model, torch.randn(1, 1, 64, 64, 64))


def video_autoencoder() -> Example:
    """Make a small CogVideoX autoencoder as diffusers builds it."""
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX(block_out_channels=(64, 128, 128, 256), layers_per_block=1)
    return Example("CogVideoX autoencoder (diffusers)", model, torch.randn(1, 3, 5, 64, 64))


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": resnet50,
    "unet3d": unet3d,
    "video-autoencoder": video_autoencoder,
}


def _built_in(name: str) -> Example:
    try:
        with _quiet():
            return MODELS[name]()
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: type `pip install 'torch-nhwc[models]'`") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what packages warn of and log while they are imported, such as extensions that fit another torch."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _shape_for(model: nn.Module) -> str:
    """Return the shape of an input that a model's first convolution takes, as an example."""
    for layer in model.modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            sizes = {1: "224", 2: "224,224", 3: "32,32,32"}[len(layer.kernel_size)]
            return f"1,{layer.in_channels or 3},{sizes}"  # a lazy layer has 0 channels
    return "1,3,224,224"


def _made_by(factory: str) -> Example:
    """Return the example that `module:callable` of the current folder or an installed package makes."""
    module_name, _, function_name = factory.partition(":")
    import_from_here()
    try:
        function = getattr(importlib.import_module(module_name.removesuffix(".py")), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # also for a path instead of a module's name
        raise ValueError(f"--factory: expected module:callable, got {factory!r}: {error}") from error
    if isinstance(function, nn.Module):
        raise ValueError(f"--factory: {factory} is a module: expected a function that returns one")
    made = function()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--factory: expected {factory} to return a module, or a module and its inputs")
    try:
        arguments_of(model, inputs)
    except TypeError as error:
        raise ValueError(f"--factory: {error}") from error
    return Example(factory, model, inputs)
