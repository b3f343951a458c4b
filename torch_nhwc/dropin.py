"""Drop-ins for `torch.nn.utils.convert_conv2d_weight_memory_format` and `convert_conv3d_weight_memory_format`."""

import warnings
from typing import TypeVar

import torch
from torch import nn

from torch_nhwc.companions import Followers
from torch_nhwc.conversion import Job
from torch_nhwc.ops import Outcome
from torch_nhwc.planning import Action, decide, format_name, outcomes_of
from torch_nhwc.reasons import Reason
from torch_nhwc.sites import CHANNELS_LAST, find_sites

_M = TypeVar("_M", bound=nn.Module)


def convert_conv2d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Brings the weight of every `nn.Conv2d` and `nn.ConvTranspose2d` in a module into a memory format, in place.

    What `torch.nn.utils.convert_conv2d_weight_memory_format` does right happens alike: values, exact strides, the
    identity of the parameters, recursion, the returned module. Beyond it, everything is checked before anything
    changes; a weight that is in format is left alone; a tied weight is converted once and stays tied; `.grad` follows;
    parametrized, normed, pruned, lazy and scripted layers convert as well, as by `convert_`; and the bytes are permuted
    in place where nothing else can see them.

    Args:
        module: a model, or one layer.
        memory_format: `torch.channels_last` or `torch.contiguous_format`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module.
        RuntimeError: the format is neither of the two, or a weight was refused, with the reason. The module is then as
            it was.

    Warns:
        UserWarning: once for each layer that stays as it is because its weight is packed, frozen, fake or computed in a
            way that is not known, and for each weight that leaves a larger storage or shared memory.
    """
    return _convert(module, memory_format, 4, "convert_conv2d_weight_memory_format")


def convert_conv3d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """`convert_conv2d_weight_memory_format` for `nn.Conv3d`, `nn.ConvTranspose3d` and `torch.channels_last_3d`."""
    return _convert(module, memory_format, 5, "convert_conv3d_weight_memory_format")


# What the stock converters do not see either, or cannot convert; anything else that is refused raises.
_SKIPPED = (Reason.COMPUTED, Reason.ON_THE_FLY, Reason.PACKED, Reason.FROZEN, Reason.FAKE)
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
    name = format_name(memory_format)
    sites = [site for site in find_sites(module) if site.rank == rank]
    job = Job(module, sites, decide(sites, name, "detach"), name, "detach", Followers())
    left = [
        (site, row.reason)
        for site, row in zip(sites, job.rows)
        if row.reason and (row.action is Action.REFUSE or row.reason is Reason.FAKE)
    ]
    hard = [f"{site}: {reason.value}" for site, reason in left if reason not in _SKIPPED]
    if hard:
        raise RuntimeError(f"{caller}: nothing was changed, because of {'; '.join(hard)}")
    # Warnings may be errors: they come before anything changes.
    for site, reason in left:
        _warn(f"{caller}: left {site} as it is: {reason.value}")
    changing = [site for site, row in zip(sites, job.rows) if row.action is Action.CONVERT and site.tensor is not None]
    for site, outcome in zip(
        changing, outcomes_of([site.tensor for site in changing if site.tensor is not None], name)
    ):
        if outcome in _LEAVES:
            _warn(f"{caller}: the weight of {site} leaves {_LEAVES[outcome]}")
    job.run()
    return module


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
