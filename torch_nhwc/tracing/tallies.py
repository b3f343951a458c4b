"""Counting what is alike, from several threads."""

import threading
from typing import Any

from torch_nhwc.tracing.rows import Gain, Loss, MixedConvolution, Phase, Reorder, TracedModule, Unseen

# What adds up in a row; all else says what it is a row of.
AMOUNTS: dict[type, tuple[str, ...]] = {
    Loss: ("bytes", "count"),
    MixedConvolution: ("bytes", "count"),
    Gain: ("bytes", "count"),
    Reorder: ("milliseconds", "count"),
    Unseen: (),
}


class Tallies:
    """The rows that were seen, each with the sum of its amounts, in the order of the first time.

    Rows are alike whatever the sizes are that they tell: they have those of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[Any, tuple[Any, list[float]]] = {}
        self._advice: dict[Any, str | None] = {}
        self._modules: dict[str, TracedModule | None] = {}
        self._operators: dict[threading.Thread | None, list[int]] = {None: [0, 0]}

    def add(self, row: Any, *amounts: float) -> bool:
        """Adds the amounts to those of a row, which has none itself; whether it is new."""
        key = _key(row)
        with self._lock:
            seen = self._amounts.get(key)
            if seen is None:
                self._amounts[key] = row, list(amounts)
            else:
                for index, amount in enumerate(amounts):
                    seen[1][index] += amount
        return seen is None

    def counter(self) -> list[int]:
        """A count of operators, forward and backward, for this thread to go on with."""
        with self._lock:
            ended = [thread for thread in self._operators if thread and not thread.is_alive()]
            for counts in map(self._operators.pop, ended):
                self._operators[None] = [sum(each) for each in zip(self._operators[None], counts)]
            return self._operators.setdefault(threading.current_thread(), [0, 0])

    def begin(self, path: str) -> bool:
        """Notes that a module begins to run; whether it is the first time, or no other came to an end."""
        return self._modules.setdefault(path, None) is None

    def add_module(self, module: TracedModule) -> None:
        """Adds a module that has run, in the place where it began."""
        self._modules[module.path] = module

    def modules(self) -> tuple[TracedModule, ...]:
        """Those that have run, in the order in which they began."""
        return tuple(module for module in list(self._modules.values()) if module is not None)

    def advise(self, row: Loss, advice: str | None) -> None:
        """Says what keeps the format at a row that was added."""
        self._advice[_key(row)] = advice

    def rows(self, kind: Any) -> tuple[Any, ...]:
        """The rows of a kind, with their amounts."""
        with self._lock:
            seen = [(key, *each) for key, each in self._amounts.items() if key[0] is kind]
        rows = [(key, row._replace(**dict(zip(AMOUNTS[kind], sums)))) for key, row, sums in seen]
        if kind is Loss:
            return tuple(row._replace(advice=self._advice.get(key)) for key, row in rows)
        return tuple(row for _, row in rows)

    def operators(self) -> dict[Phase, int]:
        """How many operators ran in each phase."""
        with self._lock:
            forward, backward = map(sum, zip(*self._operators.values()))
        return {"forward": forward, "backward": backward}


def _key(row: Any) -> tuple[Any, ...]:
    """What rows have in common that add up."""
    if not isinstance(row, (Loss, MixedConvolution, Gain)):
        return type(row), *row
    formats = (tuple(layout.format for layout in layouts) for layouts in (row.inputs, row.outputs))
    return type(row), row.path, row.operator, row.phase, row.source, *formats
