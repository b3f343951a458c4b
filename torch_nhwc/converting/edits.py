"""What a conversion changes besides tensors: hooks on modules, last steps of computed weights, classes of layers."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from torch import nn

from torch_nhwc.each_forward import exchange as each_forward
from torch_nhwc.each_forward.exchange import is_in_each_forward
from torch_nhwc.each_forward.weights import drop_result, is_result_kept, keep_result
from torch_nhwc.formats import Format
from torch_nhwc.hooks import ChannelsLastInput, ConvertWhenMaterialised, add_hook, find_hook, remove_hook
from torch_nhwc.modules import computed
from torch_nhwc.modules.walk import walk
from torch_nhwc.planning.companions import Sources
from torch_nhwc.planning.deciding import Decision, Request
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.exchange import bring_back, exchange, is_exchanged
from torch_nhwc.preserving.find import find_layers
from torch_nhwc.reasons import Reason


class Edit(NamedTuple):
    """A change to a module that the operators do not make. Both ways do nothing where there is nothing to do."""

    module: "weakref.ref[nn.Module]"
    """Weakly, since a report keeps the edit."""
    forth: Callable[[nn.Module], object]
    back: Callable[[nn.Module], object]

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
    model, sources = following.model, following.sources
    edits = _exchanges(following, request) + _each_forward(following, request)
    seen: set[int] = set()  # layers with a computed weight, each of which may have several sites
    for decision in following.decisions:
        site = decision.site
        module = site.module
        if decision.reason is Reason.LAZY or module._forward_pre_hooks:
            edits += _waiting(decision)
        is_laid_out = decision.takes_part or decision.reason is Reason.TIED
        if site.name != "weight" and id(module) not in seen and is_laid_out:
            seen.add(id(module))
            edits += _steps(decision, sources, request.format)
    hook = find_hook(model, ChannelsLastInput)
    if request.input_format and not hook:
        edits.append(_hook_edit(model, ChannelsLastInput()))
    elif hook and not request.format.is_channels_last:
        edits.append(_hook_edit(model, hook).reverse)
    return edits


def _waiting(decision: Decision) -> list[Edit]:
    """A lazy layer gets a hook; one from an earlier call, that this call takes the place of, goes."""
    waiting = find_hook(decision.site.module, ConvertWhenMaterialised)
    if decision.waits:
        return [] if waiting else [_hook_edit(decision.site.module, ConvertWhenMaterialised())]
    is_over = decision.takes_part or decision.reason is Reason.LAZY
    return [_hook_edit(decision.site.module, waiting).reverse] if waiting and is_over else []


def _steps(decision: Decision, sources: Sources, wanted: Format) -> list[Edit]:
    """The layer's last step, and those of its averaged copies, that bring a computed weight into the format."""
    module, reason = decision.site.module, decision.reason
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
