"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.finding.convolutions import OPERATORS, PASSING_ON, RANKS
from torch_nhwc.finding.site import Site
from torch_nhwc.reasons import Reason

_CONSTANTS = ("prim::Constant", "prim::ConstantMKLDNNTensor")


def find(prefix: str, module: nn.Module) -> list[Site]:
    """The sites of a TorchScript module, at any depth.

    A class keeps its name through scripting and tracing. A subclass or a layer of the user's own does not; its weight
    shows in the graphs, where it reaches a convolution.

    Args:
        prefix: the module's path.
        module: a scripted, traced or loaded one.
    """
    found: dict[str, Site] = {}
    modules = list(module.named_modules(prefix=prefix))
    for path, child in modules:
        for site in _layer(path, child):
            found[site.full_name] = site
    # A module's graphs contain those of its children that it calls, and not the methods that only others call. What has
    # no name of its own is a child's where the same line of source shows there: the deepest ones come first.
    nameless: list[tuple[str, str]] = []
    for path, child in reversed(modules):
        lines = [line for where, line in nameless if path == prefix or where.startswith(f"{path}.")]
        for line, site in _reaching_a_convolution(path, child):
            if site.reason is None:
                found.setdefault(site.full_name, site)
            elif line not in lines:
                found[site.full_name] = site
                nameless.append((path, line))
    order = {path: index for index, (path, _) in enumerate(modules)}
    return sorted(found.values(), key=lambda site: order[site.path])


def _layer(path: str, module: nn.Module) -> Iterator[Site]:
    layer = getattr(module, "original_name", "")
    rank = RANKS.get(layer.removeprefix("Mkldnn"), 0)
    if not rank:
        return
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.layout == torch.strided:
        if weight.dim() == rank:
            yield Site(path, "weight", layer, rank, 0, module, weight, None)
    elif weight is not None or hasattr(module, "_packed_params"):  # oneDNN's namesakes are scripted always
        yield Site(path, "weight", layer, rank, 0, module, None, Reason.PACKED)


def _reaching_a_convolution(path: str, module: Any) -> Iterator[tuple[str, Site]]:
    """Each with the line of source where the convolution is called."""
    layer, count = module.original_name, 0
    for method in module._c._method_names():
        graph = module._c._get_method(method).graph.copy()
        torch._C._jit_pass_inline(graph)
        for node in (node for kind in OPERATORS for node in graph.findAllNodes(kind)):
            rank = OPERATORS[node.kind()] or _length(node.inputsAt(3)) + 2
            if rank not in (4, 5):
                continue
            weight, is_laid_out = node.inputsAt(1).node(), False
            while weight.kind() in PASSING_ON:
                is_laid_out = is_laid_out or weight.kind() == "nhwc::convert_weight"
                weight = weight.inputsAt(0).node()
            line = str(node.sourceRange())
            names = _attribute(weight)
            if names:
                owner = module
                for name in names[:-1]:
                    owner = getattr(owner, name)
                where, tensor = ".".join(filter(None, (path, *names[:-1]))), getattr(owner, names[-1])
                yield line, Site(where, names[-1], owner.original_name, rank, 0, owner, tensor, None)
            elif names is None and not is_laid_out:
                is_constant = weight.kind() in _CONSTANTS
                name = f"<{'constant' if is_constant else 'computed'} {count}>"
                count += 1
                reason = Reason.FROZEN if is_constant else Reason.ON_THE_FLY
                yield line, Site(path, name, layer, rank, 0, module, None, reason)


def _attribute(node: Any) -> list[str] | None:
    """The names that lead from the module to what a node gives; none for an argument; `None` where it is computed."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.input().node()
    return names if node.kind() == "prim::Param" else None


def _length(value: Any) -> int:
    """Of a list of numbers in a graph."""
    node = value.node()
    return len(list(node.inputs())) if node.kind() == "prim::ListConstruct" else len(value.toIValue() or ())
