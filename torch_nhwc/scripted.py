"""Finding the convolution weights of a TorchScript module: by its layers' original classes, and by its graphs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.reasons import Reason

_RANKS = {"Conv2d": 4, "ConvTranspose2d": 4, "Conv3d": 5, "ConvTranspose3d": 5}
_CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution")

# Path, name of the tensor, class of the layer, rank, the layer, the tensor, and why it cannot be converted.
Found = tuple[str, str, str, int, nn.Module, Tensor | None, Reason | None]


def find(module: nn.Module) -> list[Found]:
    """The weights of a TorchScript module, at any depth.

    A class keeps its name through scripting and tracing. A subclass or a layer of the user's own does not; its weight
    shows in the graphs, where it reaches a convolution.
    """
    found: dict[str, Found] = {}
    for path, child in module.named_modules():
        for each in _layer(path, child):
            found[f"{each[0]}.{each[1]}"] = each
    for each in _reaching_a_convolution(module):
        found.setdefault(f"{each[0]}.{each[1]}", each)
    return list(found.values())


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


def _reaching_a_convolution(module: Any) -> Iterator[Found]:
    frozen = 0
    for method in module._c._get_methods():
        graph = method.graph.copy()
        torch._C._jit_pass_inline(graph)
        for kind in _CONVOLUTIONS:
            for node in graph.findAllNodes(f"aten::{kind}"):
                weight = list(node.inputs())[1].node()
                if weight.kind() == "prim::Constant":
                    value = weight.output().toIValue()
                    if isinstance(value, Tensor) and value.dim() in (4, 5):
                        yield "", f"<constant {frozen}>", kind, value.dim(), module, None, Reason.FROZEN
                        frozen += 1
                elif (names := _attribute(weight)) is not None:
                    owner = module
                    for name in names[:-1]:
                        owner = getattr(owner, name)
                    value = getattr(owner, names[-1])
                    if isinstance(value, Tensor) and value.dim() in (4, 5):
                        layer = getattr(owner, "original_name", kind)
                        yield ".".join(names[:-1]), names[-1], layer, value.dim(), owner, value, None


def _attribute(node: Any) -> list[str] | None:
    """The names that lead from the module to what a node gives, or `None` where it is computed."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.input().node()
    return names if names and node.kind() == "prim::Param" else None
