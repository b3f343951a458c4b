"""The report: what was done to every site and its companions, and the way back."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from torch_nhwc.converting.preparing import Changes
from torch_nhwc.converting.undoing import Undo
from torch_nhwc.finding.exported import Program
from torch_nhwc.memory import place_of
from torch_nhwc.outcomes import Outcome
from torch_nhwc.page.rendering import write
from torch_nhwc.planning.companions import CompanionRow
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.page import page_of
from torch_nhwc.planning.plans import Plan, row_as_data
from torch_nhwc.planning.rendering import full_table, render, summary
from torch_nhwc.planning.rows import PlanRow
from torch_nhwc.reasons import Reason
from torch_nhwc.rendering import amount
from torch_nhwc.verifying.verification import Verification


@dataclass(frozen=True, repr=False)
class Report:
    """A report says what `convert_` did, and can undo it.

    Attributes:
        plan: what was decided, and done unless `dry_run`.
        outcomes: for each row of the plan, what the operators did to the weight: whether its bytes were permuted where
            they were, or went to new storage and why. `None` where the operators were not called.
        remarks: sentences on the whole.
        new_bytes: the new storage that was needed. On a CPU it is made in stages of 8 MB or one tensor, and each gives
            the old one back before the next; permuting in place takes room for one filter and thread.
        seconds: of the whole call.
        dry_run: whether nothing was done.
        verification: what `verify=` has found, of the layers that were put back afterwards; `None` without it.

    Example:
        >>> report = torch_nhwc.convert_(torch.nn.Conv2d(3, 8, 3))
        >>> report.outcomes
        (<Outcome.REUSED: 2>,)
    """

    plan: Plan
    outcomes: tuple[Outcome | None, ...]
    remarks: tuple[str, ...]
    new_bytes: int
    seconds: float
    dry_run: bool
    _companions: tuple[list[str], list[str], list[Outcome | None], list[Reason | None]]
    _undo: Undo | None
    """`None` in copies."""
    verification: Verification | None = None

    @property
    def model(self) -> nn.Module | ExportedProgram | None:
        """The model that it is about, while it is there; none in copies."""
        model = None if self._undo is None else self._undo.model()
        return model.program if isinstance(model, Program) else model

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The plan's rows, each with its outcome; their strides are those from before."""
        return tuple(row._replace(outcome=outcome) for row, outcome in zip(self.plan.rows, self.outcomes))

    @property
    def companions(self) -> list[CompanionRow]:
        """What was done to gradients, optimizer state and averaged copies, and what stays as it is."""
        return [CompanionRow(*each) for each in zip(*self._companions)]

    def revert(self, optimizer: Any = None, ema: Any = None) -> None:
        """Lays the present values out in the strides from before the conversion, companions included, all or nothing.

        Layers that were exchanged become what they were, and hooks go. It never brings back old values. Gradients and
        state that have come since take the strides of their weight.

        Args:
            optimizer: one or several that the conversion was not told of, such as those made after it.
            ema: averaged copies that the conversion was not told of.

        Warns:
            UserWarning: weights leave shared memory.

        Raises:
            RuntimeError: the model is gone, or was wrapped or compiled since; the report is a deep copy or was loaded,
                which belongs to no model; or the operators refuse a tensor, and their error says why.
            ValueError: the model has other sites than it had; the first one that differs is named.

        Example:
            >>> layer = torch.nn.Conv2d(3, 8, 3)
            >>> torch_nhwc.convert_(layer).revert()
            >>> layer.weight.is_contiguous()
            True
        """
        if self.dry_run:
            return
        if self._undo is None:
            raise RuntimeError(
                "Report.revert: this report is a copy, or was loaded, and belongs to no model: only the original goes "
                "back; convert_(model, torch.contiguous_format) makes any model contiguous"
            )
        self._undo.revert(self.plan, optimizer, ema)

    def to_json(self) -> str:
        """The report as JSON text."""
        rows = [{"outcome": _name(outcome)} | row_as_data(row) for outcome, row in zip(self.outcomes, self.plan.rows)]
        companions = [
            each._asdict() | {"outcome": _name(each.outcome), "reason": _name(each.reason)} for each in self.companions
        ]
        described = {name: getattr(self, name) for name in ("dry_run", "new_bytes", "seconds", "remarks")}
        described = {"memory_format": self.plan.memory_format, "digest": self.plan.digest} | described
        layers = [row_as_data(row) for row in self.plan.layers]
        return json.dumps(described | {"rows": rows, "companions": companions, "layers": layers}, indent=1)

    def table(self) -> str:
        """A line for every site and every layer that loses, as text that fits the terminal."""
        return full_table(self.rows, self.plan.layers)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one HTML file, to be looked at in a browser; it needs the extra `page`.

        Raises:
            ImportError: jinja2 is not installed.
        """
        plan, is_done = self.plan, not self.dry_run
        page = page_of("Report", self.rows, plan.layers, plan.entries, plan.memory_format, is_done, self._lines())
        write(page, path)

    def __str__(self) -> str:
        plan = self.plan
        return render(plan.rows, plan.layers, plan.memory_format, not self.dry_run, plan.observed, self._lines())

    def _lines(self) -> list[str]:
        """What there is to say besides the rows."""
        is_done = not self.dry_run
        lines: list[str] = []
        where = Counter(outcome for outcome in self.outcomes if outcome in _WHERE)
        if where:
            lines.append(f"Moved: {', '.join(f'{where[each]} {_WHERE[each]}' for each in sorted(where))}.")
        _, labels, _, reasons = self._companions
        kinds = Counter((label.split(".")[0], reason) for label, reason in zip(labels, reasons))
        follow = ", ".join(f"{count} {label}" for (label, reason), count in kinds.items() if reason is None)
        if follow:
            lines.append(f"{'Laid' if is_done else 'To be laid'} out as their weights: {follow}.")
        for (label, reason), count in kinds.items():
            if reason is not None:
                lines.append(f"{count} {label} left: {reason.value}.")
        lines += self.remarks
        if is_done:
            new = f"{amount(self.new_bytes)} of new storage" if self.new_bytes else "No new storage"
            took = f"{self.seconds:.1f} s" if self.seconds >= 1 else f"{self.seconds * 1e3:.1f} ms"
            lines.append(f"{new}, {took}.")
        return lines

    def __repr__(self) -> str:
        return f"<Report: {summary(self.plan.rows, self.plan.memory_format, not self.dry_run)}>"


_WHERE = {
    Outcome.REUSED: "in place",
    Outcome.FRESH: "to new storage",
    Outcome.FRESH_HELD: "to new storage (something else holds the old one)",
    Outcome.FRESH_FOREIGN: "to new storage (the old memory is foreign)",
    Outcome.FRESH_SHARED: "to new storage (no longer shared with other processes)",
}
_FRESH = (Outcome.FRESH, Outcome.FRESH_HELD, Outcome.FRESH_FOREIGN, Outcome.FRESH_SHARED)


def _name(member: Any) -> str | None:
    return None if member is None else member.name


def report_of(plan: Plan, following: Following, changes: Changes, undo: Undo, seconds: float, dry_run: bool) -> Report:
    """The report on a conversion, from the records of all that took part in it."""
    companions = following.companions
    fresh = {
        place_of(tensor): tensor.nbytes
        for tensor, record in zip(changes.tensors, () if dry_run else changes.records)
        if record.outcome in _FRESH
    }
    return Report(
        plan=plan,
        outcomes=tuple(
            None if dry_run else Outcome.KEPT if each.outcome is None and each.takes_part else each.outcome
            for each in following.decisions
        ),
        remarks=tuple(following.remarks),
        new_bytes=sum(fresh.values()),  # exact aliases once
        seconds=seconds,
        dry_run=dry_run,
        # By columns: thousands of rows that nobody may ask for would keep the garbage collector busy.
        _companions=(
            [each.weight.name for each in companions],
            [each.label for each in companions],
            [None if dry_run or each.reason else each.outcome for each in companions],
            [each.reason for each in companions],
        ),
        _undo=undo,
    )
