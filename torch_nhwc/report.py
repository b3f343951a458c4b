"""The report: what was done to every site and its companions, and the way back."""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from torch_nhwc import wrapping
from torch_nhwc.commit import Edit, commit
from torch_nhwc.companions import Followers, find_companions, followers_of
from torch_nhwc.ops import Outcome, lay_out_weights_
from torch_nhwc.planning import Plan, Strides, canonical_strides, match, render
from torch_nhwc.reasons import Reason
from torch_nhwc.text import amount, paragraphs

_FRESH = (Outcome.FRESH, Outcome.FRESH_HELD, Outcome.FRESH_FOREIGN, Outcome.FRESH_SHARED)


class CompanionRow(NamedTuple):
    """What was done to a gradient, a state of an optimizer or an averaged copy."""

    site: str
    """The full name of its weight."""
    label: str
    """`grad`, `ema`, `ema.grad`, or the name that the optimizer gives to its state."""
    outcome: Outcome | None
    """`None` where it stays as it is, and after a dry run."""
    reason: Reason | None
    """Why it stays as it is."""


class Before(NamedTuple):
    """What a conversion changes, as it was. Holds models, optimizers and tensors weakly."""

    model: "weakref.ref[nn.Module]"
    followers: Callable[[], Followers]
    strides: dict[int, Strides | None]
    """Of the weights, by the index of their site. `None` for those that had no shape yet."""
    companions: dict[int, tuple[TensorWeakRef, Strides]]
    """The strides of the companions, by the identity of the tensors."""
    edits: tuple[Edit, ...]

    @staticmethod
    def layouts(tensors: Iterable[Tensor]) -> dict[int, tuple[TensorWeakRef, Strides]]:
        """What `companions` is to hold; without expanded tensors, whose strides cannot be brought back."""
        return {id(tensor): (TensorWeakRef(tensor), tensor.stride()) for tensor in tensors if 0 not in tensor.stride()}

    def strides_of(self, companion: Tensor) -> Strides | None:
        """The strides that a companion had; `None` for one that has come since."""
        reference, strides = self.companions.get(id(companion), (None, None))
        return strides if reference is not None and reference() is companion else None


