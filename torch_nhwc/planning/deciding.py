"""What happens to every site of a model, and to all that goes with it, decided before anything changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_nhwc.layout import (
    Format,
    Strides,
    is_fake,
    memory_id,
    tied_by_view,
)
from torch_nhwc.nn.class_swap import is_pickled_otherwise
from torch_nhwc.nn.each_forward import is_in_each_forward, views_weight
from torch_nhwc.nn.hooks import InputHook
from torch_nhwc.ops import Outcome, Storage, convert_weight, plan_weights
from torch_nhwc.planning.companions import NO_SOURCES, Companion, Sources, Weight, find_companions, sources_of
from torch_nhwc.planning.faults import loses_gradient
from torch_nhwc.planning.matching import match_layers
from torch_nhwc.planning.plans import (
    Action,
    FilterFunction,
    LayerRow,
    Options,
    Plan,
    PlanRow,
    Preserve,
    as_text,
    in_vain,
)
from torch_nhwc.planning.remarks import decide_input_hook, remarks_on, replaced_layers
from torch_nhwc.rendering import warn
from torch_nhwc.sites import computed_weights, wrappers
from torch_nhwc.sites.finding import find, is_layer
from torch_nhwc.sites.reasons import CONTIGUOUS_ONLY, Kind, Reason
from torch_nhwc.sites.site import Found, ReplaceableLayer, Site


def plan(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: Preserve = True,
    each_forward: bool = False,
) -> Plan:
    """Plan what a conversion would do to every convolution weight of a model, without writing anything.

    The arguments are those of `convert_`, which does what the plan says, and so does `convert_(model, plan=plan)`. A
    weight whose optimizer state cannot follow is refused. On `example_inputs` the model runs once, under `no_grad` and
    in its own mode, and every parameter that reaches a convolution as its weight is a site; buffers and random
    generators are restored afterwards.

    Raises:
        ValueError, TypeError: An argument is not valid, or an optimizer or an averaged copy is another model's.
        RuntimeError: `input_format` for a TorchScript module, which takes no hook.

    Warns:
        UserWarning: `memory_format`, `filter_fn` or `input_format` leaves nothing to convert.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> plan.bytes_to_move
        864
    """
    options = Options.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
    found = find(model, example_inputs)
    planned = decide(found, options, sources_of(optimizer, ema, model), with_gradients=False).plan
    for sentence in in_vain(planned, f"the {type(model).__name__}"):
        warn(f"torch_nhwc: {sentence}")
    return planned


def decide(
    found: Found,
    options: Options,
    sources: Sources = NO_SOURCES,
    plan: Plan | None = None,
    with_gradients: bool = True,
) -> "Decisions":
    """Decide what happens to every site, and to what goes with it; nothing is written.

    With a plan, `found` is what `match` returned for it, and what can be done is decided again. A plan has no rows for
    gradients, and does without them by `with_gradients=False`: the operators refuse a weight whose gradient cannot
    follow in any case.
    """
    sources.check_optimizers((*found.tensors, *found.weights))
    rows, outcomes = _decide_sites(found, options, plan)
    _refuse_for_optimizers(found.sites, rows, options, sources)
    has_companions = with_gradients or sources.optimizers or sources.copies or options.storage == "reuse"
    companions = _decide_companions(found.sites, rows, options, sources) if has_companions else []
    layers = _decide_layers(found, options, plan)
    replaced = replaced_layers(layers)
    for site, row in zip(found.sites, rows):
        if row.reason is Reason.COMPUTED_IN_FORWARD and id(site.module) in replaced:
            row.reason = None  # a replaced layer converts what it computes
    hook = decide_input_hook(found, options, layers)
    remarks = remarks_on(found, options, rows, layers, hook)
    decisions = Decisions(found, options, sources, rows, outcomes, companions, layers, hook, remarks)
    remarks[:0] = in_vain(decisions.plan, "the model")
    return decisions


@dataclass
class Decisions:
    """All that a conversion is to do, with the tensors and modules that it concerns."""

    found: Found
    options: Options
    sources: Sources
    rows: list[PlanRow]
    """One for each of `found.sites`."""
    outcomes: list[Outcome | None]
    """What the operators would do to the weight of each site; `None` where they do not take it."""
    companions: list[Companion]
    layers: list[tuple[ReplaceableLayer, LayerRow]]
    input_hook: InputHook | None
    """The hook for its inputs that the model is to have."""
    remarks: list[str]
    """Sentences on the whole model."""

    @property
    def plan(self) -> Plan:
        """The part that can be kept, compared and applied."""
        options, layers = self.options, tuple(row for _, row in self.layers)
        formats = options.format.name, options.storage, options.input_format
        return Plan(tuple(self.rows), *formats, layers, options.preserve, self.found.observed)

    @cached_property
    def changing(self) -> list[tuple[Site, PlanRow, Tensor]]:
        """The sites whose weights the operators are called for."""
        pairs = zip(self.found.sites, self.rows)
        return [(site, row, site.tensor) for site, row in pairs if site.tensor is not None and row.changes]

    def leaving(self) -> list[tuple[Site, Outcome]]:
        """Return the sites whose weights get memory of their own, and why: the present one is shared, or a part."""
        moving = [
            (site, site.tensor)
            for site, row, outcome in zip(self.found.sites, self.rows, self.outcomes)
            if outcome in _NEW_STORAGE and row.changes and site.tensor is not None
        ]
        if not moving:
            return []
        formats = [self.options.format] * len(moving)
        outcomes = outcomes_of([tensor for _, tensor in moving], formats, "auto")
        return [(site, outcome) for (site, _), outcome in zip(moving, outcomes) if outcome in _LEAVES]

    def held(self) -> list[Companion]:
        """Return the companions that get new memory, while something else holds the present one."""
        moving = [each for each in self.companions if each.changes and each.outcome is not Outcome.IN_PLACE]
        return held_among(moving)


def held_among(companions: Sequence[Companion]) -> list[Companion]:
    """Return those of some companions that would leave memory which something else holds."""
    companions = [each for each in companions if not each.tensor._is_view()]  # a view holds its base itself
    formats = [each.weight.format for each in companions]
    outcomes = outcomes_of([each.tensor for each in companions], formats, "auto")
    return [each for each, outcome in zip(companions, outcomes) if outcome is Outcome.COPIED_HELD]


_NEW_STORAGE = (Outcome.COPIED, Outcome.COPIED_SHARED)
# Memory that others see, or that is more than the weight's.
_LEAVES = (Outcome.COPIED_SHARED, Outcome.PART_OF_LARGER_STORAGE)


def outcomes_of(tensors: Sequence[Tensor | None], formats: Sequence[Format], storage: Storage) -> list[Outcome | None]:
    """Return what the operators would do to each tensor in its format; `None` for one that they do not take."""
    outcomes: list[Outcome | None] = [None] * len(tensors)
    for wanted in set(formats):
        pairs = enumerate(zip(tensors, formats))
        some = {index: tensor for index, (tensor, own) in pairs if tensor is not None and own == wanted}
        for index, outcome in zip(some, _in_one_format(list(some.values()), wanted, storage)):
            outcomes[index] = outcome
    return outcomes


def _in_one_format(tensors: list[Tensor], wanted: Format, storage: Storage) -> list[Outcome | None]:
    try:
        return list(plan_weights(tensors, wanted.for_operators, storage=storage))
    except (RuntimeError, NotImplementedError):
        if len(tensors) == 1:
            return [None]
        half = len(tensors) // 2
        return [each for part in (tensors[:half], tensors[half:]) for each in _in_one_format(part, wanted, storage)]


def _decide_sites(found: Found, options: Options, plan: Plan | None) -> tuple[list[PlanRow], list[Outcome | None]]:
    """Return a row for each site, and what the operators would do to each weight."""
    wanted, sites = options.format, found.sites
    formats = [site.format(wanted) for site in sites]
    outcomes = outcomes_of(found.weights, formats, options.storage)
    tied = tied_by_view(found.tensors, found.weights)
    first: dict[int, PlanRow] = {}  # the first row of each tensor
    remarks: dict[int, Reason | None] = {}
    rows: list[PlanRow] = []
    for index, (site, own, outcome) in enumerate(zip(sites, formats, outcomes)):
        tensor, key = site.tensor, id(site.tensor)
        planned = plan.rows[index] if plan else None
        reason = options.skip_reason(site.module, site.path) or site.reason
        if reason in CONTIGUOUS_ONLY and not wanted.is_channels_last:
            reason = None
        if key in tied and (reason is None or reason.kind is Kind.REMARK):
            reason = Reason.TIED_BY_VIEW
        in_each_forward = planned.is_in_each_forward if planned else options.each_forward
        if wanted.is_channels_last and reason is None and site.name == "weight" and views_weight(site.module):
            in_each_forward = True
        if planned and planned.reason not in _FROM_OPTIMIZERS and (planned.is_wanted or in_each_forward):
            planned = None
        earlier = None if tensor is None else first.get(key)
        if planned:
            action = Action.REFUSE if planned.action is Action.REFUSE else Action.KEEP
            row = _row_of(site, action, planned.reason, planned.target_strides)
        else:
            case = _Case(found, site, tensor, wanted, own, outcome, reason, earlier, remarks)
            row = _row_of(site, *_by_tables(case, in_each_forward))
        if tensor is not None and earlier is None:
            first[key] = row
        rows.append(row)
    _refuse_together(sites, rows)
    return rows, outcomes


def _row_of(site: Site, action: Action, reason: Reason | None, target: Strides | None) -> PlanRow:
    """Return the row of a site, with what is decided about it."""
    tensor = site.tensor
    if tensor is None:
        nothing = (None, site.groups, None, None, None, None, 0)
        return PlanRow(site.path, site.name, site.layer, site.rank, *nothing, action, reason)
    strides = tensor.stride() if tensor.layout is torch.strided else None  # a sparse one has none
    return PlanRow(
        site.path,
        site.name,
        site.layer,
        site.rank,
        tuple(tensor.shape),
        site.groups,
        as_text(tensor.dtype),
        as_text(tensor.device),
        target if target == strides else strides,  # one tuple rather than two
        target,
        tensor.nbytes if action is Action.CONVERT else 0,
        action,
        reason,
    )


@dataclass(slots=True)
class _Case:
    """A site, and what the tables of decisions ask about it."""

    found: Found
    site: Site
    tensor: Any
    """The site's tensor, or `None`."""
    wanted: Format
    """The requested format."""
    own: Format
    """What the requested format amounts to for this site."""
    outcome: Outcome | None
    """What the operators would do to the tensor; `None` where they do not take it."""
    reason: Reason | None
    """What stands against converting, or a remark."""
    earlier: PlanRow | None
    """The row of an earlier site with the same tensor."""
    remarks: dict[int, Reason | None]
    """Remarks on computed weights, by the id of their layer."""

    @property
    def is_against(self) -> bool:
        return self.tensor is None or (self.reason is not None and self.reason.kind is Kind.REFUSED)

    @property
    def is_in_format(self) -> bool:
        """Return whether forward sees the weight in the format, as far as is known."""
        site, tensor = self.site, self.tensor
        if tensor is None or self.outcome is not Outcome.UNCHANGED:
            return False
        # Offloading restores strides that cannot be seen.
        return site.reason is not Reason.OFFLOADED and not wrappers.is_offloaded(site.module, tensor)

    @property
    def is_swappable(self) -> bool:
        """Return whether the layer's class can become one that converts its weight in each forward."""
        module = self.site.module
        is_replaced = not {"forward", "_conv_forward"}.isdisjoint(vars(module))
        return is_layer(module) and not is_replaced and not is_pickled_otherwise(type(module))

    @property
    def takes_operator(self) -> bool:
        """Return whether the operator can convert the tensor in each forward; for a subclass, that is tried."""
        if self.tensor is None or type(self.tensor) in (Tensor, nn.Parameter) or self.reason in wrappers.REASONS:
            return True
        try:
            convert_weight(self.tensor.detach())
        except Exception:
            return False
        return True

    @property
    def kept_reason(self) -> Reason:
        """The reason for a weight that stays because it is in its format."""
        return Reason.IN_FORMAT if self.own == self.wanted else Reason.ONE_CHANNEL

    @property
    def remark(self) -> Reason | None:
        """What to know about a weight that changes, or is in the format."""
        known = self.reason or self.computed_remark or (Reason.OVERLAPPING if 0 in self.tensor.stride() else None)
        return known or (None if self.own == self.wanted else Reason.ONE_CHANNEL)

    @property
    def computed_remark(self) -> Reason | None:
        """What to know about a weight that is computed from this tensor."""
        site, key = self.site, id(self.site.module)
        if site.name == "weight" or self.reason or not computed_weights.is_original(site.module, site.name):
            return None
        if key not in self.remarks:
            self.remarks[key] = computed_weights.remark_on(site.module, site.rank, self.own)
        return self.remarks[key]


