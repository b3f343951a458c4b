"""Carry out what was decided, all or nothing, and report on it."""

import time
from typing import Any

from torch_nhwc.converting.edits import Edit, commit, edits_of
from torch_nhwc.converting.report import Report, Undo
from torch_nhwc.converting.warnings_ import warn_nothing_found, warn_refused, warn_unknown_optimizer, warn_unshared
from torch_nhwc.layout import memory_id
from torch_nhwc.ops import Outcome
from torch_nhwc.planning.deciding import Decisions
from torch_nhwc.planning.rows import CompanionRow

_FRESH = (Outcome.COPIED, Outcome.COPIED_HELD, Outcome.COPIED_FOREIGN, Outcome.COPIED_SHARED)


def apply(decisions: Decisions, strict: bool = False, start: float | None = None) -> Report:
    """Do everything that was decided for a model, or nothing, and return the report.

    Args:
        decisions: What to do.
        strict: As in `convert_`.
        start: When the call began, by `time.perf_counter()`.

    Raises:
        RuntimeError: `strict`, and a weight was refused or there is none to convert; or the operators refuse a tensor.
    """
    start = time.perf_counter() if start is None else start
    edits = edits_of(decisions)
    warn_refused(decisions.rows, strict)
    warn_nothing_found(decisions, edits, strict)
    warn_unknown_optimizer(decisions)
    warn_unshared([(row.full_name, tensor) for _, row, tensor in decisions.changing], decisions.options.format)
    undo = Undo.of(decisions, edits)
    new_bytes = change(decisions, edits)
    companions = tuple(
        CompanionRow(each.weight.name, each.label, None if each.reason else each.outcome, each.reason)
        for each in decisions.companions
    )
    seconds = time.perf_counter() - start
    return Report(decisions.plan, companions, tuple(decisions.remarks), new_bytes, seconds, undo)


def change(decisions: Decisions, edits: list[Edit]) -> int:
    """Make all changes and note their outcomes in the rows and companions; return the bytes of new storage."""
    options, changing = decisions.options, decisions.changing
    companions = [companion for companion in decisions.companions if companion.changes]
    tensors = [tensor for _, _, tensor in changing] + [companion.tensor for companion in companions]
    strides = [row.target_strides or () for _, row, _ in changing]
    strides += [companion.weight.strides for companion in companions]
    outcomes = commit(tensors, strides, edits, options.storage)
    for row in decisions.rows:
        row.outcome = Outcome.UNCHANGED if row.takes_part and row.shape is not None else None
    records: list[Any] = [*(row for _, row, _ in changing), *companions]
    for record, outcome in zip(records, outcomes):
        record.outcome = outcome
    fresh = {memory_id(each): each.nbytes for each, outcome in zip(tensors, outcomes) if outcome in _FRESH}
    return sum(fresh.values())  # exact aliases once
