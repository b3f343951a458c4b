"""Walking the modules of a model."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from torch_nhwc.modules import wrapping
from torch_nhwc.reasons import Reason


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reason | None]]:
    """Every module once, in the order of `named_modules`, with the reason that a wrapper around it gives.

    In one loop, since the generators of `named_modules` nest as deep as the model. The insides of a TorchScript module
    are left to `finding.scripted`.
    """
    seen: set[int] = set()  # by identity: a module of the user's may have an equality of its own
    wrappers: dict[type, wrapping.Wrapper] = {}  # of the model's classes, which are few
    stack: list[tuple[str, nn.Module, Reason | None]] = [("", model, None)]
    while stack:
        path, module, wrapped = entry = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if wrapped is None:
            module_type = type(module)
            wrapper = wrappers.get(module_type)
            if wrapper is None:
                wrapper = wrappers[module_type] = wrapping.wrapper_of(module_type)
            wrapped = wrapping.reason_of(module, wrapper)
            entry = path, module, wrapped
        yield entry
        if module._modules and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{path}." if path else ""
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    stack.append((prefix + name, child, wrapped))


def is_within(path: str, others: Iterable[str]) -> bool:
    """Whether a module is one of some others, or inside of one."""
    return any(not other or path == other or path.startswith(f"{other}.") for other in others)
