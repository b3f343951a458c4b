"""What a conversion changes, tensors and all else, in one commit; and how that is undone."""

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torch_nhwc.converting.step_guard import (
    align_when_loaded,
    is_aligned_when_loaded,
    is_watched,
    leave_as_loaded,
    loading_optimizer,
    release,
    watch,
)
from torch_nhwc.layout import CONTIGUOUS, Strides, memory_id, tied_by_view
from torch_nhwc.nn.class_swap import Swap, original_class, restore_class, swap_class
from torch_nhwc.nn.each_forward import EachForward, is_in_each_forward
from torch_nhwc.nn.hooks import (
    ConvertWhenMaterialised,
    InputHook,
    add_hook,
    find_hook,
    input_hook,
    remove_hook,
    set_input_hook,
)
from torch_nhwc.nn.pending import AtOnce
from torch_nhwc.nn.replacements import Preserving
from torch_nhwc.ops import Outcome, Storage, set_strides_
from torch_nhwc.planning.companions import Companion, Sources, Weight, find_companions, sources_of
from torch_nhwc.planning.deciding import Decisions, held_among, outcomes_of
from torch_nhwc.planning.matching import match
from torch_nhwc.planning.plans import Action, CompanionRow, Plan, PlanRow
from torch_nhwc.rendering import first_of, warn
from torch_nhwc.sites import computed_weights, wrappers
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found, Site, walk

_FRESH = (Outcome.COPIED, Outcome.COPIED_HELD, Outcome.COPIED_FOREIGN, Outcome.COPIED_SHARED)


class Edit(NamedTuple):
    """A reversible change to a module or an optimizer: of a hook, a class or a parametrization."""

    module: "weakref.ref[Any]"
    """Weak, since a report keeps the edit."""
    forth: Callable[[Any], object]
    back: Callable[[Any], object]
    """Like `forth`, does nothing where there is nothing to do."""

    @property
    def reverse(self) -> "Edit":
        """The edit that undoes this one."""
        return Edit(self.module, self.back, self.forth)

    def make(self) -> None:
        """Change the module, if it still exists."""
        module = self.module()
        if module is not None:
            self.forth(module)


def change(decisions: Decisions, others: Sequence[Edit] = ()) -> "tuple[Undo, int]":
    """Make all changes, with some others, or none, and note the outcomes in the rows and companions.

    Returns:
        What undoes them, and the bytes of new storage.
    """
    edits = [*_edits_of(decisions), *others]
    undo = Undo.of(decisions, edits)
    following = [companion for companion in decisions.companions if companion.changes]
    tensors = [tensor for _, _, tensor in decisions.changing] + [companion.tensor for companion in following]
    strides = [row.target_strides or () for _, row, _ in decisions.changing]
    strides += [companion.weight.strides for companion in following]
    outcomes = commit(tensors, strides, edits, decisions.options.storage)
    for row in decisions.rows:
        row.outcome = Outcome.UNCHANGED if row.takes_part and row.shape is not None else None
    records: list[Any] = [*(row for _, row, _ in decisions.changing), *following]
    for record, outcome in zip(records, outcomes):
        record.outcome = outcome
    fresh = {memory_id(each): each.nbytes for each, outcome in zip(tensors, outcomes) if outcome in _FRESH}
    return undo, sum(fresh.values())  # exact aliases once


def commit(
    tensors: Sequence[Tensor], strides: Sequence[Strides], edits: Sequence[Edit], storage: Storage = "auto"
) -> list[Outcome]:
    """Make the edits, then change the tensors' strides; after an exception everything is as it was before.

    The exception may be a KeyboardInterrupt, which Python also raises when the operator has returned. The operator
    changes all tensors or none, so their strides show on which side of it the exception came.
    """
    before = [tensor.stride() for tensor in tensors]
    try:
        for edit in edits:
            edit.make()
        return set_strides_(tensors, strides, storage=storage) if tensors else []
    except BaseException:
        with suppress(RuntimeError):  # strides that overlapped cannot be restored: then everything stays
            if any(tensor.stride() != own for tensor, own in zip(tensors, before)):
                set_strides_(tensors, before)
            for edit in reversed(edits):
                edit.reverse.make()
        raise


