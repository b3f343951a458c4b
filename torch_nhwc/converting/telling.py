"""What a conversion tells besides its report: warnings, which `strict` may make errors."""

from collections.abc import Sequence

from torch_nhwc.converting.preparing import Changes
from torch_nhwc.finding.held import Contents, StateDict
from torch_nhwc.finding.site import Found
from torch_nhwc.formats import Format
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.companions import Weight
from torch_nhwc.planning.deciding import Decision, outcomes_of
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.rendering import NOTHING_IN_A_FILE, SEEN_BY_EXAMPLE
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason
from torch_nhwc.rendering import first_of, warn
from torch_nhwc.stepping.guard import is_guarded


def tell_refused(decisions: Sequence[Decision], strict: bool) -> None:
    """Of the weights that should change and cannot."""
    by_reason: dict[Reason, list[str]] = {}
    for decision in decisions:
        if decision.action is Action.REFUSE and decision.reason is not None:
            name = f"{decision.site.full_name!r} ({decision.site.layer})"
            by_reason.setdefault(decision.reason, []).append(name)
    if by_reason:
        sentences = [f"{first_of(names)}: {reason.value}" for reason, names in by_reason.items()]
        count = sum(map(len, by_reason.values()))
        _tell(f"{count} of {len(decisions)} sites stay as they are: {'; '.join(sentences)}", strict)


def tell_nothing_found(found: Found, following: Following, request: Request, changes: Changes, strict: bool) -> None:
    """Where no weight is of the rank that was asked for, unless layers are exchanged, or become what they were."""
    ranks = {decision.site.rank for decision in following.decisions}
    is_back = bool(changes.edits) and not request.format.is_channels_last
    if any(map(request.format.serves, ranks)) or any(layer.row.is_wanted for layer in following.layers) or is_back:
        return
    if isinstance(found.model, (Contents, StateDict)):
        _tell(f"nothing to convert: {NOTHING_IN_A_FILE}", strict)
        return
    why = f"no 2D or 3D convolution was found{'' if found.observed else f'. {SEEN_BY_EXAMPLE}'}"
    if ranks:
        rank, name = max(ranks), request.format.name
        why = (
            f"its convolutions are {rank - 2}D: ask for {Format(None).name_at(rank)}, or for no format, not for {name}"
        )
    _tell(f"nothing to convert in the {type(found.model).__name__}: {why}", strict)


def tell_unnamed(following: Following) -> None:
    """Weights that have gradients train, and the state of an optimizer that was not given stays behind."""
    moved = [each for each in following.decisions if each.action is Action.CONVERT and each.changes]
    trains = any(each.tensor.grad is not None for each in moved)
    if trains and following.sources.is_optimizer_unknown:
        steps = "is right only by the guard at its step" if is_guarded() else "steps silently wrong"
        _tell(
            "the weights have gradients, and no optimizer was given: the state of one stays as it is, with which it is "
            f"slower, and a fused one on a CPU {steps}. Give it as optimizer=..., or optimizer=() where there is none"
        )


def tell_differing(remarks: Sequence[str], strict: bool) -> None:
    """Of what `verify` has found to differ."""
    if remarks:
        _tell("; ".join(remarks), strict)


def tell_unshared(weights: Sequence[Weight], wanted: Format) -> None:
    """Of the weights that need new storage on their way to a format because other processes share theirs."""
    outcomes = outcomes_of([weight.tensor for weight in weights], Request(wanted))
    names = [repr(weight.name) for weight, outcome in zip(weights, outcomes) if outcome is Outcome.FRESH_SHARED]
    if names:
        _tell(
            f"{first_of(names)} will no longer be in shared memory: other processes that have the model keep the "
            "memory of before, and neither see what is trained here nor train what is here. Convert, and revert, "
            "before sharing the model and before starting processes"
        )


def _tell(message: str, strict: bool = False) -> None:
    if strict:
        raise RuntimeError(f"torch_nhwc: {message} (nothing was changed, since strict=True)")
    warn(f"torch_nhwc: {message}")
