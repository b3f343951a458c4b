"""What is tuned in the model's place: a deep copy, or the model itself, with all of it brought back."""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_nhwc.running.copying import deep_copy
from torch_nhwc.running.modes import modes_of
from torch_nhwc.running.rehearsal import restore_afterwards

MakeOptimizer = Callable[[Any], Any]


class StandIn(NamedTuple):
    """A model that may be changed, and put through steps of training."""

    model: nn.Module
    why_itself: str | None
    """Why it is the caller's own; `None` of a copy."""


def stand_in_for(stack: ExitStack, model: nn.Module) -> StandIn:
    """A deep copy, or the model itself where there can be none; random generators are brought back in any case.

    Args:
        stack: at whose end everything is as it was: of the model itself buffers, gradients and modes. What changes its
            weights and its layers has to change them back.
        model: the caller's.
    """
    try:
        if not _has_room(model):
            raise MemoryError("there is no room for a copy")
        twin = deep_copy(model)
    except Exception as error:  # whatever a module's own code raises
        restore_afterwards(stack, model)
        put_back_afterwards(stack, "training", (module for module, _ in modes_of(model)))
        put_back_afterwards(stack, "grad", model.parameters())
        trial = StandIn(model, str(error) or type(error).__name__)
    else:
        restore_afterwards(stack)
        trial = StandIn(twin, None)
    for parameter in trial.model.parameters():
        parameter.grad = None
    return trial


def optimizer_for(trial: StandIn, model: nn.Module, optimizer: Any) -> Any:
    """An optimizer like the caller's for a stand-in, whose steps do all their work with a learning rate of zero.

    Args:
        trial: the stand-in.
        model: whose parameters the caller's optimizer holds.
        optimizer: one, whose kind and groups are taken, or what makes one of parameters, such as its class.

    Raises:
        ValueError: the optimizer holds none of the model's parameters, or is LBFGS.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        twins = {id(own): twin for own, twin in zip(model.parameters(), trial.model.parameters())}
        groups = [
            {**group, "params": [twins[id(each)] for each in group["params"] if id(each) in twins]}
            for group in optimizer.param_groups
        ]
        if not any(group["params"] for group in groups):
            raise ValueError(f"tune: the {type(optimizer).__name__} holds none of the model's parameters")
        kind: Any = type(optimizer)
        made = kind(groups)
    else:
        made = optimizer([parameter for parameter in trial.model.parameters() if parameter.requires_grad])
    if isinstance(made, torch.optim.LBFGS):
        raise ValueError("tune: LBFGS calls the model as often as it likes in a step: tune without an optimizer")
    for group in made.param_groups:
        rate = group.get("lr")
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return made


def put_back_afterwards(stack: ExitStack, attribute: str, owners: Iterable[Any]) -> None:
    """Has an attribute of some objects brought back at the end of a stack."""
    values = [(owner, getattr(owner, attribute)) for owner in owners]
    # Twice: where an interrupt ends the first, the second goes on.
    for _ in range(2):
        stack.callback(_put_back, attribute, values)


def _put_back(attribute: str, values: list[tuple[Any, Any]]) -> None:
    for owner, value in values:
        setattr(owner, attribute, value)


def _has_room(model: nn.Module) -> bool:
    """Whether a copy fits well: as often again, for what its conversion and its steps need."""
    needed: dict[torch.device, int] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        needed[tensor.device] = needed.get(tensor.device, 0) + 2 * tensor.nbytes
    return all(size <= _free_bytes(device) for device, size in needed.items())


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            available = [line.split()[1] for line in file if line.startswith("MemAvailable")]
        return int(available[0]) * 1024 if available else float("inf")
    return float("inf")
