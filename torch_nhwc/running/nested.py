"""Tensors inside of whatever a module is given and gives: tuples, lists, dicts and other objects, nested."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from types import MemberDescriptorType, ModuleType
from typing import Any
from weakref import CallableProxyType, ProxyType

from torch import Tensor, nn

_WITHOUT = {ProxyType, CallableProxyType, int, float, complex, bool, str, bytes, type(None)}
_DEEPEST = 32
"""Levels that are looked into: what is deeper is no container, but a graph of the caller's objects."""


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside of a value, each with the name by which it is found there, such as `output[0].mask`.

    What is there several times is looked into once.
    """
    return _tensors_in(value, name, {}, 0)


def _tensors_in(value: Any, name: str, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    if type(value) in _WITHOUT:
        return
    if isinstance(value, Tensor):
        yield name, value
    elif id(value) not in seen and depth < _DEEPEST:
        seen[id(value)] = value  # which keeps it, and so its identity
        for _, suffix, each in _items(value):
            yield from _tensors_in(each, name + suffix, seen, depth + 1)


def mapped(value: Any, name: str, function: Callable[[str, Tensor], Tensor]) -> Any:
    """The same value with other tensors inside, in the order of `tensors_in`; what has none stays the object it is.

    So does a container that cannot be made anew.
    """
    return _mapped(value, name, function, {}, 0)


def _mapped(
    value: Any, name: str, function: Callable[[str, Tensor], Tensor], done: dict[int, tuple[Any, Any]], depth: int
) -> Any:
    if type(value) in _WITHOUT:
        return value
    if isinstance(value, Tensor):
        return function(name, value)
    if id(value) not in done:
        if depth == _DEEPEST or next(tensors_in(value, name), None) is None:
            return value
        other = _copied(value)
        done[id(value)] = value, other  # before it is filled: it may be inside of itself
        inner = [(key, _mapped(each, name + suffix, function, done, depth + 1)) for key, suffix, each in _items(value)]
        if isinstance(value, tuple):
            each = [each for _, each in inner]
            done[id(value)] = value, type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
        elif other is not value:
            for key, each in inner:
                if isinstance(value, (MutableMapping, MutableSequence)):
                    other[key] = each
                else:
                    object.__setattr__(other, key, each)
    return done[id(value)][1]


def _copied(value: Any) -> Any:
    """A shallow copy; the value itself where it cannot be copied, or not changed."""
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (MutableMapping, MutableSequence)):
        return value
    try:
        return copy.copy(value)
    except Exception:
        return value


def _items(value: Any) -> list[tuple[Any, str, Any]]:
    """What is inside of a value: by what key or attribute, and what follows the value's name."""
    try:
        return _all_items(value)
    except Exception:  # of the value's own code
        return []


def _all_items(value: Any) -> list[tuple[Any, str, Any]]:
    if isinstance(value, Mapping):
        return [(key, f".{key}", each) for key, each in value.items()]
    if isinstance(value, Sequence):
        is_flat = isinstance(value, (str, bytes, bytearray, memoryview, range))
        return [] if is_flat else [(index, f"[{index}]", each) for index, each in enumerate(value)]
    if isinstance(value, (type, ModuleType, nn.Module)):
        return []
    attributes = dict(getattr(value, "__dict__", {}))
    if hasattr(value, "__slots__"):
        members = (pair for base in type(value).__mro__ for pair in vars(base).items())
        slots = (name for name, member in members if isinstance(member, MemberDescriptorType))
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [(key, f".{key}", each) for key, each in attributes.items()]
