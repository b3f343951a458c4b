"""The tensors in nested containers: find them, and make the same containers with other tensors."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten, tree_flatten_with_path, tree_is_leaf


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers with their names, such as `output.images[0]` if the value is `output`.

    Containers are lists, tuples, mappings, dataclasses and registered pytree nodes.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    for key, child in _children_of(value):
        yield from tensors_in(child, f"{name}{key}")


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers with other tensors.

    A tensor that occurs several times is mapped once. A container without tensors is returned unchanged.
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
    if not _is_leaf(value):
        children, spec = tree_flatten(value, is_leaf=_is_inside(value))
        return spec.unflatten([_map(child, function) for child in children])
    # A copy of a state dict has the metadata that `load_state_dict` reads.
    other = dict(value) if isinstance(value, Mapping) and not isinstance(value, MutableMapping) else copy.copy(value)
    for key, child in _fields_of(value):
        mapped = _map(child, function)
        if isinstance(other, (MutableMapping, list)):
            other[key] = mapped
        else:
            object.__setattr__(other, key, mapped)  # a dataclass may be frozen
    return other


def _children_of(value: Any) -> list[tuple[str, Any]]:
    if _is_leaf(value):
        return [(f".{key}", child) for key, child in _fields_of(value)]
    try:
        pairs, _ = tree_flatten_with_path(value, is_leaf=_is_inside(value))
    except ValueError:  # a registered class without names for its children, such as the outputs of diffusers' models
        children, _ = tree_flatten(value, is_leaf=_is_inside(value))
        keys = list(value) if isinstance(value, Mapping) and len(value) == len(children) else range(len(children))
        return [(f".{key}", child) for key, child in zip(keys, children)]
    return [(_text_of(path[0]), child) for path, child in pairs]


def _is_leaf(value: Any) -> bool:
    """Return whether pytree does not know a container, or does not make all of it again: attributes are left out."""
    return type(value) in (dict, OrderedDict) or tree_is_leaf(value)


def _is_inside(container: Any) -> Callable[[Any], bool]:
    """Return a function that says of a node if it is another one than a container.

    PyTorch keeps the function until the garbage is collected, so that it does not hold the container.
    """
    key = id(container)
    return lambda node: id(node) != key


def _fields_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a mapping, a dataclass or a list of the user's own class holds."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    return []


def _text_of(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, MappingKey):
        return f".{key.key}"
    return f".{key.name}" if isinstance(key, GetAttrKey) else str(key)