class Undo(NamedTuple):
    """What a conversion changes, as it was. Holds models, optimizers and tensors weakly."""

    model: "weakref.ref[nn.Module]"
    sources: Callable[[], Sources]
    companions: MutableMapping[Tensor, Strides]
    """The strides of those companions that differed from their weight's; the others go back with it."""
    edits: list[Edit]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave `None` in deep copies and pickles of a report: they belong to no model."""
        return type(None), ()

    @classmethod
    def of(cls, decisions: Decisions, edits: list[Edit]) -> "Undo":
        """Note everything that is about to change, but for the weights' strides: the plan's rows have them."""
        apart: MutableMapping[Tensor, Strides] = WeakTensorKeyDictionary()
        for companion in decisions.companions:
            own = companion.tensor.stride()
            # The strides of expanded tensors cannot be restored.
            if companion.reason is None and own != companion.weight.strides_before and 0 not in own:
                apart[companion.tensor] = own
        return cls(weakref.ref(decisions.found.model), decisions.sources.weakly(), apart, edits)

    def revert(self, plan: Plan, followed: Sequence[CompanionRow], optimizer: Any, ema: Any) -> None:
        """Do what `Report.revert` says, for a plan that was carried out and the companions that followed."""
        model = self.model()
        if model is None:
            raise RuntimeError("Report.revert: the model no longer exists")
        given = sources_of(optimizer, ema, model)
        sources = self.sources().joined(given)
        moved = {each.site for each in followed if each.outcome not in (None, Outcome.UNCHANGED)}
        rows = [row for row in plan.rows if row.action in (Action.CONVERT, Action.RESTRIDE) or row.full_name in moved]
        # If only layers were replaced, the sites need not be found: a wrapper may have moved the layers since.
        try:
            found = match(plan, model, any_dtype=True) if rows or not self.edits else Found(model, [], set(), [])
        except ValueError as error:
            undo = "convert_(model, torch.contiguous_format) undoes what is left of the conversion"
            raise ValueError(f"Report.revert: {error}; {undo}") from error
        sources.check_optimizers((*model.parameters(), *found.weights) if sources.optimizers else ())
        weights = _weights_from(found, {row.full_name: row for row in rows})
        moving = [each for each in weights if each.tensor.stride() != each.strides]
        outcomes = outcomes_of([each.tensor for each in moving], [CONTIGUOUS] * len(moving), "auto")
        warn_unshared([each.name for each, outcome in zip(moving, outcomes) if outcome is Outcome.COPIED_SHARED])
        companions = [each for each in find_companions(weights, sources) if each.reason is None]
        warn_held(held_among([each for each in companions if each.tensor.stride() != each.weight.strides]))
        tensors = [weight.tensor for weight in weights] + [companion.tensor for companion in companions]
        strides = [weight.strides for weight in weights]
        apart = self.companions
        strides += [(apart and apart.get(each.tensor)) or each.weight.strides for each in companions]
        # An optimizer goes on aligning what it loads: that may be a checkpoint from before the revert.
        edits = [edit.reverse for edit in reversed(self.edits) if edit.back is not leave_as_loaded]
        swapped = {row.path for row in plan.layers if row.action is Action.REPLACE}
        swapped |= {row.path for row in plan.rows if row.action is Action.EACH_FORWARD}
        edits += [edit for path in sorted(swapped) for layer in given.layers_at(path) for edit in _restoring(layer)]
        commit(tensors, strides, edits)


def _weights_from(found: Found, rows: dict[str, PlanRow]) -> list[Weight]:
    """Return the weights to revert, with the strides from before; raise a RuntimeError for one that cannot be."""
    tied = tied_by_view(found.tensors, found.weights)
    weights = []
    for site in found.sites:
        row, tensor, reason = rows.get(site.full_name), site.tensor, site.reason
        if row is None:
            continue
        if id(tensor) in tied:
            reason = Reason.TIED_BY_VIEW
        elif tensor is not None and wrappers.is_offloaded(site.module, tensor):
            reason = Reason.OFFLOADED
        if reason and reason in (Reason.OFFLOADED, Reason.TIED_BY_VIEW, *wrappers.REASONS):
            raise RuntimeError(f"Report.revert: {site.full_name!r}: {reason.value}")
        if tensor is not None:
            # There were no strides, or elements overlapped.
            before = None if row.reason is Reason.OVERLAPPING else row.strides
            weights.append(Weight(site.full_name, tensor, before or CONTIGUOUS.strides(tensor.shape)))
    return weights


def warn_unshared(names: Sequence[str]) -> None:
    """Warn about weights that get new storage because other processes share theirs."""
    if names:
        warn(
            f"torch_nhwc: {first_of([*map(repr, names)])} will no longer be in shared memory: other processes that "
            "have the model keep the old memory, so that neither side sees what the other trains. Convert, and "
            "revert, before sharing the model and before starting processes"
        )


def warn_held(companions: Sequence[Companion]) -> None:
    """Warn about companions that leave memory which something else holds."""
    if companions:
        names = [f"{each.label} of {each.weight.name!r}" for each in companions]
        warn(
            f"torch_nhwc: {first_of(names)}: something else holds this memory, such as a state dict, or an average "
            "that keeps the tensors of one. It will not see later values, and what it writes will be lost: drop it, "
            "or convert before it is made"
        )


def _edits_of(decisions: Decisions) -> list[Edit]:
    """Return what changes besides tensors, before anything changes."""
    found, wanted = decisions.found, decisions.options.format
    edits = _swaps(decisions) if wanted.is_channels_last else _restorations(decisions)
    # The step guard is installed while a layer of a model that trains is converted.
    is_guarded = wanted.is_channels_last and found.trains
    watched: list[weakref.ref[nn.Module]] = []
    seen: set[int] = set()  # layers, since one with a computed weight may have several sites
    for site, row in zip(found.sites, decisions.rows):
        module = site.module
        if row.reason is Reason.LAZY or module._forward_pre_hooks:
            edits += _waiting(site, row)
        if id(module) in seen or not (row.takes_part or row.reason in (Reason.LAZY, Reason.TIED)):
            continue
        seen.add(id(module))
        if site.name != "weight":
            edits += _steps(decisions, site, row)
        if (is_guarded or not wanted.is_channels_last) and is_watched(module) != is_guarded:
            watched.append(weakref.ref(module))
    if watched:
        forth, back = (partial(_for_all, each, watched) for each in (watch, release))
        edit = Edit(weakref.ref(found.model), forth, back)
        edits.append(edit if is_guarded else edit.reverse)
    return edits + _loading(decisions.sources)


def _for_all(function: Callable[[Iterable[Any]], object], layers: Iterable[weakref.ref[Any]], _: object) -> None:
    function([layer for each in layers if (layer := each()) is not None])


_SWAP = (swap_class, restore_class)


def _each(function: Callable[..., object], layers: Iterable[nn.Module], kind: type[Swap]) -> None:
    for layer in layers:
        function(layer, kind)


def _swaps(decisions: Decisions) -> list[Edit]:
    """Return the edits of the layers' classes, in averaged copies too, and of the hook for the inputs."""
    found, sources = decisions.found, decisions.sources
    edits: list[Edit] = []
    preserving: list[weakref.ref[nn.Module]] = []
    for layer, layer_row in decisions.layers:
        layers = [layer.module] if layer_row.action is Action.REPLACE else []
        if layer_row.is_wanted and sources.copies:
            copies = sources.layers_at(layer_row.path)
            layers += [each for each in copies if original_class(type(each)).__name__ == layer_row.layer]
        preserving += [weakref.ref(each) for each in layers if not issubclass(type(each), Preserving)]
    if preserving:  # one edit, since there may be thousands
        forth, back = (partial(_for_all, partial(_each, each, kind=Preserving), preserving) for each in _SWAP)
        edits.append(Edit(weakref.ref(found.model), forth, back))
    if decisions.options.preserve == "at_once":
        edits += [_swap_edit(each, AtOnce) for ref in preserving if (each := ref()) is not None]
    swapped: dict[int, nn.Module] = {}  # by id: one with a computed weight may have several sites
    for site, row in zip(found.sites, decisions.rows):
        if row.is_in_each_forward:
            swapped |= {id(each): each for each in (site.module, *sources.layers_at(site.path))}
    for each in swapped.values():
        if not is_in_each_forward(type(each)):
            edits.append(_swap_edit(each, EachForward))
    return edits + _input_hook(found.model, decisions.input_hook)


