"""What happens to every site of a model, and to all that goes with it, decided before anything changes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_nhwc.layout import (
    CHANNELS_LAST,
    Format,
    Strides,
    is_fake,
    is_permuted,
    known_strides,
    memory_id,
    tied_by_view,
)
from torch_nhwc.nn.class_swap import is_pickled_otherwise
from torch_nhwc.nn.each_forward import is_in_each_forward
from torch_nhwc.nn.hooks import InputHook, expect_hookable, input_hook, state_dict_hook_key
from torch_nhwc.nn.replacements import (
    ALWAYS_REPLACED,
    has_taps,
    is_preserving,
    meets_small_input_rule,
)
from torch_nhwc.ops import Outcome, Storage, convert_weight, plan_weights
from torch_nhwc.planning.companions import NO_SOURCES, Companion, Sources, Weight, find_companions, sources_of
from torch_nhwc.planning.plans import Action, FilterFunction, LayerRow, Options, Plan, PlanRow, as_text, expect_plan
from torch_nhwc.rendering import amount
from torch_nhwc.sites import computed_weights, wrappers
from torch_nhwc.sites.finding import MEASURED_DEVICES, ReplaceableLayer, find, find_replaceable_layers, is_layer
from torch_nhwc.sites.reasons import CONTIGUOUS_ONLY, Kind, Reason
from torch_nhwc.sites.site import Found, Site


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
    preserve: bool = True,
    each_forward: bool = False,
) -> Plan:
    """Plan what a conversion would do to every convolution weight of a model, without writing anything.

    `convert_` with the same arguments does what the plan says, and so does `convert_(model, plan=plan)`.

    Args:
        model: Any module, TorchScript modules included, or one layer.
        memory_format: As in `convert_`, and so are all others.
        optimizer: One or several, whose state would follow. A weight whose state cannot follow is refused.
        ema: One or several averaged copies that would follow.
        filter_fn: Called as `filter_fn(module, path)`; if it returns false, the layer is left out.
        example_inputs: The model runs once on them, under `no_grad` and in its own mode, and every parameter that
            reaches a convolution as its weight is a site; buffers and random generators are restored afterwards.
        storage: As in `convert_weights_`; `None` is `"auto"`.
        input_format: The format of the inputs that a hook would convert.
        preserve: Whether layers that lose channels-last would be replaced.
        each_forward: Whether layers would convert their weights in each forward.

    Raises:
        ValueError, TypeError: An argument is not valid, or an optimizer or an averaged copy is another model's.
        RuntimeError: `input_format` for a TorchScript module, which takes no hook.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> plan.bytes_to_move
        864
    """
    options = Options.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
    found = find(model, example_inputs)
    return decide(found, options, sources_of(optimizer, ema, model), with_gradients=False).plan


def decide(
    found: Found,
    options: Options,
    sources: Sources = NO_SOURCES,
    plan: Plan | None = None,
    with_gradients: bool = True,
) -> "Decisions":
    """Decide what happens to every site, and to what goes with it; nothing is written.

    With a plan, `found` is what `match` returned for it, and what can be done is decided again. `with_gradients=False`
    is for plans: the operators' answers say already whether a gradient can follow.
    """
    sources.check_optimizers((*found.tensors, *found.weights))
    rows, outcomes = _decide_sites(found, options, plan)
    _refuse_for_optimizers(found.sites, rows, options, sources)
    has_companions = with_gradients or sources.optimizers or sources.copies or options.storage == "reuse"
    companions = _decide_companions(found.sites, rows, options, sources) if has_companions else []
    layers = _decide_layers(found.model, options, plan)
    hook = _decide_input_hook(found, options)
    decisions = Decisions(found, options, sources, rows, outcomes, companions, layers, hook, [])
    decisions.remarks += _remarks(decisions)
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


_NEW_STORAGE = (Outcome.COPIED, Outcome.COPIED_SHARED)
# Memory that others see, or that is more than the weight's.
_LEAVES = (Outcome.COPIED_SHARED, Outcome.PART_OF_LARGER_STORAGE)


def outcomes_of(tensors: Sequence[Tensor | None], formats: Sequence[Format], storage: Storage) -> list[Outcome | None]:
    """Return what the operators would do to each tensor in its format; `None` for one that they do not take."""
    outcomes: list[Outcome | None] = [None] * len(tensors)
    kinds = set(formats)
    present = [each for each in tensors if each is not None]
    if len(kinds) == 1 and len(present) == len(tensors):
        return _in_one_format(present, kinds.pop(), storage)
    for wanted in kinds:
        some = [
            (index, tensor)
            for index, (tensor, own) in enumerate(zip(tensors, formats))
            if tensor is not None and own == wanted
        ]
        for (index, _), outcome in zip(some, _in_one_format([tensor for _, tensor in some], wanted, storage)):
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


# What happens to a weight that nothing stands against, by what the operators would do to it.
_PLAIN: dict[Outcome | None, tuple[Action, Reason | None]] = {
    Outcome.IN_PLACE: (Action.CONVERT, None),
    Outcome.RESTRIDED: (Action.RESTRIDE, None),
    Outcome.UNCHANGED: (Action.KEEP, Reason.IN_FORMAT),
}


def _decide_sites(found: Found, options: Options, plan: Plan | None) -> tuple[list[PlanRow], list[Outcome | None]]:
    """Return a row for each site, and what the operators would do to each weight."""
    wanted, sites = options.format, found.sites
    formats = [site.format(wanted) for site in sites]
    outcomes = outcomes_of(found.weights, formats, options.storage)
    tied = tied_by_view(found.tensors, found.weights)
    has_swapped = any(map(is_in_each_forward, found.module_types))
    ranks = [rank for rank in CHANNELS_LAST if wanted.serves(rank)]
    asks_nothing_else = not (options.filter_fn or options.each_forward or has_swapped)
    first: dict[int, PlanRow] = {}  # the first row of each tensor
    remarks: dict[int, Reason | None] = {}
    rows: list[PlanRow] = []
    for index, (site, own, outcome) in enumerate(zip(sites, formats, outcomes)):
        tensor, key = site.tensor, id(site.tensor)
        planned = plan.rows[index] if plan else None
        # Most weights are plain, and need no table.
        is_plain = asks_nothing_else and own is wanted and site.reason is None and outcome in _PLAIN
        is_plain = is_plain and (planned is None or planned.changes or planned.reason is Reason.IN_FORMAT)
        if is_plain and site.name == "weight" and site.rank in ranks and key not in tied and key not in first:
            weight: Any = tensor
            row = _row(site, *_PLAIN[outcome], known_strides(weight.shape, wanted.is_channels_last))
            if not (weight.is_meta or 0 in weight.stride()):
                first[key] = row
                rows.append(row)
                continue
        reason = options.skip_reason(site.module, site.path) or site.reason
        if reason in CONTIGUOUS_ONLY and not wanted.is_channels_last:
            reason = None
        if key in tied and (reason is None or reason.kind is Kind.REMARK):
            reason = Reason.TIED_BY_VIEW
        in_each_forward = planned.is_in_each_forward if planned else options.each_forward
        if planned and planned.reason not in _FROM_OPTIMIZERS and (planned.is_wanted or in_each_forward):
            planned = None
        earlier = None if tensor is None else first.get(key)
        if planned:
            action = Action.REFUSE if planned.action is Action.REFUSE else Action.KEEP
            row = _row(site, action, planned.reason, planned.target_strides)
        else:
            case = _Case(found, site, tensor, wanted, own, outcome, reason, earlier, remarks)
            row = _row(site, *_by_table(case, _IN_EACH_FORWARD if in_each_forward else _REGULAR))
        if tensor is not None and earlier is None:
            first[key] = row
        rows.append(row)
    _refuse_together(sites, rows)
    return rows, outcomes


def _row(site: Site, action: Action, reason: Reason | None, target: Strides | None) -> PlanRow:
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
    def in_format(self) -> Reason:
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


_Rule = tuple[Callable[[_Case], bool], Action, Callable[[_Case], Reason | None] | Reason | None]

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
_REQUESTED: tuple[_Rule, ...] = (
    (lambda c: not c.wanted.serves(c.site.rank), Action.KEEP, Reason.OTHER_RANK),
    (lambda c: c.reason is Reason.FILTERED, Action.KEEP, Reason.FILTERED),
    (
        lambda c: c.wanted.is_channels_last and is_in_each_forward(type(c.site.module)),
        Action.KEEP,
        Reason.IN_EACH_FORWARD,
    ),
)
_REGULAR: tuple[_Rule, ...] = (
    *_REQUESTED,
    (lambda c: c.reason is Reason.LAZY and c.wanted.is_channels_last, Action.CONVERT, Reason.LAZY),
    (lambda c: c.reason is Reason.LAZY, Action.KEEP, Reason.LAZY),
    (
        lambda c: c.is_against and c.is_in_format and c.reason not in CONTIGUOUS_ONLY,
        Action.KEEP,
        lambda c: c.in_format,
    ),
    (
        lambda c: c.reason is Reason.TIED_BY_VIEW and c.outcome is Outcome.PART_OF_LARGER_STORAGE,
        Action.REFUSE,
        Reason.PART_OF_LARGER_STORAGE,
    ),
    (lambda c: c.is_against, Action.REFUSE, lambda c: c.reason),
    # Sites that share a tensor.
    (
        lambda c: c.earlier is not None and c.earlier.action is Action.REFUSE,
        Action.REFUSE,
        lambda c: c.earlier.reason if c.earlier else None,
    ),
    (lambda c: c.earlier is not None, Action.KEEP, Reason.TIED),
    # What the operators would do.
    (lambda c: c.site.name == "weight" and c.is_in_format, Action.KEEP, lambda c: c.reason or c.in_format),
    (lambda c: c.outcome is None, Action.REFUSE, Reason.UNSUPPORTED),
    (lambda c: c.outcome is Outcome.TRACED and is_fake(c.tensor), Action.KEEP, Reason.FAKE),
    (lambda c: c.outcome is Outcome.TRACED, Action.REFUSE, Reason.SUBCLASS),
    (lambda c: c.outcome in _REFUSALS, Action.REFUSE, lambda c: _REFUSALS[c.outcome]),
    (lambda c: wrappers.is_offloaded(c.site.module, c.tensor), Action.REFUSE, Reason.OFFLOADED),
    (lambda c: c.computed_remark is Reason.COMPUTED, Action.REFUSE, Reason.COMPUTED),
    (lambda c: c.outcome is Outcome.UNCHANGED, Action.KEEP, lambda c: c.remark or Reason.IN_FORMAT),
    (lambda c: c.outcome is Outcome.RESTRIDED and c.tensor.is_meta, Action.RESTRIDE, Reason.META),
    (lambda c: c.outcome is Outcome.RESTRIDED, Action.RESTRIDE, lambda c: c.remark),
    (lambda c: True, Action.CONVERT, lambda c: c.remark),
)
_IN_EACH_FORWARD: tuple[_Rule, ...] = (
    *_REQUESTED,
    (lambda c: c.own != c.wanted and c.outcome is Outcome.UNCHANGED, Action.KEEP, Reason.ONE_CHANNEL),
    (lambda c: c.reason in _NOT_IN_EACH_FORWARD, Action.REFUSE, lambda c: c.reason),
    (lambda c: c.reason is Reason.ON_THE_FLY and not c.is_swappable, Action.REFUSE, Reason.ON_THE_FLY),
    (lambda c: not c.is_swappable, Action.REFUSE, Reason.NOT_EXCHANGEABLE),
    (lambda c: c.tensor is not None and c.tensor.layout is not torch.strided, Action.REFUSE, Reason.UNSUPPORTED),
    (lambda c: not c.takes_operator, Action.REFUSE, Reason.SUBCLASS),
    (lambda c: True, Action.EACH_FORWARD, None),
)


def _by_table(case: _Case, rules: tuple[_Rule, ...]) -> tuple[Action, Reason | None, Strides | None]:
    """Return what happens to a site, why, and the strides that its weight should have."""
    action, why = next((action, why) for condition, action, why in rules if condition(case))
    reason = why(case) if callable(why) else why
    has_target = rules is not _IN_EACH_FORWARD and reason not in _NOT_REQUESTED
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


def _decide_layers(model: nn.Module, options: Options, plan: Plan | None) -> list[tuple[ReplaceableLayer, LayerRow]]:
    """Return the layers that lose channels-last or are wrong there, and what happens to each."""
    if not options.format.is_channels_last:
        return []
    planned = {row.path: row for row in plan.layers} if plan else {}
    decided = []
    for layer in match_layers(plan, model) if plan else find_replaceable_layers(model):
        reason, row = layer.reason, planned.get(layer.path)
        if row is None and not (options.preserve or layer.fault is Reason.STRIDED_POINTWISE):
            continue
        if row is not None and not row.is_wanted:
            reason = row.reason
        elif reason is None:
            reason = options.skip_reason(layer.module, layer.path)
        action = Action.KEEP if reason else Action.EXCHANGE
        # A plan was perhaps made in training mode, and the layer has no fault in evaluation mode.
        planned_fault = row.reason if row is not None and row.action is Action.EXCHANGE else None
        reason = reason or layer.fault or planned_fault
        decided.append((layer, LayerRow(layer.path, layer.kind, layer.loses, action, reason)))
    return decided


def _decide_input_hook(found: Found, options: Options) -> InputHook | None:
    """Return the hook that the model is to have: the present one, with what is requested added, or `None`.

    An input of another rank than the convolutions' is no image or volume, for example a video of `[B, T, C, H, W]` for
    convolutions in 2D. One of one channel stays as it is if a convolution of one channel may take it whose width is
    strided: on some CPUs PyTorch computes those wrong where weight or input are channels-last.
    """
    present = input_hook(found.model)
    if options.input_format is None:
        return present if options.format.is_channels_last else None
    expect_hookable(found.model)
    if any(site.reason is Reason.PER_SAMPLE_GRADIENTS for site in found.sites):
        raise RuntimeError(f"torch_nhwc: input_format: {Reason.PER_SAMPLE_GRADIENTS.value}")
    ranks = ranks_to_bring(options.input_format, options.format)
    sites = [site for site in found.sites if site.rank in ranks]
    if not sites:
        return present
    return InputHook(_ranks_of(sites), _ranks_of(filter(_may_be_wrong_on_one_channel, sites))).joined(present)


def _remark_on_input_hook(model: nn.Module, hook: InputHook | None) -> str:
    """Return what the report says if a format of the inputs is requested."""
    if hook is None:
        return (
            "input_format: no input is converted, since no convolution was found that would take one (example_inputs "
            "show more of them)"
        )
    end = "revert removes it"
    if hook == input_hook(model):
        end = "it was there before, and goes with the revert of the report that it came with"
    ranks = " and ".join(f"{rank}D" for rank in hook.ranks)
    remark = f"input_format: a forward pre-hook converts {ranks} inputs of the {type(model).__name__}; {end}"
    if hook.one_channel_ranks:
        remark += "; inputs of one channel stay as they are, since strided convolutions of one channel may take them"
    return remark


def has_lost_input_hook(model: nn.Module, plan: Plan) -> bool:
    """Return whether a model lacks the hook for its inputs that a plan has."""
    if plan.input_format is None or input_hook(model) is not None:
        return False
    ranks = ranks_to_bring(plan.input_format, Format(plan.memory_format))
    return any(row.rank in ranks for row in plan.rows)


def ranks_to_bring(input_format: str, weights: Format) -> list[int]:
    """Return the ranks of inputs that a format of the inputs means, for weights in a format."""
    of_inputs = Format(None if input_format == "channels_last" else input_format)
    return [rank for rank in CHANNELS_LAST if weights.serves(rank) and of_inputs.serves(rank)]


def _may_be_wrong_on_one_channel(site: Site) -> bool:
    """Return whether a convolution of one group takes one channel and strides over its width, if that is known."""
    strides = getattr(site.module, "stride", None)
    if isinstance(strides, tuple) and strides[-1:] == (1,):
        return False
    if site.tensor is None:
        return True
    channels = getattr(site.module, "in_channels", None)  # a computed weight may come from tensors of other shapes
    has_one = site.tensor.shape[1:2] == (1,) if channels is None else channels == 1
    return bool(has_one) and site.groups <= 1


def _ranks_of(sites: Iterable[Site]) -> tuple[int, ...]:
    return tuple(sorted({site.rank for site in sites}))


_NORMS: dict[Reason, tuple[type, ...]] = {
    Reason.INSTANCE_NORM: (nn.InstanceNorm2d, nn.InstanceNorm3d),
    Reason.GROUP_NORM: (nn.GroupNorm,),
}


def _remarks(decisions: Decisions) -> list[str]:
    """Return what the report says of the whole model."""
    found, options, rows = decisions.found, decisions.options, decisions.rows
    remarks = []
    each_forward = any(row.action is Action.EACH_FORWARD for row in rows)
    if options.format.is_channels_last and (each_forward or any(row.changes for row in rows)):
        remarks += [reason.value for reason in _losing_norms(decisions)]
    is_saved_as_it_is = state_dict_hook_key(found.model) is None
    if _has_ranks() and is_saved_as_it_is and any(map(_is_permuted, rows)):
        remarks.append(Reason.BROADCAST.value)
    if each_forward:
        weights = {id(site.tensor): site.tensor for site, row in zip(found.sites, rows) if row.is_in_each_forward}
        size = amount(sum(tensor.nbytes for tensor in weights.values() if tensor is not None))
        remarks.append(
            f"converted in each forward: up to {size} of new memory, until the backward where there are gradients"
        )
    if options.input_format:
        remarks.append(_remark_on_input_hook(found.model, decisions.input_hook))
    is_hook_new = decisions.input_hook not in (None, input_hook(found.model))
    if is_hook_new or each_forward or any(row.action is Action.EXCHANGE for _, row in decisions.layers):
        remarks.append(Reason.SAVED_WHOLE.value)
    return remarks + [reason.value for reason in _remarks_on_layers(decisions)]


def _remarks_on_layers(decisions: Decisions) -> Iterator[Reason]:
    """Yield what to know about layers that stay as they are, and are wrong in training."""
    found, options = decisions.found, decisions.options
    if not options.format.is_channels_last:
        return
    mended = {id(layer.module) for layer, row in decisions.layers if row.is_wanted}
    others = (site.module for site in found.sites if id(site.module) not in mended and _may_be_on_cpu(site.tensor))
    modules = [module for module in others if is_layer(module) and not is_preserving(type(module))]
    if not options.preserve:
        if any(map(meets_small_input_rule, modules)):
            yield Reason.WRONG_GRADIENTS
        return
    untrained = any(has_taps(module) and not meets_small_input_rule(module) for module in modules)
    has_norms = not found.module_types.isdisjoint((nn.BatchNorm2d, nn.BatchNorm3d))
    are_trained = any(layer.fault is Reason.BATCH_STATISTICS for layer, _ in decisions.layers)
    is_on_cpu = any(_may_be_on_cpu(site.tensor) for site in found.sites)
    if untrained or (has_norms and is_on_cpu and not are_trained):
        yield Reason.FOR_INFERENCE
    if any(issubclass(each, torch.jit.ScriptModule) for each in found.module_types):
        names = {getattr(module, "original_name", "") for module in found.model.modules()}
        if not names.isdisjoint(ALWAYS_REPLACED):
            yield Reason.SCRIPTED_LAYERS


def _may_be_on_cpu(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.device.type in MEASURED_DEVICES


def _losing_norms(decisions: Decisions) -> list[Reason]:
    """Return why norms that stay as they are will go wrong."""
    kept = {type(layer.module) for layer, row in decisions.layers if row.action is Action.KEEP}
    types: set[Any] = kept if decisions.options.preserve else decisions.found.module_types
    types = {each for each in types if not is_preserving(each)}
    return [reason for reason, norms in _NORMS.items() if any(issubclass(each, norms) for each in types)]


def _has_ranks() -> bool:
    """Return whether this is one of several processes of a group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_permuted(row: PlanRow) -> bool:
    return row.takes_part and is_permuted(torch.Size(row.shape or ()), row.target_strides or ())


