"""A weight on its way to a convolution: in channels-last, in the dtype of autocast, and which results are kept."""

import weakref
from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.hooks import laid_out
from torch_nhwc.memory import with_canonical_strides
from torch_nhwc.ops import convert_weight

# What a weight was and what became of it.
_Results = MutableMapping[Tensor, tuple[tuple[Any, ...], Tensor | None]]

# Those that are kept until their weight changes, for weights that were asked for alone: parameters that a wrapper
# puts in their place, and refills without a word to autograd, are others.
_kept: _Results = WeakTensorKeyDictionary()
# By the type of the device, those of the autocast region that is running.
_of_region: dict[str, _Results] = {}


def in_channels_last(weight: Tensor, groups: int) -> Tensor:
    """A weight as a convolution is to get it: the one itself, or a view of it, where no bytes have to move.

    Filters of one channel stay contiguous, for the reason that `Format.of_filters` has.

    Otherwise the cast of autocast and the conversion are one pass. The result is remembered where autocast would have
    remembered its cast, and where it was asked for by `keep_result`.
    """
    if not isinstance(weight, Tensor):  # what torch.fx has for one
        return cast(Tensor, torch.ops.nhwc.convert_weight(weight))
    memory_format = CHANNELS_LAST.get(weight.dim())
    if memory_format is None:
        return weight
    if groups == 1 and _channels_of(weight) == 1:
        is_contiguous = type(weight) is nn.Parameter and weight.stride(0) == weight.stride(1)
        return weight if is_contiguous else weight.flatten(1).view(weight.shape)
    dtype = _dtype_of_autocast(weight)
    if dtype is None and _is_in_order(weight, memory_format):
        return with_canonical_strides(weight)
    results = None if _is_seen(weight) or type(weight) is not nn.Parameter else _results_for(weight, dtype)
    if results is None:
        return laid_out(weight, memory_format, dtype)
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    # The reference to the storage keeps its place from being another's.
    memory = StorageWeakRef(weight.untyped_storage()), weight.data_ptr()  # type: ignore[no-untyped-call]
    stamp = weight._version, memory, weight.dtype, weight.device, stream, dtype, needs_gradient
    known, result = results.get(weight, ((), None))
    if result is None or known != stamp:
        # A result from inference mode could not take part in training, where a frozen weight has the same stamp.
        with torch.inference_mode(False), torch.set_grad_enabled(needs_gradient):
            result = convert_weight(weight, dtype=dtype)
        if type(result) is Tensor:  # and none that is fake
            results[weight] = stamp, result
    return result


def keep_result(layer: nn.Module) -> None:
    """Has the result for a layer's weight kept from now on, without a gradient, until the weight changes."""
    weight = layer._parameters.get("weight")
    if weight is not None and weight not in _kept:
        _kept[weight] = (), None


def is_result_kept(layer: nn.Module) -> bool:
    """Whether it is."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight in _kept


def drop_result(layer: nn.Module) -> None:
    """Ends that, and frees the result."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        _kept.pop(weight, None)


def _is_seen(weight: Tensor) -> bool:
    """Whether a compiler, a tracer, a transform or a capture sees what is made: it is of no use to others."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or _is_transformed()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _is_transformed() -> bool:
    """Whether the call is inside of a transform of `torch.func`."""
    return torch._C._are_functorch_transforms_active()


def _channels_of(weight: Tensor) -> int:
    """Of each filter, without a warning from a tracer, to which sizes are tensors."""
    tracing = None if torch.compiler.is_compiling() else torch._C._get_tracing_state()
    if tracing is None:
        return weight.shape[1]
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return weight.shape[1]
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _is_in_order(weight: Tensor, memory_format: torch.memory_format) -> bool:
    """Whether no bytes have to move; of what is no parameter, as far as `torch.vmap` lets it be asked."""
    if type(weight) is nn.Parameter:
        return weight.is_contiguous(memory_format=memory_format)
    is_either = type(weight) is Tensor and 1 in (weight.shape[1], weight.shape[2:].numel())
    return is_either and weight.is_contiguous()


def _dtype_of_autocast(weight: Tensor) -> torch.dtype | None:
    """What autocast would cast a convolution's weight to; `None` where it stays, or where only autocast knows."""
    device = weight.device.type
    if _is_transformed() or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    stays = weight.dtype in (dtype, torch.float64) or not weight.is_floating_point()
    return None if stays else dtype


def _results_for(weight: Tensor, dtype: torch.dtype | None) -> _Results | None:
    """Where the result for a weight is remembered; `None` where it is not."""
    if weight.is_inference():  # it has no version
        return None
    if _kept and weight in _kept and not (torch.is_grad_enabled() and weight.requires_grad):
        return _kept
    # Autocast's own rule.
    is_cached = weight.dtype is torch.float32 and weight.is_leaf and weight.requires_grad and not weight._is_view()
    return _results_of_region(weight.device.type) if dtype and is_cached and torch.is_autocast_cache_enabled() else None


def _results_of_region(device: str) -> _Results | None:
    """The results that are forgotten when autocast forgets its own, as at the end of its outermost region.

    Autocast tells nobody when that is. So it is given a tensor to cast, which it caches: the end of that cast is the
    end of the others, too. A hook sees the cast, on its way to be saved for a backward; `None` where there may be none.
    """
    results = _of_region.get(device)
    if results is None:
        casts: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(casts.append, lambda nothing: nothing)
        try:
            # No mode sees it, since selective checkpointing wants the same operators in each pass.
            with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), hooks:
                token = torch.zeros(0, 0, dtype=torch.float32, device=device, requires_grad=True)
                torch.mm(token, token)
        except RuntimeError:  # such hooks are switched off
            return None
        results = {}
        weakref.finalize(casts[0].untyped_storage(), _of_region.pop, device, None).atexit = False
        _of_region[device] = results
    return results
