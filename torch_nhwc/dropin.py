"""Drop-ins for `torch.nn.utils.convert_conv2d_weight_memory_format` and `convert_conv3d_weight_memory_format`."""

import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn

from torch_nhwc.ops import Outcome, convert_weights_, plan_weights
from torch_nhwc.reasons import Reason
from torch_nhwc.sites import CHANNELS_LAST, Site, find_sites

_M = TypeVar("_M", bound=nn.Module)


def convert_conv2d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Brings the weight of every `nn.Conv2d` and `nn.ConvTranspose2d` in a module into a memory format, in place.

    What `torch.nn.utils.convert_conv2d_weight_memory_format` does right happens alike: values, exact strides, the
    identity of the parameters, recursion, the returned module. Beyond it, everything is checked before anything
    changes; a weight that is in format is left alone; a tied weight is converted once and stays tied; `.grad` follows;
    and the bytes are permuted in place where nothing else can see them.

    Args:
        module: a model, or one layer.
        memory_format: `torch.channels_last` or `torch.contiguous_format`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module.
        RuntimeError: the format is neither of the two, or a weight was refused by `convert_weights_`, which says why.
            The module is then as it was.

    Warns:
        UserWarning: once for each layer that stays as it is because its weight is computed, lazy, scripted or
            packed, and for each weight that leaves a larger storage or shared memory.
    """
    return _convert(module, memory_format, 4, "convert_conv2d_weight_memory_format")


def convert_conv3d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """`convert_conv2d_weight_memory_format` for `nn.Conv3d`, `nn.ConvTranspose3d` and `torch.channels_last_3d`."""
    return _convert(module, memory_format, 5, "convert_conv3d_weight_memory_format")


_LEAVES = {
    Outcome.PART_OF_LARGER_STORAGE: "the larger storage that it was part of",
    Outcome.FRESH_SHARED: "the shared memory that it was in",
}


def _convert(module: _M, memory_format: torch.memory_format, rank: int, caller: str) -> _M:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a torch.nn.Module, got {type(module).__name__}")
    if memory_format not in (torch.contiguous_format, CHANNELS_LAST[rank]):
        raise RuntimeError(
            f"{caller}: expected torch.contiguous_format or {CHANNELS_LAST[rank]} for weights of rank {rank}, "
            f"got {memory_format}"
        )
    sites = list(find_sites(module, rank))
    convertible = [(site, site.weight) for site in sites if site.reason is None and site.weight is not None]
    weights = [weight for _, weight in convertible]
    try:
        # Warnings may be errors: they come before anything changes, and behind what is known to fail.
        if not any(outcome.is_refusal for outcome in plan_weights(weights, memory_format, storage="detach")):
            for site in sites:
                if site.reason is not None and not _in_format(site, memory_format):
                    _warn(f"{caller}: left {site} as it is: {site.reason.value}")
            for (site, _), outcome in zip(convertible, plan_weights(weights, memory_format)):
                if outcome in _LEAVES:
                    _warn(f"{caller}: the weight of {site} leaves {_LEAVES[outcome]}")
        convert_weights_(weights, memory_format, storage="detach")
    except RuntimeError as error:
        refused = [str(site) for site, weight in convertible if _refuses(weight, memory_format)]
        reason = f", because of {', '.join(refused)}" if refused else ""
        message = str(error).split(": ", maxsplit=1)[-1]  # behind the operator, which the caller did not call
        raise type(error)(f"{caller}: nothing was changed{reason}: {message}") from error
    return module


def _refuses(weight: Tensor, memory_format: torch.memory_format) -> bool:
    try:
        return plan_weights([weight], memory_format, storage="detach")[0].is_refusal
    except RuntimeError:
        return True


def _in_format(site: Site, memory_format: torch.memory_format) -> bool:
    if site.weight is None:
        return site.reason is Reason.LAZY and memory_format == torch.contiguous_format
    return plan_weights([site.weight], memory_format) == [Outcome.KEPT]


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