_Rule = tuple[Callable[[Any], bool], Action, Callable[[Any], Reason | None] | Reason | None]

# Reasons that come from optimizers, which need not be the same when a plan is applied again.
_FROM_OPTIMIZERS = (Reason.FLATTENING_OPTIMIZER, Reason.BUCKET_VIEW, Reason.STATE_IN_THE_WAY)
# Reasons against converting in each forward, too.
_NOT_IN_EACH_FORWARD = (
    *(Reason.NO_WEIGHT, Reason.PACKED, Reason.FROZEN, Reason.COMPILED, Reason.UNSUPPORTED),
    Reason.PER_SAMPLE_GRADIENTS,
)
# Why the operators refuse, as a reason.
_REFUSALS: dict[Outcome | None, Reason] = {
    each: Reason[each.name] for each in Outcome if each.is_refusal and each.name in Reason.__members__
}
# Rows with these reasons have no target.
_NOT_REQUESTED = (Reason.OTHER_RANK, Reason.FILTERED, Reason.IN_EACH_FORWARD)

# The tables of decisions: the first condition that holds says what happens to a site, and why. A reason may be a
# function of the case.
_Rules = tuple[_Rule, ...]
_REQUESTED: _Rules = (
    (lambda c: not c.wanted.serves(c.site.rank), Action.KEEP, Reason.OTHER_RANK),
    (lambda c: c.reason is Reason.FILTERED, Action.KEEP, Reason.FILTERED),
    (
        lambda c: c.wanted.is_channels_last and is_in_each_forward(type(c.site.module)),
        Action.KEEP,
        Reason.IN_EACH_FORWARD,
    ),
)
_WITH_REASON: _Rules = (
    (lambda c: c.reason is Reason.LAZY and c.wanted.is_channels_last, Action.CONVERT, Reason.LAZY),
    (lambda c: c.reason is Reason.LAZY, Action.KEEP, Reason.LAZY),
    (
        lambda c: c.is_against and c.is_in_format and c.reason not in CONTIGUOUS_ONLY,
        Action.KEEP,
        lambda c: c.kept_reason,
    ),
    (
        lambda c: c.reason is Reason.TIED_BY_VIEW and c.outcome is Outcome.PART_OF_LARGER_STORAGE,
        Action.REFUSE,
        Reason.PART_OF_LARGER_STORAGE,
    ),
    (lambda c: c.is_against, Action.REFUSE, lambda c: c.reason),
)
_OF_SHARED_TENSORS: _Rules = (
    (lambda c: c.earlier.action is Action.REFUSE, Action.REFUSE, lambda c: c.earlier.reason),
    (lambda c: True, Action.KEEP, Reason.TIED),
)
_OF_TENSORS: _Rules = (
    (lambda c: wrappers.is_offloaded(c.site.module, c.tensor), Action.REFUSE, Reason.OFFLOADED),
    (lambda c: c.computed_remark is Reason.COMPUTED, Action.REFUSE, Reason.COMPUTED),
)
# By what the operators would do.
_BY_OUTCOME: dict[Outcome | None, _Rules] = {
    None: ((lambda c: True, Action.REFUSE, Reason.UNSUPPORTED),),
    Outcome.TRACED: (
        (lambda c: is_fake(c.tensor), Action.KEEP, Reason.FAKE),
        (lambda c: True, Action.REFUSE, Reason.SUBCLASS),
    ),
    Outcome.UNCHANGED: (
        (lambda c: c.site.name == "weight" and c.is_in_format, Action.KEEP, lambda c: c.reason or c.kept_reason),
        *_OF_TENSORS,
        (lambda c: True, Action.KEEP, lambda c: c.remark or Reason.IN_FORMAT),
    ),
    Outcome.RESTRIDED: (
        *_OF_TENSORS,
        (lambda c: c.tensor.is_meta, Action.RESTRIDE, Reason.META),
        (lambda c: True, Action.RESTRIDE, lambda c: c.remark),
    ),
    **{outcome: ((lambda c: True, Action.REFUSE, reason),) for outcome, reason in _REFUSALS.items()},
}
_OF_ANY_OTHER_OUTCOME: _Rules = (*_OF_TENSORS, (lambda c: True, Action.CONVERT, lambda c: c.remark))
_IN_EACH_FORWARD: _Rules = (
    (lambda c: c.own != c.wanted and c.outcome is Outcome.UNCHANGED, Action.KEEP, Reason.ONE_CHANNEL),
    (lambda c: c.reason in _NOT_IN_EACH_FORWARD, Action.REFUSE, lambda c: c.reason),
    (lambda c: c.reason is Reason.ON_THE_FLY and not c.is_swappable, Action.REFUSE, Reason.ON_THE_FLY),
    (lambda c: not c.is_swappable, Action.REFUSE, Reason.NOT_REPLACEABLE),
    (lambda c: c.tensor is not None and c.tensor.layout is not torch.strided, Action.REFUSE, Reason.UNSUPPORTED),
    (lambda c: not c.takes_operator, Action.REFUSE, Reason.SUBCLASS),
    (lambda c: True, Action.EACH_FORWARD, None),
)