def _restorations(decisions: Decisions) -> list[Edit]:
    """Return the edits that undo what earlier conversions to channels-last did to layers and hooks."""
    found, edits = decisions.found, []
    has_swapped = any(issubclass(each, Swap) for each in found.module_types)
    for path, module, _ in walk(found.model):
        edits += _input_hook(module, None)
        if has_swapped and decisions.options.skip_reason(module, path) is None:
            for layer in (module, *decisions.sources.layers_at(path)):
                edits += _restoring(layer)
    return edits


def _restoring(layer: nn.Module) -> list[Edit]:
    """Return the edits that restore the original class of a layer."""
    return [
        _swap_edit(layer, kind).reverse for kind in (AtOnce, EachForward, Preserving) if issubclass(type(layer), kind)
    ]


def _swap_edit(layer: nn.Module, kind: type[Swap]) -> Edit:
    """Return the edit that swaps a layer's class."""
    return Edit(weakref.ref(layer), partial(swap_class, kind=kind), partial(restore_class, kind=kind))


def _input_hook(module: nn.Module, wanted: InputHook | None) -> list[Edit]:
    """Return the edit that gives a module a hook for its inputs, or removes it."""
    present = input_hook(module) if module._forward_pre_hooks else None
    if present == wanted:
        return []
    forth, back = (
        partial(set_input_hook, wanted=new, instead_of=old) for new, old in ((wanted, present), (present, wanted))
    )
    return [Edit(weakref.ref(module), forth, back)]


