"""Swaps of a layer's class for a subclass, and back. The object stays, with everything that it holds.

A subclass is made of a mixin and the layer's own class. Layers are copied and pickled by their own class. A class that
was made around a layer's, as PyTorch does to parametrize or shard it, stays the outermost one.
"""

import sys
import threading
from collections.abc import MutableMapping
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin


class Swap:
    """The base of kinds of swaps, each of which is the base of all classes that it makes."""

    prefix: ClassVar[str]
    """The beginning of the names of the classes."""
    order: ClassVar[int]
    """If a layer has two swaps, the one with the higher number overrides the methods of the other."""
    swaps: ClassVar[type]
    """The class that it swaps, in each class that `swap_class` gives to layers."""

    @classmethod
    def mixin_for(cls, layer_type: type) -> type:
        """Return the subclass of this class that comes before a layer's class."""
        raise NotImplementedError


class ModuleName(str):
    """A class's `__module__` that for its layers is the one of their own class.

    `torch.fx` asks a layer for it: layers of PyTorch are calls in a graph, and others are traced into.
    """

    original: str

    def __get__(self, layer: object, layer_type: type | None = None) -> str:
        return self if layer is None else self.original

    def __reduce__(self) -> tuple[Any, ...]:  # pickles name a class by a plain string
        return str, (str(self),)


# By the kind of a swap and the id of the class that it swaps. A swapped class keeps that class alive, as its base, so
# that no id is used again while it is here. Weak, since classes may be made and dropped as models are.
_swapped: MutableMapping[tuple[type[Swap], int], type] = WeakValueDictionary()
_lock = threading.RLock()  # two threads that swap one class get the same


def swap_class(layer: nn.Module, kind: type[Swap]) -> None:
    """Swap a layer's class for one of a kind, unless it is one already.

    Example:
        >>> from torch_nhwc.nn.replacements import Preserving
        >>> norm = torch.nn.GroupNorm(2, 6)
        >>> torch_nhwc.nn.class_swap.swap_class(norm, Preserving)
        >>> type(norm).__name__, isinstance(norm, torch.nn.GroupNorm)
        ('PreservingGroupNorm', True)
    """
    # Not through the attribute hook of modules, which takes several times as long.
    object.__setattr__(layer, "__class__", swapped_class(type(layer), kind))


def restore_class(layer: nn.Module, kind: type[Swap]) -> None:
    """Undo `swap_class`; other kinds of swaps stay."""
    if issubclass(type(layer), kind):
        with _lock:
            layer.__class__ = _with_kinds(type(layer), _kinds_of(type(layer)) - {kind})


def swapped_class(layer_type: type, kind: type[Swap]) -> type:
    """Return the class that `swap_class` gives to layers of a class."""
    known = _swapped.get((kind, id(layer_type)))
    if known is not None:
        return known
    if issubclass(layer_type, kind):
        return layer_type
    with _lock:
        return _with_kinds(layer_type, _kinds_of(layer_type) | {kind})


def original_class(layer_type: type) -> type:
    """Return the class that a layer has in its package: without swaps, and without what parametrizes or shards it."""
    inner = _below(layer_type) or _wrapped_class(layer_type)
    return layer_type if inner is None else original_class(inner)


def is_pickled_otherwise(layer_type: type) -> bool:
    """Return whether a class copies and pickles its layers in its own way, which knows no other class."""
    others = [each for each in layer_type.__mro__[:-1] if not each.__module__.startswith("torch_nhwc.")]
    return any(not {"__reduce__", "__reduce_ex__"}.isdisjoint(vars(each)) for each in others)


def _kinds_of(layer_type: type) -> set[type[Swap]]:
    return {kind for kind in Swap.__subclasses__() if issubclass(layer_type, kind)}


def _below(layer_type: type) -> type | None:
    """Return the class that a class swaps; `None` for any other class, those that derive from such a class included."""
    return vars(layer_type).get("swaps")


def _with_kinds(layer_type: type, kinds: set[type[Swap]]) -> type:
    """Return the class that has these swaps and no others."""
    wrapped = _wrapped_class(layer_type)
    if wrapped is not None:
        return _around(layer_type, wrapped, _with_kinds(wrapped, kinds))
    while (below := _below(layer_type)) is not None:
        layer_type = below
    for kind in sorted(kinds, key=lambda kind: kind.order):
        layer_type = _one_swap(layer_type, kind)
    return layer_type


def _one_swap(layer_type: type, kind: type[Swap]) -> type:
    swapped: Any = _swapped.get((kind, id(layer_type)))
    if swapped is None:
        mixin = kind.mixin_for(layer_type)
        if layer_type in mixin.__bases__:  # a class of its own, which needs no other
            swapped = mixin
        else:
            body: dict[str, Any] = {"__module__": __name__, "__reduce_ex__": _reduce}
            lazily = getattr(layer_type, "cls_to_become", None) if issubclass(layer_type, LazyModuleMixin) else None
            if lazily is not None:
                body["cls_to_become"] = swapped_class(lazily, kind)
            swapped = type(layer_type)(f"{kind.prefix}{layer_type.__name__}", (mixin, layer_type), body)
        _swapped[kind, id(layer_type)] = swapped
        swapped.swaps = layer_type
        swapped.__module__ = name = ModuleName(swapped.__module__)
        name.original = original_class(layer_type).__module__
    return swapped


def _reduce(layer: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle a layer by its own class, since no module has the one that was made here."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(layer, 2))
    return blank, (original_class(type(layer)), *_kinds_of(type(layer))), *state


def blank(layer_type: type, *kinds: type[Swap]) -> Any:
    """Return a layer of a class, swapped, without anything inside of it: for pickle."""
    with _lock:
        swapped: Any = _with_kinds(layer_type, set(kinds))
    return swapped.__new__(swapped)


def _wrapped_class(layer_type: type) -> type | None:
    """Return the class that a class was made around: by PyTorch, or by anybody around a swapped one; or `None`."""
    if _below(layer_type) is not None:
        return None
    if issubclass(layer_type, Swap):
        return next(base for base in layer_type.__bases__ if issubclass(base, Swap))
    package = sys.modules.get(layer_type.__module__)
    is_torch = layer_type.__module__.split(".")[0] == "torch"
    is_made_on_the_fly = is_torch and getattr(package, layer_type.__name__, None) is not layer_type
    return layer_type.__bases__[-1] if is_made_on_the_fly else None


def _around(wrapper: type, old: type, new: type) -> type:
    """Return a copy of a class that was made around another, around a third one.

    A copy, since copies of a module share the class, and removing a parametrization changes it.
    """
    body = {name: value for name, value in vars(wrapper).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(new if base is old else base for base in wrapper.__bases__)
    return type(wrapper)(wrapper.__name__.replace(old.__name__, new.__name__), bases, body)
