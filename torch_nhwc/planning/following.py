"""Who follows the weights, and which weights stay for the sake of what cannot."""

from typing import NamedTuple

import torch
from torch import nn

from torch_nhwc.finding.site import Found
from torch_nhwc.hooks import expect_hookable
from torch_nhwc.memory import place_of
from torch_nhwc.modules import optimizers
from torch_nhwc.planning.companions import Companion, Sources, Weight, find_companions, held_by
from torch_nhwc.planning.deciding import Decision, Request, outcomes_of
from torch_nhwc.planning.layers import LayerDecision
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.exchange import is_exchanged
from torch_nhwc.reasons import Reason
from torch_nhwc.text import amount

_NORMS: dict[Reason, tuple[type, ...]] = {
    Reason.INSTANCE_NORM: (nn.InstanceNorm2d, nn.InstanceNorm3d),
    Reason.GROUP_NORM: (nn.GroupNorm,),
}


class Following(NamedTuple):
    """All that is decided of a conversion."""

    model: nn.Module
    sources: Sources
    decisions: list[Decision]
    companions: list[Companion]
    remarks: list[str]
    """Sentences on the whole."""
    layers: list[LayerDecision]
    module_types: set[type]
    """The classes of the model's modules."""


def follow(
    found: Found, decisions: list[Decision], layers: list[LayerDecision], sources: Sources, request: Request
) -> Following:
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
        if not request.each_forward and optimizers.views_parameters(optimizer):
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
    exchanged = [decision for decision in decisions if decision.action is Action.EACH_FORWARD]
    if request.format.is_channels_last and (exchanged or any(decision.changes for decision in decisions)):
        remarks += [reason.value for reason in _losing_norms(found, layers, request)]
    if exchanged or request.each_forward == "keep":
        remarks.append(_memory_of(decisions, request))
    if exchanged or any(layer.action is Action.EXCHANGE for layer in layers):
        remarks.append(Reason.SAVED_WHOLE.value)
    if request.preserve and any(issubclass(each, torch.jit.ScriptModule) for each in found.module_types):
        remarks.append(Reason.SCRIPTED_LAYERS.value)
    return Following(found.model, sources, decisions, companions, remarks, layers, found.module_types)


def _memory_of(decisions: list[Decision], request: Request) -> str:
    """What it takes to convert weights in each forward."""
    of_layers = [each.site.tensor for each in decisions if each.is_in_each_forward]
    weights = {id(tensor): tensor.nbytes for tensor in of_layers if tensor is not None}
    size = f"up to {amount(sum(weights.values()))}"
    kept = f", and {size} are kept beside them by a forward without" if request.each_forward == "keep" else ""
    return f"converted in each forward: {size} of new memory, until the backward where there are gradients{kept}"


def _losing_norms(found: Found, layers: list[LayerDecision], request: Request) -> list[Reason]:
    """Why norms that stay as they are will go wrong."""
    stay = {type(each.layer.module) for each in layers if each.action is Action.KEEP}
    types = [each for each in (stay if request.preserve else found.module_types) if not is_exchanged(each)]
    return [reason for reason, norms in _NORMS.items() if any(issubclass(each, norms) for each in types)]


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
