"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.finding.convolutions import OPERATORS, PACKED, PASSING_ON, RANKS
from torch_nhwc.finding.site import Site
from torch_nhwc.reasons import Reason

# Of the operators' arguments; the other operators have it at 6.
_PLACE_OF_GROUPS = {"aten::convolution": 8, "aten::_convolution": 8}
# Which raise for channels-last, or read the memory as it lies.
_VIEWS = "aten::view", "aten::as_strided"
_CHANNELS_LAST = (2, 3)  # as graphs have the memory formats
# Which a graph holds by itself; the second is in a layout of oneDNN's own.
_CONSTANT, _PACKED_CONSTANT = "prim::Constant", "prim::ConstantMKLDNNTensor"
# By the kind of the node that a weight without a name comes from; what an object holds has none.
_WITHOUT_NAME = {_CONSTANT: None, _PACKED_CONSTANT: Reason.FROZEN, "": Reason.PACKED}
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
    viewed: set[str] = set()
    for path, child in reversed(modules):
        lines = [line for where, line in nameless if path == prefix or where.startswith(f"{path}.")]
        for line, site in _reaching_a_convolution(path, child, viewed):
            if site.name.startswith("<"):
                if line not in lines:
                    found[site.full_name] = site
                    nameless.append((path, line))
            elif site.reason is not Reason.PACKED or ".".join(filter(None, (site.path, "weight"))) not in found:
                known = found.setdefault(site.full_name, site)
                known.groups = known.groups or site.groups  # which an archive has in its graphs alone
    for name in found.keys() & viewed:
        found[name] = found[name].because(found[name].reason or Reason.VIEWS_WEIGHT)
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


def _reaching_a_convolution(path: str, module: Any, viewed: set[str]) -> Iterator[tuple[str, Site]]:
    """Each with the line of source where the convolution is called; what a view is taken of is added to `viewed`."""
    count = 0
    for method in module._c._method_names():
        for node, known in _calls(module._c._get_method(method).graph, [[]]):
            if node.kind() in _VIEWS:
                names = _attribute(_passed_on(node.inputsAt(0))[0], known)
                viewed.add(".".join(filter(None, (path, *(names or ())))))
                continue
            is_packed = node.kind() in PACKED
            rank = PACKED.get(node.kind()) or OPERATORS[node.kind()] or _length(node.inputsAt(3)) + 2
            if rank not in (4, 5):
                continue
            objects = [each for each in node.inputs() if each.type().kind() == "ClassType"] if is_packed else []
            weight, is_laid_out = _passed_on((objects or [node.inputsAt(1)])[0])
            groups = 0 if is_packed else node.inputsAt(_PLACE_OF_GROUPS.get(node.kind(), 6)).toIValue() or 0
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
                yield line, Site(where, names[-1], owner.original_name, rank, groups, owner, *weight_or_why)
            elif names is None and not is_laid_out:
                kind = "" if is_packed else weight.node().kind()
                is_constant = weight.node().kind() in (_CONSTANT, _PACKED_CONSTANT)
                name = f"<{'constant' if is_constant else 'computed'} {count}>"
                count += 1
                # Which all copies of the graph share: it changes in the module.
                constant = weight.toIValue() if kind == _CONSTANT else None
                reason = _WITHOUT_NAME.get(kind, Reason.ON_THE_FLY)
                yield line, Site(path, name, module.original_name, rank, groups, module, constant, reason)


def _passed_on(value: Any) -> tuple[Any, bool]:
    """Where a weight comes from, and whether it was brought into channels-last on the way."""
    is_laid_out = False
    while value.node().kind() in PASSING_ON:
        is_laid_out = is_laid_out or _lays_out(value.node())
        value = value.node().inputsAt(0)
    return value, is_laid_out


def _lays_out(node: Any) -> bool:
    """Whether what passes a weight on brings it into a format, by our operator or by PyTorch's."""
    is_clone = node.kind() == "aten::clone"
    return node.kind() == "nhwc::convert_weight" or (is_clone and node.inputsAt(1).toIValue() in _CHANNELS_LAST)


def _calls(graph: Any, passed: list[_Names]) -> Iterator[tuple[Any, dict[str, _Names]]]:
    """The convolutions and views of a graph and of what it forks, and what is known of their graph's inputs."""
    graph = graph.copy()
    torch._C._jit_pass_inline(graph)
    # What a method is given besides itself is its caller's: an argument.
    inputs = [each.debugName() for each in graph.inputs()]
    known = dict(zip(inputs, [*passed, *([] for _ in inputs)]))
    for kind in (*OPERATORS, *PACKED, *_VIEWS):
        for node in graph.findAllNodes(kind):
            yield node, known
    for node in graph.findAllNodes("prim::fork"):
        yield from _calls(node.g("Subgraph"), [_attribute(each, known) for each in node.inputs()])


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
