"""The sites that show only when a model runs: the tensors that really reach its convolutions as weights."""

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.finding.convolutions import OPERATORS, PASSING_ON
from torch_nhwc.finding.site import Found, Site
from torch_nhwc.modules.walk import walk
from torch_nhwc.reasons import Reason
from torch_nhwc.running.rehearsal import rehearse


class _Use(NamedTuple):
    """A weight at a convolution."""

    weight: Tensor
    groups: int
    path: str
    """Of the innermost module that was running."""
    module: nn.Module


class _Owner(NamedTuple):
    """Where a model stores a tensor."""

    path: str
    name: str
    module: nn.Module
    tensor: Tensor


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes the weight of every convolution that runs, but for those inside of `torch.cond` and its kin."""

    supports_higher_order_operators = True

    def __init__(self, owned: Iterable[Tensor], running: list[tuple[str, nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.running = running
        self.uses: list[_Use] = []
        # By id, what a tensor is of those that the model owns. What an id stands for must live on.
        self.sources: dict[int, Tensor] = {id(tensor): tensor for tensor in owned}
        self.keep: list[Tensor] = []
        self.laid_out: set[int] = set()  # what the code of the model brings into its format itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in OPERATORS:
            weight = args[1]
            if weight.dim() in (4, 5) and id(weight) not in self.laid_out:
                groups = next((each for each in reversed(args) if type(each) is int), 1)
                self.uses.append(_Use(self.sources.get(id(weight), weight), groups, *self.running[-1]))
        elif (name in PASSING_ON or name == "aten::squeeze") and id(args[0]) in self.sources:
            self.sources[id(result)] = self.sources[id(args[0])]
            self.keep.append(result)
        elif name == "nhwc::convert_weight":
            self.laid_out.add(id(result))
            self.keep.append(result)
        return result


def add_sites(found: Found, example_inputs: Any) -> Found:
    """Adds the sites that show only when the model runs, and remarks on those whose weight never does.

    Raises:
        ValueError: a layer is lazy; running the model would make its weights.
    """
    model, sites = found.model, found.sites
    lazy = next((site for site in sites if site.reason is Reason.LAZY), None)
    if lazy is not None:
        raise ValueError(
            f"example_inputs would materialise the lazy layer {lazy}: run the model once, or leave them out"
        )
    owners = _owners(model)
    uses = _uses(model, example_inputs, [owner.tensor for owner in owners.values()])
    known = {id(site.tensor) for site in sites if site.tensor is not None}
    used = {id(use.weight) for use in uses}
    computed_in = {use.path for use in uses if id(use.weight) not in owners}
    seen = [
        site.because(Reason.COMPUTED_IN_FORWARD)
        if site.reason is None and site.name == "weight" and site.path in computed_in and id(site.tensor) not in used
        else site
        for site in sites
    ]
    explained = {site.path for site in seen if site.reason is not None or site.name != "weight"}
    for use in uses:
        if id(use.weight) in owners:
            if id(use.weight) not in known:
                known.add(id(use.weight))
                path, name, owner, tensor = owners[id(use.weight)]
                layer = getattr(owner, "original_name", type(owner).__name__)
                seen.append(Site(path, name, layer, tensor.dim(), use.groups, owner, tensor, None))
        elif use.path not in explained and not isinstance(use.module, torch.jit.ScriptModule):
            explained.add(use.path)
            layer, rank = type(use.module).__name__, use.weight.dim()
            seen.append(Site(use.path, "<computed>", layer, rank, use.groups, use.module, None, Reason.ON_THE_FLY))
    return found._replace(sites=seen, observed=True)


def _owners(model: nn.Module) -> dict[int, _Owner]:
    """By id, the tensors that a model stores, and where."""
    owners: dict[int, _Owner] = {}
    for path, module, _ in walk(model):
        # The insides of a TorchScript module are not walked.
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        for inner, owner in module.named_modules(prefix=path) if is_scripted else [(path, module)]:
            plain = {} if is_scripted else vars(owner)
            own = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
            for name, tensor in (*plain.items(), *own):
                if isinstance(tensor, Tensor):
                    owners.setdefault(id(tensor), _Owner(inner, name, owner, tensor))
    return owners


def _uses(model: nn.Module, example_inputs: Any, owned: Iterable[Tensor]) -> list[_Use]:
    """Runs the model; the weights that its convolutions were given."""
    paths = {id(module): path for path, module, _ in walk(model)}
    running: list[tuple[str, nn.Module]] = [("", model)]
    watch = _Watch(owned, running)
    thread = threading.get_ident()  # others may be running models of their own, and the hooks are everybody's

    def enter(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            running.append((paths.get(id(module), running[-1][0]), module))

    def leave(module: nn.Module, _: object, __: object) -> None:
        if threading.get_ident() == thread:
            running.pop()

    def prepare(stack: ExitStack) -> None:
        stack.callback(nn_module.register_module_forward_pre_hook(enter).remove)
        stack.callback(nn_module.register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(watch)

    rehearse(model, example_inputs, prepare)
    return watch.uses