@cache
def _rules_for(in_each_forward: bool, has_reason: bool, is_shared: bool, outcome: Outcome | None) -> _Rules:
    if in_each_forward:
        return _REQUESTED + _IN_EACH_FORWARD
    against = (_WITH_REASON if has_reason else ()) + (_OF_SHARED_TENSORS if is_shared else ())
    return _REQUESTED + against + _BY_OUTCOME.get(outcome, _OF_ANY_OTHER_OUTCOME)


def _by_tables(case: _Case, in_each_forward: bool) -> tuple[Action, Reason | None, Strides | None]:
    """Return what happens to a site, why, and the strides that its weight should have."""
    has_reason = case.reason is not None or case.tensor is None
    for rule in _rules_for(in_each_forward, has_reason, case.earlier is not None, case.outcome):
        if rule[0](case):
            break
    _, action, why = rule
    reason = why(case) if callable(why) else why
    has_target = not in_each_forward and reason not in _NOT_REQUESTED
    return action, reason, case.own.strides(case.tensor.shape) if has_target and case.tensor is not None else None


def _refuse_together(sites: Sequence[Site], rows: Sequence[PlanRow]) -> None:
    """Leave all weights as they are that share their memory with one that stays, and would part from it."""
    staying = {
        memory_id(site.tensor): row
        for site, row in zip(sites, rows)
        if site.tensor is not None and (row.action is Action.REFUSE or row.reason is Reason.FILTERED)
    }
    for site, row in zip(sites, rows) if staying else ():
        other = None if site.tensor is None else staying.get(memory_id(site.tensor))
        if other is not None and (row.changes or row.reason is Reason.TIED):
            row.refuse(other.reason, other.action)
            row.target_strides = None if other.reason is Reason.FILTERED else row.target_strides


