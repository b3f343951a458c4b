"""Where in a model an operator runs: the modules that are running, and in backward those that ran forward."""

import os
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr

from torch_nhwc.running.outputs import tensors_of

# Whose frames are passed over on the way to the code that calls.
_OURS_FILES = f"{Path(__file__).parents[1]}{os.sep}"
_PASSED = (_OURS_FILES, f"{Path(torch.__file__).parent}{os.sep}", "<eval_with_key>", "<frozen")
_OUR_FUNCTIONS = f"{_OURS_FILES}functional{os.sep}"
_FUNCTIONAL = torch.nn.functional.__file__
_BACKWARD = torch.autograd.graph.__file__
_CHECKPOINT = torch.utils.checkpoint.__file__
_KEY = "torch_nhwc.trace"


_MOST = 1 << 16  # operators of a forward that are remembered together
OURS = "torch_nhwc.functional"


class Place(NamedTuple):
    """Where an operator was called."""

    path: str
    """Of the innermost module; empty outside of all."""
    source: str | None
    """File and line of the innermost code that is not PyTorch's nor ours."""
    function: str | None
    """Of `torch.nn.functional`, where the call went through one; `OURS` where it went through one of ours."""
    operator: str
    """Which it was: autograd's node has a similar name."""


_NOWHERE = Place("", None, None, "")


