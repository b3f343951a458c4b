"""The sites that show only when a model runs: the tensors that reach its convolutions as weights."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.running.calls import run_once
from torch_nhwc.running.module_stack import ModuleStack
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import OPERATORS, PASSING_ON, Found, Site, walk


def add_sites(found: Found, example_inputs: Any) -> Found:
    """Add the sites that show only when the model runs, and remarks on weights that do not reach their convolution.

    Raises:
        ValueError: a layer is lazy, and running the model would make its weights.
    """
    model, sites = found.model, found.sites
    lazy = next((site for site in sites if site.reason is Reason.LAZY), None)
    if lazy is not None:
        raise ValueError(
            f"example_inputs would materialise the lazy layer {lazy}: run the model once, or leave them out"
        )
    owners = _owners(model)
    stack = ModuleStack(model)
    watch = _Watch([tensor for _, _, _, tensor in owners.values()], stack)
    run_once(model, example_inputs, stack, watch)
    used = {id(use.weight) for use in watch.uses}
    computed_in = {use.path for use in watch.uses if id(use.weight) not in owners}
    seen = [
        site.because(Reason.COMPUTED_IN_FORWARD)
        if site.reason is None and site.name == "weight" and site.path in computed_in and id(site.tensor) not in used
        else site
        for site in sites
    ]
    known = {id(site.tensor) for site in sites if site.tensor is not None}
    explained = {site.path for site in seen if site.reason is not None or site.name != "weight"}
    for use in watch.uses:
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


def _owners(model: nn.Module) -> dict[int, tuple[str, str, nn.Module, Tensor]]:
    """Return the tensors that a model stores, by identity: the module's path, the name, the module, the tensor."""
    owners: dict[int, tuple[str, str, nn.Module, Tensor]] = {}
    for path, module, _ in walk(model):
        is_scripted = isinstance(module, torch.jit.ScriptModule)  # walk does not go inside of one
        for inner, owner in module.named_modules(prefix=path) if is_scripted else [(path, module)]:
            plain = {} if is_scripted else vars(owner)
            own = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
            for name, tensor in (*plain.items(), *own):
                if isinstance(tensor, Tensor):
                    owners.setdefault(id(tensor), (inner, name, owner, tensor))
    return owners


class _Use(NamedTuple):
    """A weight that reached a convolution, and the innermost module that was running."""

    weight: Tensor
    groups: int
    path: str
    module: nn.Module


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Records the weight of every convolution that runs, except inside of `torch.cond` and its kin."""

    supports_higher_order_operators = True

    def __init__(self, owned: Iterable[Tensor], stack: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.stack = stack
        self.uses: list[_Use] = []
        self.sources: dict[int, Tensor] = {id(tensor): tensor for tensor in owned}  # by id, the tensor it came from
        self.converted: set[int] = set()  # by id, the weights that the model's own code converts
        self.keep: list[Tensor] = []  # the tensors of these ids, since an id may be reused once its tensor is gone

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in OPERATORS:
            weight = args[1]
            if weight.dim() in (4, 5) and id(weight) not in self.converted:
                groups = next((each for each in reversed(args) if type(each) is int), 1)
                source = self.sources.get(id(weight), weight)
                self.uses.append(_Use(source, groups, self.stack.path, self.stack.module))
        elif (name in PASSING_ON or name == "aten::squeeze") and id(args[0]) in self.sources:
            self.sources[id(result)] = self.sources[id(args[0])]
            self.keep.append(result)
        elif name == "nhwc::convert_weight":
            self.converted.add(id(result))
            self.keep.append(result)
        return result
