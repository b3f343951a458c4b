"""Walking the modules of a model."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from torch_nhwc.sites import wrappers
from torch_nhwc.sites.reasons import Reason


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reason | None]]:
    """Yield every module once: its path, the module, and the reason that a wrapper around it gives, or `None`.

    The order is that of `named_modules`, whose nested generators take quadratic time in a deep model. The modules
    inside of a TorchScript module are left to `sites.scripted`.
    """
    seen: set[int] = set()  # by identity, since a module may define its own equality
    known: dict[type, wrappers.Wrapper] = {}
    stack: list[tuple[str, nn.Module, Reason | None]] = [("", model, None)]
    while stack:
        path, module, reason = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if reason is None:
            module_type = type(module)
            if module_type not in known:
                known[module_type] = wrappers.wrapper_of(module_type)
            reason = wrappers.reason_of(module, known[module_type])
        yield path, module, reason
        if module._modules and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{path}." if path else ""
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    stack.append((prefix + name, child, reason))


def is_within(path: str, others: Iterable[str]) -> bool:
    """Return whether a module is one of the modules at some paths, or is inside of one."""
    return any(not other or path == other or path.startswith(f"{other}.") for other in others)