class ForwardPass:
    """The places of one forward, by autograd's number of each operator; as long as a graph that it made lives.

    Numbers go up in each thread. A node that has none here, such as that of a write into a view, is the last one's.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.last = -1
        self.numbers: list[int] = []
        self.places: list[Place] = []
        self.end = sys.maxsize
        self.helpers: list[ForwardPass] = []
        """What other threads did for it."""
        self.has_channels_last = False
        """Whether an activation was channels-last by now."""

    def add(self, number: int, place: Place) -> None:
        """Remembers an operator."""
        self.last = number
        self.numbers.append(number)
        self.places.append(place)

    def find(self, number: int) -> Place | None:
        """Where the operator with a number was called, if it was in this forward."""
        index = bisect_right(self.numbers, number) - 1
        return self.places[index] if index >= 0 and number <= self.end else None


class _Frame:
    """A module that is running, or a function in another thread."""

    __slots__ = ("called_in", "is_compiled", "path", "source", "task")

    def __init__(self, path: str, is_compiled: bool = False, called_in: FrameType | None = None) -> None:
        self.path = path
        self.called_in = called_in
        self.task = _current_graph_task_id()
        """The backward that it runs in, as in a checkpoint; -1 outside of all."""
        self.is_compiled = is_compiled
        """Whether that was told, of it or of one around it."""
        self.source: str | None = ""
        """Of its call; empty while nobody asked."""


class _Thread:
    """What a thread is at."""

    def __init__(self, new: Callable[[], ForwardPass]) -> None:
        self.frames: list[_Frame] = []
        self.outside = _Frame("")
        # Some forwards are kept besides those of living graphs, for outputs in which no tensor is found.
        self.forwards = deque([new()], maxlen=3)
        self.node: tuple[int, int, Place | None] = -1, -1, None
        self.root = -1, -1
        """A backward, and the node that it began with."""


class _Threads(threading.local):
    def __init__(self, new: Callable[[], ForwardPass]) -> None:
        self.now = _Thread(new)


class Places:
    """Where the operators of a model run, in each thread."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths
        self.forwards: list[ref[ForwardPass]] = []
        self._lock = threading.Lock()
        self.threads = _Threads(self._new)

    def begin(self, within: ForwardPass | None = None) -> ForwardPass:
        """A forward begins, or what a thread does for the forward of another one."""
        here, forward = self.threads.now, self._new()
        here.forwards[-1].end = _get_sequence_nr() - 1
        here.forwards.append(forward)
        if within is not None:
            within.helpers.append(forward)
        return forward

    def _new(self) -> ForwardPass:
        forward = ForwardPass()
        with self._lock:
            self.forwards = [each for each in self.forwards if each() is not None] + [ref(forward)]
        return forward

    def within(self, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a module; the graph of its outputs keeps what is known of the forward."""
        here = self.threads.now
        frames = here.frames
        frames.append(_Frame(path, bool(frames) and frames[-1].is_compiled, sys._getframe()))
        try:
            outputs = call(*args, **kwargs)
        finally:
            frames.pop()
        for output in (outputs,) if type(outputs) is Tensor else tensors_of(outputs):
            node: Any = output.grad_fn
            if node is not None:
                node.metadata[_KEY] = here.forwards[-1]
        return outputs

    def is_inside(self) -> bool:
        """Whether a module is running in this thread."""
        return bool(self.threads.now.frames)

    def tell_compiled(self) -> str | None:
        """The path of the innermost module, where it was not yet told that something in it is compiled."""
        frame = self.threads.now.frames[-1] if self.threads.now.frames else self.threads.now.outside
        if frame.is_compiled:
            return None
        frame.is_compiled = True
        return frame.path

    def of_call(self, operator: str) -> tuple[bool, Place | None]:
        """Whether an operator that is called computes a gradient, and where it was called in the forward.

        The place is `None` in backward where gradients are summed up, and in the forward where autograd will not ask.
        """
        here, task = self.threads.now, _current_graph_task_id()
        number, forward = _get_sequence_nr() - 1, here.forwards[-1]
        # What a checkpoint computes again has a module that began in the backward.
        if task != -1 and not (here.frames and here.frames[-1].task == task):
            is_recorded = torch.is_grad_enabled()  # as for another backward of this one
            if not (is_recorded and _is_computed_again()):
                place = self._backward(task)
                if is_recorded and place is not None and number > forward.last:
                    self._remember(number, place)
                return True, place
        if number <= forward.last:
            return False, None
        place = self.locate(operator)
        self._remember(number, place)
        return False, place

    def _remember(self, number: int, place: Place) -> None:
        forward = self.threads.now.forwards[-1]
        if len(forward.numbers) == _MOST:
            forward = self.begin()
        forward.add(number, place)

    def locate(self, operator: str) -> Place:
        """Where an operator is called."""
        frame: FrameType | None = sys._getframe(2)
        source: str | None = None
        function = None
        modules: list[_Frame] = []  # that were called on the way
        while frame is not None:
            code = frame.f_code
            if code is _WITHIN:  # perhaps another trace's
                module = next((each for each in reversed(self.threads.now.frames) if each.called_in is frame), None)
                if module is not None:
                    source = module.source
                    if source != "":
                        break
                    modules.append(module)
            else:
                file = _passed(code.co_filename)
                if file is None:
                    source = f"{code.co_filename}:{frame.f_lineno}"
                    break
                if file == _FUNCTIONAL:
                    function = code.co_name
                elif file == _OUR_FUNCTIONS:
                    function = OURS
                elif file == _BACKWARD:  # beyond is who called backward
                    source = None
                    break
            frame = frame.f_back
        else:
            source = None
        for module in modules:
            module.source = source
        return Place(self.path(), source, function, operator)

    def forward(self) -> ForwardPass:
        """The forward that runs in this thread, or the last one."""
        return self.threads.now.forwards[-1]

    def path(self) -> str:
        """Of the innermost module; where a checkpoint computes functions again, of the one that ran them forward."""
        if self.threads.now.frames:
            return self.threads.now.frames[-1].path
        task = _current_graph_task_id()
        return ((task != -1 and self._backward(task)) or _NOWHERE).path

    def _backward(self, task: int) -> Place | None:
        """Where the operator was called whose gradient is being computed."""
        here = self.threads.now
        node: Any = _current_autograd_node()
        if node is None:
            return _NOWHERE
        number = node._sequence_nr()
        if here.root[0] != task:
            here.root = task, number
        if here.node[0] != task or here.node[1] != number:
            here.node = task, number, self._find(number, node.name())
        return here.node[2]

    def is_root(self) -> bool:
        """Whether the gradient that is being computed is the first of its backward."""
        return self.threads.now.node[:2] == self.threads.now.root

    def _find(self, number: int, name: str) -> Place | None:
        if name == "torch::autograd::AccumulateGrad":
            return None
        found = [
            (forward.thread, place)
            for each in self.forwards
            if (forward := each()) is not None and (place := forward.find(number)) is not None
        ]
        # Several threads may have given the same number.
        if len(found) > 1:
            name, thread = name.lower(), threading.get_ident()
            found.sort(key=lambda each: (not name.startswith(_as_node(each[1].operator)), each[0] != thread))
        return found[0][1] if found else _NOWHERE


def _is_computed_again() -> bool:
    """Whether a checkpoint calls functions in the backward that runs."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename not in (_BACKWARD, _CHECKPOINT):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


@cache
def _passed(file: str) -> str | None:
    """A file whose frames are passed over, or the folder of our functions; `None` for the user's."""
    if file.startswith(_OUR_FUNCTIONS):
        return _OUR_FUNCTIONS
    return file if file.startswith(_PASSED) else None


@cache
def _as_node(operator: str) -> str:
    return operator.partition("::")[2].strip("_").replace("_", "")


_WITHIN = Places.within.__code__
