"""Who follows the weights, and which weights stay for the sake of what cannot."""

from typing import NamedTuple

from torch import nn

from torch_nhwc.finding.site import Found
from torch_nhwc.hooks import expect_hookable
from torch_nhwc.memory import place_of
from torch_nhwc.modules import optimizers
from torch_nhwc.planning.companions import Companion, Sources, Weight, find_companions, held_by
from torch_nhwc.planning.deciding import Decision, Request, outcomes_of
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason

_INSTANCE_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)


class Following(NamedTuple):
    """All that is decided of a conversion."""

    model: nn.Module
    sources: Sources
    decisions: list[Decision]
    companions: list[Companion]
    remarks: list[str]
    """Sentences on the whole."""


def follow(found: Found, decisions: list[Decision], sources: Sources, request: Request) -> Following:
    """What goes with the weights; a site whose companions cannot follow is refused.

    Raises:
        ValueError: an optimizer or an averaged copy is that of another model.
        RuntimeError: a format of the inputs is asked for, and the model takes no hook.
    """
    if request.input_format:
        expect_hookable(found.model)
    sources.check_optimizers(found.model, (site.tensor for site in found.sites))
    remarks = []
    for optimizer in sources.optimizers:
        if optimizers.views_parameters(optimizer):
            remarks.append(f"{type(optimizer).__name__}: {Reason.VIEWS_PARAMETERS.value}")
        if request.format.is_channels_last and optimizers.flattens_parameters(optimizer):
            held = held_by(optimizer)
            for decision in decisions:
                if decision.action is Action.CONVERT and id(decision.site.tensor) in held:
                    decision.keep(Action.REFUSE, Reason.FLATTENING_OPTIMIZER)
    weights = [
        Weight(decision.site.full_name, decision.tensor, decision.strides or ())
        for decision in decisions
        if decision.takes_part
    ]
    companions = find_companions(weights, sources)
    stuck = _foresee(companions, request)
    if stuck:
        # Two parameters over one storage change together or not at all.
        places = {place_of(companion.weight.tensor) for companion in stuck}
        refused = set()
        for decision in decisions:
            is_with_them = decision.takes_part and place_of(decision.tensor) in places
            if is_with_them and decision.action is not Action.KEEP:
                decision.keep(Action.REFUSE, Reason.STATE_IN_THE_WAY)
                refused.add(decision.site.full_name)
        companions = [companion for companion in companions if companion.weight.name not in refused]
    has_instance_norm = any(issubclass(each, _INSTANCE_NORMS) for each in found.module_types)
    if has_instance_norm and request.format.is_channels_last and any(decision.changes for decision in decisions):
        remarks.append(Reason.INSTANCE_NORM.value)
    return Following(found.model, sources, decisions, companions, remarks)


def _foresee(companions: list[Companion], request: Request) -> list[Companion]:
    """Notes what the operators are to do to each companion; those that should change and cannot."""
    apart, stuck = [], []
    for companion in companions:
        if companion.reason is None and companion.tensor.stride() != companion.weight.strides:
            apart.append(companion)
        elif companion.reason is Reason.STATE_IN_THE_WAY:
            stuck.append(companion)
    for companion, outcome in zip(apart, outcomes_of([each.tensor for each in apart], request)):
        if outcome is None or outcome.is_refusal:
            companion.reason = Reason.STATE_IN_THE_WAY
            stuck.append(companion)
        else:
            companion.outcome = outcome
    return stuck
