"""What a model is called with: a tensor, a tuple of positional arguments, or a dict of keyword ones."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments.

    Raises:
        TypeError: a shape was given where tensors are wanted: whole numbers, more than the model takes.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if isinstance(inputs, torch.Size) or (_is_shape(inputs) and not _takes(model, inputs)):
        raise _instead_of(inputs)
    return tuple(inputs), {}


def call(model: nn.Module, inputs: Any) -> Any:
    """What the model returns.

    Raises:
        TypeError: a shape was given where tensors are wanted: by itself, or as an argument of a model that fails on it.
    """
    arguments, keywords = arguments_of(model, inputs)
    try:
        return model(*arguments, **keywords)
    except Exception as error:
        given = [*arguments, *keywords.values()]
        shape = next((each for each in given if isinstance(each, (tuple, list)) and each and _is_shape(each)), None)
        if shape is None or any(isinstance(each, Tensor) for each in tree_leaves(given)):
            raise
        raise _instead_of(shape) from error


def _is_shape(inputs: Sequence[Any]) -> bool:
    return all(type(each) is int for each in inputs)


def _instead_of(shape: Sequence[int]) -> TypeError:
    sizes = ", ".join(map(str, shape))
    return TypeError(f"expected example_inputs to be tensors, got the shape ({sizes}): give torch.randn({sizes})")


def _takes(model: nn.Module, numbers: Sequence[int]) -> bool:
    """Whether a model can be called with as many arguments, as far as its signature says."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return len(numbers) < 3
    try:
        signature.bind(*numbers)
    except TypeError:
        return False
    return True
