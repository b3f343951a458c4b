"""Drop-ins for `torch.nn.utils.convert_conv2d_weight_memory_format` and `convert_conv3d_weight_memory_format`."""

import copyreg
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_nhwc.converting.edits import Edit, change
from torch_nhwc.layout import CHANNELS_LAST, Format, has_strides, is_fake
from torch_nhwc.ops import Outcome, named_format
from torch_nhwc.planning.deciding import Decisions, decide, outcomes_of
from torch_nhwc.planning.plans import Action, Options
from torch_nhwc.rendering import warn
from torch_nhwc.sites.finding import instead_of, walk_layers
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site

_M = TypeVar("_M", bound=nn.Module)


def convert_conv2d_weight_memory_format(module: _M, memory_format: torch.memory_format | str) -> _M:
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
        memory_format: `torch.channels_last` or `torch.contiguous_format`, or its name.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or `memory_format` is neither a memory format nor the name of one.
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


def convert_conv3d_weight_memory_format(module: _M, memory_format: torch.memory_format | str) -> _M:
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


def _convert(module: _M, memory_format: torch.memory_format | str, rank: int, caller: str) -> _M:
    if torch.compiler.is_compiling():  # a graph has no use for the walk, and tracing it sometimes fails
        converted: _M = _convert_outside_of_graphs(module, memory_format, rank, caller)
        return converted
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a torch.nn.Module, got {type(module).__name__}{instead_of(module)}")
    memory_format = named_format(memory_format)
    if not isinstance(memory_format, (torch.memory_format, type(None))):
        got = repr(memory_format) if isinstance(memory_format, str) else type(memory_format).__name__
        raise TypeError(f"{caller}: memory_format must be torch.memory_format or its name, not {got}")
    found = walk_layers(module)
    sites = [site for site in found.sites if site.rank == rank]
    if memory_format not in (torch.contiguous_format, CHANNELS_LAST[rank]):
        if not sites:
            return module
        raise RuntimeError(
            f"{caller}: expected torch.contiguous_format or {CHANNELS_LAST[rank]} for weights of rank {rank}, "
            f"got {memory_format}{_REQUIRED.get(memory_format, '')}"
        )
    # As PyTorch's functions, these leave layers their classes, but for those whose training the conversion makes wrong.
    options = Options(Format.of(memory_format), "detach", preserve=False)
    decisions = decide(found._replace(sites=sites), options)
    edits, left = _clone(decisions)
    hard = [f"{site}: {reason.value}" for site, reason in left if reason not in _SKIPPED]
    if hard:
        raise RuntimeError(f"{caller}: nothing was changed, because of {'; '.join(hard)}")
    _warn(caller, decisions, left)
    change(decisions, edits)
    return module


_convert_outside_of_graphs: Callable[[Any, torch.memory_format | str, int, str], Any] = _disable_dynamo(_convert)


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
                clones[key] = _clone_edits(site.tensor, site, reason, site.format(decisions.options.format))
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
    for site, outcome in decisions.leaving():
        warn(f"{caller}: the weight of {site} leaves {_LEAVES[outcome]}")


# Other owners of such a tensor's memory would not see the change.
_OWNED_ELSEWHERE = {Outcome.COPIED_HELD, Outcome.COPIED_SHARED, Outcome.PART_OF_LARGER_STORAGE, None}


@torch.inference_mode(False)  # what is made in inference mode can never train
@torch.no_grad()
def _clone_edits(weight: Tensor, site: Site, reason: Reason, wanted: Format) -> list[Edit] | Reason:
    """Return the edits by which a weight and its gradient become their clones in a format, inner tensors included.

    The tensor's class makes the clone. Inner tensors that need not move stay where they are, and only their strides
    change. Strides, values, inner tensors and their strides are all compared, so that no clone is used that only claims
    to be in the format. If the clone is not right, `reason` is returned, and another if something else owns what would
    change.
    """
    if reason is Reason.WRAPPED:
        return [] if _is_in_format(weight, wanted) else reason
    edits: list[Edit] = []
    for tensor in (weight, weight.grad):
        try:
            if tensor is None or _is_in_format(tensor, wanted):
                continue
            clone = tensor.detach().clone(memory_format=getattr(torch, wanted.name_at(site.rank)))
            if not (tensor.is_leaf and _is_in_format(clone, wanted)):
                return reason
            pairs = list(zip(_memory_of(tensor), _memory_of(clone)))
            moving = [part for part, copy in pairs if not has_strides(part, copy.stride())]
            outcomes = outcomes_of(moving, [wanted] * len(moving), "auto")
            if tensor is weight and not _OWNED_ELSEWHERE.isdisjoint(outcomes):
                return Reason.INNER_HELD
            if not _is_equal(tensor, clone):
                return reason
            if Outcome.PART_OF_LARGER_STORAGE in outcomes:
                return Reason.GRADIENT_IN_THE_WAY if edits else []
            for part, copy in pairs:
                if has_strides(part, copy.stride()):
                    copy.data = part.as_strided(part.shape, copy.stride())
        except Exception:  # the code of the class may raise anything
            return reason
        names = _attributes(tensor) & _attributes(clone)
        forth, back = (
            partial(_become, tensor, data, {name: getattr(source, name) for name in names})
            for data, source in ((clone, clone), (tensor.detach(), tensor))
        )
        edits.append(Edit(weakref.ref(site.module), forth, back))
    return edits


def _memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the values of a tensor: itself, or its inner tensors; none if it is fake."""
    return [part for part in _parts(tensor) if not (is_fake(part) or is_traceable_wrapper_subclass(part))]


def _become(tensor: Tensor, data: Tensor, attributes: dict[str, Any], _: nn.Module) -> None:
    """Replace a tensor's data and its inner tensors. Replacing `.data` alone, as PyTorch does, leaves those behind."""
    tensor.data = data
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _attributes(tensor: Tensor) -> set[str]:
    """Return the names of what a wrapper subclass keeps in Python, its inner tensors among them."""
    if is_fake(tensor):
        return set()
    slots = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    return {*vars(tensor), *(name for name in slots if hasattr(tensor, name))}


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and all its inner tensors, at any depth."""
    yield tensor
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _parts(inner)


def _is_in_format(tensor: Tensor, wanted: Format) -> bool:
    """Return whether a tensor and its inner tensors are in a format; at least one of them must have its rank."""
    alike = [part for part in _parts(tensor) if part.dim() == tensor.dim()]
    has_values = not all(is_traceable_wrapper_subclass(part) for part in alike)
    return has_values and all(part.stride() == wanted.strides(part.shape) for part in alike)


def _is_equal(tensor: Tensor, clone: Tensor) -> bool:
    """Return whether a clone has the values of a tensor, bit for bit, in inner tensors of the same kind."""
    parts, copies = list(_parts(tensor)), list(_parts(clone))
    if [type(part) for part in parts] != [type(copy) for copy in copies]:
        return False
    for part, copy in zip(parts, copies):
        if (part.shape, part.dtype, part.device) != (copy.shape, copy.dtype, copy.device):
            return False
        has_values = type(copy) is Tensor and not copy.is_meta
        if has_values and not torch.equal(_bytes(part), _bytes(copy)):
            return False
        if not (has_values or copy.is_meta or is_fake(copy) or is_traceable_wrapper_subclass(copy)):
            return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
