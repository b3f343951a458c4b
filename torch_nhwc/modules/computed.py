"""Weights that a layer computes from other tensors before each forward.

`parametrize` of today, and the older weight_norm, spectral_norm and pruning, which are hooks. What is converted are the
tensors that the weight is computed from; whether the weight then has the wanted strides is seen by computing it once
from converted copies. Where it has not, a last step of ours copies it into them.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from torch_nhwc.formats import Format
from torch_nhwc.hooks import LayOut, LayOutHook, add_hook, remove_hook
from torch_nhwc.reasons import Reason


def originals(module: nn.Module) -> dict[str, Tensor] | None:
    """By name, the tensors that the weight of a layer is computed from; `None` where it is not known to be computed."""
    parametrization = _parametrization(module)
    if parametrization is not None:
        stored = {**parametrization._parameters, **parametrization._buffers}
        return {f"parametrizations.weight.{name}": tensor for name, tensor in stored.items() if tensor is not None}
    if _hook(module) is None:
        return None
    stored = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in stored.items() if tensor is not None and name.startswith("weight_")}


def evaluate(module: nn.Module, replacements: Mapping[str, Tensor]) -> Tensor | None:
    """The weight of a layer as it will be when other tensors stand in the place of its originals.

    Computed on copies, and without a last step of ours: neither the layer nor the state that a parametrization may keep
    changes. `None` where that does not work, which only the code that computes the weight can know.
    """
    tensors = originals(module) or {}
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
                id(tensors[name]): _like(tensors[name], replacement) for name, replacement in replacements.items()
            }
            simulated = copy.deepcopy(parametrization, memo)
            _remove_steps(simulated)
            return simulated()  # type: ignore[no-any-return]
    except Exception:
        return None


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def is_original(module: nn.Module, name: str) -> bool:
    """Whether the weight of a layer is computed from the tensor of this name."""
    return name in (originals(module) or ())


def is_orthogonal(module: nn.Module) -> bool:
    """Whether `torch.nn.utils.parametrizations.orthogonal` computes the weight of a layer."""
    return any(isinstance(each, _Orthogonal) for each in _parametrization(module) or ())


def remark_on(module: nn.Module, rank: int, wanted: Format) -> Reason | None:
    """Why a computed weight will not be in a format once the originals of its rank are; `None` where it will."""
    tensors = originals(module) or {}
    replacements = {
        name: tensor.new_empty_strided(tensor.shape, wanted.strides(tensor.shape)).copy_(tensor.detach())
        for name, tensor in tensors.items()
        if tensor.dim() == rank
    }
    weight = evaluate(module, replacements)
    if weight is None:
        return Reason.COMPUTED
    return None if weight.stride() == wanted.strides(weight.shape) else Reason.COPIED_EACH_FORWARD


def step_format(module: nn.Module) -> str | None:
    """The memory format of the last step of ours in a layer, if there is one.

    `None` also where something has come behind it since, as a second pruning does.
    """
    parametrization = _parametrization(module)
    if parametrization is not None:
        last = parametrization[len(parametrization) - 1]
    else:
        computing = (_hook(module), *_step_hooks(module))
        last = next((hook for hook in reversed(module._forward_pre_hooks.values()) if hook in computing), None)
    return last.memory_format if isinstance(last, (LayOut, LayOutHook)) else None


def set_step(module: nn.Module, memory_format: str | None) -> None:
    """Gives a layer a last step of ours, changes it, or takes it away with `None`."""
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


def _remove_steps(parametrization: Any) -> None:
    for index in reversed(range(len(parametrization))):
        if isinstance(parametrization[index], LayOut):
            del parametrization[index]


def _step_hooks(module: nn.Module) -> list[LayOutHook]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, LayOutHook)]


def _parametrization(module: nn.Module) -> Any:
    """The list of a parametrized weight's parametrizations, which holds the originals as well, or `None`."""
    return module.parametrizations["weight"] if parametrize.is_parametrized(module, "weight") else None  # type: ignore[index, unused-ignore]


def _hook(module: nn.Module) -> Any:
    """The hook that computes `weight`: of weight_norm, spectral_norm or pruning, by the name that it keeps."""
    if "weight" in module._parameters:
        return None
    for hook in module._forward_pre_hooks.values():
        if "weight" in (getattr(hook, "_tensor_name", None), getattr(hook, "name", None)):
            return hook
    return None
