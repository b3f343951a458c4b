"""The warnings of a conversion, which `strict` turns into errors."""

from collections.abc import Sequence

from torch import Tensor

from torch_nhwc.converting.edits import Edit
from torch_nhwc.layout import Format
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.deciding import Decisions, outcomes_of
from torch_nhwc.planning.rows import Action, PlanRow
from torch_nhwc.planning.summaries import SEEN_BY_EXAMPLE
from torch_nhwc.rendering import first_of, warn
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.step_guard import is_guarded


def warn_refused(rows: Sequence[PlanRow], strict: bool) -> None:
    """Warn about weights that should change and cannot."""
    by_reason: dict[Reason, list[str]] = {}
    for row in rows:
        if row.action is Action.REFUSE and row.reason is not None:
            by_reason.setdefault(row.reason, []).append(f"{row.full_name!r} ({row.layer})")
    if by_reason:
        sentences = [f"{first_of(names)}: {reason.value}" for reason, names in by_reason.items()]
        count = sum(map(len, by_reason.values()))
        _warn(f"{count} of {len(rows)} sites stay as they are: {'; '.join(sentences)}", strict)


def warn_nothing_found(decisions: Decisions, edits: Sequence[Edit], strict: bool) -> None:
    """Warn if there is no weight of a requested rank, unless layers are replaced or restored."""
    wanted, ranks = decisions.options.format, {row.rank for row in decisions.rows}
    is_back = bool(edits) and not wanted.is_channels_last
    if is_back or any(map(wanted.serves, ranks)) or any(row.is_wanted for _, row in decisions.layers):
        return
    found = decisions.found
    why = f"no 2D or 3D convolution was found{'' if found.observed else f'. {SEEN_BY_EXAMPLE}'}"
    if ranks:
        rank = max(ranks)
        instead = Format(None).name_at(rank)
        why = f"its convolutions are {rank - 2}D: pass {instead!r}, or no format, instead of {wanted.name!r}"
    _warn(f"nothing to convert in the {type(found.model).__name__}: {why}", strict)


def warn_unknown_optimizer(decisions: Decisions) -> None:
    """Warn if weights that move have gradients, and the state of an optimizer that was not given stays as it is."""
    if not decisions.sources.is_optimizer_unknown:
        return
    if any(row.action is Action.CONVERT and tensor.grad is not None for _, row, tensor in decisions.changing):
        steps = "is right only thanks to the step guard" if is_guarded() else "gives wrong updates, silently"
        _warn(
            "the weights have gradients, and no optimizer was given: its state, if there is one, stays as it is, with "
            f"which steps are slower, and a fused one on a CPU {steps}. Pass optimizer=..., or optimizer=() if there "
            "is none"
        )


def warn_unshared(weights: Sequence[tuple[str, Tensor]], wanted: Format) -> None:
    """Warn about weights that get new storage because other processes share theirs."""
    outcomes = outcomes_of([tensor for _, tensor in weights], [wanted] * len(weights), "auto")
    names = [repr(name) for (name, _), outcome in zip(weights, outcomes) if outcome is Outcome.COPIED_SHARED]
    if names:
        _warn(
            f"{first_of(names)} will no longer be in shared memory: other processes that have the model keep the old "
            "memory, so that neither side sees what the other trains. Convert, and revert, before sharing the model "
            "and before starting processes"
        )


def _warn(message: str, strict: bool = False) -> None:
    if strict:
        raise RuntimeError(f"torch_nhwc: {message} (nothing was changed, since strict=True)")
    warn(f"torch_nhwc: {message}")
