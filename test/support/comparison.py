"""Comparing a converted model with a deep copy that was never converted."""

import copy
import warnings
from contextlib import contextmanager

import torch
from reference import FORMATS, canonical_strides
from torch import nn
from torch.overrides import TorchFunctionMode

import torch_nhwc  # noqa: F401  registers the operators

# By name: `opcheck` replaces operators in `torch.ops`.
_CONVOLUTIONS = "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"


class WeightsAtConvolutions(TorchFunctionMode):
    """The weights that reach the 2D and 3D convolutions inside of it, whatever the layer."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in _CONVOLUTIONS:
            self.weights.append(args[1] if len(args) > 1 else kwargs["weight"])
        return function(*args, **(kwargs or {}))


def strides_at_convolutions(model, *inputs):
    """Those of the weights, in the order of the calls, as the model runs in its own mode."""
    with WeightsAtConvolutions() as seen:
        model(*inputs)
    return [weight.stride() for weight in seen.weights]


def strides_in(weights, memory_format=None):
    """Canonical strides of the weights' shapes, in channels-last by rank unless another format is named."""
    return [canonical_strides(weight.shape, memory_format or FORMATS[weight.dim()]) for weight in weights]


def assert_weights_arrive_in(memory_format, model, *inputs):
    with WeightsAtConvolutions() as seen:
        model(*inputs)
    assert seen.weights
    assert [weight.stride() for weight in seen.weights] == strides_in(seen.weights, memory_format)


def tensors(model):
    """By name, parameters and buffers, the tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def layouts(model):
    """Identity and strides of every tensor of a model."""
    return {name: (id(tensor), tensor.stride()) for name, tensor in tensors(model).items()}


def total(output):
    """Return a number that depends on every tensor of an output."""
    if isinstance(output, torch.Tensor):
        return output.square().mean() if output.is_floating_point() else output.sum() * 0.0
    if isinstance(output, dict):
        output = list(output.values())
    return sum((total(each) for each in output), torch.zeros(())) if isinstance(output, (list, tuple)) else 0.0


def assert_trains_alike(model, plain, run, steps=1, tolerance=1e-9):
    """Equal losses, gradients and tensors over some steps of training, by `run(model)`, which gives an output."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    for _ in range(steps):
        losses = []
        for each, optimizer in zip((model, plain), optimizers):
            torch.manual_seed(0)
            optimizer.zero_grad()
            losses.append(total(run(each)))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert expected[name].grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=tolerance, atol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    expected = tensors(plain)
    for name, tensor in tensors(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance)


@contextmanager
def quiet():
    """PyTorch's own deprecations say nothing about us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def copied(model):
    """Return a deep copy; a layer's computed weight, which PyTorch cannot copy, is computed by the next forward."""
    for module in model.modules():
        weight = vars(module).get("weight")
        if isinstance(weight, torch.Tensor) and not isinstance(weight, nn.Parameter):
            module.weight = weight.detach()
    return copy.deepcopy(model)


def state_of(model):
    """Return the values of every tensor of a model."""
    return {name: tensor.clone() for name, tensor in tensors(model).items()}


def assert_as_it_was(model, before, layout):
    assert list(tensors(model)) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    assert layouts(model) == layout
