"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.finding.convolutions import OPERATORS, PACKED, PASSING_ON, RANKS
from torch_nhwc.finding.site import Site
from torch_nhwc.reasons import Reason

_CONSTANTS = ("prim::Constant", "prim::ConstantMKLDNNTensor")
_Names = list[str] | None


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
            if site.name.startswith("<"):
                if line not in lines:
                    found[site.full_name] = site
                    nameless.append((path, line))
            elif site.reason is not Reason.PACKED or ".".join(filter(None, (site.path, "weight"))) not in found:
                found.setdefault(site.full_name, site)
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
    count = 0
    for method in module._c._method_names():
        for node, known in _convolutions(module._c._get_method(method).graph, [[]]):
            is_packed = node.kind() in PACKED
            rank = PACKED.get(node.kind()) or OPERATORS[node.kind()] or _length(node.inputsAt(3)) + 2
            if rank not in (4, 5):
                continue
            objects = [each for each in node.inputs() if each.type().kind() == "ClassType"] if is_packed else []
            weight, is_laid_out = (objects or [node.inputsAt(1)])[0], False
            while weight.node().kind() in PASSING_ON:
                is_laid_out = is_laid_out or weight.node().kind() == "nhwc::convert_weight"
                weight = weight.node().inputsAt(0)
            line = str(node.sourceRange())
            names = _attribute(weight, known)
            if names:
                owner = module
                for name in names[:-1]:
                    owner = getattr(owner, name)
                where = ".".join(filter(None, (path, *names[:-1])))
                held = getattr(owner, names[-1])
                is_packed = is_packed or (isinstance(held, Tensor) and held.layout != torch.strided)
                weight_or_why = (None, Reason.PACKED) if is_packed else (held, None)
                yield line, Site(where, names[-1], owner.original_name, rank, 0, owner, *weight_or_why)
            elif names is None and not is_laid_out:
                is_constant = weight.node().kind() in _CONSTANTS
                name = f"<{'constant' if is_constant else 'computed'} {count}>"
                count += 1
                constant = weight.toIValue() if weight.node().kind() == "prim::Constant" and not is_packed else None
                reason = Reason.PACKED if is_packed else Reason.FROZEN if is_constant else Reason.ON_THE_FLY
                yield line, Site(path, name, module.original_name, rank, 0, module, constant, reason)


def _convolutions(graph: Any, passed: list[_Names]) -> Iterator[tuple[Any, dict[str, _Names]]]:
    """The convolutions of a graph and of what it forks, and what is known of their graph's inputs."""
    graph = graph.copy()
    torch._C._jit_pass_inline(graph)
    # What a method is given besides itself is its caller's: an argument.
    inputs = [each.debugName() for each in graph.inputs()]
    known = dict(zip(inputs, [*passed, *([] for _ in inputs)]))
    for kind in (*OPERATORS, *PACKED):
        for node in graph.findAllNodes(kind):
            yield node, known
    for node in graph.findAllNodes("prim::fork"):
        yield from _convolutions(node.g("Subgraph"), [_attribute(each, known) for each in node.inputs()])


def _attribute(value: Any, known: dict[str, _Names]) -> _Names:
    """The names that lead from the module to a value of a graph; none for an argument; `None` where it is computed."""
    names: list[str] = []
    while value.node().kind() in ("prim::GetAttr", "prim::unchecked_cast"):
        if value.node().kind() == "prim::GetAttr":
            names.insert(0, value.node().s("name"))
        value = value.node().input()
    # What a loop carries along is computed.
    before = known.get(value.debugName()) if value.node().kind() == "prim::Param" else None
    return None if before is None else [*before, *names]


def _length(value: Any) -> int:
    """Of a list of numbers in a graph."""
    node = value.node()
    return len(list(node.inputs())) if node.kind() == "prim::ListConstruct" else len(value.toIValue() or ())
