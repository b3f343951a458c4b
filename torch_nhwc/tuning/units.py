"""The parts of a model that have one format each, and how long each takes inside of the whole."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.modules.walk import walk
from torch_nhwc.planning.plans import Plan
from torch_nhwc.running.outputs import tensors_of


def units_of(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """By path, the modules that have one format: those that own a convolution's weight, or have none inside."""
    owners = {row.path for row in plan.rows}
    units: dict[str, nn.Module] = {}
    inside = "\0"  # of no path
    for path, module, _ in walk(model):
        is_unit = path in owners or not module._modules
        if is_unit and not path.startswith(inside) and not isinstance(module, torch.jit.ScriptModule):
            units[path] = module
            if module._modules:
                inside = f"{path}." if path else ""
    return units


class Clock:
    """How long modules take inside of a whole model, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        """By path, of all calls since the clock was made."""
        self._device = device

    @contextmanager
    def watching(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Has the clock run for all calls of some modules."""
        with ExitStack() as stack:
            for path, module in modules:
                calls: list[tuple[float, int]] = []
                enter, leave = partial(self._enter, calls), partial(self._leave, path, calls)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, prepend=True, always_call=True).remove)
            yield

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _add(self, path: str, seconds: float) -> None:
        self.seconds[path] = self.seconds.get(path, 0.0) + seconds

    def _enter(self, calls: list[tuple[float, int]], module: nn.Module, arguments: Any) -> None:
        calls.append((self._now(), torch._C._autograd._get_sequence_nr()))

    def _leave(self, path: str, calls: list[tuple[float, int]], module: nn.Module, arguments: Any, output: Any) -> None:
        start, first = calls.pop()
        self._add(path, self._now() - start)
        for node in _nodes_since(first, tensors_of(output)):
            started: list[float] = []
            node.register_prehook(partial(self._node_starts, started))
            node.register_hook(partial(self._node_ends, path, started))

    def _node_starts(self, started: list[float], _: Any) -> None:
        started.append(self._now())

    def _node_ends(self, path: str, started: list[float], _: Any, __: Any) -> None:
        self._add(path, self._now() - started.pop())


def _nodes_since(first: int, tensors: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graph behind tensors that were made since a number in autograd's sequence."""
    waiting, seen, found = [tensor.grad_fn for tensor in tensors], set(), []
    while waiting:
        node: Any = waiting.pop()
        # Those that add up gradients belong to no call, and have the largest number.
        is_older = node is None or node in seen or not first <= node._sequence_nr() < 1 << 62
        if not is_older:
            seen.add(node)
            found.append(node)
            waiting += [each for each, _ in node.next_functions]
    return found


def seconds_of_units(
    run: Callable[[], object], units: Iterable[tuple[str, nn.Module]], device: torch.device
) -> dict[str, float]:
    """By path, the seconds that modules take in one run of the whole."""
    clock = Clock(device)
    with clock.watching(units):
        run()
    return clock.seconds
