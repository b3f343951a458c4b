"""Tensors in nested containers: what `torch.utils._pytree` knows, dataclasses, and mappings of other classes."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path, tree_is_leaf


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in nested containers.

    Args:
        value: A tensor, or lists, tuples, mappings, dataclasses and registered pytree nodes that contain tensors.
        name: The name of the value.

    Yields:
        The name of each tensor, such as `output.images[0]`, and the tensor.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    for key, child in _children_of(value):
        yield from tensors_in(child, f"{name}{key}")


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers with other tensors.

    A tensor that occurs several times is mapped once. A container without tensors is returned unchanged.

    Args:
        value: What `tensors_in` takes.
        function: Returns the tensor that replaces a tensor.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, which keeps its id from being used again

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = tensor, function(tensor)
        return done[id(tensor)][1]

    return _map(value, once)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if next(tensors_in(value), None) is None:
        return value
    if not tree_is_leaf(value):
        children, spec = tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
        return spec.unflatten([_map(child, function) for _, child in children])
    other = copy.copy(value)
    for key, child in _fields_of(value):
        mapped = _map(child, function)
        if dataclasses.is_dataclass(value):
            object.__setattr__(other, key, mapped)  # a dataclass may be frozen
        elif isinstance(other, MutableMapping):
            other[key] = mapped
    return other


def _children_of(value: Any) -> list[tuple[str, Any]]:
    if tree_is_leaf(value):
        return [(f".{key}", child) for key, child in _fields_of(value)]
    children, _ = tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    return [(_text_of(path[0]), child) for path, child in children]


def _fields_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container holds that pytree does not know."""
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    return []


def _text_of(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, MappingKey):
        return f".{key.key}"
    return f".{key.name}" if isinstance(key, GetAttrKey) else str(key)
