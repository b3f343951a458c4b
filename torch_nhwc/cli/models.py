"""The models of the command line: built-in ones, and those that a user's function makes."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from torch_nhwc.running.calls import arguments_of, call

_FLOATING = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPES = _FLOATING | {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?")


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
            raise ValueError(f"{self.name} comes without inputs: give a shape by --input-shape, such as 1,3,224,224")
        if self.is_lazy:
            with torch.no_grad():
                call(self.model, self.inputs)

    @property
    def is_lazy(self) -> bool:
        """Return whether layers have no weights before the first call."""
        return any(map(is_lazy, self.model.parameters()))


def load_example(
    model: str | None,
    factory: str | None,
    input_shapes: Sequence[str] | None,
    device: str | None,
    dtype: str | None,
) -> Example:
    """Return the model that the options name, with its inputs, on a device and in a dtype.

    Floating-point inputs get the dtype of the model, except random ones whose shape comes with another dtype.

    Raises:
        ValueError: An option is not valid.
    """
    if (model is None) == (factory is None):
        raise ValueError("name one model, by --model or --factory")
    kind = dtype_of(dtype, "--dtype")
    torch.manual_seed(0)
    example = _built_in(model) if model is not None else _made_by(factory or "")
    if device is not None or kind is not None:  # a model's own `to` may warn, or do more than PyTorch's
        example.model.to(device=device, dtype=kind)
    like = example.like
    if input_shapes:
        return example._replace(inputs=random_inputs(input_shapes, like))

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)

    return example._replace(inputs=tree_map_only(Tensor, move, example.inputs))


def dtype_of(text: str | None, option: str) -> torch.dtype | None:
    """Return the floating-point dtype with a name.

    Raises:
        ValueError: There is none.
    """
    if text is not None and text not in _FLOATING:
        raise ValueError(f"{option}: expected one of {', '.join(_FLOATING)}, got {text!r}")
    return None if text is None else _FLOATING[text]


def random_inputs(texts: Sequence[str], like: Tensor) -> Any:
    """Return random inputs with shapes such as `1,3,224,224`, `1,16:int64` or `pixel_values=1,3,224,224`.

    They are on the device of a tensor, and in its dtype if none is named. Integers are 0 or 1. Unnamed inputs are one
    tensor or a tuple, named ones a dict.

    Raises:
        ValueError: A text is not such a shape, or some inputs have names and others have none.
    """
    named: dict[str | None, Tensor] = {}
    tensors = []
    for text in texts:
        read = _SHAPE.fullmatch(text.replace(" ", ""))
        if read is None:
            expected = "sizes such as 1,3,224,224 or pixel_values=1,3,224,224:float32"
            raise ValueError(f"--input-shape: expected {expected}, got {text!r}")
        if read["dtype"] not in (None, *_DTYPES):
            raise ValueError(f"--input-shape: expected a dtype among {', '.join(_DTYPES)}, got {read['dtype']!r}")
        sizes, dtype = [int(size) for size in read["sizes"].split(",")], _DTYPES.get(read["dtype"], like.dtype)
        values = torch.randn(sizes) if dtype.is_floating_point else torch.randint(0, 2, sizes)
        tensors.append(values.to(like.device, dtype))
        named[read["name"]] = tensors[-1]
    if None not in named and len(named) == len(tensors):
        return named
    if [*named] != [None]:
        raise ValueError("--input-shape: expected a different name for each input, or none for all of them")
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
    if name not in MODELS:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {name!r}")
    try:
        return MODELS[name]()
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: type `pip install 'torch-nhwc[models]'`") from error


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
