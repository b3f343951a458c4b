"""Exchanging a layer's class for one that converts its weight in each forward, and bringing it back.

A saved module names this file: `blank` stays here.
"""

from typing import Any, cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from torch_nhwc.each_forward.layers import EachForward, mixin_for
from torch_nhwc.each_forward.weights import drop_result, keep_result
from torch_nhwc.modules.classes import is_made_on_the_fly, with_base

_EXCHANGED: dict[type, type] = {}
_STOCK: dict[type, type] = {}


def is_in_each_forward(layer_type: type) -> bool:
    """Whether layers of a class convert their weight in each forward."""
    return issubclass(layer_type, EachForward)


def is_pickled_otherwise(layer_type: type) -> bool:
    """Whether a class has its own way to copy and pickle its layers, which knows no other class."""
    others = [each for each in layer_type.__mro__[:-1] if not each.__module__.startswith("torch_nhwc.")]
    return any(not {"__reduce__", "__reduce_ex__"}.isdisjoint(vars(each)) for each in others)


def exchange(layer: nn.Module, keep: bool = False) -> None:
    """Makes a layer one that converts its weight in each forward, if it is none, and may keep results."""
    layer.__class__ = exchanged_type(type(layer))
    if keep:
        keep_result(layer)


def bring_back(layer: nn.Module) -> None:
    """Makes a layer what it was, if it is one of those."""
    layer.__class__ = stock_of(type(layer))
    drop_result(layer)


def exchanged_type(layer_type: type) -> type:
    """The class that a class is exchanged for: itself, where it is such."""
    if is_in_each_forward(layer_type):
        return layer_type
    if is_made_on_the_fly(layer_type):
        return with_base(layer_type, exchanged_type(layer_type.__bases__[-1]))
    exchanged = _EXCHANGED.get(layer_type)
    if exchanged is None:
        body: dict[str, Any] = {"__module__": __name__, "__reduce_ex__": _reduce}
        if issubclass(layer_type, LazyModuleMixin):
            body["cls_to_become"] = layer_type.cls_to_become and exchanged_type(layer_type.cls_to_become)
        bases = mixin_for(layer_type), layer_type
        exchanged = _EXCHANGED[layer_type] = type(layer_type)(f"EachForward{layer_type.__name__}", bases, body)
        _STOCK[exchanged] = layer_type
    return exchanged


def stock_of(layer_type: type) -> type:
    """The class that a class was exchanged for: itself, where it was not."""
    if not is_in_each_forward(layer_type):
        return layer_type
    return _STOCK.get(layer_type) or with_base(layer_type, stock_of(layer_type.__bases__[-1]))


def stock_right_below(layer_type: type) -> type | None:
    """The class that one was exchanged for; `None` where it was not, or has another class around it."""
    return _STOCK.get(layer_type)


def _reduce(layer: Any, protocol: int) -> tuple[Any, ...]:
    """Pickles a layer by its own class, since no module has the one that was made here."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(layer, 2))
    return blank, (_STOCK[type(layer)],), *state


def blank(stock: type) -> Any:
    """A layer without anything inside of it, for pickle."""
    exchanged: Any = exchanged_type(stock)
    return exchanged.__new__(exchanged)
