"""The decision of `tune`: the plan that won, the evidence, and the conditions under which it was measured."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_nhwc.planning import Plan
from torch_nhwc.rendering import paragraphs, table
from torch_nhwc.running.machine import warn_if_tuned_elsewhere
from torch_nhwc.serialization import from_data, to_data

# What of a machine is printed.
_PRINTED = ("device", "threads", "torch")
# What the candidates convert, other than the contiguous one.
_MEANINGS = {
    "weights only": "convolution weights",
    "full": "weights and inputs",
    "full, preserved": "weights, inputs and replaced layers",
}


class TuningRow(NamedTuple):
    """A row says what was measured for one candidate.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> row = torch_nhwc.tune(model, x, budget_seconds=0.1).table[0]
        >>> row.name, row.ratio, row.difference
        ('contiguous', 1.0, 0.0)
    """

    name: str
    seconds: float | None
    """The time of a call: the contiguous model's median of its rounds, times `ratio`; `None` if it was not measured."""
    spread: float | None
    """The distance of the quartiles, in units of the median."""
    samples: int
    """How many rounds the candidate was measured in."""
    ratio: float | None
    """How many times as long it takes as the contiguous model, by the rounds in which both were measured."""
    low: float | None
    """The lower end of the 99 % interval of the ratio; `None` where there are too few samples for one."""
    high: float | None
    """The upper end."""
    regret: float | None
    """By which share it is slower than the fastest candidate."""
    difference: float | None
    """How far its output is from the contiguous model's, in units of the largest output; `None` if not compared."""
    remark: str
    """Why it could not be measured."""
    compile_seconds: float | None = None
    """How long the first call of a compiled candidate took, which compiles it; `None` for others."""


@dataclass(frozen=True)
class Tuning:
    """A tuning is a decision by measurement: `convert_(model, plan=tuning.plan)` applies it.

    So does `convert_(model, plan="tuning.json")`, where the file holds the text of `to_json`.

    If `compile` is true, call `torch.compile(model)` after that.

    Attributes:
        plan: The fastest plan; the contiguous model's where none is certainly faster.
        choice: Its name in the table.
        table: A row for each candidate, the contiguous one first.
        notes: Sentences on what was decided, and how certain it is.
        seconds: How long the tuning took.
        workload: What was timed: model, mode, dtypes, shapes, optimizer, device.
        machine: What it was timed on: processor or GPU, libraries and their settings.
        compile: Whether to compile the model after the conversion. It is false unless `tune` measured that.
        is_decided: Whether there were enough rounds: if not, the plan is the contiguous model's, in doubt.

    Example:
        >>> from torch_nhwc.tuning import Tuning
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> tuning = torch_nhwc.tune(model, x, budget_seconds=0.1)
        >>> report = torch_nhwc.convert_(model, plan=tuning.plan)
        >>> Tuning.from_json(tuning.to_json()) == tuning
        True
    """

    plan: Plan
    choice: str
    table: tuple[TuningRow, ...]
    notes: tuple[str, ...]
    seconds: float
    workload: dict[str, Any]
    machine: dict[str, Any]
    compile: bool = False
    is_decided: bool = True

    def to_json(self) -> str:
        """Return the decision with its evidence as JSON text, for `from_json`."""
        return json.dumps(to_data(self) | {"plan": json.loads(self.plan.to_json())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """Return the decision that `to_json` wrote.

        Raises:
            ValueError: The text is not such a decision, or its plan was changed since.

        Warns:
            UserWarning: It was measured under other conditions than those here; the message says what differs.
        """
        try:
            data = json.loads(text)
            plan = Plan.from_json(json.dumps(data["plan"]))
            tuning: Tuning = from_data(cls, data | {"plan": to_data(plan)})
            device = torch.device(tuning.workload["device"])
            from_data(list[str], tuning.workload["shapes"])
            for name in _PRINTED:
                tuning.machine[name]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"Tuning.from_json: expected what Tuning.to_json writes: {error!r}") from error
        warn_if_tuned_elsewhere(tuning.machine, device)
        return tuning

    def __str__(self) -> str:
        workload = {**self.workload, "shapes": ", ".join(self.workload["shapes"])}
        described = ", ".join(f"{name} {value}" for name, value in workload.items() if value)
        processor, threads, version = (self.machine[name] for name in _PRINTED)
        where = f"{processor}, {threads} threads, torch {version}"
        title = (
            f"Tuning: {self.choice if self.is_decided else 'not decided'} ({self.seconds:.0f} s; {described}; {where})"
        )
        head = ["candidate", "time", "speed", "99 % interval", "error", "compile"]
        rows = [_cells(row, self.is_decided and row.name == self.choice) for row in self.table]
        failed = [f"{row.name}: {row.remark}." for row in self.table if row.remark]
        named = [f"{name}: {what}" for name, what in _MEANINGS.items() if any(row.name == name for row in self.table)]
        meanings = [f"{'; '.join(named)}."] if named else []
        return paragraphs([title]) + table(rows, head) + paragraphs([*meanings, *failed, *self.notes])


def _cells(row: TuningRow, is_chosen: bool) -> list[str]:
    name = f"* {row.name}" if is_chosen else row.name
    compiling = "" if row.compile_seconds is None else _duration(row.compile_seconds)
    if row.seconds is None or not row.ratio:
        return [name, "failed", *[""] * 3, compiling]
    limits = f"{1 / row.high:.2f} to {1 / row.low:.2f}" if row.low and row.high else "unknown"
    speed = ("1", "") if row.ratio == 1 and row.low == row.high else (f"{1 / row.ratio:.2f}x", limits)
    difference = "" if row.difference is None else f"{row.difference:.0e}" if row.difference else "0"
    return [name, _duration(row.seconds), *speed, difference, compiling]


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
