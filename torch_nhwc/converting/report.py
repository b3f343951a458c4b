"""The report: what was done to every site and its companions, and the way back."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_nhwc import serialization
from torch_nhwc.converting.edits import Undo
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.plans import NEW_STORAGE, CompanionRow, Plan, PlanRow, full_table, render, summary
from torch_nhwc.rendering import amount, several


@dataclass(frozen=True, repr=False)
class Report:
    """A report says what `convert_` did, and can undo it.

    Attributes:
        plan: The plan that was carried out; its rows have the outcomes.
        companions: What was done to gradients, optimizer state and averaged copies, and what stays as it is.
        remarks: Sentences on the whole model.
        new_bytes: The new storage that was needed. On a CPU it is allocated in stages of 8 MB or one tensor, and each
            stage releases the old storage before the next; permuting in place takes memory for one filter per thread.
        seconds: The time of the whole call.

    Example:
        >>> report = torch_nhwc.convert_(torch.nn.Conv2d(3, 8, 3))
        >>> report.outcomes
        (<Outcome.IN_PLACE: 2>,)
    """

    plan: Plan
    companions: tuple[CompanionRow, ...]
    remarks: tuple[str, ...]
    new_bytes: int
    seconds: float
    _undo: Undo | None = field(default=None, compare=False, metadata={"json": False})
    """`None` in copies."""

    @property
    def model(self) -> nn.Module | None:
        """The converted model, while it exists; `None` in copies."""
        return None if self._undo is None else self._undo.model()

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The plan's rows, each with its outcome; their strides are those from before."""
        return self.plan.rows

    @property
    def outcomes(self) -> tuple[Outcome | None, ...]:
        """What the operators did to the weight of each row; `None` where they were not called."""
        return tuple(row.outcome for row in self.plan.rows)

    def revert(self, optimizer: Any = None, ema: Any = None) -> None:
        """Restore the strides from before the conversion, companions included, all or nothing.

        Replaced layers get their original classes back, and hooks are removed. Values stay the present ones. Gradients
        and state that have come since get the strides of their weight.

        Args:
            optimizer: One or several that the conversion did not know, for example because they were made after it.
            ema: Averaged copies that the conversion did not know.

        Warns:
            UserWarning: Weights leave shared memory.

        Raises:
            RuntimeError: The model no longer exists, or was wrapped or compiled since; the report is a deep copy or was
                loaded, and belongs to no model; or the operators refuse a tensor, and their error says why.
            ValueError: The model has other sites than before; the first one that differs is named.

        Example:
            >>> layer = torch.nn.Conv2d(3, 8, 3)
            >>> torch_nhwc.convert_(layer).revert()
            >>> layer.weight.is_contiguous()
            True
        """
        if self._undo is None:
            raise RuntimeError(
                "Report.revert: this report is a copy, or was loaded, and belongs to no model: only the original can "
                "revert; convert_(model, torch.contiguous_format) makes any model contiguous"
            )
        self._undo.revert(self.plan, self.companions, optimizer, ema)

    def to_json(self) -> str:
        """Return the report as JSON text, for `from_json`."""
        return serialization.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote. It belongs to no model, so that it cannot revert.

        Raises:
            ValueError: The text is not such a report.
        """
        return serialization.from_json(cls, text, lambda report: report.plan.options())

    def table(self) -> str:
        """Return a line for every site and every layer that loses channels-last, as text that fits the terminal."""
        return full_table(self.rows, self.plan.layers)

    def __str__(self) -> str:
        return render(self.plan, is_done=True, lines=self._lines())

    def _lines(self) -> list[str]:
        """Return what there is to say besides the rows."""
        lines: list[str] = []
        kinds = Counter((each.label.split(".")[0], each.reason) for each in self.companions)
        follow = ", ".join(f"{count} {label}" for (label, reason), count in kinds.items() if reason is None)
        if follow:
            lines.append(f"Following their weights: {follow}.")
        for (label, reason), count in kinds.items():
            if reason is not None:
                lines.append(f"{count} {label} kept: {reason.value}.")
        return [*lines, *self._new_storage(), *self.remarks]

    def _new_storage(self) -> Iterator[str]:
        """Yield which weights got new storage, and why; nothing if all bytes were permuted in their own."""
        if not self.new_bytes:
            return
        counts = Counter(outcome for outcome in self.outcomes if outcome in NEW_STORAGE)
        weights = [
            f"{several(counts[each], 'weight')}{f' ({why})' if why else ''}"
            for each, (_, why) in NEW_STORAGE.items()
            if counts[each]
        ]
        size = f"{amount(self.new_bytes)} of new storage"
        yield f"{size}: {', '.join(weights)}." if weights else f"{size}."

    def __repr__(self) -> str:
        return f"<Report: {summary(self.plan.rows, self.plan.memory_format, is_done=True)}>"
