"""The report: what was done to every site and its companions, and the way back."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch_nhwc.converting.preparing import Changes
from torch_nhwc.converting.undoing import Undo
from torch_nhwc.memory import place_of
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.companions import CompanionRow
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.plans import Plan, row_as_data
from torch_nhwc.planning.rendering import render
from torch_nhwc.reasons import Reason
from torch_nhwc.text import amount, paragraphs


@dataclass(frozen=True)
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
    _undo: Undo

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

        Raises:
            RuntimeError: the model is gone, or was wrapped or compiled since; or the operators refuse a tensor, and
                their error says why.
            ValueError: the model has other sites than it had; the first one that differs is named.

        Example:
            >>> layer = torch.nn.Conv2d(3, 8, 3)
            >>> torch_nhwc.convert_(layer).revert()
            >>> layer.weight.is_contiguous()
            True
        """
        if not self.dry_run:
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

    def __str__(self) -> str:
        lines: list[str] = []
        weights = Counter(outcome for outcome in self.outcomes if outcome is not None)
        if weights:
            lines.append("weights: " + ", ".join(f"{weights[each]} {_WORDS[each]}" for each in sorted(weights)))
        kinds = Counter((each.label.split(".")[0], each.reason) for each in self.companions)
        for (label, reason), count in kinds.items():
            lines.append(f"{label}: {count} {'follow' if reason is None else 'left: ' + reason.value}")
        lines += self.remarks
        if not self.dry_run:
            lines.append(f"{amount(self.new_bytes)} of new storage, {self.seconds * 1e3:.1f} ms")
        what = "Dry run" if self.dry_run else "Report"
        done = ["" if outcome is None else _SHORT.get(outcome, "") for outcome in self.outcomes]
        return render(what, self.plan.rows, self.plan.layers, self.plan.memory_format, done) + paragraphs(lines)


_WORDS = {
    Outcome.KEPT: "kept",
    Outcome.RESTRIDED: "restrided",
    Outcome.REUSED: "permuted in place",
    Outcome.FRESH: "in new storage",
    Outcome.FRESH_HELD: "in new storage (something else holds the old one)",
    Outcome.FRESH_FOREIGN: "in new storage (the old memory is foreign)",
    Outcome.FRESH_SHARED: "in new storage (no longer shared with other processes)",
}
_SHORT = {
    Outcome.REUSED: "in place",
    Outcome.FRESH: "new",
    Outcome.FRESH_HELD: "new: held",
    Outcome.FRESH_FOREIGN: "new: foreign",
    Outcome.FRESH_SHARED: "new: shared",
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
