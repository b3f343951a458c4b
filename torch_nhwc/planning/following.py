"""Who follows the weights, and which weights stay for the sake of what cannot."""

from typing import Any, NamedTuple

import torch
from torch import nn

from torch_nhwc.entries import expect_hookable
from torch_nhwc.finding.site import Found
from torch_nhwc.formats import CONTIGUOUS, is_permuted
from torch_nhwc.hooks import state_dict_hook_key
from torch_nhwc.memory import place_of
from torch_nhwc.modules import optimizers
from torch_nhwc.planning.companions import Companion, Sources, Weight, find_companions, held_by
from torch_nhwc.planning.deciding import Decision, outcomes_of
from torch_nhwc.planning.entry import Entry, decide_entries, decide_inputs, remark_on_inputs
from torch_nhwc.planning.layers import LayerDecision
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.exchange import is_exchanged
from torch_nhwc.reasons import Reason
from torch_nhwc.rendering import amount
from torch_nhwc.running.trial import raises_on_channels_last

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
    trains: bool
    """Whether the model does, as far as its tensors say."""
    entries: list[Entry]
    """The modules whose hooks for their inputs change."""


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
        reason = Reason.PER_SAMPLE_GRADIENTS
        if any(site.reason is reason for site in found.sites):
            raise RuntimeError(f"torch_nhwc: input_format: {reason.value}")
    sources.check_optimizers(found.model, (site.tensor for site in found.sites))
    remarks = []
    for optimizer in (each for given in sources.optimizers for each in optimizers.with_inner(given)):
        remark = f"{type(optimizer).__name__}: {Reason.VIEWS_PARAMETERS.value}"
        if remark not in remarks and _takes_views(optimizer, decisions):
            remarks.append(remark)
        flattens = optimizers.flattens_parameters(optimizer)
        if request.format.is_channels_last and (flattens or optimizers.keeps_buckets(optimizer)):
            held = held_by(optimizer)
            reason = Reason.FLATTENING_OPTIMIZER if flattens else Reason.BUCKET_VIEW
            for decision in decisions:
                is_slice = not flattens and decision.reason is Reason.PART_OF_LARGER_STORAGE
                if (is_slice or decision.action is Action.CONVERT) and id(decision.site.tensor) in held:
                    decision.keep(Action.REFUSE, reason)
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
    inputs = decide_inputs(found.model, decisions, request)
    entries = decide_entries(found.model, inputs, request)
    exchanged = [decision for decision in decisions if decision.action is Action.EACH_FORWARD]
    if request.format.is_channels_last and (exchanged or any(decision.changes for decision in decisions)):
        remarks += [reason.value for reason in _losing_norms(found, layers, request)]
    is_saved_as_it_is = state_dict_hook_key(found.model) is None
    if _has_ranks() and is_saved_as_it_is and any(_is_permuted(decision) for decision in decisions):
        remarks.append(Reason.BROADCAST.value)
    if exchanged or request.each_forward == "keep":
        remarks.append(_memory_of(decisions, request))
    if request.entries:
        remarks.append(
            f"forward pre-hooks bring the inputs of {len(request.entries)} modules into a format: plan.entries"
        )
    if request.input_format:
        remarks.append(remark_on_inputs(found.model, inputs))
    has_new_hook = any(entry.wanted is not None for entry in entries)
    if has_new_hook or exchanged or any(layer.action is Action.EXCHANGE for layer in layers):
        remarks.append(Reason.SAVED_WHOLE.value)
    if request.preserve and any(issubclass(each, torch.jit.ScriptModule) for each in found.module_types):
        remarks.append(Reason.SCRIPTED_LAYERS.value)
    return Following(
        found.model, sources, decisions, companions, remarks, layers, found.module_types, found.trains, entries
    )


def _is_permuted(decision: Decision) -> bool:
    return decision.takes_part and is_permuted(decision.tensor.shape, decision.strides or ())


def _has_ranks() -> bool:
    """Whether this is one of several processes of a group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _takes_views(optimizer: Any, decisions: list[Decision]) -> bool:
    """Whether an optimizer takes views that channels-last weights do not have, as far as can be known."""
    if not optimizers.is_from_elsewhere(optimizer):
        return False
    ranks = {decision.site.rank for decision in decisions if decision.action is Action.CONVERT}
    tried = [raises_on_channels_last(optimizer, rank) for rank in ranks]
    guess = optimizers.calls_view(type(optimizer)) if None in tried else False  # type: ignore[arg-type, unused-ignore]
    return guess or any(tried)


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
    # A gradient or a state goes with its weight, whatever that weight's format is.
    formats = [
        CONTIGUOUS if each.weight.strides == CONTIGUOUS.strides(each.tensor.shape) else request.format for each in apart
    ]
    for companion, outcome in zip(apart, outcomes_of([each.tensor for each in apart], request, formats)):
        if outcome is None or outcome.is_refusal:
            companion.reason = Reason.STATE_IN_THE_WAY
            stuck.append(companion)
        else:
            companion.outcome = outcome
    return stuck
