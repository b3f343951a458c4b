"""Trying a conversion on a copy, and finding what is not to be converted, since it would not compute the same."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from torch_nhwc.modules.walk import is_within
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.running.copying import deep_copy
from torch_nhwc.verifying.verification import Verification, VerificationRow
from torch_nhwc.verifying.verifier import verify

ConvertCopy = Callable[[nn.Module, Collection[str]], Plan]
"""Converts a copy, but for the modules at some paths and what is inside of them; what was done."""
_CHANGES = (Action.CONVERT, Action.RESTRIDE, Action.EXCHANGE, Action.EACH_FORWARD)


class Proof(NamedTuple):
    """What comparing a converted copy with the model has come to."""

    verification: Verification
    """Of the conversion that leaves out what differed."""
    put_back: dict[str, VerificationRow]
    """By the path of what is left out, a row that differed."""

    @property
    def remarks(self) -> list[str]:
        """Sentences for the report."""
        rows = self.put_back.values()
        lines = [f"verify: {_told(row)}: it stays as it was" for row in rows]
        others = {row.path: row for row in self.verification.differing}
        lines += [f"verify: {_told(row)}, and would also without being converted" for row in others.values()]
        return lines


def prove(model: nn.Module, example_inputs: Any, convert_copy: ConvertCopy) -> Proof:
    """Converts a copy of a model and compares it with the model, until nothing differs that was changed.

    Raises:
        RuntimeError: the model cannot be copied.
    """
    put_back: dict[str, VerificationRow] = {}
    while True:
        trial = _copy(model)
        plan = convert_copy(trial, put_back)
        verification = verify(model, trial, example_inputs)
        changed = [row.path for row in plan.rows if row.action in _CHANGES]
        changed += [row.path for row in plan.layers if row.action in _CHANGES]
        differing: dict[str, VerificationRow] = {}
        for row in (row for row in verification.differing if not row.before_differs):
            if any(is_within(path, [row.path]) for path in changed):
                differing.setdefault(row.path, row)
        if not differing:
            return Proof(verification, put_back)
        put_back |= differing


def _copy(model: nn.Module) -> nn.Module:
    try:
        return deep_copy(model)
    except Exception as error:
        raise RuntimeError(
            f"verify: the conversion is tried on a copy, and the model cannot be copied: {error}"
        ) from error


def _told(row: VerificationRow) -> str:
    where = repr(row.path) if row.path else "the model"
    error = f"{row.what} by {row.error:.1g}, where {row.tolerance:.1g} is allowed"
    inputs = f" (inputs: {row.inputs})" if row.inputs else ""
    return f"{where} ({row.layer}) differs: {error}{inputs}{f', {row.remark}' if row.remark else ''}"
