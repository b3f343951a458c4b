"""The convolution weights of a TorchScript module, by the original classes of its layers and by its graphs."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import OPERATORS, PASSING_ON, RANKS, Site

# The place of `groups` among an operator's arguments; it is 6 for the other operators.
_PLACE_OF_GROUPS = {"aten::convolution": 8, "aten::_convolution": 8}
# These raise for a channels-last tensor, or read its memory in another order.
_VIEWS = "aten::view", "aten::as_strided"
_CHANNELS_LAST = (2, 3)  # as graphs number the memory formats
# A weight without a name, by the kind of the node that it comes from. The second is in oneDNN's own layout.
_CONSTANTS = {"prim::Constant": None, "prim::ConstantMKLDNNTensor": Reason.FROZEN}


def find(prefix: str, module: nn.Module) -> list[Site]:
    """Return the sites of a TorchScript module, at any depth; `prefix` is its path.

    PyTorch's layers keep the name of their class. Other classes do not, and their weights are found in the graphs,
    where they reach a convolution.
    """
    modules = list(module.named_modules(prefix=prefix))
    found = {site.full_name: site for path, child in modules for site in _layer(path, child)}
    # A module's graphs contain those of the children that it calls, but not the methods that only others call. So all
    # graphs are read, the deepest first, and a nameless weight that shows again at the same line of source is known.
    nameless: list[tuple[str, str]] = []
    viewed: set[str] = set()
    for path, child in reversed(modules):
        inside = f"{path}." if path else ""
        lines = {line for where, line in nameless if f"{where}.".startswith(inside)}
        viewed |= _viewed(path, child)
        for line, site in _reaching_a_convolution(path, child):
            if site.name.startswith("<"):
                if line not in lines:
                    found[site.full_name] = site
                    nameless.append((path, line))
            else:
                known = found.setdefault(site.full_name, site)
                known.groups = known.groups or site.groups  # only the graphs of a loaded module have them
    for name in found.keys() & viewed:
        found[name] = found[name].because(found[name].reason or Reason.VIEWS_WEIGHT)
    order = {path: index for index, (path, _) in enumerate(modules)}
    return sorted(found.values(), key=lambda site: order[site.path])


def _layer(path: str, module: nn.Module) -> Iterator[Site]:
    layer = getattr(module, "original_name", "")
    rank = RANKS.get(re.sub("^Mkldnn|(Add)?(ReLU)?", "", layer), 0)  # quantized ones are fused with other layers
    if not rank:
        return
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.layout == torch.strided:
        if weight.dim() == rank:
            yield Site(path, "weight", layer, rank, 0, module, weight, None)
    elif weight is not None or hasattr(module, "_packed_params"):
        yield Site(path, "weight", layer, rank, 0, module, None, Reason.PACKED)


def _reaching_a_convolution(path: str, module: Any) -> Iterator[tuple[str, Site]]:
    """Yield the weights in a module's graphs, each with the source line of its convolution."""
    count = 0
    for graph, node in _nodes(module, OPERATORS):
        rank = OPERATORS[node.kind()] or _length(node.inputsAt(3)) + 2
        if rank not in (4, 5):
            continue
        weight, is_converted = _passed_on(node.inputsAt(1))
        groups = node.inputsAt(_PLACE_OF_GROUPS.get(node.kind(), 6)).toIValue() or 0
        names, kind = _attribute(weight, graph), weight.node().kind()
        if names:
            owner = module
            for name in names[:-1]:
                owner = getattr(owner, name)
            tensor, reason = getattr(owner, names[-1]), None
            if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
                tensor, reason = None, Reason.PACKED
            where, layer = ".".join(filter(None, (path, *names[:-1]))), owner.original_name
            yield str(node.sourceRange()), Site(where, names[-1], layer, rank, groups, owner, tensor, reason)
        elif names is None and not is_converted:
            reason = _CONSTANTS.get(kind, Reason.ON_THE_FLY)
            # The copy of the graph shares the module's constants.
            tensor = weight.toIValue() if reason is None else None
            name = f"<{'constant' if kind in _CONSTANTS else 'computed'} {count}>"
            count += 1
            site = Site(path, name, module.original_name, rank, groups, module, tensor, reason)
            yield str(node.sourceRange()), site


def _viewed(path: str, module: Any) -> set[str]:
    """Return the full names of the tensors that a module's graphs take a view of."""
    names: set[str] = set()
    for graph, node in _nodes(module, _VIEWS):
        names.add(".".join(filter(None, (path, *(_attribute(_passed_on(node.inputsAt(0))[0], graph) or ())))))
    return names


def _nodes(module: Any, kinds: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of some kinds in a module's graphs, each with its graph."""
    for method in module._c._method_names():
        graph = module._c._get_method(method).graph.copy()
        torch._C._jit_pass_inline(graph)
        for kind in kinds:
            yield from ((graph, node) for node in graph.findAllNodes(kind))


def _passed_on(value: Any) -> tuple[Any, bool]:
    """Return where a weight comes from, and whether it is converted to channels-last on the way."""
    is_converted = False
    while (node := value.node()).kind() in PASSING_ON:
        is_clone = node.kind() == "aten::clone" and node.inputsAt(1).toIValue() in _CHANNELS_LAST
        is_converted = is_converted or is_clone or node.kind() == "nhwc::convert_weight"
        value = node.inputsAt(0)
    return value, is_converted


def _attribute(value: Any, graph: Any) -> list[str] | None:
    """Return the names that lead from the module to a value: none for an argument, `None` if the value is computed."""
    names: list[str] = []
    while (node := value.node()).kind() in ("prim::GetAttr", "prim::unchecked_cast"):
        if node.kind() == "prim::GetAttr":
            names.insert(0, node.s("name"))
        value = node.input()
    inputs = [each.debugName() for each in graph.inputs()]  # the first is the module
    if node.kind() != "prim::Param" or value.debugName() not in inputs:  # a loop's own variables are computed
        return None
    return names if value.debugName() == inputs[0] else []


def _length(value: Any) -> int:
    """Return the length of a list of numbers in a graph."""
    node = value.node()
    return len(list(node.inputs())) if node.kind() == "prim::ListConstruct" else len(value.toIValue() or ())
