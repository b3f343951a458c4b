"""Call sites: where the forward called an operator, which the backward finds again by autograd's sequence numbers."""

import os
import sys
import threading
from bisect import bisect_right
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr

from torch_nhwc.running import ModuleStack

OURS = "torch_nhwc.functional"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OUR_FUNCTIONS = f"{_PACKAGE}functional"
# The files whose frames are skipped to find the code that calls.
_SKIPPED = (_PACKAGE, f"{Path(torch.__file__).parent}{os.sep}", "<eval_with_key>", "<frozen")
_KINDS = {torch.nn.functional.__file__: "function", torch.autograd.graph.__file__: "backward"}
_MOST = 1 << 17


class CallSite(NamedTuple):
    """Where an operator was called."""

    path: str
    """The path of the innermost module; empty outside of all modules."""
    source: str | None
    """The file and line of the innermost code that is neither PyTorch's nor this package's."""
    function: str | None
    """The function of `torch.nn.functional` that called the operator; `OURS` for a function of this package."""
    operator: str
    """Its name, which resembles the name of autograd's node."""


_UNKNOWN = CallSite("", None, None, "")


class _Recorded:
    """The call sites of one thread, by autograd's sequence number, which increases within a thread.

    A node without a site of its own, such as that of a write into a view, belongs to the operator before it.
    """

    def __init__(self) -> None:
        # The nodes that exist already were not seen.
        self.numbers = [_get_sequence_nr() - 1]
        self.sites = [_UNKNOWN]

    def add(self, number: int, site: CallSite) -> None:
        """Record the site of a node; the oldest sites are forgotten."""
        if len(self.numbers) == 2 * _MOST:
            del self.numbers[:_MOST], self.sites[:_MOST]
        self.numbers.append(number)
        self.sites.append(site)

    def find(self, number: int) -> CallSite:
        """Return the site of a node."""
        index = bisect_right(self.numbers, number) - 1
        return self.sites[index] if index >= 0 else _UNKNOWN


class CallSites(ModuleStack):
    """The module stack, which also knows for each operator whether it computes a gradient and where it was called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._recorded: dict[int, _Recorded] = {threading.get_ident(): _Recorded()}
        # By module, the backward in which it was called, as by a checkpoint; -1 outside of all.
        self._backward_of: dict[int, int] = {}
        self._root = -1, -1
        self._node: tuple[int, int, CallSite | None] = -1, -1, None

    def _enter(self, module: nn.Module, args: Any) -> None:
        super()._enter(module, args)
        self._backward_of[id(module)] = _current_graph_task_id()

    def of_call(self, operator: str) -> tuple[bool, CallSite | None]:
        """Return whether the operator that runs computes a gradient, and where the forward called it.

        The site is `None` in the forward if autograd does not record the call, and where a leaf's gradient is
        accumulated.
        """
        task, number = _current_graph_task_id(), _get_sequence_nr() - 1
        recorded = self._recorded.get(threading.get_ident())
        if recorded is None:  # a thread of autograd, for a GPU
            recorded = self._recorded[threading.get_ident()] = _Recorded()
        is_new = number > recorded.numbers[-1]
        if task != -1 and not self._is_computed_again(task):
            site = self._of_node(task)
            if is_new and site is not None and torch.is_grad_enabled():  # for a second-order gradient
                recorded.add(number, site)
            return True, site
        if not is_new:
            return False, None
        site = self.locate(operator)
        recorded.add(number, site)
        return False, site

    def locate(self, operator: str) -> CallSite:
        """Return where the operator that runs is called."""
        frame: FrameType | None = sys._getframe(1)
        source = function = None
        while frame is not None:
            kind = _kind_of(frame.f_code.co_filename)
            if kind == "caller":
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                break
            if kind == "backward":  # further out is the code that called backward
                break
            if kind == "function":
                function = frame.f_code.co_name
            elif kind == "ours":
                function = OURS
            frame = frame.f_back
        return CallSite(self.path, source, function, operator)

    def is_root(self) -> bool:
        """Return whether the node that runs is the first one of its backward."""
        return self._node[:2] == self._root

    def _is_computed_again(self, task: int) -> bool:
        running = self.running
        return bool(running) and self._backward_of[id(running[-1].module)] == task

    def _of_node(self, task: int) -> CallSite | None:
        node: Any = _current_autograd_node()
        if node is None:
            return _UNKNOWN
        number = node._sequence_nr()
        if self._root[0] != task:
            self._root = task, number
        if self._node[:2] != (task, number):
            self._node = task, number, self._find(number, node.name())
        return self._node[2]

    def _find(self, number: int, name: str) -> CallSite | None:
        if name == "torch::autograd::AccumulateGrad":
            return None
        # Threads number their nodes independently: the name decides between them.
        sites = [recorded.find(number) for recorded in self._recorded.values()]
        return next((site for site in sites if site.operator and _is_node_of(name, site.operator)), sites[0])


@cache
def _kind_of(file: str) -> str:
    if not file.startswith(_SKIPPED):
        return "caller"
    return "ours" if file.startswith(_OUR_FUNCTIONS) else _KINDS.get(file, "")


def _is_node_of(name: str, operator: str) -> bool:
    return name.lower().startswith(operator.partition("::")[2].strip("_").replace("_", ""))
