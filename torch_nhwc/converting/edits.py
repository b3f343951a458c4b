"""What a conversion changes besides tensors: hooks, last steps of computed weights, classes of layers."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from torch_nhwc.converting.programs import agrees, set_strides, set_values, values_of
from torch_nhwc.each_forward import exchange as each_forward
from torch_nhwc.each_forward.exchange import is_in_each_forward
from torch_nhwc.each_forward.weights import drop_result, is_result_kept, keep_result
from torch_nhwc.entries import set_input_hook
from torch_nhwc.finding.exported import Program
from torch_nhwc.formats import Format
from torch_nhwc.hooks import ConvertWhenMaterialised, add_hook, find_hook, remove_hook
from torch_nhwc.modules import computed
from torch_nhwc.modules.walk import walk
from torch_nhwc.planning.companions import Sources
from torch_nhwc.planning.deciding import Decision
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.exchange import bring_back, exchange, is_exchanged
from torch_nhwc.preserving.find import find_layers
from torch_nhwc.reasons import Reason
from torch_nhwc.stepping.guard import is_watched, release, watch
from torch_nhwc.stepping.loading import (
    align_when_loaded,
    is_aligned_when_loaded,
    leave_as_loaded,
    loading_optimizer,
)


class Edit(NamedTuple):
    """A change to a module that the operators do not make. Both ways do nothing where there is nothing to do."""

    module: "weakref.ref[Any]"
    """Or an optimizer. Weakly, since a report keeps the edit."""
    forth: Callable[[Any], object]
    back: Callable[[Any], object]

    @property
    def reverse(self) -> "Edit":
        """The edit that undoes this one."""
        return Edit(self.module, self.back, self.forth)

    def make(self) -> None:
        """Changes the module, if it is still there."""
        module = self.module()
        if module is not None:
            self.forth(module)


def edits_of(following: Following, request: Request) -> list[Edit]:
    """The edits of a conversion: layers exchanged, lazy ones converting later, computed weights and inputs laid out."""
    sources = following.sources
    edits = _exchanges(following, request) + _each_forward(following, request)
    seen: set[int] = set()  # layers with a computed weight, each of which may have several sites
    for decision in following.decisions:
        site = decision.site
        module = site.module
        if decision.reason is Reason.LAZY or module._forward_pre_hooks:
            edits += _waiting(decision)
        if site.name != "weight" and (decision.takes_part or decision.reason is Reason.TIED) and id(module) not in seen:
            seen.add(id(module))
            edits += _steps(decision, sources, request.format)
    edits += _guarding(following, request) + _describing(following)
    for entry in following.entries:
        pairs = (entry.wanted, entry.there), (entry.there, entry.wanted)
        forth, back = (partial(set_input_hook, wanted=wanted, instead_of=other) for wanted, other in pairs)
        edits.append(Edit(weakref.ref(entry.module), forth, back))
    for optimizer in map(loading_optimizer, sources.optimizers):
        if optimizer is not None and not is_aligned_when_loaded(optimizer):
            edits.append(Edit(weakref.ref(optimizer), align_when_loaded, leave_as_loaded))
    return edits


def _describing(following: Following) -> list[Edit]:
    """What exported programs say of their tensors goes with them."""
    edits: list[Edit] = []
    if Program not in following.module_types:
        return edits
    decisions = (each for each in following.decisions if each.action is not Action.REFUSE)
    wanted = {id(each.site.tensor): each.strides for each in decisions if each.strides is not None}
    for program in (module for _, module, _ in walk(following.model) if isinstance(module, Program)):
        held = *program._parameters.items(), *program._buffers.items()
        strides = {name: wanted[id(tensor)] for name, tensor in held if id(tensor) in wanted}
        if not agrees(program, strides):
            forth, back = partial(set_strides, strides=strides), partial(set_values, values=values_of(program))
            edits.append(Edit(weakref.ref(program), forth, back))
    return edits


def _guarding(following: Following, request: Request) -> list[Edit]:
    """The guard is there for layers that are converted, of a model that trains."""
    sites = [each.site for each in following.decisions if each.takes_part or each.reason is Reason.LAZY]
    layers = {id(site.module): site.module for site in sites}.values()
    if not request.format.is_channels_last:
        return [Edit(weakref.ref(layer), release, watch) for layer in layers if is_watched(layer)]
    return [Edit(weakref.ref(layer), watch, release) for layer in layers if following.trains and not is_watched(layer)]


def _waiting(decision: Decision) -> list[Edit]:
    """A lazy layer gets a hook; one from an earlier call, that this call takes the place of, goes."""
    waiting = find_hook(decision.site.module, ConvertWhenMaterialised)
    if decision.waits:
        return [] if waiting else [_hook_edit(decision.site.module, ConvertWhenMaterialised())]
    is_over = decision.takes_part or decision.reason is Reason.LAZY
    return [_hook_edit(decision.site.module, waiting).reverse] if waiting and is_over else []


def _steps(decision: Decision, sources: Sources, wanted: Format) -> list[Edit]:
    """The layer's last step, and those of its averaged copies, that bring a computed weight into the format."""
    module, reason, wanted = decision.site.module, decision.reason, decision.site.format(wanted)
    if reason is Reason.TIED:
        is_original = computed.is_original(module, decision.site.name)
        reason = computed.remark_on(module, decision.site.rank, wanted) if is_original else None
    name = wanted.name_at(decision.site.rank) if reason is Reason.COPIED_EACH_FORWARD else None
    current = computed.step_format(module)
    if name == current:
        return []
    forth, back = (partial(computed.set_step, memory_format=each) for each in (name, current))
    return [Edit(weakref.ref(layer), forth, back) for layer in (module, *sources.layers_at(decision.site.path))]


