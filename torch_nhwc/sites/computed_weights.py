"""Weights that a layer computes from other tensors (its originals) before each forward.

These are parametrizations, and the hooks of the older weight_norm, spectral_norm and pruning. The originals are
converted. To see whether the weight then has the requested strides, it is computed once from converted copies. If it
has not, a last step of this package copies the weight into the format in each forward.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from torch_nhwc.layout import Format
from torch_nhwc.nn.hooks import LayOut, LayOutHook, add_hook, remove_hook
from torch_nhwc.sites.reasons import Reason


def originals(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors that a layer's weight is computed from, by name; `None` if it is not known to be computed."""
    parametrization = _parametrization(module)
    if parametrization is not None:
        stored = {**parametrization._parameters, **parametrization._buffers}
        return {f"parametrizations.weight.{name}": tensor for name, tensor in stored.items() if tensor is not None}
    if _hook(module) is None:
        return None
    stored = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in stored.items() if tensor is not None and name.startswith("weight_")}


def is_original(module: nn.Module, name: str) -> bool:
    """Return whether a layer's weight is computed from the tensor of this name."""
    return name in (originals(module) or ())


def is_orthogonal(module: nn.Module) -> bool:
    """Return whether `torch.nn.utils.parametrizations.orthogonal` computes a layer's weight."""
    return any(isinstance(each, _Orthogonal) for each in _parametrization(module) or ())


def remark_on(module: nn.Module, rank: int, wanted: Format) -> Reason | None:
    """Return why a computed weight will not be in a format once its originals are; `None` if it will be."""
    tensors = originals(module) or {}
    replacements = {
        name: tensor.new_empty_strided(tensor.shape, wanted.strides(tensor.shape)).copy_(tensor.detach())
        for name, tensor in tensors.items()
        if tensor.dim() == rank
    }
    weight = _evaluate(module, tensors, replacements)
    if weight is None:
        return Reason.COMPUTED
    return None if weight.stride() == wanted.strides(weight.shape) else Reason.COPIED_EACH_FORWARD


def step_format(module: nn.Module) -> str | None:
    """Return the memory format of the last step of this package in a layer; `None` if that is not the last step.

    A second pruning, for example, adds its own step after it.
    """
    parametrization = _parametrization(module)
    if parametrization is not None:
        last = parametrization[len(parametrization) - 1]
    else:
        computing = (_hook(module), *_step_hooks(module))
        last = next((hook for hook in reversed(module._forward_pre_hooks.values()) if hook in computing), None)
    return last.memory_format if isinstance(last, (LayOut, LayOutHook)) else None


def set_step(module: nn.Module, memory_format: str | None) -> None:
    """Add or change the last step of this package in a layer; `None` removes it."""
    parametrization = _parametrization(module)
    if parametrization is not None:
        _remove_steps(parametrization)
        if memory_format is not None:
            parametrization.append(LayOut(memory_format))
    else:
        for hook in _step_hooks(module):
            remove_hook(module, hook)
        if memory_format is not None:
            add_hook(module, LayOutHook(memory_format))


def _evaluate(module: nn.Module, tensors: Mapping[str, Tensor], replacements: Mapping[str, Tensor]) -> Tensor | None:
    """Compute a layer's weight with some of its originals replaced, without a last step of this package.

    This runs on copies, so neither the layer nor a parametrization's own state changes. Returns `None` if that fails,
    for whatever reason the code that computes the weight has.
    """
    devices = {tensor.device.index for tensor in tensors.values() if tensor.is_cuda}
    parametrization = _parametrization(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            if parametrization is None:
                stand_in: Any = nn.Module().train(module.training)
                for name, tensor in tensors.items():
                    setattr(stand_in, name, replacements.get(name, tensor.detach().clone()))
                _hook(module)(stand_in, ())
                return stand_in.weight  # type: ignore[no-any-return]
            memo: dict[int, object] = {
                id(tensors[name]): nn.Parameter(each, tensors[name].requires_grad)
                if isinstance(tensors[name], nn.Parameter)
                else each
                for name, each in replacements.items()
            }
            simulated = copy.deepcopy(parametrization, memo)
            _remove_steps(simulated)
            return simulated()  # type: ignore[no-any-return]
    except Exception:
        return None


def _remove_steps(parametrization: Any) -> None:
    for index in reversed(range(len(parametrization))):
        if isinstance(parametrization[index], LayOut):
            del parametrization[index]


def _step_hooks(module: nn.Module) -> list[LayOutHook]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, LayOutHook)]


def _parametrization(module: nn.Module) -> Any:
    """Return the list of the weight's parametrizations, which also holds the originals, or `None`."""
    return module.parametrizations["weight"] if parametrize.is_parametrized(module, "weight") else None  # type: ignore[index, unused-ignore]


def _hook(module: nn.Module) -> Any:
    """Return the hook of weight_norm, spectral_norm or pruning that computes the weight, or `None`."""
    if "weight" in module._parameters:
        return None
    for hook in module._forward_pre_hooks.values():
        if "weight" in (getattr(hook, "_tensor_name", None), getattr(hook, "name", None)):
            return hook
    return None
