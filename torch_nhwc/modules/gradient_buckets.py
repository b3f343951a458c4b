"""DDP's communication hooks that read gradients one by one, where those of channels-last weights are permuted."""

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_PYTORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
# It reads them as matrices of low rank, and it does not matter in which order their columns lie.
_RIGHT = "powerSGD_hook"
# It gives them to the parameters, which have them already where gradients are views of the bucket.
_RIGHT_WITH_VIEWS = "apply_optim_in_backward_hook"


def hooks_that_permute(wrapper: nn.Module) -> list[str]:
    """The names of a wrapper's communication hooks whose code reads `bucket.gradients()`, and is not known to be right.

    A bucket gives gradients out in contiguous strides, whatever order they are in.
    """
    own = vars(wrapper)  # what torch.compile makes of a wrapper passes its attributes on
    has_views = own.get("gradient_as_bucket_view", False)
    return [
        getattr(hook, "__qualname__", type(hook).__name__)
        for hook, _ in own.get("_comm_hooks", ())
        if not (has_views and getattr(hook, "__name__", "") == _RIGHT_WITH_VIEWS)
        and any("gradients" in code.co_names for code in _codes_of(hook, set()))
    ]


def _codes_of(value: Any, seen: set[int]) -> Iterator[types.CodeType]:
    """The code of a function, and of those that it is made of: inner ones, those that it holds, and calls by name."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if not isinstance(value, types.FunctionType):
        value = getattr(type(value), "__call__", None)  # noqa: B004  it is to be read, not called
    package = getattr(value, "__module__", None) or ""
    is_known = package.startswith("torch.") and (not package.startswith(_PYTORCHS) or value.__name__ == _RIGHT)
    if not isinstance(value, types.FunctionType) or is_known or id(value) in seen:
        return
    seen.add(id(value))
    codes = [value.__code__]
    for code in codes:
        yield code
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    named = (value.__globals__.get(name) for code in codes for name in code.co_names)
    held = (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
    for each in (*named, *held):
        if isinstance(each, (types.FunctionType, types.MethodType, functools.partial)):
            yield from _codes_of(each, seen)
