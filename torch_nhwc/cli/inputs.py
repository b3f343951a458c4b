"""What a command is given, as text, and what a model is called with."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.running.outputs import TOLERANCES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}
_WHOLE = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)}
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?")


class InputShape(NamedTuple):
    """What is known of an input that is to be random."""

    name: str | None
    """Of the keyword; `None` of a positional one."""
    sizes: list[int]
    dtype: torch.dtype | None
    """`None` is the model's."""


def parse_shapes(texts: Sequence[str] | None) -> list[InputShape]:
    """The inputs in texts such as 1,3,224,224 or input_ids=1,16:int64.

    Raises:
        ValueError: one says something else, or some have names and others none.
    """
    shapes = [_parse_shape(text) for text in texts or ()]
    names = [shape.name for shape in shapes]
    if None in names and any(names):
        raise ValueError("--input-shape: expected a name for each input, or for none")
    if len({*names}) < len(names) and any(names):
        raise ValueError("--input-shape: expected each name once")
    return shapes


def _parse_shape(text: str) -> InputShape:
    read = _SHAPE.fullmatch(text.replace(" ", ""))
    if read is None:
        expected = "sizes such as 1,3,224,224 or pixel_values=1,3,224,224:float32"
        raise ValueError(f"--input-shape: expected {expected}, got {text!r}")
    dtypes, dtype = DTYPES | _WHOLE, read["dtype"]
    if dtype is not None and dtype not in dtypes:
        raise ValueError(f"--input-shape: expected a dtype among {', '.join(dtypes)}, got {dtype!r}")
    sizes = [int(size) for size in read["sizes"].split(",")]
    return InputShape(read["name"], sizes, None if dtype is None else dtypes[dtype])


def random_inputs(shapes: Sequence[InputShape], like: Tensor) -> Any:
    """Inputs of these shapes, on the device of a tensor and in its dtype where none is named; whole numbers are 0 or 1.

    One tensor, a tuple of several, or a dict of those with names.
    """
    tensors = [_random(shape.sizes, shape.dtype or like.dtype).to(like.device) for shape in shapes]
    if shapes[0].name is not None:
        return {shape.name: tensor for shape, tensor in zip(shapes, tensors)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _random(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, sizes).to(dtype)


def parse_dtype(text: str | None, option: str = "--dtype") -> torch.dtype | None:
    """The dtype of a name.

    Raises:
        ValueError: it is none that is known.
    """
    if text is not None and text not in DTYPES:
        raise ValueError(f"{option}: expected one of {', '.join(DTYPES)}, got {text!r}")
    return None if text is None else DTYPES[text]


def check_device(device: str | None) -> None:
    """Raises a ValueError where a device cannot be used."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def moved(inputs: Any, device: str | torch.device, dtype: torch.dtype) -> Any:
    """Inputs on a device, those that are floating in a dtype."""
    return tree_map_only(
        Tensor, lambda each: each.to(device, dtype if each.is_floating_point() else each.dtype), inputs
    )


def in_channels_last(inputs: Any, ranks: set[int]) -> Any:
    """Inputs, of which those of these ranks are in channels-last."""

    def lay_out(tensor: Tensor) -> Tensor:
        return tensor.to(memory_format=CHANNELS_LAST[tensor.dim()]) if tensor.dim() in ranks else tensor

    return tree_map_only(Tensor, lay_out, inputs)