def _exchanges(following: Following, request: Request) -> list[Edit]:
    """Layers become such as preserve, in averaged copies too; on the way to contiguous they become what they were."""
    sources = following.sources
    if not request.format.is_channels_last:
        is_there = any(is_exchanged(each) or is_in_each_forward(each) for each in following.module_types)
        paths = [path for path, module, _ in walk(following.model) if request.takes(module, path)] if is_there else []
        return bring_back_edits(paths, Sources((), (following.model, *sources.copies)))
    paths = [each.layer.path for each in following.layers if each.row.is_wanted]
    modules = [each.layer.module for each in following.layers if each.action is Action.EXCHANGE]
    for copy in sources.copies if paths else ():
        if isinstance(copy, nn.Module):
            of_copy = {layer.path: layer for layer in find_layers(copy) if layer.reason is None}
            modules += [of_copy[path].module for path in paths if path in of_copy]
    return [Edit(weakref.ref(module), exchange, bring_back) for module in modules]


def bring_back_edits(paths: Iterable[str], sources: Sources) -> list[Edit]:
    """The edits that make exchanged layers what they were, in each of some models."""
    edits = []
    for layer in (layer for path in paths for layer in sources.layers_at(path)):
        if is_in_each_forward(type(layer)):
            again = partial(each_forward.exchange, keep=is_result_kept(layer))
            edits.append(Edit(weakref.ref(layer), each_forward.bring_back, again))
        if is_exchanged(type(layer)):
            edits.append(Edit(weakref.ref(layer), bring_back, exchange))
    return edits


def _each_forward(following: Following, request: Request) -> list[Edit]:
    """Layers become such as convert their weight in each forward, in averaged copies too."""
    keep = request.each_forward == "keep"
    layers: dict[int, nn.Module] = {}  # by identity: one with a computed weight may have several sites
    for decision in following.decisions:
        if decision.is_in_each_forward:
            for layer in (decision.site.module, *following.sources.layers_at(decision.site.path)):
                layers[id(layer)] = layer
    edits = []
    for layer in layers.values():
        if not is_in_each_forward(type(layer)):
            each_forward.exchanged_type(type(layer))  # fails here, if ever
            edits.append(Edit(weakref.ref(layer), partial(each_forward.exchange, keep=keep), each_forward.bring_back))
        elif keep and not is_result_kept(layer):
            edits.append(Edit(weakref.ref(layer), keep_result, drop_result))
    return edits


def _hook_edit(module: nn.Module, hook: object) -> Edit:
    return Edit(weakref.ref(module), partial(add_hook, hook=hook), partial(remove_hook, hook=hook))