def _waiting(site: Site, row: PlanRow) -> list[Edit]:
    """Give a lazy layer the hook that converts it later, and remove one of an earlier call that is not needed."""
    waiting = find_hook(site.module, ConvertWhenMaterialised)
    if row.reason is Reason.LAZY and row.action is Action.CONVERT:
        return [] if waiting else [_hook_edit(site.module, ConvertWhenMaterialised())]
    is_over = row.takes_part or row.reason is Reason.LAZY
    return [_hook_edit(site.module, waiting).reverse] if waiting and is_over else []


def _hook_edit(module: nn.Module, hook: object) -> Edit:
    return Edit(weakref.ref(module), partial(add_hook, hook=hook), partial(remove_hook, hook=hook))


def _steps(decisions: Decisions, site: Site, row: PlanRow) -> list[Edit]:
    """Edit the last step of a layer, and of its averaged copies, that lays out a computed weight in the format."""
    module, reason, wanted = site.module, row.reason, site.format(decisions.options.format)
    if reason is Reason.TIED:
        is_original = computed_weights.is_original(module, site.name)
        reason = computed_weights.remark_on(module, site.rank, wanted) if is_original else None
    name = wanted.name_at(site.rank) if reason is Reason.COPIED_EACH_FORWARD else None
    current = computed_weights.step_format(module)
    if name == current:
        return []
    forth, back = (partial(computed_weights.set_step, memory_format=each) for each in (name, current))
    layers = (module, *decisions.sources.layers_at(site.path))
    return [Edit(weakref.ref(layer), forth, back) for layer in layers]


def _loading(sources: Sources) -> list[Edit]:
    """Make the state that optimizers load follow their weights."""
    loading = (optimizer for optimizer in map(loading_optimizer, sources.optimizers) if optimizer is not None)
    return [
        Edit(weakref.ref(each), align_when_loaded, leave_as_loaded)
        for each in loading
        if not is_aligned_when_loaded(each)
    ]
