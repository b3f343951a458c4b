"""Call models with example inputs, and copy both."""

import copy
import inspect
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_nhwc.running.containers import map_tensors, tensors_in

Model = TypeVar("Model", bound=nn.Module)


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments.

    Args:
        model: The model to be called.
        inputs: A tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.

    Raises:
        TypeError: The inputs are a shape: integers that the model does not take as arguments.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if all(type(each) is int for each in inputs) and (isinstance(inputs, torch.Size) or not _takes(model, inputs)):
        sizes = ", ".join(map(str, inputs))
        raise TypeError(f"expected example_inputs to be tensors, got the shape ({sizes}): give torch.randn({sizes})")
    return tuple(inputs), {}


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with example inputs, as `arguments_of` takes them, and return its output."""
    args, kwargs = arguments_of(model, inputs)
    return model(*args, **kwargs)


def copy_model(model: Model) -> Model:
    """Return a deep copy, in which TorchScript modules keep their own constants and what requires gradients."""
    # A deep copy of a frozen TorchScript module shares the constants of its graphs, which are its weights.
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) and any(map(_has_constants, module.modules())):
            with suppress(RuntimeError):  # archives with operators fused for oneDNN do not load
                archive = io.BytesIO(module.save_to_buffer())  # type: ignore[no-untyped-call, unused-ignore]
                memo[id(module)] = torch.jit.load(archive)  # type: ignore[no-untyped-call, unused-ignore]
    with torch.no_grad():  # otherwise parameters of a copied TorchScript module have a gradient function
        copied = copy.deepcopy(model, memo)
    for parameter, other in zip(model.parameters(), copied.parameters()):
        other.requires_grad_(parameter.requires_grad)
    return copied


def copy_inputs(inputs: Any) -> Any:
    """Return a deep copy of example inputs in which each tensor is a leaf."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    tensors = {id(tensor): tensor for _, tensor in tensors_in(inputs)}
    try:
        return copy.deepcopy(inputs, {identity: leaf(tensor) for identity, tensor in tensors.items()})
    except Exception:  # an argument such as a lock cannot be copied
        return map_tensors(inputs, leaf)


def _takes(model: nn.Module, numbers: Sequence[int]) -> bool:
    """Return whether the model's signature accepts as many arguments."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return len(numbers) < 3
    try:
        signature.bind(*numbers)
    except TypeError:
        return False
    return True


def _has_constants(module: Any) -> bool:
    """Return whether the graphs of a TorchScript module contain tensors."""
    graphs = (module._c._get_method(name).graph for name in module._c._method_names())
    constants = (node for graph in graphs for node in graph.findAllNodes("prim::Constant"))
    return any(node.output().type().kind() == "TensorType" for node in constants)
