"""All or nothing: the edits of modules, and one call of the operators."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from torch_nhwc.converting.edits import Edit
from torch_nhwc.converting.preparing import Changes
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.request import Request
from torch_nhwc.stepping.guard import align_seen


def commit_changes(changes: Changes, request: Request) -> None:
    """Makes all changes of a conversion and notes their outcomes, or makes none where an exception comes."""
    if changes.tensors or changes.edits:
        convert = partial(lay_out_weights_, changes.tensors, changes.strides, storage=request.storage)
        for record, outcome in zip(changes.records, commit(changes.tensors, convert, changes.edits)):
            record.outcome = outcome
    if not request.format.is_channels_last:
        align_seen()


def commit(tensors: Sequence[Tensor], operation: Callable[[], list[Outcome]], edits: Sequence[Edit]) -> list[Outcome]:
    """Makes the edits, then calls the operation; where an exception comes all is as it was.

    It may come between any two lines, KeyboardInterrupt for one, which Python raises when the operation has returned.
    That changes all of the tensors or none, so their strides say on which side of it the exception came.
    """
    before = [tensor.stride() for tensor in tensors]
    try:
        for edit in edits:
            edit.make()
        return operation()
    except BaseException:
        with suppress(RuntimeError):  # where strides that overlapped do not come back, all of it stays
            if any(tensor.stride() != strides for tensor, strides in zip(tensors, before)):
                lay_out_weights_(tensors, before)
            for edit in reversed(edits):
                edit.reverse.make()
        raise
