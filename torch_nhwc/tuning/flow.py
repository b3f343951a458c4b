"""Which activations go from which unit of a model to which others, seen while it runs once."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.entries import is_activation
from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.running.outputs import tensors_of
from torch_nhwc.tuning.workload import Workload

FIXED = "fixed: "


@dataclass(slots=True, eq=False)
class Activation:
    """A tensor on its way."""

    producer: str
    """A unit's path, or the name of something else that has a format."""
    shape: torch.Size
    dtype: torch.dtype
    consumers: set[str] = field(default_factory=set)
    """The paths of units."""


@dataclass
class Flow:
    """What goes where."""

    activations: list[Activation] = field(default_factory=list)
    joined: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of producers that have one format, since the code between the units uses what they write together."""
    passed: set[tuple[str, str]] = field(default_factory=set)
    """Units that write to what a producer has written, or pass it on: pairs of the two."""
    outputs: dict[str, bool | None] = field(default_factory=dict)
    """Of each name, whether what it writes is channels-last; `None` where both formats fit."""


def observe(workload: Workload, units: Mapping[str, nn.Module]) -> Flow:
    """Runs the model once, without gradients.

    What is computed between the units, in the code of their parents, follows the format of its operands.
    """
    flow = Flow()
    watch = _Watch(flow)
    with ExitStack() as stack:
        for path, module in units.items():
            enter, leave = partial(watch.enter, path), partial(watch.leave, path)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True, prepend=True, always_call=True).remove)
        stack.enter_context(watch)
        workload.run()
    return flow


def is_channels_last(tensor: Tensor) -> bool | None:
    """Whether an activation is channels-last; `None` where it is in both formats, or in none."""
    last = tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()])
    return None if last == tensor.is_contiguous() else last


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Knows activations by their storage, which views and writes in place share."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.flow = flow
        self.known: dict[int, Activation] = {}
        self.running: list[list[tuple[Tensor, int]]] = []
        """Of each unit that runs, its inputs with their versions; by a user's hook one may run inside of another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.running:
            places = map(_place, _activations_in([*args, *(kwargs or {}).values()]))
            operands = [self.known[place] for place in places if place in self.known]
            for output in _activations_in(result):
                self._note_glue(operands, output)
        return result

    def enter(self, path: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        inputs = _activations_in([*arguments, *keywords.values()])
        if not self.running:
            for each in inputs:
                self._activation_of(each).consumers.add(path)
        self.running.append([(each, _version(each)) for each in inputs])

    def leave(self, path: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        inputs = self.running.pop()
        if self.running:
            return
        places = {_place(each): each for each, _ in inputs}
        for each, version in inputs:
            if _version(each) != version:  # a copy would be written to in its place
                self.flow.passed.add((path, self._activation_of(each).producer))
        for each in _activations_in(output):
            if _place(each) in places:
                self.flow.passed.add((path, self._activation_of(each).producer))
            else:
                self._add(each, path)

    def _activation_of(self, tensor: Tensor) -> Activation:
        """What is known of a tensor; one from outside of the units has the format that it has."""
        place = _place(tensor)
        if place not in self.known:
            self._add(tensor, f"{FIXED}{len(self.flow.activations)}")
        return self.known[place]

    def _add(self, tensor: Tensor, producer: str) -> None:
        self.known[_place(tensor)] = activation = Activation(producer, tensor.shape, tensor.dtype)
        self.flow.activations.append(activation)
        if self.flow.outputs.get(producer) is None:
            self.flow.outputs[producer] = is_channels_last(tensor)

    def _note_glue(self, operands: list[Activation], output: Tensor) -> None:
        if not operands:
            self.known.pop(_place(output), None)  # its memory was something else's before
            return
        first, *others = operands
        self.flow.joined |= {(first.producer, other.producer) for other in others if other.producer != first.producer}
        if self.known.get(_place(output)) not in operands:
            self._add(output, first.producer)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _activations_in(value: Any) -> list[Tensor]:
    return [each for each in tensors_of(value) if is_activation(each)]
