"""A tuning as a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch_nhwc.page.content import Cell, Page, Table
from torch_nhwc.planning.page import page_of as page_of_plan
from torch_nhwc.planning.plans import Plan
from torch_nhwc.tuning.rows import TuningRow

_HEAD = [
    "candidate",
    "milliseconds",
    "spread",
    "times as fast",
    "at least",
    "at most",
    "regret",
    "difference",
    "remark",
]


def page_of(
    plan: Plan, choice: str, candidates: Sequence[TuningRow], notes: Sequence[str], conditions: Mapping[str, Any]
) -> Page:
    """The candidates, and the plan that was chosen."""
    cells: list[list[Cell]] = []
    for row in candidates:
        name = f"{row.name} (chosen)" if row.name == choice else row.name
        speeds = [1 / ratio if ratio else None for ratio in (row.ratio, row.high, row.low)]
        numbers = [row.seconds and row.seconds * 1e3, row.spread, *speeds, row.regret, row.difference]
        cells.append([name, *("" if each is None else each for each in numbers), row.remark])
    told = {name: ", ".join(map(str, each)) if isinstance(each, list) else each for name, each in conditions.items()}
    lines = [*notes, "; ".join(f"{name} {value}" for name, value in told.items() if value)]
    title = f"Tuning of {conditions.get('model', 'a model')}: {choice}"
    page = page_of_plan(title, plan.rows, plan.layers, plan.entries, plan.memory_format, False, lines)
    return page._replace(tables=[Table("Candidates", _HEAD, cells), *page.tables])
