"""Weights that the operators do not take, and that become what their clones are: fake tensors, wrapper subclasses."""

import copyreg
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_nhwc.converting.edits import Edit
from torch_nhwc.layout import Format, has_strides, is_fake
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.deciding import outcomes_of
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site

# Other owners of such a tensor's memory would not see the change.
_OWNED_ELSEWHERE = {Outcome.COPIED_HELD, Outcome.COPIED_SHARED, Outcome.PART_OF_LARGER_STORAGE, None}


@torch.inference_mode(False)  # what is made in inference mode can never train
@torch.no_grad()
def clone_edits(weight: Tensor, site: Site, reason: Reason, wanted: Format) -> list[Edit] | Reason:
    """Return the edits by which a weight and its gradient become their clones in a format, inner tensors included.

    The tensor's class makes the clone. Inner tensors that need not move stay where they are, and only their strides
    change. Strides, values, inner tensors and their strides are all compared, so that no clone is used that only claims
    to be in the format.

    Args:
        weight: The weight of the site.
        site: A site whose weight the operators do not take.
        reason: Why.
        wanted: The site's format.

    Returns:
        The edits, or a reason: `reason` if the clone is not right, another if something else owns what would change.
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
