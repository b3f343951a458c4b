"""The report: what was done to every site and its companions, and the way back."""

import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torch_nhwc import serialization
from torch_nhwc.converting.edits import Edit, commit, restoring_edits, warn_unshared
from torch_nhwc.layout import CONTIGUOUS, Strides, tied_by_view
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.companions import Sources, Weight, find_companions, sources_of
from torch_nhwc.planning.deciding import Decisions, match
from torch_nhwc.planning.plans import Action, CompanionRow, Plan, PlanRow, full_table, render, summary
from torch_nhwc.rendering import amount
from torch_nhwc.sites import wrappers as wrapping
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found
from torch_nhwc.step_guard import leave_as_loaded


class Undo(NamedTuple):
    """What a conversion changes, as it was. Holds models, optimizers and tensors weakly."""

    model: "weakref.ref[nn.Module]"
    sources: Callable[[], Sources]
    strides: dict[str, Strides | None]
    """The weights' strides by full name; `None` for contiguous ones: there were none, or elements overlapped."""
    companions: MutableMapping[Tensor, Strides]
    """The strides of those companions that differed from their weight's; the others go back with it."""
    edits: list[Edit]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave `None` in deep copies and pickles of a report: they belong to no model."""
        return type(None), ()

    @classmethod
    def of(cls, decisions: Decisions, edits: list[Edit]) -> "Undo":
        """Note everything that is about to change."""
        followed = {companion.weight.name for companion in decisions.companions if companion.changes}
        strides: dict[str, Strides | None] = {}
        for row in decisions.rows:
            name = row.full_name
            if row.action in (Action.CONVERT, Action.RESTRIDE) or name in followed:
                strides[name] = None if row.reason is Reason.OVERLAPPING else row.strides
        apart: MutableMapping[Tensor, Strides] = WeakTensorKeyDictionary()
        for companion in decisions.companions if strides else ():
            own = companion.tensor.stride()
            # The strides of expanded tensors cannot be restored.
            if companion.reason is None and own != companion.weight.tensor.stride() and 0 not in own:
                apart[companion.tensor] = own
        return cls(weakref.ref(decisions.found.model), decisions.sources.weakly(), strides, apart, edits)

    def revert(self, plan: Plan, optimizer: Any, ema: Any) -> None:
        """Do what `Report.revert` says."""
        model = self.model()
        if model is None:
            raise RuntimeError("Report.revert: the model no longer exists")
        given = sources_of(optimizer, ema, model)
        sources = self.sources().joined(given)
        # If only layers were replaced, the sites need not be found: a wrapper may have moved the layers since.
        found = match(plan, model, any_dtype=True) if self.strides or not self.edits else Found(model, [], set(), [])
        sources.check_optimizers(model, (site.tensor for site in found.sites))
        weights = self._weights(found)
        warn_unshared(
            [(each.name, each.tensor) for each in weights if each.tensor.stride() != each.strides], CONTIGUOUS
        )
        companions = [each for each in find_companions(weights, sources) if each.reason is None]
        tensors = [weight.tensor for weight in weights] + [companion.tensor for companion in companions]
        strides = [weight.strides for weight in weights]
        strides += [self.companions.get(companion.tensor, companion.weight.strides) for companion in companions]
        # An optimizer goes on aligning what it loads: that may be a checkpoint from before the revert.
        edits = [edit.reverse for edit in reversed(self.edits) if edit.back is not leave_as_loaded]
        swapped = [row.path for row in plan.layers if row.action is Action.EXCHANGE]
        swapped += [row.path for row in plan.rows if row.action is Action.EACH_FORWARD]
        edits += restoring_edits(dict.fromkeys(swapped), given)
        commit(tensors, strides, edits)

    def _weights(self, found: Found) -> list[Weight]:
        """Return the weights to revert, with the strides from before; raise a RuntimeError for one that cannot be."""
        tied = tied_by_view(found.tensors, [site.tensor for site in found.sites])
        weights = []
        for site in found.sites:
            if site.full_name not in self.strides:
                continue
            reason = site.reason
            if id(site.tensor) in tied:
                reason = Reason.TIED_BY_VIEW
            elif site.tensor is not None and wrapping.is_offloaded(site.module, site.tensor):
                reason = Reason.OFFLOADED
            if reason and reason in (Reason.OFFLOADED, Reason.TIED_BY_VIEW, *wrapping.REASONS):
                raise RuntimeError(f"Report.revert: {site.full_name!r}: {reason.value}")
            if site.tensor is not None:
                before = self.strides[site.full_name] or CONTIGUOUS.strides(site.tensor.shape)
                weights.append(Weight(site.full_name, site.tensor, before))
        return weights


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
            optimizer: One or several that the conversion did not know, such as those made after it.
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
        self._undo.revert(self.plan, optimizer, ema)

    def to_json(self) -> str:
        """Return the report as JSON text, for `from_json`."""
        return serialization.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote. It belongs to no model, so that it cannot revert.

        Raises:
            ValueError: The text is not such a report.
        """
        report = serialization.from_json(cls, text)
        try:
            report.plan.options()
        except (TypeError, ValueError) as error:
            raise ValueError(f"Report.from_json: expected what Report.to_json writes: {error}") from error
        return report

    def table(self) -> str:
        """Return a line for every site and every layer that loses channels-last, as text that fits the terminal."""
        return full_table(self.rows, self.plan.layers)

    def __str__(self) -> str:
        plan = self.plan
        return render(plan.rows, plan.layers, plan.memory_format, True, plan.observed, self._lines())

    def _lines(self) -> list[str]:
        """Return what there is to say besides the rows."""
        lines: list[str] = []
        where = Counter(outcome for outcome in self.outcomes if outcome in _WHERE)
        if where:
            lines.append(f"Moved: {', '.join(f'{where[each]} {_WHERE[each]}' for each in sorted(where))}.")
        kinds = Counter((each.label.split(".")[0], each.reason) for each in self.companions)
        follow = ", ".join(f"{count} {label}" for (label, reason), count in kinds.items() if reason is None)
        if follow:
            lines.append(f"With the strides of their weights: {follow}.")
        for (label, reason), count in kinds.items():
            if reason is not None:
                lines.append(f"{count} {label} left: {reason.value}.")
        new = f"{amount(self.new_bytes)} of new storage" if self.new_bytes else "No new storage"
        took = f"{self.seconds:.1f} s" if self.seconds >= 1 else f"{self.seconds * 1e3:.1f} ms"
        return [*lines, *self.remarks, f"{new}, {took}."]

    def __repr__(self) -> str:
        return f"<Report: {summary(self.plan.rows, self.plan.memory_format, is_done=True)}>"


_WHERE = {
    Outcome.IN_PLACE: "in place",
    Outcome.COPIED: "to new storage",
    Outcome.COPIED_HELD: "to new storage (something else holds the old one)",
    Outcome.COPIED_FOREIGN: "to new storage (the old memory is foreign)",
    Outcome.COPIED_SHARED: "to new storage (no longer shared with other processes)",
}
