"""What a conversion changes besides tensors (hooks, steps of parametrizations, classes of layers), and the commit."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_nhwc.layout import Format, Strides
from torch_nhwc.nn.class_swap import Swap, restore_class, swap_class, swapped_class
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
from torch_nhwc.nn.replacements import Preserving, is_preserving
from torch_nhwc.ops import Outcome, Storage, set_strides_
from torch_nhwc.planning.companions import Sources
from torch_nhwc.planning.deciding import Decisions, outcomes_of
from torch_nhwc.planning.plans import Action, PlanRow
from torch_nhwc.rendering import first_of, warn
from torch_nhwc.sites import computed_weights as computed
from torch_nhwc.sites.finding import find_replaceable_layers
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site, walk
from torch_nhwc.step_guard import (
    align_when_loaded,
    is_aligned_when_loaded,
    is_watched,
    leave_as_loaded,
    loading_optimizer,
    release,
    watch,
)


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


def edits_of(decisions: Decisions) -> list[Edit]:
    """Return the edits of a conversion, before anything changes."""
    edits = _swaps(decisions)
    seen: set[int] = set()  # layers with a computed weight, each of which may have several sites
    for site, row in zip(decisions.found.sites, decisions.rows):
        module = site.module
        if row.reason is Reason.LAZY or module._forward_pre_hooks:
            edits += _waiting(site, row)
        if site.name != "weight" and (row.takes_part or row.reason is Reason.TIED) and id(module) not in seen:
            seen.add(id(module))
            edits += _steps(decisions, site, row)
    return edits + _guarding(decisions) + _input_hooks(decisions) + _loading(decisions.sources)


def restoring_edits(paths: Iterable[str], sources: Sources) -> list[Edit]:
    """Return the edits that restore the original classes of the layers at some paths, in each of some models."""
    edits = []
    for layer in (layer for path in paths for layer in sources.layers_at(path)):
        if is_in_each_forward(type(layer)):
            edits.append(_swap_edit(layer, EachForward).reverse)
        if is_preserving(type(layer)):
            edits.append(_swap_edit(layer, Preserving).reverse)
    return edits


def _swaps(decisions: Decisions) -> list[Edit]:
    """Return the edits of the layers' classes, in averaged copies too."""
    found, sources = decisions.found, decisions.sources
    if not decisions.options.format.is_channels_last:
        if not any(is_preserving(each) or is_in_each_forward(each) for each in found.module_types):
            return []
        paths = [path for path, module, _ in walk(found.model) if decisions.options.skip_reason(module, path) is None]
        return restoring_edits(paths, Sources((), (found.model, *sources.copies)))
    kept = [row.path for _, row in decisions.layers if row.is_wanted]
    modules = [layer.module for layer, row in decisions.layers if row.action is Action.EXCHANGE]
    for copy in sources.copies if kept else ():
        if isinstance(copy, nn.Module):
            of_copy = {layer.path: layer.module for layer in find_replaceable_layers(copy) if layer.reason is None}
            modules += [of_copy[path] for path in kept if path in of_copy]
    edits = [_swap_edit(module, Preserving) for module in modules]
    layers: dict[int, nn.Module] = {}  # by id: one with a computed weight may have several sites
    for site, row in zip(found.sites, decisions.rows):
        if row.is_in_each_forward:
            layers |= {id(layer): layer for layer in (site.module, *sources.layers_at(site.path))}
    for layer in layers.values():
        if not is_in_each_forward(type(layer)):
            swapped_class(type(layer), EachForward)  # if making the class fails, it fails before anything changes
            edits.append(_swap_edit(layer, EachForward))
    return edits


def _swap_edit(layer: nn.Module, kind: type[Swap]) -> Edit:
    return Edit(weakref.ref(layer), partial(swap_class, kind=kind), partial(restore_class, kind=kind))


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
        is_original = computed.is_original(module, site.name)
        reason = computed.remark_on(module, site.rank, wanted) if is_original else None
    name = wanted.name_at(site.rank) if reason is Reason.COPIED_EACH_FORWARD else None
    current = computed.step_format(module)
    if name == current:
        return []
    forth, back = (partial(computed.set_step, memory_format=each) for each in (name, current))
    layers = (module, *decisions.sources.layers_at(site.path))
    return [Edit(weakref.ref(layer), forth, back) for layer in layers]


def _guarding(decisions: Decisions) -> list[Edit]:
    """Keep the step guard installed while a layer of a model that trains is converted."""
    pairs = zip(decisions.found.sites, decisions.rows)
    layers = {id(site.module): site.module for site, row in pairs if row.takes_part or row.reason is Reason.LAZY}
    if not decisions.options.format.is_channels_last:
        return [Edit(weakref.ref(layer), release, watch) for layer in layers.values() if is_watched(layer)]
    if not decisions.found.trains:
        return []
    return [Edit(weakref.ref(layer), watch, release) for layer in layers.values() if not is_watched(layer)]


def _input_hooks(decisions: Decisions) -> list[Edit]:
    """Edit the hook for the model's inputs; a conversion to contiguous also removes those of modules inside of it."""
    model = decisions.found.model
    changes: list[tuple[nn.Module, InputHook | None]] = [(model, decisions.input_hook)]
    if not decisions.options.format.is_channels_last:
        changes = [(module, None) for _, module, _ in walk(model)]
    edits = []
    for module, wanted in changes:
        present = input_hook(module)
        if present != wanted:
            pairs = (wanted, present), (present, wanted)
            forth, back = (partial(set_input_hook, wanted=new, instead_of=old) for new, old in pairs)
            edits.append(Edit(weakref.ref(module), forth, back))
    return edits


def _loading(sources: Sources) -> list[Edit]:
    """Make the state that optimizers load follow their weights."""
    loading = (optimizer for optimizer in map(loading_optimizer, sources.optimizers) if optimizer is not None)
    return [
        Edit(weakref.ref(each), align_when_loaded, leave_as_loaded)
        for each in loading
        if not is_aligned_when_loaded(each)
    ]


def warn_unshared(weights: Sequence[tuple[str, Tensor]], wanted: Format) -> None:
    """Warn about weights that get new storage because other processes share theirs."""
    outcomes = outcomes_of([tensor for _, tensor in weights], [wanted] * len(weights), "auto")
    names = [repr(name) for (name, _), outcome in zip(weights, outcomes) if outcome is Outcome.COPIED_SHARED]
    if names:
        warn(
            f"torch_nhwc: {first_of(names)} will no longer be in shared memory: other processes that have the model "
            "keep the old memory, so that neither side sees what the other trains. Convert, and revert, before sharing "
            "the model and before starting processes"
        )
