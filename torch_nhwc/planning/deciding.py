"""What is to happen to every site: by what kind of site it is, and by what the operators say of its tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.each_forward.exchange import is_in_each_forward, is_pickled_otherwise
from torch_nhwc.finding.layers import is_layer
from torch_nhwc.finding.site import Found, Site
from torch_nhwc.formats import Format, Strides
from torch_nhwc.memory import is_fake, place_of, tied_by_view
from torch_nhwc.modules import computed, wrapping
from torch_nhwc.ops import convert_weight, plan_weights
from torch_nhwc.outcomes import Outcome, Storage
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action, PlanRow, as_text, as_tuple
from torch_nhwc.reasons import CONTIGUOUS_ONLY, Kind, Reason


@dataclass(slots=True)
class Decision:
    """What is to happen to one site, and in the end what has happened to it."""

    site: Site
    action: Action
    reason: Reason | None
    strides: Strides | None
    """Those that the weight is to have, now or once it can; `None` where it is not to change."""
    outcome: Outcome | None
    """What the operators are to do to the weight, and then what they did; `None` where they are not called."""

    @property
    def tensor(self) -> Tensor:
        """The weight, of a site that has one."""
        assert self.site.tensor is not None
        return self.site.tensor

    @property
    def changes(self) -> bool:
        """Whether the operators are to be called."""
        return self.outcome is not None

    @property
    def waits(self) -> bool:
        """Whether it is done once there is a weight."""
        return self.reason is Reason.LAZY and self.action is Action.CONVERT

    @property
    def is_in_each_forward(self) -> bool:
        """Whether the weight is to be converted in each forward, or is so already."""
        return self.action is Action.EACH_FORWARD or self.reason is Reason.IN_EACH_FORWARD

    @property
    def takes_part(self) -> bool:
        """Whether the site is in the format or will be: its companions are looked after, also where it is in order."""
        return (
            self.strides is not None
            and self.action is not Action.REFUSE
            and self.reason not in (Reason.FAKE, Reason.TIED)
        )

    def keep(self, action: Action, reason: Reason | None) -> None:
        """Leaves the site as it is."""
        self.action, self.reason, self.outcome = action, reason, None

    @property
    def row(self) -> PlanRow:
        """The decision as a plan has it, with the strides that the weight has at the time."""
        site, tensor = self.site, self.site.tensor
        if tensor is None:
            nothing = (None, site.groups, None, None, None, None, 0)
            return PlanRow(site.path, site.name, site.layer, site.rank, *nothing, self.action, self.reason)
        strides = tensor.stride() if tensor.layout == torch.strided else None  # a sparse one has none
        return PlanRow(
            site.path,
            site.name,
            site.layer,
            site.rank,
            as_tuple(tensor.shape),
            site.groups,
            as_text(tensor.dtype),
            as_text(tensor.device),
            self.strides if self.strides == strides else strides,  # one tuple rather than two
            self.strides,
            tensor.nbytes if self.action is Action.CONVERT else 0,
            self.action,
            self.reason,
        )


# Tuples: the members of an enumeration compare fast and hash slowly.
_CHANGES = (Action.CONVERT, Action.RESTRIDE)
# Refused for the sake of companions that are not known when a plan is applied again.
_FOR_COMPANIONS = (Reason.FLATTENING_OPTIMIZER, Reason.BUCKET_VIEW, Reason.STATE_IN_THE_WAY)
# Why the operators refuse, as a reason.
_REFUSALS = {outcome: Reason[outcome.name] for outcome in Outcome if outcome.name in Reason.__members__}
# Those that stand against converting a weight in each forward, too.
_NOT_SEEN_IN_FORWARD = (
    *(Reason.NO_WEIGHT, Reason.PACKED, Reason.FROZEN, Reason.COMPILED, Reason.UNSUPPORTED),
    Reason.PER_SAMPLE_GRADIENTS,
)


def decide(found: Found, request: Request, plan: Plan | None = None) -> list[Decision]:
    """What is to happen to every site.

    Args:
        found: in a model.
        request: what is asked for.
        plan: whose rows are those of the sites, and which says what is to change; what can be done is decided anew.
    """
    sites, wanted = _with_bars(found, request), request.format
    formats = [site.format(wanted) for site in sites]
    there = [(site.tensor, each) for site, each in zip(sites, formats) if site.tensor is not None]
    outcomes = iter(outcomes_of([tensor for tensor, _ in there], request, [each for _, each in there]))
    first: dict[int, Decision] = {}  # of the sites of one tensor, by its identity
    remarks: dict[int, Reason | None] = {}  # on computed weights, by the identity of their layer
    each_forward = [row.is_in_each_forward for row in plan.rows] if plan else [bool(request.each_forward)] * len(sites)
    decisions = []
    for site, own_format, in_each_forward in zip(sites, formats, each_forward):
        tensor, reason = site.tensor, site.reason
        outcome = None if tensor is None else next(outcomes)
        is_kept = tensor is not None and outcome is Outcome.KEPT and _stays(found, site, tensor)
        earlier = None if tensor is None else first.get(id(tensor))
        strides = None if tensor is None else own_format.strides(tensor.shape)
        # What was not asked for has no strides to get, and neither have its companions.
        if not wanted.serves(site.rank):
            action, reason, strides = Action.KEEP, Reason.OTHER_RANK, None
        elif reason is not None and reason.kind is Kind.KEPT:
            action, strides = Action.KEEP, None
        elif wanted.is_channels_last and is_in_each_forward(type(site.module)):
            action, reason, strides = Action.KEEP, Reason.IN_EACH_FORWARD, None
        elif in_each_forward and own_format != wanted and outcome is Outcome.KEPT:
            action, reason, strides = Action.KEEP, Reason.ONE_CHANNEL, None
        elif in_each_forward:
            (action, reason), strides = _judge_layer(site), None
        elif reason is Reason.LAZY:
            action = Action.CONVERT if wanted.is_channels_last else Action.KEEP
        elif tensor is None or (reason is not None and reason.kind is Kind.REFUSED):
            if reason is Reason.TIED_BY_VIEW and outcome is Outcome.PART_OF_LARGER_STORAGE:
                reason = Reason.PART_OF_LARGER_STORAGE
            is_in_format = is_kept and reason not in CONTIGUOUS_ONLY
            action, reason = (Action.KEEP, Reason.IN_FORMAT) if is_in_format else (Action.REFUSE, reason)
        elif earlier is not None:
            is_refused = earlier.action is Action.REFUSE
            action, reason = (earlier.action, earlier.reason) if is_refused else (Action.KEEP, Reason.TIED)
        elif is_kept and site.name == "weight":
            action, reason = Action.KEEP, reason or Reason.IN_FORMAT
        else:
            action, reason = _judge(site, tensor, outcome, own_format, remarks)
        if own_format != wanted and strides is not None and reason in (None, Reason.IN_FORMAT):
            reason = Reason.ONE_CHANNEL
        decision = Decision(site, action, reason, strides, outcome if action in _CHANGES else None)
        if tensor is not None and earlier is None:
            first[id(tensor)] = decision
        decisions.append(decision)
    _keep_aliases(decisions)
    for planned, decision in zip(plan.rows if plan else (), decisions):
        if not (planned.is_wanted or planned.is_in_each_forward) or planned.reason in _FOR_COMPANIONS:
            decision.keep(planned.action, planned.reason)
            decision.strides = planned.target_strides
    return decisions


def _keep_aliases(decisions: list[Decision]) -> None:
    """Has what the operators refuse keep all others over the same memory, which would come apart from it."""
    refused = {
        place_of(each.site.tensor): each.reason
        for each in decisions
        if each.action is Action.REFUSE and each.site.tensor is not None
    }
    for each in decisions if refused else ():
        if each.action in _CHANGES and each.site.tensor is not None:
            reason = refused.get(place_of(each.site.tensor))
            if reason is not None:
                each.keep(Action.REFUSE, reason)


def _with_bars(found: Found, request: Request) -> Sequence[Site]:
    """The sites, each with the reason that keeps it: what keeps a site keeps all others over the same memory."""
    sites: Sequence[Site] = found.sites
    if request.filter_fn is not None or request.differing:
        bars = [request.bar(site.module, site.path) for site in sites]
        sites = [site if bar is None else site.because(bar) for site, bar in zip(sites, bars)]
    if not request.format.is_channels_last:
        sites = [site.because(None) if site.reason in CONTIGUOUS_ONLY else site for site in sites]
    tied = tied_by_view(found.tensors, [site.tensor for site in sites])
    if tied:
        sites = [
            site.because(Reason.TIED_BY_VIEW)
            if id(site.tensor) in tied and (site.reason is None or site.reason.kind is Kind.REMARK)
            else site
            for site in sites
        ]
    barred = {
        place_of(site.tensor): site.reason
        for site in sites
        if site.tensor is not None and site.reason is not None and site.reason.kind is not Kind.REMARK
    }
    if not barred:
        return sites
    return [
        site if site.tensor is None else site.because(barred.get(place_of(site.tensor), site.reason)) for site in sites
    ]


def _stays(found: Found, site: Site, tensor: Tensor) -> bool:
    """Whether forward sees a weight in the strides that it has here, as far as is known."""
    is_offloaded = site.reason is Reason.OFFLOADED or wrapping.is_offloaded(site.module, tensor)
    return not is_offloaded or wrapping.strides_put_back(found.model, site.full_name, tensor) in (None, tensor.stride())


def _judge(
    site: Site, tensor: Tensor, outcome: Outcome | None, wanted: Format, remarks: dict[int, Reason | None]
) -> tuple[Action, Reason | None]:
    """What an outcome of `plan_weights` means for a site."""
    if outcome is None:
        return Action.REFUSE, Reason.UNSUPPORTED
    if outcome is Outcome.TRACED:
        return (Action.KEEP, Reason.FAKE) if is_fake(tensor) else (Action.REFUSE, Reason.SUBCLASS)
    if outcome.is_refusal:
        return Action.REFUSE, _REFUSALS[outcome]
    if wrapping.is_offloaded(site.module, tensor):
        return Action.REFUSE, Reason.OFFLOADED
    remark = site.reason
    if remark is None and site.name != "weight" and computed.is_original(site.module, site.name):
        if id(site.module) not in remarks:
            remarks[id(site.module)] = computed.remark_on(site.module, site.rank, wanted)
        remark = remarks[id(site.module)]
        if remark is Reason.COMPUTED:
            return Action.REFUSE, remark
    if outcome is Outcome.KEPT:
        return Action.KEEP, remark or Reason.IN_FORMAT
    if remark is None and 0 in tensor.stride():
        remark = Reason.OVERLAPPING
    if outcome is Outcome.RESTRIDED:
        return Action.RESTRIDE, Reason.META if tensor.is_meta else remark
    return Action.CONVERT, remark


def _judge_layer(site: Site) -> tuple[Action, Reason | None]:
    """Whether a layer can convert its weight in each forward."""
    tensor, reason = site.tensor, site.reason
    if reason in _NOT_SEEN_IN_FORWARD:
        return Action.REFUSE, reason
    is_replaced = not {"forward", "_conv_forward"}.isdisjoint(vars(site.module))
    if not is_layer(site.module) or is_replaced or is_pickled_otherwise(type(site.module)):
        return Action.REFUSE, Reason.ON_THE_FLY if reason is Reason.ON_THE_FLY else Reason.NOT_EXCHANGEABLE
    if tensor is not None and tensor.layout is not torch.strided:
        return Action.REFUSE, Reason.UNSUPPORTED
    is_ours = tensor is None or type(tensor) in (Tensor, nn.Parameter) or reason in wrapping.REASONS
    return (Action.EACH_FORWARD, None) if is_ours or _is_taken(tensor) else (Action.REFUSE, Reason.SUBCLASS)


def _is_taken(tensor: Any) -> bool:
    """Whether the class of a tensor takes the operator: what tells is to try."""
    try:
        convert_weight(tensor.detach())
    except Exception:
        return False
    return True


def outcomes_of(
    tensors: list[Tensor], request: Request, formats: Sequence[Format] | None = None
) -> list[Outcome | None]:
    """What the operators would do to each tensor, in a format of its own where `formats` has them.

    `None` for one that they do not take.
    """
    if not tensors:
        return []
    own = list(set(formats or ())) or [request.format]
    if formats is None or len(own) == 1:
        return _planned(tensors, own[0], request.storage)
    outcomes: list[Outcome | None] = [None] * len(tensors)
    for wanted in own:
        places = [place for place, each in enumerate(formats) if each == wanted]
        for place, outcome in zip(places, _planned([tensors[place] for place in places], wanted, request.storage)):
            outcomes[place] = outcome
    return outcomes


def _planned(tensors: list[Tensor], wanted: Format, storage: Storage) -> list[Outcome | None]:
    try:
        return list(plan_weights(tensors, wanted.for_operators, storage=storage))
    except (RuntimeError, NotImplementedError):
        if len(tensors) == 1:
            return [None]
        half = len(tensors) // 2
        return [each for part in (tensors[:half], tensors[half:]) for each in _planned(part, wanted, storage)]