def _refuse_for_optimizers(sites: Sequence[Site], rows: Sequence[PlanRow], options: Options, sources: Sources) -> None:
    """Refuse the weights of optimizers that need contiguous ones."""
    if not options.format.is_channels_last:
        return
    for reason, held in sources.needing_contiguous():
        for site, row in zip(sites, rows):
            is_slice = reason is Reason.BUCKET_VIEW and row.reason is Reason.PART_OF_LARGER_STORAGE
            if (is_slice or row.action is Action.CONVERT) and id(site.tensor) in held:
                row.refuse(reason)


def _decide_companions(
    sites: Sequence[Site], rows: Sequence[PlanRow], options: Options, sources: Sources
) -> list[Companion]:
    """Return what follows the weights, and refuse each weight whose companions should change and cannot."""
    has_sources = bool(sources.optimizers or sources.copies)
    weights = [
        Weight(row.full_name, site.tensor, row.target_strides, site.format(options.format), row.strides)
        for site, row in zip(sites, rows)
        if site.tensor is not None
        and row.target_strides is not None
        and row.takes_part
        and (has_sources or site.tensor.grad is not None)
    ]
    if not weights:
        return []
    companions = find_companions(weights, sources)
    apart = [each for each in companions if each.reason is None and each.tensor.stride() != each.weight.strides]
    formats = [each.weight.format for each in apart]
    for companion, outcome in zip(apart, outcomes_of([each.tensor for each in apart], formats, options.storage)):
        if outcome is None or outcome.is_refusal:
            companion.reason = Reason.STATE_IN_THE_WAY
        else:
            companion.outcome = outcome
    # Two parameters over one storage change together or not at all.
    places = {memory_id(each.weight.tensor) for each in companions if each.reason is Reason.STATE_IN_THE_WAY}
    refused = set()
    for site, row in zip(sites, rows) if places else ():
        is_stuck = site.tensor is not None and row.takes_part and memory_id(site.tensor) in places
        if is_stuck and row.action is not Action.KEEP:
            row.refuse(Reason.STATE_IN_THE_WAY)
            refused.add(row.full_name)
    return [companion for companion in companions if companion.weight.name not in refused]


