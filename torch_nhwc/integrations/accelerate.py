"""Accelerate: loaders whose batches one process reads for all."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

try:
    from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher
    from accelerate.utils import recursively_apply
except ImportError as error:
    raise ImportError("accelerate is missing: pip install 'torch_nhwc[accelerate]'") from error


def contiguous_broadcasts_(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """Make a prepared loader broadcast contiguous batches, if one process reads them for all.

    `Accelerator.prepare` makes a `DataLoaderDispatcher` of every loader of an `IterableDataset`, and of others with
    `dispatch_batches=True`. The other processes receive its batches in contiguous memory, whatever their strides are:
    channels-last batches arrive permuted there, without an error. With this call batches are contiguous in all
    processes, and `convert_(model, input_format="channels_last")` converts them at the model's entry.

    Args:
        dataloader: The result of `Accelerator.prepare`. A loader of a single process, or one whose processes read for
            themselves, is not changed.

    Returns:
        The same loader.

    Raises:
        TypeError: It is not a loader.
        ValueError: It is not prepared.

    Example:
        >>> from accelerate import Accelerator
        >>> from torch_nhwc.integrations.accelerate import contiguous_broadcasts_
        >>> images = torch.utils.data.DataLoader(torch.randn(4, 3, 8, 8), collate_fn=torch_nhwc.data.collate)
        >>> images = contiguous_broadcasts_(Accelerator(cpu=True).prepare(images))
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"contiguous_broadcasts_: expected a DataLoader, got {type(dataloader).__name__}")
    if not issubclass(type(dataloader), DataLoaderAdapter):  # `prepare` would make another loader of it
        raise ValueError("contiguous_broadcasts_: this loader is not prepared: give what Accelerator.prepare returns")
    if isinstance(dataloader, DataLoaderDispatcher) and dataloader.state.num_processes > 1:
        inside = dataloader.base_dataloader
        if getattr(inside.collate_fn, "func", None) is not _contiguous_batch:
            inside.collate_fn = partial(_contiguous_batch, inside.collate_fn)  # can be pickled for workers
            inside._iterator = None  # persistent workers keep the function that they started with
    return dataloader


def _contiguous_batch(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    # accelerate's own function visits the same containers as its broadcast.
    return recursively_apply(Tensor.contiguous, collate_fn(samples))
