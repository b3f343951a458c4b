"""Weights that the operators do not take and clones convert, as PyTorch does it: fake tensors, wrapper subclasses."""

import copyreg
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_nhwc.converting.edits import Edit
from torch_nhwc.formats import Format
from torch_nhwc.memory import is_fake, lies_as
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.deciding import Decision, outcomes_of
from torch_nhwc.planning.request import Request
from torch_nhwc.reasons import Reason

# What other owners of a tensor's memory would not see: they keep, or gather from, what it was before.
_OWNED_ELSEWHERE = (Outcome.FRESH_HELD, Outcome.FRESH_SHARED, Outcome.PART_OF_LARGER_STORAGE, None)


@torch.inference_mode(False)  # what is made in inference mode can never train
@torch.no_grad()
def clones_of(decision: Decision, request: Request, patience: Iterator[Any]) -> list[Edit] | Reason | None:
    """The edits by which a site's weight and its gradient take over what their clones in the format are.

    The tensor's class makes the clone. What is inside and need not move stays where it is, and only its strides change.
    For what is held, there may be a wait of some hundredths of a second, as many as `patience` has items: the threads
    of torch.distributed let go of a tensor a moment after its collective has ended.

    Returns:
        The edits; the reason where something else owns what would change; or `None` where the clone is not right:
        strides, values, inner tensors and their strides are all looked at, so that nothing is taken over which only
        says that it is in the format.
    """
    wanted = decision.site.format(request.format)
    if decision.reason is Reason.WRAPPED:
        return [] if _is_laid_out(decision.tensor, wanted) else Reason.WRAPPED
    edits = _cloned(decision, request, wanted)
    while edits is Reason.INNER_HELD and next(patience, None) is not None:
        time.sleep(0.01)
        edits = _cloned(decision, request, wanted)  # of what was perhaps written meanwhile
    return edits


def _cloned(decision: Decision, request: Request, wanted: Format) -> list[Edit] | Reason | None:
    site = decision.site
    edits: list[Edit] = []
    for tensor in (decision.tensor, decision.tensor.grad):
        try:
            if tensor is None or _is_laid_out(tensor, wanted):
                continue
            clone = tensor.detach().clone(memory_format=getattr(torch, wanted.name_at(site.rank)))
            if not (tensor.is_leaf and _is_laid_out(clone, wanted)):
                return None
            pairs = list(zip(_memory_of(tensor), _memory_of(clone)))
            moving = [part for part, copy in pairs if not lies_as(part, copy.stride())]
            outcomes = outcomes_of(moving, request._replace(storage="auto"))  # before there is a detached copy
            if tensor is decision.tensor and not set(_OWNED_ELSEWHERE).isdisjoint(outcomes):
                return Reason.INNER_HELD
            if not _is_equal(tensor, clone):  # whoever held it has let go of it, and writes no more
                return None
            if Outcome.PART_OF_LARGER_STORAGE in outcomes:
                return Reason.GRADIENT_IN_THE_WAY if edits else []
            for part, copy in pairs:
                if lies_as(part, copy.stride()):
                    copy.data = part.as_strided(part.shape, copy.stride())
        except Exception:  # the code of the class may raise anything
            return None
        before = tensor.detach()
        names = _attributes(tensor) & _attributes(clone)
        forth, back = (
            partial(_become, tensor, data, {name: getattr(source, name) for name in names})
            for data, source in ((clone, clone), (before, tensor))
        )
        edits.append(Edit(weakref.ref(site.module), forth, back))
    return edits


def _memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the values of a tensor: itself, or those inside of it; none where it is fake."""
    return [part for part in _parts(tensor) if not (is_fake(part) or is_traceable_wrapper_subclass(part))]


def _become(tensor: Tensor, data: Tensor, attributes: dict[str, Any], _: nn.Module) -> None:
    """Replacing `.data` alone, as PyTorch's converter does, leaves the inner tensors as they were."""
    tensor.data = data
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _attributes(tensor: Tensor) -> set[str]:
    """The names of what a wrapper subclass keeps in Python, its inner tensors among them."""
    if is_fake(tensor):
        return set()
    slots = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    return {*vars(tensor), *(name for name in slots if hasattr(tensor, name))}


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor and all that are inside of it."""
    yield tensor
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _parts(inner)


def _is_laid_out(tensor: Tensor, wanted: Format) -> bool:
    """Whether a tensor is in the format, and with it those inside, of which one at least has its rank."""
    alike = [part for part in _parts(tensor) if part.dim() == tensor.dim()]
    has_values = not all(is_traceable_wrapper_subclass(part) for part in alike)
    return has_values and all(part.stride() == wanted.strides(part.shape) for part in alike)


def _is_equal(tensor: Tensor, clone: Tensor) -> bool:
    """Whether a clone has the values of a tensor, bit for bit, in inner tensors like its own."""
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
