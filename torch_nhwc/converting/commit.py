"""All or nothing: the edits of modules, and one call of the operators."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from torch_nhwc.converting.edits import Edit
from torch_nhwc.converting.preparing import Changes
from torch_nhwc.ops import convert_weights_
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.deciding import Request


def commit_changes(changes: Changes, request: Request) -> None:
    """Makes all changes of a conversion and notes their outcomes, or makes none where an exception comes."""
    if changes.tensors or changes.edits:
        wanted = request.format.for_operators
        convert = partial(convert_weights_, changes.tensors, wanted, storage=request.storage)
        for record, outcome in zip(changes.records, commit(changes.tensors, convert, changes.edits)):
            record.outcome = outcome


def commit(tensors: Sequence[Tensor], operation: Callable[[], list[Outcome]], edits: Sequence[Edit]) -> list[Outcome]:
    """Makes the edits, then calls the operation; where that did not happen the edits are undone.

    An exception may come between any two lines, KeyboardInterrupt for one. The operation changes all of the tensors or
    none, so their strides say on which side of it the exception came.
    """
    before = [tensor.stride() for tensor in tensors] if edits else []
    try:
        for edit in edits:
            edit.make()
        return operation()
    except BaseException:
        if all(tensor.stride() == strides for tensor, strides in zip(tensors, before)):
            for edit in reversed(edits):
                edit.reverse.make()
        raise
