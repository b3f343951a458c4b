"""Exchanging a layer's class for the one that preserves, and bringing it back: the object stays, with all it holds."""

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from torch_nhwc.each_forward.exchange import exchanged_type, stock_right_below
from torch_nhwc.modules.classes import with_base
from torch_nhwc.preserving.layers import Preserving
from torch_nhwc.preserving.losing import LOSSES, is_known, loss_of

_STOCK: dict[type, type] = {loss.preserving: stock for stock, loss in LOSSES.items()}
_PRESERVING: dict[type, type] = {stock: preserving for preserving, stock in _STOCK.items()}


def is_exchanged(layer_type: type) -> bool:
    """Whether a class is one that preserves."""
    return issubclass(layer_type, Preserving)


def exchange(layer: nn.Module) -> None:
    """Makes a layer one that preserves, if it is none."""
    if not is_exchanged(type(layer)):
        layer.__class__ = _mapped(type(layer), _preserving_of)


def bring_back(layer: nn.Module) -> None:
    """Makes a layer what it was, if it is one that preserves."""
    if is_exchanged(type(layer)):
        layer.__class__ = _mapped(type(layer), _STOCK.get)


def stock_of(layer_type: type) -> type:
    """The class that a layer has in its package: without what preserves, and without what parametrizes."""
    if not is_exchanged(layer_type):
        return layer_type
    return _STOCK.get(layer_type) or next(stock_of(base) for base in layer_type.__bases__ if is_exchanged(base))


def _mapped(layer_type: type, known: Callable[[type], type | None]) -> type:
    """What a class becomes, below one that converts weights in each forward or parametrizes them."""
    mapped = known(layer_type)
    if mapped is not None or loss_of(layer_type) is None:
        return mapped or layer_type
    below = stock_right_below(layer_type)
    if below is not None:
        return exchanged_type(_mapped(below, known))
    return with_base(layer_type, _mapped(layer_type.__bases__[-1], known))


def _preserving_of(layer_type: type) -> type | None:
    """The class that stands in for one of the table or a known subclass; `None` for others."""
    preserving = _PRESERVING.get(layer_type)
    if preserving is None and is_known(layer_type):
        _, loss = loss_of(layer_type) or (None, None)
        assert loss is not None
        body = {"__module__": __name__, "__reduce_ex__": _reduce}
        preserving = type(f"Preserving{layer_type.__name__}", (loss.preserving, layer_type), body)
        _PRESERVING[layer_type], _STOCK[preserving] = preserving, layer_type
    return preserving


def _reduce(layer: Any, protocol: int) -> tuple[Any, ...]:
    """Pickles a layer by its class in its own package, since no module has the one that was made here."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(layer, 2))
    return _blank, (_STOCK[type(layer)],), *state


def _blank(stock: type) -> Any:
    preserving: Any = _preserving_of(stock)
    return preserving.__new__(preserving)
