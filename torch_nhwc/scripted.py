"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.reasons import Reason

_RANKS = {"Conv2d": 4, "ConvTranspose2d": 4, "Conv3d": 5, "ConvTranspose3d": 5}
# What convolves, with the rank of its weight; 0 where it serves all, and the stride or padding, as long as the kernel's
# dimensions, is its fourth argument. The weight is its second. The C++ walk has the same table: module/graph_walk.h.
_CONVOLUTIONS = {
    **dict.fromkeys(("aten::conv2d", "aten::conv_transpose2d"), 4),
    **dict.fromkeys(("aten::conv3d", "aten::conv_transpose3d"), 5),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::_convolution_mode"), 0),
    **dict.fromkeys(("aten::mkldnn_convolution", "prim::mkldnn_convolution"), 0),
}
# An object holds the weight of these.
_PACKED = {
    "mkldnn_prepacked::conv2d_run": 4,
    **{f"quantized::conv2d{kind}": 4 for kind in ("", "_relu", "_add", "_add_relu", "_dynamic")},
    **{f"quantized::conv3d{kind}": 5 for kind in ("", "_relu", "_dynamic")},
    **{f"quantized::conv_transpose{rank - 2}d{kind}": rank for rank in (4, 5) for kind in ("", "_dynamic")},
}
# What gives the same weight: in another dtype, as autocast does, or as a tensor that is not `None`.
_PASSING_ON = ("aten::to", "aten::detach", "prim::unchecked_cast", "nhwc::convert_weight")
_CONSTANTS = ("prim::Constant", "prim::ConstantMKLDNNTensor")

# Path, name of the tensor, class of the layer, rank, the layer, the tensor, and why it cannot be converted.
Found = tuple[str, str, str, int, nn.Module, Tensor | None, Reason | None]


def find(module: nn.Module) -> list[Found]:
    """The weights of a TorchScript module, at any depth.

    A class keeps its name through scripting and tracing. A subclass or a layer of the user's own does not; its weight
    shows in the graphs, where it reaches a convolution.
    """
    found: dict[str, Found] = {}
    modules = list(module.named_modules())
    for path, child in modules:
        for each in _layer(path, child):
            found[f"{each[0]}.{each[1]}"] = each
    # A module's graphs contain those of its children that it calls, and not the methods that only others call. What has
    # no name of its own is a child's where the same line of source shows there: the deepest ones come first.
    nameless: list[tuple[str, str]] = []
    for path, child in reversed(modules):
        lines = [line for where, line in nameless if not path or where.startswith(f"{path}.")]
        for line, each in _reaching_a_convolution(path, child):
            if not each[1].startswith("<"):
                if each[-1] is not Reason.PACKED or f"{each[0]}.weight" not in found:
                    found.setdefault(f"{each[0]}.{each[1]}", each)
            elif line not in lines:
                found[f"{each[0]}.{each[1]}"] = each
                nameless.append((path, line))
    order = {path: index for index, (path, _) in enumerate(modules)}
    return sorted(found.values(), key=lambda each: order[each[0]])


def _layer(path: str, module: nn.Module) -> Iterator[Found]:
    layer = getattr(module, "original_name", "")
    rank = _RANKS.get(layer.removeprefix("Mkldnn"), 0)
    if not rank:
        return
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.layout == torch.strided:
        if weight.dim() == rank:
            yield path, "weight", layer, rank, module, weight, None
    elif weight is not None or hasattr(module, "_packed_params"):  # oneDNN's namesakes are scripted always
        yield path, "weight", layer, rank, module, None, Reason.PACKED


def _reaching_a_convolution(path: str, module: Any) -> Iterator[tuple[str, Found]]:
    """Each with the line of source where the convolution is called."""
    layer, count = module.original_name, 0
    for method in module._c._method_names():
        for node, known in _convolutions(module._c._get_method(method).graph, [[]]):
            is_packed = node.kind() in _PACKED
            rank = _PACKED.get(node.kind()) or _CONVOLUTIONS[node.kind()] or _length(node.inputsAt(3)) + 2
            if rank not in (4, 5):
                continue
            objects = [each for each in node.inputs() if each.type().kind() == "ClassType"] if is_packed else []
            weight, is_laid_out = (objects or [node.inputsAt(1)])[0], False
            while weight.node().kind() in _PASSING_ON:
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
                tensor, reason = (None, Reason.PACKED) if is_packed else (held, None)
                yield line, (where, names[-1], owner.original_name, rank, owner, tensor, reason)
            elif names is None and not is_laid_out:
                is_constant = weight.node().kind() in _CONSTANTS
                name = f"<{'constant' if is_constant else 'computed'} {count}>"
                count += 1
                constant = weight.toIValue() if weight.node().kind() == "prim::Constant" and not is_packed else None
                reason = Reason.PACKED if is_packed else Reason.FROZEN if is_constant else Reason.ON_THE_FLY
                yield line, (path, name, layer, rank, module, constant, reason)


_Names = list[str] | None


def _convolutions(graph: Any, passed: list[_Names]) -> Iterator[tuple[Any, dict[str, _Names]]]:
    """The convolutions of a graph and of what it forks, and what is known of their graph's inputs."""
    graph = graph.copy()
    torch._C._jit_pass_inline(graph)
    known = dict(zip((each.debugName() for each in graph.inputs()), passed))
    for kind in (*_CONVOLUTIONS, *_PACKED):
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
    if value.node().kind() != "prim::Param":
        return None
    return [*(known.get(value.debugName()) or []), *names]


def _length(value: Any) -> int:
    """Of a list of numbers in a graph."""
    node = value.node()
    return len(list(node.inputs())) if node.kind() == "prim::ListConstruct" else len(value.toIValue() or ())