def match(plan: Plan, model: nn.Module, any_dtype: bool = False) -> Found:
    """Return the model's sites in the order of a plan's rows, or raise a ValueError that names the first difference."""
    rows = expect_plan(plan).rows
    found = find(model)
    sites = {site.full_name: site for site in found.sites}
    matched = []
    for row in rows:
        site = sites.pop(row.full_name, None) or _site_from_example(model, row)
        if site is None:
            raise ValueError(f"the model differs from the plan: it has no {row.full_name!r} ({row.layer})")
        if site.tensor is not None and row.shape is not None:
            shape, dtype = tuple(site.tensor.shape), as_text(site.tensor.dtype)
            if shape != row.shape or not (any_dtype or dtype == row.dtype):
                raise ValueError(
                    f"the model differs from the plan: {row.full_name!r} is {shape} of {dtype}, "
                    f"the plan has {row.shape} of {row.dtype}"
                )
        matched.append(site if row.reason is not Reason.COMPUTED_IN_FORWARD else site.because(row.reason))
    for site in sites.values():
        raise ValueError(f"the model differs from the plan: the plan does not know {site.full_name!r} ({site.layer})")
    return found._replace(sites=matched, observed=plan.observed)


def match_layers(plan: Plan, model: nn.Module) -> list[ReplaceableLayer]:
    """Return the model's layers that lose channels-last, in the order of a plan's rows, as `match` does for sites.

    A layer that is kept is not compared: it may have another class since, or be another layer. One that only training
    makes wrong need not be in the plan.
    """
    if not (plan.layers or (plan.preserve and Format(plan.memory_format).is_channels_last)):
        return []
    layers = {layer.path: layer for layer in find_replaceable_layers(model, {row.path for row in plan.layers})}
    matched = []
    for row in plan.layers:
        layer = layers.pop(row.path, None)
        if row.is_wanted and (layer is None or layer.kind != row.layer):
            got = "no such layer" if layer is None else f"a {layer.kind}"
            raise ValueError(f"the model differs from the plan: it has {got} at {row.path!r}, the plan a {row.layer}")
        if layer is not None:
            matched.append(layer)
    for layer in layers.values():
        if layer.reason is None and layer.fault is None and plan.preserve:
            raise ValueError(f"the model differs from the plan: the plan does not know {layer.path!r} ({layer.kind})")
    return [*matched, *layers.values()]


def _site_from_example(model: nn.Module, row: PlanRow) -> Site | None:
    """Return the site of a row that only example inputs have shown."""
    try:
        module = model.get_submodule(row.path)
    except AttributeError:
        return None
    tensor = getattr(module, row.name, None)
    tensor, reason = (tensor, None) if isinstance(tensor, Tensor) else (None, row.reason)
    if tensor is None and reason is not Reason.ON_THE_FLY:
        return None
    return Site(row.path, row.name, row.layer, row.rank, row.groups, module, tensor, reason)
