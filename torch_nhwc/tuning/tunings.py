"""The answer: the plan that won, the evidence, and under which conditions that was measured."""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_nhwc.page.rendering import write
from torch_nhwc.planning.plans import Plan
from torch_nhwc.rendering import paragraphs, table
from torch_nhwc.tuning.conditions import differences, machine
from torch_nhwc.tuning.page import page_of
from torch_nhwc.tuning.rows import TuningRow

_VERSION = 1


@dataclass(frozen=True)
class Tuning:
    """A tuning is a decision by measurement: `convert_(model, plan=tuning.plan)` applies it.

    Attributes:
        plan: the fastest; that of the contiguous model where none was faster with certainty.
        choice: its name in the table.
        table: a row for each candidate, the contiguous one first.
        notes: sentences on what was decided, and how sure it is.
        seconds: what the tuning took.
        workload: what was timed: mode, dtypes, shapes, optimizer.
        machine: on what it was timed: device, libraries and their settings.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> tuning = torch_nhwc.tune(model, x, budget_seconds=0.1)
        >>> report = torch_nhwc.convert_(model, plan=tuning.plan)
        >>> torch_nhwc.Tuning.from_json(tuning.to_json()) == tuning
        True
    """

    plan: Plan
    choice: str
    table: tuple[TuningRow, ...]
    notes: tuple[str, ...]
    seconds: float
    workload: Mapping[str, Any]
    machine: Mapping[str, Any]
    device: str = field(repr=False)

    def to_json(self) -> str:
        """The decision with its evidence as JSON text, for `from_json`."""
        described = {
            "version": _VERSION,
            "choice": self.choice,
            "notes": self.notes,
            "seconds": self.seconds,
            "device": self.device,
            "workload": self.workload,
            "machine": self.machine,
            "table": [row._asdict() for row in self.table],
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(described, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """The decision that `to_json` wrote.

        Raises:
            ValueError: the text is not such a decision, or its plan was changed since.

        Warns:
            UserWarning: it was measured under other conditions than those here; what differs is named.
        """
        try:
            read = json.loads(text)
            if read["version"] != _VERSION:
                raise ValueError(f"version {read['version']!r}, expected {_VERSION}")
            rows = tuple(TuningRow(**row) for row in read["table"])
            plan = Plan.from_json(json.dumps(read["plan"]))
            tuning = cls(
                *(plan, read["choice"], rows, tuple(read["notes"]), read["seconds"]),
                *(dict(read["workload"]), dict(read["machine"]), read["device"]),
            )
            kind = torch.device(tuning.device).type
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"Tuning.from_json: expected what Tuning.to_json writes: {error!r}") from error
        is_here = kind != "cuda" or torch.cuda.is_available()
        apart = differences(tuning.machine, machine(torch.device(kind if is_here else "cpu")))
        if apart:
            message = f"torch_nhwc: this was tuned under other conditions, tune again: {'; '.join(apart)}"
            warnings.warn(message, UserWarning, stacklevel=2)
        return tuning

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the decision and its plan as one HTML file, to be looked at in a browser; it needs the extra `page`.

        Raises:
            ImportError: jinja2 is not installed.
        """
        write(page_of(self.plan, self.choice, self.table, self.notes, {**self.workload, **self.machine}), path)

    def __str__(self) -> str:
        told = ((name, ", ".join(value) if isinstance(value, list) else value) for name, value in self.workload.items())
        described = [f"{name} {value}" for name, value in told if value]
        machine = f"{self.machine['device']}, {self.machine['threads']} threads, torch {self.machine['torch']}"
        head = f"Tuning: {self.choice} ({self.seconds:.0f} s; {', '.join(described)}; {machine})"
        names = ["candidate", "time", "spread", "speed", "99 % of it", "regret", "difference"]
        rows = [_cells(row, row.name == self.choice) for row in self.table]
        out = [f"{row.name}: {row.remark}." for row in self.table if row.remark]
        return paragraphs([head]) + table(rows, names) + paragraphs([*out, *self.notes])


def _cells(row: TuningRow, is_chosen: bool) -> list[str]:
    name = f"* {row.name}" if is_chosen else row.name
    if row.seconds is None or row.ratio is None or row.regret is None or row.spread is None:
        return [name, "out", *[""] * 5]
    between = f"{1 / row.high:.2f} to {1 / row.low:.2f}" if row.low and row.high else "unknown"
    difference = "" if row.difference is None else f"{row.difference:.0e}" if row.difference else "0"
    speed = ("1", "") if row.ratio == 1 and row.low == row.high else (f"{1 / row.ratio:.2f}x", between)
    return [name, _duration(row.seconds), f"{row.spread:.0%}", *speed, f"{row.regret:.1%}", difference]


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} us"
    )
