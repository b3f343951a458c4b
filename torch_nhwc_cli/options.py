"""What the options of the program name, as texts: read and checked without torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MODELS = "resnet50", "unet3d", "video-autoencoder"
_FLOATING = "float64", "float32", "float16", "bfloat16"
_DTYPES = *_FLOATING, "int64", "int32", "uint8", "bool"
_SPELLINGS = {
    **{"double": "float64", "fp64": "float64", "float": "float32", "fp32": "float32"},
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32"},
}
_FORMATS = "channels_last", "channels_last_3d", "contiguous_format"
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>[\w.]+))?")


class Answer(NamedTuple):
    """What a command prints, and whether all is well."""

    text: str
    is_well: bool = True


class InputShape(NamedTuple):
    """A random input: its name or `None`, its sizes, and the name of its dtype or `None` for the model's."""

    name: str | None
    sizes: tuple[int, ...]
    dtype: str | None


class ModelOptions(NamedTuple):
    """The options that name a model and its inputs: one of `built_in` and `factory` is given."""

    built_in: str | None
    factory: str | None
    input_shapes: tuple[InputShape, ...]
    device: str | None
    dtype: str | None


class Limits(NamedTuple):
    """What a trace may lose; `None` does not limit."""

    losses: int | None
    mixed: int | None
    bytes: int | None


def model_options(
    model: str | None,
    factory: str | None,
    input_shapes: Sequence[str] | None,
    device: str | None,
    dtype: str | None,
) -> ModelOptions:
    """Return the options that name a model.

    Raises:
        ValueError: One of them is not valid.
    """
    if (model is None) == (factory is None):
        raise ValueError("name one model, by --model or --factory")
    if model is not None and model not in MODELS:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {model!r}")
    if factory is not None and not all(factory.partition(":")):
        module, _, name = factory.rpartition(".")
        hint = f": did you mean {module}:{name}?" if module and name.isidentifier() and name != "py" else ""
        raise ValueError(f"--factory: expected module:callable, got {factory!r}{hint}")
    shapes = tuple(map(_shape, input_shapes or ()))
    names = [shape.name for shape in shapes]
    if names and {*names} != {None} and (None in names or len({*names}) < len(names)):
        raise ValueError("--input-shape: expected a different name for each input, or none for all of them")
    return ModelOptions(model, factory, shapes, device, dtype_name(dtype, "--dtype"))


def dtype_name(text: str | None, option: str, names: Sequence[str] = _FLOATING) -> str | None:
    """Return PyTorch's name of a dtype, which may be spelled as `bf16`, `torch.bfloat16` or `half`.

    Raises:
        ValueError: There is no such dtype.
    """
    if text is None:
        return None
    name = text.lower().removeprefix("torch.")
    name = _SPELLINGS.get(name, name)
    if name not in names:
        raise ValueError(f"{option}: expected one of {', '.join(names)}, got {text!r}")
    return name


def format_name(text: str | None, option: str = "--memory-format", names: Sequence[str] = _FORMATS) -> str | None:
    """Return PyTorch's name of a memory format, which may begin with `torch.`.

    Raises:
        ValueError: There is no such format.
    """
    name = None if text is None else text.lower().removeprefix("torch.")
    if name not in (None, *names):
        raise ValueError(f"{option}: expected one of {', '.join(names)}, got {text!r}")
    return name


def check_file(option: str, path: Path | None) -> None:
    """Raise a ValueError for a file that cannot be written, before long work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{option}: expected a file in a folder that exists, got {path}")


# How errors and reports name arguments of Python functions, and the options that take their place.
_OPTIONS: Mapping[str, Any] = {
    r"\b(preserve|each_forward|strict|allow_pickle)=True": lambda found: f"--{found[1].replace('_', '-')}",
    r"\bpreserve=False": "--no-preserve",
    r"^plan:": "--plan:",
    r"\bomit(\s+)memory_format": r"omit\1--memory-format",
    r"\bgive(\s+)example_inputs": r"give\1--input-shape",
    r", or give loss=": "",
    r"\bbudget_seconds": "--budget",
    r"\.table\(\)": "--table",
}


def in_options(text: str) -> str:
    """Return a text of the package with the names of options in place of those of arguments."""
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _shape(text: str) -> InputShape:
    read = _SHAPE.fullmatch(text.replace(" ", ""))
    if read is None:
        expected = "sizes such as 1,3,224,224 or pixel_values=1,3,224,224:float32"
        raise ValueError(f"--input-shape: expected {expected}, got {text!r}")
    sizes = tuple(int(size) for size in read["sizes"].split(","))
    return InputShape(read["name"], sizes, dtype_name(read["dtype"], "--input-shape", _DTYPES))
