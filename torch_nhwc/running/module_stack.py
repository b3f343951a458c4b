"""Which module of a model is running, as in `torch.utils.module_tracker`, but for each thread and by module."""

import threading
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModule(NamedTuple):
    """A module whose forward runs."""

    path: str
    """Its path in the model. A module from elsewhere has the path of the module that calls it."""
    module: nn.Module


class _Here(threading.local):
    """The modules that run in each thread."""

    def __init__(self) -> None:
        self.running: list[RunningModule] = []


class ModuleStack:
    """Context manager that knows the innermost module whose forward runs in this thread.

    Global hooks follow the calls: no module is changed, and other models may run in other threads meanwhile.

    Attributes:
        model: The model.
        paths: The path of each module, by the module's id.

    Example:
        >>> from torch_nhwc.running.module_stack import ModuleStack
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> with ModuleStack(model) as stack:
        ...     handle = model[0].register_forward_pre_hook(lambda *_: print(stack.path, type(stack.module).__name__))
        ...     output = model(torch.zeros(1))
        0 ReLU
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._here = _Here()

    @property
    def running(self) -> list[RunningModule]:
        """The modules that run in this thread, the outermost first."""
        return self._here.running

    @property
    def path(self) -> str:
        """The path of the innermost module that runs in this thread; empty outside of all modules."""
        running = self.running
        return running[-1].path if running else ""

    @property
    def module(self) -> nn.Module:
        """The innermost module that runs in this thread; the model outside of all modules."""
        running = self.running
        return running[-1].module if running else self.model

    def __enter__(self) -> "ModuleStack":
        """Begin to follow the calls of modules."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        path = self.paths.get(id(module))
        self.running.append(RunningModule(self.path if path is None else path, module))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # PyTorch does not call hooks after an interrupt: modules above this one in the stack have been left as well.
        running = self.running
        while running and running.pop().module is not module:
            pass
