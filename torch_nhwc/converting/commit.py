"""All or nothing: small edits of modules, and one call of the operators."""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from torch_nhwc.outcomes import Outcome


class Edit(NamedTuple):
    """A change to a module that is not a change of its tensors. Both ways do nothing where there is nothing to do."""

    module: "weakref.ref[nn.Module]"
    """Weakly, since a report keeps the edit."""
    forth: Callable[[nn.Module], object]
    back: Callable[[nn.Module], object]

    @property
    def reverse(self) -> "Edit":
        """The edit that undoes this one."""
        return Edit(self.module, self.back, self.forth)

    def make(self) -> None:
        """Changes the module, if it is still there."""
        module = self.module()
        if module is not None:
            self.forth(module)


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
