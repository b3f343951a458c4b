"""Running a model once on example inputs, to see which tensors really reach its convolutions as weights."""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.reasons import Reason
from torch_nhwc.sites import Site, walk

_CONVOLUTIONS = {
    f"aten::{name}"
    for name in ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution")
}
# What gives the same weight under another name, or in autocast's dtype.
_PASSING_ON = {"aten::detach", "aten::alias", "aten::_to_copy", "aten::clone", "nhwc::convert_weight"}


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
    """Notes the weight of every convolution that runs."""

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
        name = func._schema.name
        if name in _CONVOLUTIONS:
            weight = args[1]
            if weight.dim() in (4, 5) and id(weight) not in self.laid_out:
                groups = next((each for each in reversed(args) if type(each) is int), 1)
                self.uses.append(_Use(self.sources.get(id(weight), weight), groups, *self.running[-1]))
        elif name in _PASSING_ON and id(args[0]) in self.sources:
            self.sources[id(result)] = self.sources[id(args[0])]
            self.keep.append(result)
        elif name == "nhwc::convert_weight":
            self.laid_out.add(id(result))
            self.keep.append(result)
        return result


def add_sites(model: nn.Module, sites: list[Site], example_inputs: Any) -> list[Site]:
    """The sites of a model, with those that show only when it runs, and remarks on those whose weight never does.

    Raises:
        ValueError: a layer is lazy; running the model would make its weights.
    """
    lazy = next((site for site in sites if site.reason is Reason.LAZY), None)
    if lazy is not None:
        raise ValueError(
            f"example_inputs would materialise the lazy layer {lazy}: run the model once, or leave them out"
        )
    owners = _owners(model)
    uses = _run(model, example_inputs, [owner.tensor for owner in owners.values()])
    known = {id(site.tensor) for site in sites if site.tensor is not None}
    used = {id(use.weight) for use in uses}
    computed_in = {use.path for use in uses if id(use.weight) not in owners}
    found = [
        site._replace(reason=Reason.COMPUTED_IN_FORWARD)
        if site.reason is None and site.name == "weight" and site.path in computed_in and id(site.tensor) not in used
        else site
        for site in sites
    ]
    explained = {site.path for site in found if site.reason is not None or site.name != "weight"}
    for use in uses:
        if id(use.weight) in owners:
            if id(use.weight) not in known:
                known.add(id(use.weight))
                path, name, owner, tensor = owners[id(use.weight)]
                layer = getattr(owner, "original_name", type(owner).__name__)
                found.append(Site(path, name, layer, tensor.dim(), use.groups, owner, tensor, None))
        elif use.path not in explained and not isinstance(use.module, torch.jit.ScriptModule):
            explained.add(use.path)
            layer, rank = type(use.module).__name__, use.weight.dim()
            found.append(Site(use.path, "<computed>", layer, rank, use.groups, use.module, None, Reason.ON_THE_FLY))
    return found


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


def _run(model: nn.Module, example_inputs: Any, owned: Iterable[Tensor]) -> list[_Use]:
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        keywords = dict(example_inputs)
    else:
        arguments = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    paths = {id(module): path for path, module, _ in walk(model)}
    running: list[tuple[str, nn.Module]] = [("", model)]

    thread = threading.get_ident()  # others may be running models of their own, and the hooks are everybody's

    def enter(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            running.append((paths.get(id(module), running[-1][0]), module))

    def leave(module: nn.Module, _: object, __: object) -> None:
        if threading.get_ident() == thread:
            running.pop()

    watch = _Watch(owned, running)
    with ExitStack() as stack:
        _restore_afterwards(stack, model)
        stack.callback(nn_module.register_module_forward_pre_hook(enter).remove)
        stack.callback(nn_module.register_module_forward_hook(leave, always_call=True).remove)
        # A weight that an autocast region has cast before would not be recognised, and one that is cast here, without
        # a gradient, must not be there afterwards.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.no_grad())
        stack.enter_context(watch)
        model(*arguments, **keywords)
        stack.close()  # by the end of the block an interrupt would come too late to be seen
    return watch.uses


def _restore_afterwards(stack: ExitStack, model: nn.Module) -> None:
    """Has buffers and random generators brought back, whatever happens in between."""
    callbacks: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        callbacks.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        callbacks.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for _, module, _ in walk(model):
        if isinstance(module, torch.jit.ScriptModule):
            callbacks += [partial(_put_back, buffer, buffer.detach().clone()) for buffer in module.buffers()]
            continue
        callbacks.append(partial(_put_back_all, module._buffers, dict(module._buffers)))
        for buffer in module._buffers.values():
            if buffer is not None:
                callbacks.append(partial(_put_back, buffer, buffer.detach().clone()))
    # Twice: where an interrupt ends the first, the second goes on.
    stack.callback(_call_all, callbacks)
    stack.callback(_call_all, callbacks)


def _call_all(pending: list[Callable[[], object]]) -> None:
    """Calls functions, the last one first, each of which may be called again."""
    while pending:
        pending[-1]()
        pending.pop()


def _put_back_all(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(before)


def _put_back(buffer: Tensor, values: Tensor) -> None:
    has_values = not buffer.is_meta and not hasattr(buffer, "fake_mode")
    if buffer.shape != values.shape:  # observers of quantization do that
        buffer.resize_(values.shape)
    if has_values and not torch.equal(buffer, values):
        buffer.detach().copy_(values)
