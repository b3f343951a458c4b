"""Drop-ins for `torch.nn.utils.convert_conv2d_weight_memory_format` and `convert_conv3d_weight_memory_format`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo

from torch_nhwc.converting.cloning import clones_of
from torch_nhwc.converting.commit import commit_changes
from torch_nhwc.converting.preparing import prepare
from torch_nhwc.finding.find import instead_of
from torch_nhwc.finding.layers import walk_layers
from torch_nhwc.formats import CHANNELS_LAST, Format
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.companions import Sources
from torch_nhwc.planning.deciding import decide, outcomes_of
from torch_nhwc.planning.following import follow
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason
from torch_nhwc.rendering import warn

_M = TypeVar("_M", bound=nn.Module)


def convert_conv2d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Brings the weight of every `nn.Conv2d` and `nn.ConvTranspose2d` in a module into a memory format, in place.

    What `torch.nn.utils.convert_conv2d_weight_memory_format` does right happens alike: values, exact strides, the
    identity of the parameters, recursion, the returned module. Beyond it, everything is checked before anything
    changes; a weight that is in format is left alone; a tied weight is converted once and stays tied; `.grad` follows;
    parametrized, normed, pruned, lazy and scripted layers convert as well, as by `convert_`; and the bytes are permuted
    in place where nothing else can see them. Fake tensors and wrapper subclasses (DTensor) become what their clones in
    the format are, inner tensors included; a subclass whose clone is not in the format is refused, as is one whose
    inner tensors something else holds (FSDP2, another weight).

    Args:
        module: a model, or one layer.
        memory_format: `torch.channels_last` or `torch.contiguous_format`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or `memory_format` is a number or a name.
        RuntimeError: the format is neither of the two, and there is a weight to convert; or a weight was refused, with
            the reason. The module is then as it was.

    Warns:
        UserWarning: once for each layer that stays as it is because its weight is packed or computed in a way that is
            not known, and for each weight that leaves a larger storage or shared memory.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> model = torch_nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
        >>> model[0].weight.stride()
        (27, 1, 9, 3)
    """
    return _convert(module, memory_format, 4, "convert_conv2d_weight_memory_format")


def convert_conv3d_weight_memory_format(module: _M, memory_format: torch.memory_format) -> _M:
    """Does what `convert_conv2d_weight_memory_format` does, for 3D layers and `torch.channels_last_3d`.

    Example:
        >>> layer = torch_nhwc.convert_conv3d_weight_memory_format(torch.nn.Conv3d(3, 8, 3), torch.channels_last_3d)
        >>> layer.weight.stride()
        (81, 1, 27, 9, 3)
    """
    return _convert(module, memory_format, 5, "convert_conv3d_weight_memory_format")


# What the stock converters do not see either, or cannot convert; anything else that is refused raises.
_SKIPPED = (Reason.COMPUTED, Reason.ON_THE_FLY, Reason.PACKED, Reason.FROZEN, Reason.FAKE)
# Those that are asked for their clones; hooks stand against that only where there is something to convert.
_CLONED = (Reason.FAKE, Reason.SUBCLASS, Reason.WRAPPED)
# PyTorch's own words for a format of another rank, which people search for.
_REQUIRED = {
    each: f" (required rank {rank} tensor to use {str(each).removeprefix('torch.')} format)"
    for rank, each in CHANNELS_LAST.items()
}
_LEAVES = {
    Outcome.PART_OF_LARGER_STORAGE: "the larger storage that it was part of",
    Outcome.FRESH_SHARED: "the shared memory that it was in",
}


def _convert(module: _M, memory_format: torch.memory_format, rank: int, caller: str) -> _M:
    if torch.compiler.is_compiling():  # the walk is nothing for a graph, and tracing it fails now and then
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
    request = Request(Format.of(memory_format), "detach")
    decisions = decide(found._replace(sites=sites), request)
    following = follow(found, decisions, [], Sources(), request)
    to_clone = {id(each.tensor): each for each in decisions if each.reason in _CLONED}  # a tied weight once
    patience = iter(range(20))  # for all of them
    clones = {key: clones_of(each, request, patience) for key, each in to_clone.items()}
    edits = {key: each for key, each in clones.items() if isinstance(each, list)}
    owned = {key: each for key, each in clones.items() if isinstance(each, Reason)}
    left = [
        (decision.site, owned.get(id(decision.site.tensor), reason))
        for decision in decisions
        if (reason := decision.reason)
        and (decision.action is Action.REFUSE or reason is Reason.FAKE)
        and id(decision.site.tensor) not in edits
    ]
    hard = [f"{site}: {reason.value}" for site, reason in left if reason not in _SKIPPED]
    if hard:
        raise RuntimeError(f"{caller}: nothing was changed, because of {'; '.join(hard)}")
    # Warnings may be errors: they come before anything changes.
    for site, reason in left:
        warn(f"{caller}: left {site} as it is: {reason.value}")
    moving = [each for each in decisions if each.outcome in (Outcome.FRESH, Outcome.FRESH_SHARED)]
    outcomes = outcomes_of([each.tensor for each in moving], Request(request.format))
    for decision, outcome in zip(moving, outcomes):
        if outcome in _LEAVES:
            warn(f"{caller}: the weight of {decision.site} leaves {_LEAVES[outcome]}")
    changes = prepare(following, request)
    changes.edits.extend(edit for each in edits.values() for edit in each)
    commit_changes(changes, request)
    return module


_convert_outside_of_graphs: Callable[[Any, torch.memory_format, int, str], Any] = _disable_dynamo(_convert)
