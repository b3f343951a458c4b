"""Trying an optimizer from elsewhere on a tiny channels-last parameter: what its code does there is hard to read."""

import copy
import inspect
import io
import weakref
from contextlib import ExitStack, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.running.rehearsal import keep_generators

_PARAMETERS = ("params", "parameters", "param_groups")
_STEPS = 3  # the first ones make state, and some optimizers do more once they have it
_tried: "weakref.WeakKeyDictionary[type[Optimizer], dict[str, bool | None]]" = weakref.WeakKeyDictionary()


def raises_on_channels_last(optimizer: Optimizer, rank: int) -> bool | None:
    """Whether an optimizer raises on channels-last parameters of a rank, where it takes contiguous ones.

    One of the same class with copies of its defaults, made by the class's constructor, steps on a parameter of its own,
    with random generators brought back, and what it prints is not seen. Steps that are PyTorch's own do not have to be
    tried.

    Returns:
        `None` where that cannot be tried: its class cannot be made of a list of parameters and its defaults, these are
        not all plain values, steps do not work on contiguous ones either, or there are other processes, with which it
        may communicate.
    """
    step = getattr(type(optimizer), "step", None)
    if getattr(step, "__module__", "").split(".")[0] == "torch":
        return False
    distributed = torch.distributed
    if rank not in CHANNELS_LAST or (distributed.is_available() and distributed.is_initialized()):
        return None
    if not _is_plain([*getattr(optimizer, "defaults", {}).values()]):  # a step may write to them: a model, a tensor
        return None
    results = _tried.setdefault(type(optimizer), {})
    key = f"{rank} {getattr(optimizer, 'defaults', None)}"
    if key not in results:
        works = _steps(optimizer, rank, torch.contiguous_format)
        results[key] = not _steps(optimizer, rank, CHANNELS_LAST[rank]) if works else None
    return results[key]


def _steps(optimizer: Optimizer, rank: int, memory_format: torch.memory_format) -> bool:
    values = torch.arange(1.0, 4 * 3 ** (rank - 1) + 1).sin().view(4, *[3] * (rank - 1))
    parameter = nn.Parameter(values.clone(memory_format=memory_format))
    try:
        with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
            keep_generators(stack)
            stack.enter_context(redirect_stdout(io.StringIO()))
            trial = _like(optimizer, parameter)
            # Not by way of PyTorch's hooks, which are others' as well.
            step = getattr(type(trial).step, "__wrapped__", type(trial).step)

            def closure() -> Tensor:
                trial.zero_grad()
                loss = (parameter * values).square().sum()
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                return loss

            for _ in range(_STEPS):
                closure()
                step(trial, closure)
    except Exception:  # the code of the class may raise anything
        return False
    return True


def _like(optimizer: Optimizer, parameter: nn.Parameter) -> Any:
    first, *taken = inspect.signature(type(optimizer)).parameters.values()
    if first.name not in _PARAMETERS:  # one that wraps another optimizer, for example
        raise TypeError(f"{first} instead of parameters")
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken)
    names = {each.name for each in taken}
    options = {name: value for name, value in optimizer.defaults.items() if takes_any or name in names}
    return type(optimizer)([parameter], **copy.deepcopy(options))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
