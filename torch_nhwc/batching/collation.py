"""Collating samples as PyTorch's loaders do, into batches that are channels-last."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import _utils, get_worker_info

from torch_nhwc.batching.batches import channels_last_format, empty_batch, is_batch, stack_into, to_channels_last
from torch_nhwc.formats import Format

_stock = _utils.collate
_CollateFn = Callable[..., Any]
_GIVE_NO_IMAGES = (
    _stock.collate_numpy_scalar_fn,
    _stock.collate_float_fn,
    _stock.collate_int_fn,
    _stock.collate_str_fn,
)


def collate(
    batch: Sequence[Any], *, memory_format: torch.memory_format | str | None = None, pin_memory: bool = False
) -> Any:
    """Collates samples as `torch.utils.data.default_collate` does, images and volumes into channels-last memory.

    For a loader's `collate_fn`. Types, values, errors and functions that were registered for other types are those of
    `default_collate`. Batches of `[C, H, W]` and `[C, D, H, W]` tensors, floating and uint8, differ in their strides
    alone, which are canonical. They are written once, in a worker process to shared memory; what lies channels-last in
    the samples, as in views of decoded images, is not permuted.

    NumPy arrays are taken for images or volumes only where they lie so: those of `[H, W, C]` become `[N, H, W, C]`, in
    contiguous memory.

    Args:
        batch: the samples, at least one.
        memory_format: `torch.channels_last` means images alone, `torch.channels_last_3d` volumes; by default both.
        pin_memory: whether all tensors are pinned, by this process; a loader with `pin_memory=True` pins those that
            come from its workers, and keeps their strides.

    Raises:
        ValueError: the format is not a channels-last one.
        RuntimeError: tensors are to be pinned in a worker process; or what `default_collate` raises, as the other
            errors are.

    Example:
        >>> images = [torch.zeros(4, 6, 3, dtype=torch.uint8).permute(2, 0, 1) for _ in range(2)]
        >>> batch, labels = torch_nhwc.collate([(image, 7) for image in images])
        >>> batch.shape, batch.stride(), labels
        (torch.Size([2, 3, 4, 6]), (72, 1, 18, 3), tensor([7, 7]))
    """
    wanted = channels_last_format(memory_format)
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


def collating(fn: _CollateFn, *, memory_format: torch.memory_format | str | None = None) -> _CollateFn:
    """Makes a `collate_fn` whose images and volumes are channels-last of one that exists, by `to_channels_last`.

    `collate` writes a batch once; what `fn` made is written a second time.

    Args:
        fn: what makes a batch of samples.
        memory_format: as `to_channels_last` takes it.

    Returns:
        A function that can be pickled where `fn` can.

    Raises:
        ValueError: the format is not a channels-last one.
        TypeError: `fn` cannot be called.

    Example:
        >>> collated = torch_nhwc.collating(lambda samples: {"x": torch.stack(samples)})
        >>> collated([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])["x"].stride()
        (48, 1, 12, 3)
    """
    name = channels_last_format(memory_format).name  # a name can be deep-copied, unlike a torch.memory_format
    if not callable(fn):
        raise TypeError(f"collating: expected a function that makes a batch of samples, got {type(fn).__name__}")
    return partial(_to_channels_last_of, fn, name)


def _to_channels_last_of(fn: _CollateFn, memory_format: str | None, batch: Any) -> Any:
    return to_channels_last(fn(batch), memory_format=memory_format)


def _collated(
    function: _CollateFn, wanted: Format, pin_memory: bool, batch: Sequence[Any], *, collate_fn_map: Any = None
) -> Any:
    """What a registered function makes of samples, in channels-last; written once, where it would stack tensors."""
    if function is _stock.collate_tensor_fn:
        written = _written_once(batch, wanted, pin_memory)
        if written is not None:
            return written
    if function is _stock.collate_numpy_array_fn:
        map_of_all = collate_fn_map if _are_interleaved(batch) else _stock.default_collate_fn_map
        return function(batch, collate_fn_map=map_of_all)
    return to_channels_last(function(batch, collate_fn_map=collate_fn_map), memory_format=wanted.name)


def _written_once(samples: Sequence[Any], wanted: Format, pin_memory: bool) -> Tensor | None:
    """The batch of plain tensors of images or volumes; `None` where PyTorch is to say what becomes of the samples.

    Of many small samples every look at each counts: shapes, devices and gradients are looked at by what writes.
    """
    first = samples[0]
    if not isinstance(samples, (list, tuple)) or {*map(type, samples)} != {Tensor}:
        return None
    if not is_batch(first, first.dim() + 1, wanted) or any(sample.dtype != first.dtype for sample in samples):
        return None
    try:
        batch = empty_batch(torch.Size((len(samples), *first.shape)), first, pin_memory=pin_memory)
        stack_into(batch, samples)
    except RuntimeError:
        return None
    return batch


def _are_interleaved(arrays: Sequence[Any]) -> bool:
    """Whether NumPy arrays have the channels of each pixel side by side, as `[C, H, W]` views of decoded images do.

    Of other arrays of three dimensions nobody knows whether channels are the first or the last.
    """
    return all(getattr(each, "strides", ())[:1] == (getattr(each, "itemsize", 0),) for each in arrays)
