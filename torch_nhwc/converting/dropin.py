"""Drop-ins for `torch.nn.utils.convert_conv2d_weight_memory_format` and `convert_conv3d_weight_memory_format`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo

from torch_nhwc.converting.applying import change
from torch_nhwc.converting.cloning import clone_edits
from torch_nhwc.converting.edits import Edit, edits_of
from torch_nhwc.layout import CHANNELS_LAST, Format
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.deciding import Decisions, decide, outcomes_of
from torch_nhwc.planning.options import Options
from torch_nhwc.planning.rows import Action
from torch_nhwc.rendering import warn
from torch_nhwc.sites.finding import instead_of, walk_layers
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site

_M = TypeVar("_M", bound=nn.Module)


def convert_conv2d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Convert the weight of every `nn.Conv2d` and `nn.ConvTranspose2d` in a module to a memory format, in place.

    Values, exact strides, the identity of the parameters, recursion and the returned module are the same as with
    `torch.nn.utils.convert_conv2d_weight_memory_format`. In addition, everything is checked before anything changes; a
    weight that is in format is left alone; a tied weight is converted once and stays tied; `.grad` follows;
    parametrized, normed, pruned, lazy and scripted layers are converted as by `convert_`; and the bytes are permuted in
    place where nothing else can see them. Fake tensors and wrapper subclasses (DTensor) become what their clones in the
    format are, inner tensors included; a subclass whose clone is not in the format is refused, as is one whose inner
    tensors something else holds (FSDP2, another weight).

    Args:
        module: A model, or one layer.
        memory_format: `torch.channels_last` or `torch.contiguous_format`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or `memory_format` is a number or a name.
        RuntimeError: The format is neither of the two, and there is a weight to convert; or a weight was refused, with
            the reason. The module is then as it was.

    Warns:
        UserWarning: Once for each layer that stays as it is because its weight is packed, or computed in an unknown
            way, and for each weight that leaves a larger storage or shared memory.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> model = torch_nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
        >>> model[0].weight.stride()
        (27, 1, 9, 3)
    """
    return _convert(module, memory_format, 4, "convert_conv2d_weight_memory_format")


def convert_conv3d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Do what `convert_conv2d_weight_memory_format` does, for 3D layers and `torch.channels_last_3d`.

    Example:
        >>> layer = torch_nhwc.convert_conv3d_weight_memory_format(torch.nn.Conv3d(3, 8, 3), torch.channels_last_3d)
        >>> layer.weight.stride()
        (81, 1, 27, 9, 3)
    """
    return _convert(module, memory_format, 5, "convert_conv3d_weight_memory_format")


# What PyTorch's converters skip too, or cannot convert; anything else that is refused raises.
_SKIPPED = (Reason.COMPUTED, Reason.ON_THE_FLY, Reason.PACKED, Reason.FROZEN, Reason.FAKE)
# Reasons of tensors that only their class can clone; hooks matter only where there is something to convert.
_CLONED = (Reason.FAKE, Reason.SUBCLASS, Reason.WRAPPED)
# PyTorch's own words for a format of another rank, which people search for.
_REQUIRED = {
    each: f" (required rank {rank} tensor to use {str(each).removeprefix('torch.')} format)"
    for rank, each in CHANNELS_LAST.items()
}
_LEAVES = {
    Outcome.PART_OF_LARGER_STORAGE: "the larger storage that it was part of",
    Outcome.COPIED_SHARED: "the shared memory that it was in",
}


def _convert(module: _M, memory_format: torch.memory_format, rank: int, caller: str) -> _M:
    if torch.compiler.is_compiling():  # a graph has no use for the walk, and tracing it sometimes fails
        converted: _M = _convert_outside_of_graphs(module, memory_format, rank, caller)
        return converted
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a torch.nn.Module, got {type(module).__name__}{instead_of(module)}")
    if not isinstance(memory_format, (torch.memory_format, type(None))):
        raise TypeError(f"{caller}: memory_format must be torch.memory_format, not {type(memory_format).__name__}")
    found = walk_layers(module)
    sites = [site for site in found.sites if site.rank == rank]
    if memory_format not in (torch.contiguous_format, CHANNELS_LAST[rank]):
        if not sites:
            return module
        raise RuntimeError(
            f"{caller}: expected torch.contiguous_format or {CHANNELS_LAST[rank]} for weights of rank {rank}, "
            f"got {memory_format}{_REQUIRED.get(memory_format, '')}"
        )
    decisions = decide(found._replace(sites=sites), Options(Format.of(memory_format), "detach"))
    edits, left = _clone(decisions)
    hard = [f"{site}: {reason.value}" for site, reason in left if reason not in _SKIPPED]
    if hard:
        raise RuntimeError(f"{caller}: nothing was changed, because of {'; '.join(hard)}")
    _warn(caller, decisions, left)
    change(decisions, [*edits_of(decisions), *edits])
    return module


_convert_outside_of_graphs: Callable[[Any, torch.memory_format, int, str], Any] = _disable_dynamo(_convert)


def _clone(decisions: Decisions) -> tuple[list[Edit], list[tuple[Site, Reason]]]:
    """Return the edits by which weights become their clones, and the sites that stay as they are."""
    clones: dict[int, list[Edit] | Reason] = {}  # of each weight once, by id
    left = []
    for site, row in zip(decisions.found.sites, decisions.rows):
        reason, key = row.reason, id(site.tensor)
        if reason is None or not (row.action is Action.REFUSE or reason is Reason.FAKE):
            continue
        if site.tensor is not None and reason in _CLONED:
            if key not in clones:
                clones[key] = clone_edits(site.tensor, site, reason, site.format(decisions.options.format))
            cloned = clones[key]
            if isinstance(cloned, list):
                continue
            reason = cloned
        left.append((site, reason))
    return [edit for edits in clones.values() if isinstance(edits, list) for edit in edits], left


def _warn(caller: str, decisions: Decisions, left: list[tuple[Site, Reason]]) -> None:
    """Warn before anything changes, since warnings may be errors."""
    for site, reason in left:
        warn(f"{caller}: left {site} as it is: {reason.value}")
    changing = decisions.changing
    formats = [decisions.options.format] * len(changing)
    for (site, _, _), outcome in zip(changing, outcomes_of([tensor for _, _, tensor in changing], formats, "auto")):
        if outcome in _LEAVES:
            warn(f"{caller}: the weight of {site} leaves {_LEAVES[outcome]}")
