"""Batches of images and volumes in channels-last: which tensors are such, their memory, and what is written to it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torch_nhwc.entries import can_be_laid_out, in_format
from torch_nhwc.formats import CHANNELS_LAST, Format
from torch_nhwc.ops import convert_weight, copy_weight_
from torch_nhwc.running.nested import mapped

# So many bytes of samples are stacked before our kernel reads them: they are in the cache then.
_STACKED_BYTES = 512 << 10


def to_channels_last(obj: Any, *, memory_format: torch.memory_format | str | None = None) -> Any:
    """Brings the batches of images and volumes inside of an object into channels-last.

    Args:
        obj: a tensor, or tensors in lists, tuples, dicts and other mutable mappings, and dataclasses, nested.
        memory_format: `torch.channels_last` means images, `[N, C, H, W]`, alone, `torch.channels_last_3d` volumes,
            `[N, C, D, H, W]`; by default both.

    Returns:
        The object with other tensors inside: floating and uint8 ones of such a rank have canonical strides. All others,
        expanded ones, and containers without any tensor stay the objects that they are. Gradients flow back. In a
        loader's worker process the copies are in shared memory.

    Raises:
        ValueError: the format is not a channels-last one.
        TypeError: it is a model or a loader, which have ways of their own.

    Example:
        >>> batch = torch_nhwc.to_channels_last({"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)})
        >>> batch["image"].stride()
        (48, 1, 12, 3)
    """
    wanted = channels_last_format(memory_format)
    if isinstance(obj, (nn.Module, DataLoader, Dataset)):
        instead = "convert_ takes models" if isinstance(obj, nn.Module) else "give the loader collate_fn=nhwc.collate"
        raise TypeError(f"to_channels_last: expected tensors in containers, got {type(obj).__name__}: {instead}")
    return mapped(obj, "", lambda _, tensor: brought(tensor, wanted))


def channels_last_format(memory_format: torch.memory_format | str | None) -> Format:
    """The format that a caller means.

    Raises:
        ValueError: it is not a channels-last one.
    """
    wanted = Format.of(memory_format)
    if not wanted.is_channels_last:
        raise ValueError(f"expected memory_format to be None or a channels-last format, got {memory_format!r}")
    return wanted


def is_batch(tensor: Tensor, rank: int, wanted: Format) -> bool:
    """Whether tensors of this kind, of such a rank, are batches of images or volumes that the format is for."""
    return rank in CHANNELS_LAST and wanted.serves(rank) and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def brought(tensor: Tensor, wanted: Format) -> Tensor:
    """A batch of images or volumes in channels-last; itself where it is, and any other tensor."""
    if not is_batch(tensor, tensor.dim(), wanted) or not can_be_laid_out(tensor, list(CHANNELS_LAST)):
        return tensor
    if tensor.stride() == wanted.strides(tensor.shape):
        return tensor
    if (
        type(tensor) is not Tensor
        or not tensor.is_cpu
        or tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()])
    ):
        return in_format(tensor, "channels_last")
    if get_worker_info() is None or tensor.requires_grad:
        return convert_weight(tensor)
    return copy_weight_(empty_batch(tensor.shape, tensor), tensor)


def empty_batch(shape: torch.Size, like: Tensor, *, pin_memory: bool = False) -> Tensor:
    """Memory in canonical strides, for a batch of the dtype and on the device of a tensor.

    In a worker process it is shared, so that the batch goes to the loader without a copy.
    """
    if get_worker_info() is None:
        memory_format = CHANNELS_LAST[len(shape)]
        return torch.empty(
            shape, dtype=like.dtype, device=like.device, memory_format=memory_format, pin_memory=pin_memory
        )
    size = shape.numel() * like.element_size()
    storage = torch.UntypedStorage._new_shared(size, device=like.device)  # type: ignore[no-untyped-call, unused-ignore]
    return like.new_empty(0).set_(storage, 0, shape, Format(None).strides(shape))


def stack_into(batch: Tensor, samples: list[Tensor] | tuple[Tensor, ...]) -> None:
    """Writes samples of one shape into the memory of their batch: by our kernel where elements have to be permuted."""
    is_permuted = not batch.is_contiguous() and all(sample.is_contiguous() for sample in samples)
    if not batch.is_cpu or not is_permuted:
        torch.stack(samples, 0, out=batch)
        return
    # PyTorch's threads share the work of one call.
    step = len(samples) if torch.get_num_threads() > 1 else max(1, _STACKED_BYTES // samples[0].nbytes)
    for start in range(0, len(samples), step):
        some = samples[start : start + step]
        copy_weight_(batch[start : start + step], torch.stack(some) if len(some) > 1 else some[0].unsqueeze(0))
