"""Batches of images and volumes in channels-last: collated by a loader, or converted afterwards."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, _utils, get_worker_info

from torch_nhwc.layout import CHANNELS_LAST, Format, is_convertible, to_format
from torch_nhwc.ops import copy_weight_
from torch_nhwc.running.containers import map_tensors

_CollateFn = Callable[..., Any]
_stock = _utils.collate
_GIVE_NO_IMAGES = (
    _stock.collate_numpy_scalar_fn,
    _stock.collate_float_fn,
    _stock.collate_int_fn,
    _stock.collate_str_fn,
)
# The bytes of samples that are stacked at once, so that our kernel reads them from the cache.
_STACKED_BYTES = 512 << 10


def collate(
    batch: Sequence[Any], *, memory_format: torch.memory_format | str | None = None, pin_memory: bool = False
) -> Any:
    """Collate samples as `torch.utils.data.default_collate` does, with images and volumes in channels-last memory.

    For a loader's `collate_fn`. Types, values, errors and functions that were registered for other types are those of
    `default_collate`. Batches of `[C, H, W]` and `[C, D, H, W]` tensors, floating-point and uint8, differ in their
    strides alone, which are canonical. They are written once, in a worker process to shared memory; samples that are
    channels-last views, as decoders give them, are not permuted.

    NumPy arrays count as images or volumes only if they are such views: arrays of `[H, W, C]` become `[N, H, W, C]`, in
    contiguous memory.

    Args:
        batch: The samples, at least one.
        memory_format: `torch.channels_last` means images alone, `torch.channels_last_3d` volumes; by default both.
        pin_memory: Whether this process pins all tensors; a loader with `pin_memory=True` pins those of its workers,
            and keeps their strides.

    Raises:
        ValueError: The format is not a channels-last one.
        RuntimeError: `pin_memory` in a worker process; or whatever `default_collate` raises.

    Example:
        >>> images = [torch.zeros(4, 6, 3, dtype=torch.uint8).permute(2, 0, 1) for _ in range(2)]
        >>> batch, labels = torch_nhwc.data.collate([(image, 7) for image in images])
        >>> batch.shape, batch.stride(), labels
        (torch.Size([2, 3, 4, 6]), (72, 1, 18, 3), tensor([7, 7]))
    """
    wanted = _channels_last_format(memory_format)
    if pin_memory and get_worker_info() is not None:
        raise RuntimeError(
            "collate: a worker process cannot pin memory: give the DataLoader pin_memory=True, which keeps strides"
        )
    functions: dict[Any, _CollateFn] = {
        kind: function if function in _GIVE_NO_IMAGES else partial(_collated, function, wanted, pin_memory)
        for kind, function in _stock.default_collate_fn_map.items()
    }
    collated = _stock.collate(batch, collate_fn_map=functions)
    if pin_memory:
        return _utils.pin_memory.pin_memory(collated)  # type: ignore[no-untyped-call, unused-ignore]
    return collated


def wrap_collate_fn(fn: _CollateFn, *, memory_format: torch.memory_format | str | None = None) -> _CollateFn:
    """Return a `collate_fn` that applies `to_channels_last` to the batches of another one.

    `collate` writes a batch once; this writes the batch of `fn` a second time.

    Args:
        fn: A function that makes a batch of samples.
        memory_format: As in `to_channels_last`.

    Returns:
        A function that can be pickled if `fn` can.

    Raises:
        ValueError: The format is not a channels-last one.
        TypeError: `fn` cannot be called.

    Example:
        >>> collate_fn = torch_nhwc.data.wrap_collate_fn(lambda samples: {"x": torch.stack(samples)})
        >>> collate_fn([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])["x"].stride()
        (48, 1, 12, 3)
    """
    name = _channels_last_format(memory_format).name  # a name can be deep-copied, unlike a torch.memory_format
    if not callable(fn):
        raise TypeError(f"wrap_collate_fn: expected a function that makes a batch of samples, got {type(fn).__name__}")
    return partial(_to_channels_last_of, fn, name)


def to_channels_last(obj: Any, *, memory_format: torch.memory_format | str | None = None) -> Any:
    """Return an object whose batches of images and volumes are in channels-last.

    Args:
        obj: A tensor, or tensors in lists, tuples, dicts and other mutable mappings, and dataclasses, nested.
        memory_format: `torch.channels_last` means images, `[N, C, H, W]`, alone, `torch.channels_last_3d` volumes,
            `[N, C, D, H, W]`; by default both.

    Returns:
        The object with other tensors inside: floating-point and uint8 ones of such a rank have canonical strides. All
        others, and expanded ones, are the same objects. Gradients flow back. In a loader's worker process the copies
        are in shared memory.

    Raises:
        ValueError: The format is not a channels-last one.
        TypeError: It is a model, a data set or a loader.

    Example:
        >>> batch = torch_nhwc.data.to_channels_last({"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)})
        >>> batch["image"].stride()
        (48, 1, 12, 3)
    """
    wanted = _channels_last_format(memory_format)
    if isinstance(obj, (nn.Module, DataLoader, Dataset)):
        instead = "convert_ takes models" if isinstance(obj, nn.Module) else "give the loader collate_fn=collate"
        raise TypeError(f"to_channels_last: expected tensors in containers, got {type(obj).__name__}: {instead}")
    return map_tensors(obj, partial(_in_channels_last, wanted))


def _channels_last_format(memory_format: torch.memory_format | str | None) -> Format:
    wanted = Format.of(memory_format)
    if not wanted.is_channels_last:
        raise ValueError(f"expected memory_format to be None or a channels-last format, got {memory_format!r}")
    return wanted


def _to_channels_last_of(fn: _CollateFn, memory_format: str | None, batch: Any) -> Any:
    return to_channels_last(fn(batch), memory_format=memory_format)


def _in_channels_last(wanted: Format, tensor: Tensor) -> Tensor:
    """Return a batch of images or volumes in channels-last, and any other tensor unchanged."""
    if not _is_batch(tensor, tensor.dim(), wanted) or not is_convertible(tensor, list(CHANNELS_LAST)):
        return tensor
    is_dense = tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()])
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.requires_grad or is_dense:
        return to_format(tensor)
    return copy_weight_(_empty_batch(tensor.shape, tensor), tensor)


def _is_batch(tensor: Tensor, rank: int, wanted: Format) -> bool:
    """Return whether tensors of this dtype and of a rank are batches of images or volumes for a format."""
    return rank in CHANNELS_LAST and wanted.serves(rank) and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def _collated(
    function: _CollateFn, wanted: Format, pin_memory: bool, batch: Sequence[Any], *, collate_fn_map: Any = None
) -> Any:
    """Return the batch of a registered function in channels-last; written once, if the function would stack tensors."""
    if function is _stock.collate_tensor_fn:
        written = _written_once(batch, wanted, pin_memory)
        if written is not None:
            return written
    if function is _stock.collate_numpy_array_fn:
        map_of_all = collate_fn_map if _are_interleaved(batch) else _stock.default_collate_fn_map
        return function(batch, collate_fn_map=map_of_all)
    return to_channels_last(function(batch, collate_fn_map=collate_fn_map), memory_format=wanted.name)


def _written_once(samples: Sequence[Any], wanted: Format, pin_memory: bool) -> Tensor | None:
    """Return the batch of plain tensors of images or volumes, or `None` if PyTorch has to handle the samples.

    With many small samples each check of all of them counts: writing checks shapes, devices and gradients.
    """
    first = samples[0]
    if not isinstance(samples, (list, tuple)) or {*map(type, samples)} != {Tensor}:
        return None
    if not _is_batch(first, first.dim() + 1, wanted) or any(sample.dtype != first.dtype for sample in samples):
        return None
    try:
        batch = _empty_batch(torch.Size((len(samples), *first.shape)), first, pin_memory=pin_memory)
        _stack_into(batch, samples)
    except RuntimeError:
        return None
    return batch


def _empty_batch(shape: torch.Size, like: Tensor, *, pin_memory: bool = False) -> Tensor:
    """Return an empty batch in canonical strides, with the dtype and the device of a tensor.

    In a worker process it is in shared memory, so that the batch goes to the loader without a copy.
    """
    if get_worker_info() is None:
        memory_format = CHANNELS_LAST[len(shape)]
        return torch.empty(
            shape, dtype=like.dtype, device=like.device, memory_format=memory_format, pin_memory=pin_memory
        )
    size = shape.numel() * like.element_size()
    storage = torch.UntypedStorage._new_shared(size, device=like.device)  # type: ignore[no-untyped-call, unused-ignore]
    return like.new_empty(0).set_(storage, 0, shape, Format(None).strides(shape))


def _stack_into(batch: Tensor, samples: Sequence[Tensor]) -> None:
    """Write samples of one shape into their batch: by our kernel if elements have to be permuted."""
    is_permuted = not batch.is_contiguous() and all(sample.is_contiguous() for sample in samples)
    if not batch.is_cpu or not is_permuted:
        torch.stack(list(samples), 0, out=batch)
        return
    # PyTorch's threads share the work of one call.
    step = len(samples) if torch.get_num_threads() > 1 else max(1, _STACKED_BYTES // samples[0].nbytes)
    for start in range(0, len(samples), step):
        some = list(samples[start : start + step])
        copy_weight_(batch[start : start + step], torch.stack(some) if len(some) > 1 else some[0].unsqueeze(0))


def _are_interleaved(arrays: Sequence[Any]) -> bool:
    """Return whether the channels of each pixel are adjacent in NumPy arrays, as in `[C, H, W]` views of images.

    For other arrays of three dimensions it is unknown whether the channels are the first or the last one.
    """
    return all(getattr(each, "strides", ())[:1] == (getattr(each, "itemsize", 0),) for each in arrays)
