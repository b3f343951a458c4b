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
    """Has a prepared loader broadcast contiguous batches, where one process reads them for all.

    `Accelerator.prepare` makes such a `DataLoaderDispatcher` of every loader of an `IterableDataset`, and of others by
    `dispatch_batches=True`. The other processes receive its batches in contiguous memory, whatever their strides are:
    channels-last ones arrive permuted there, without an error. From here on batches are contiguous in all processes,
    and `convert_(model, input_format="channels_last")` brings them into the format at the model's entry.

    Args:
        dataloader: what `Accelerator.prepare` gave. One whose processes read for themselves, or of one process, stays
            as it is.

    Returns:
        The same loader.

    Raises:
        TypeError: it is not a loader.
        ValueError: it is not prepared.

    Example:
        >>> from accelerate import Accelerator
        >>> from torch_nhwc.integrations.accelerate import contiguous_broadcasts_
        >>> images = torch.utils.data.DataLoader(torch.randn(4, 3, 8, 8), collate_fn=torch_nhwc.collate)
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
            inside._iterator = None  # persistent workers have the function from when they started
    return dataloader


def _contiguous_batch(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    # By accelerate's own function, which goes into the containers that the broadcast goes into.
    return recursively_apply(Tensor.contiguous, collate_fn(samples))
