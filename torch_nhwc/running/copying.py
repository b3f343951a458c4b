"""Copying a model, to try on the copy what is not to be done to the model."""

import copy
import io
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_nhwc.modules.walk import walk
from torch_nhwc.running.nested import mapped, tensors_in

Model = TypeVar("Model", bound=nn.Module)


def deep_copy(model: Model) -> Model:
    """A deep copy; where a TorchScript module is in it, PyTorch's own may forget what requires gradients."""
    # PyTorch's copies of a frozen module share the constants of its graphs, which are weights: an archive's do not.
    memo: dict[int, Any] = {}
    for _, module, _ in walk(model):
        if isinstance(module, torch.jit.ScriptModule) and any(map(_has_constants, module.modules())):
            with suppress(RuntimeError):  # fused for oneDNN, an archive cannot be loaded; nor can such weights change
                archive = io.BytesIO(module.save_to_buffer())  # type: ignore[no-untyped-call, unused-ignore]
                memo[id(module)] = torch.jit.load(archive)  # type: ignore[no-untyped-call, unused-ignore]
    with torch.no_grad():  # the parameters of such a copy would otherwise remember where they came from
        twin = copy.deepcopy(model, memo)
    for parameter, copied in zip(model.parameters(), twin.parameters()):
        copied.requires_grad_(parameter.requires_grad)
    return twin


def copy_of_inputs(inputs: Any) -> Any:
    """What a model is called with once more, each tensor a leaf, so that what it writes does not reach the caller."""
    # With each tensor, so that it lives, and no other gets its identity: a container may make it anew when it is read.
    leaves = {id(tensor): (tensor, _leaf("", tensor)) for _, tensor in tensors_in(inputs, "")}
    try:
        return copy.deepcopy(inputs, {identity: leaf for identity, (_, leaf) in leaves.items()})
    except Exception:  # such as a lock is in it
        return mapped(inputs, "", _leaf)


def _leaf(_: str, tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _has_constants(module: Any) -> bool:
    """Whether graphs of a TorchScript module have tensors for constants."""
    graphs = (module._c._get_method(name).graph for name in module._c._method_names())
    constants = (node for graph in graphs for node in graph.findAllNodes("prim::Constant"))
    return any(node.output().type().kind() == "TensorType" for node in constants)