@dataclass(frozen=True)
class Report:
    """What `convert_` did.

    Attributes:
        plan: the decisions as they were carried out.
        outcomes: for each row of the plan, what the operators did to the weight: whether its bytes were reused, or got
            new storage and why. `None` where they were not called.
        remarks: sentences on the whole.
        new_bytes: the new storage that was needed, all of it allocated before any old one is given back; beyond it,
            permuting in place takes room for one filter and thread.
        seconds: of the whole call.
        dry_run: whether nothing was done.
    """

    plan: Plan
    outcomes: tuple[Outcome | None, ...]
    remarks: tuple[str, ...]
    new_bytes: int
    seconds: float
    dry_run: bool
    _companions: tuple[tuple[int, str, Reason | None], ...]
    _companion_outcomes: Mapping[int, Outcome]
    _before: Before | None

    @property
    def companions(self) -> list[CompanionRow]:
        """What happened to gradients, optimizer state and averaged copies, and what stays as it is."""
        names = [row.full_name for row in self.plan.rows]
        kept = None if self.dry_run else Outcome.KEPT
        return [
            CompanionRow(
                names[row],
                label,
                self._companion_outcomes.get(place, kept) if reason is None else None,
                reason,
            )
            for place, (row, label, reason) in enumerate(self._companions)
        ]

    def revert(self, optimizer: Any = None, ema: Any = None) -> None:
        """Lays the present values out in the strides from before the conversion, companions included, all or nothing.

        It never brings back old values. Gradients and state that have come since take the strides of their weight.

        Args:
            optimizer: one or several that the conversion was not told of, such as those made after it.
            ema: averaged copies that the conversion was not told of.

        Raises:
            RuntimeError: the model is gone, or was wrapped or compiled since, or a tensor cannot change, with the
                operators' sentence.
            ValueError: the model's sites are others now, named as in `Plan.apply`.
        """
        if self._before is None:
            return
        model = self._before.model()
        if model is None:
            raise RuntimeError("Report.revert: the model is gone")
        followers = self._followers(optimizer, ema)
        sites = match(self.plan, model, any_dtype=True)
        followers.check_optimizers(model, (site.tensor for site in sites))
        weights: list[tuple[int, str, Tensor]] = []
        for index in self._before.strides:
            reason = sites[index].reason
            if reason in wrapping.REASONS:
                raise RuntimeError(f"Report.revert: {sites[index].full_name!r}: {reason.value}")
            tensor = sites[index].tensor
            if tensor is not None:
                weights.append((index, sites[index].full_name, tensor))
        wanted = {
            index: self._before.strides[index] or canonical_strides(tensor.shape, False) for index, _, tensor in weights
        }
        tensors = [tensor for _, _, tensor in weights]
        strides = [wanted[index] for index, _, _ in weights]
        for companion in find_companions(weights, followers):
            if companion.reason is None:
                tensors.append(companion.tensor)
                strides.append(self._before.strides_of(companion.tensor) or wanted[companion.row])
        edits = [edit.reverse for edit in reversed(self._before.edits)]
        commit(tensors, partial(lay_out_weights_, tensors, strides), edits)

    def _followers(self, optimizer: Any, ema: Any) -> Followers:
        assert self._before is not None
        known, joined = self._before.followers(), followers_of(optimizer, ema)
        return Followers(known.optimizers + joined.optimizers, known.copies + joined.copies)

    def to_json(self) -> str:
        """The report as JSON text."""
        rows = [
            {"outcome": outcome.name if outcome is not None else None, **row}
            for outcome, row in zip(self.outcomes, json.loads(self.plan.to_json())["rows"])
        ]
        companions = [
            {
                "site": each.site,
                "label": each.label,
                "outcome": each.outcome.name if each.outcome is not None else None,
                "reason": each.reason.name if each.reason is not None else None,
            }
            for each in self.companions
        ]
        return json.dumps(
            {
                "memory_format": self.plan.memory_format,
                "digest": self.plan.digest,
                "dry_run": self.dry_run,
                "new_bytes": self.new_bytes,
                "seconds": self.seconds,
                "remarks": self.remarks,
                "rows": rows,
                "companions": companions,
            },
            indent=1,
        )

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
        return render(self.plan.rows, self.plan.memory_format, what, done) + paragraphs(lines)


_WORDS = {
    Outcome.KEPT: "kept",
    Outcome.RESTRIDED: "restrided",
    Outcome.REUSED: "permuted in place",
    Outcome.FRESH: "in new storage",
    Outcome.FRESH_HELD: "in new storage (something else holds the old one)",
    Outcome.FRESH_FOREIGN: "in new storage (the old memory is foreign)",
    Outcome.FRESH_SHARED: "in new storage (no longer shared with other processes)",
}


def expect_plan(plan: Plan) -> None:
    """Raises a TypeError for anything but a plan, such as a report."""
    if not isinstance(plan, Plan):
        hint = ": pass report.plan" if isinstance(plan, Report) else ""
        raise TypeError(f"expected a Plan, got {type(plan).__name__}{hint}")


_SHORT = {
    Outcome.REUSED: "in place",
    Outcome.FRESH: "new",
    Outcome.FRESH_HELD: "new: held",
    Outcome.FRESH_FOREIGN: "new: foreign",
    Outcome.FRESH_SHARED: "new: shared",
}


def new_bytes(tensors: list[Tensor], outcomes: list[Outcome]) -> int:
    """The bytes of the tensors that got new storage, exact aliases once."""
    return sum(
        {tensor.data_ptr(): tensor.nbytes for tensor, outcome in zip(tensors, outcomes) if outcome in _FRESH}.values()
    )
