"""Comparing two traces."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_nhwc.rendering import paragraphs
from torch_nhwc.tracing.rows import Loss, MixedConvolution, described

_Row = Loss | MixedConvolution


class TraceDiff(NamedTuple):
    """A difference says which losses and mixed convolutions one trace has and the other has not.

    Rows are the same where path, operator and phase are; shapes, bytes and sources may differ. It is true where there
    is something new or gone.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> with torch_nhwc.trace(model) as before:
        ...     _ = model(x)
        >>> with torch_nhwc.channels_last(model), torch_nhwc.trace(model) as after:
        ...     _ = model(x)
        >>> [(row.operator, row.phase) for row in after.diff(before).gone]
        [('aten::convolution', 'forward')]
    """

    new: tuple[_Row, ...]
    """What the other trace has not."""
    gone: tuple[_Row, ...]
    """What only the other trace has."""
    changed: tuple[tuple[_Row, _Row], ...]
    """What is in other formats, or happens another number of times: in the other trace, and in this one."""

    def __bool__(self) -> bool:
        return bool(self.new or self.gone)

    def __str__(self) -> str:
        lines = [f"new: {described(row)}" for row in self.new]
        lines += [f"gone: {described(row)}" for row in self.gone]
        lines += [f"changed: {described(before)}; now {described(now)}" for before, now in self.changed]
        return paragraphs(lines or ["no difference"])


def difference(rows: Iterable[_Row], others: Iterable[_Row]) -> TraceDiff:
    """What is new, gone and changed in rows, beside those of another trace."""
    here, there = _merged(rows), _merged(others)
    return TraceDiff(
        tuple(row for key, row in here.items() if key not in there),
        tuple(row for key, row in there.items() if key not in here),
        tuple((there[key], row) for key, row in here.items() if key in there and _seen(there[key]) != _seen(row)),
    )


def _merged(rows: Iterable[_Row]) -> dict[Any, _Row]:
    """One row for each operator, phase and path, with the amounts of all."""
    merged: dict[Any, _Row] = {}
    for row in rows:
        key = type(row), row.path, row.operator, row.phase
        first = merged.get(key)
        if first is not None:
            row = first._replace(bytes=first.bytes + row.bytes, count=first.count + row.count)
        merged[key] = row
    return merged


def _seen(row: _Row) -> tuple[object, ...]:
    return row.count, *(layout.format for layout in (*row.inputs, *row.outputs))
