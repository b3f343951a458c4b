"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.reasons import Reason

_RANKS = {"Conv2d": 4, "ConvTranspose2d": 4, "Conv3d": 5, "ConvTranspose3d": 5}
# All take the weight second and the stride, as long as the kernel's dimensions, fourth.
_CONVOLUTIONS = {
    **{f"aten::{name}": rank for name, rank in (("conv2d", 4), ("conv_transpose2d", 4))},
    **{f"aten::{name}": rank for name, rank in (("conv3d", 5), ("conv_transpose3d", 5))},
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "prim::mkldnn_convolution"), 0),
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
            if each[-1] is None:
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
        graph = module._c._get_method(method).graph.copy()
        torch._C._jit_pass_inline(graph)
        for node in (node for kind in _CONVOLUTIONS for node in graph.findAllNodes(kind)):
            rank = _CONVOLUTIONS[node.kind()] or _length(node.inputsAt(3)) + 2
            if rank not in (4, 5):
                continue
            weight, is_laid_out = node.inputsAt(1).node(), False
            while weight.kind() in _PASSING_ON:
                is_laid_out = is_laid_out or weight.kind() == "nhwc::convert_weight"
                weight = weight.inputsAt(0).node()
            line = str(node.sourceRange())
            names = _attribute(weight)
            if names:
                owner = module
                for name in names[:-1]:
                    owner = getattr(owner, name)
                where = ".".join(filter(None, (path, *names[:-1])))
                tensor = getattr(owner, names[-1])
                yield line, (where, names[-1], owner.original_name, rank, owner, tensor, None)
            elif names is None and not is_laid_out:
                is_constant = weight.kind() in _CONSTANTS
                name = f"<{'constant' if is_constant else 'computed'} {count}>"
                count += 1
                reason = Reason.FROZEN if is_constant else Reason.ON_THE_FLY
                yield line, (path, name, layer, rank, module, None, reason)


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