def _decide_layers(found: Found, options: Options, plan: Plan | None) -> list[tuple[ReplaceableLayer, LayerRow]]:
    """Return the layers that lose channels-last or are wrong there, and what happens to each."""
    if not options.format.is_channels_last:
        return []
    if found.sites and not any(options.format.serves(site.rank) for site in found.sites):
        return []  # of a model of the other rank nothing was requested
    planned = {row.path: row for row in plan.layers} if plan else {}
    decided = []
    for layer in match_layers(plan, found) if plan else found.layers:
        reason, row, fault = layer.reason, planned.get(layer.path), None
        if row is None and layer.gains_here is not None and (plan or not layer.gains_here or not found.sites):
            continue  # without a convolution there is no model of ours
        if not options.preserve:
            if reason in (None, Reason.REPLACED) and loses_gradient(layer.module):
                fault = Reason.STRIDED_POINTWISE
            elif row is None:
                continue
        if row is not None and not (row.is_wanted or row.reason is Reason.OTHER_DEVICE):
            reason = row.reason
        elif reason is None:
            reason = options.skip_reason(layer.module, layer.path)
        action = Action.KEEP if reason else Action.REPLACE
        if row is not None and row.action is Action.REPLACE:  # a plan was perhaps made in training mode
            fault = row.reason
        decided.append((layer, LayerRow(layer.path, layer.kind, layer.gains, action, reason or fault)))
    return decided
