"""Holding a trace to a budget, in a project's own tests."""

from collections.abc import Sequence

from torch import nn

from torch_nhwc.rendering import amount, printable
from torch_nhwc.tracing.record import Trace
from torch_nhwc.tracing.rows import Loss, MixedConvolution, described

_MOST = 10  # rows that an error names


def assert_layout(trace: Trace, max_losses: int = 0, max_mixed: int = 0, max_bytes: int | None = None) -> None:
    """Raises where a trace has more losses than a project allows itself.

    Args:
        trace: from `trace`, or from a file by `Trace.from_json` or `audit`.
        max_losses: how many rows of losses there may be, forward and backward together.
        max_mixed: how many rows of mixed convolutions.
        max_bytes: how many bytes they may be together, in all calls; any number where it is `None`.

    Raises:
        AssertionError: there are more; it names them, at most ten of each, the largest first.
        TypeError: it is no trace.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
        >>> torch_nhwc.assert_layout(trace)
    """
    if not isinstance(trace, Trace):
        hint = ": run it under `with trace(model) as ...`" if isinstance(trace, nn.Module) else ""
        raise TypeError(f"assert_layout: expected a Trace, got {type(trace).__name__}{hint}")
    losses, mixed = trace.losses, trace.mixed
    total = sum(row.bytes for rows in (losses, mixed) for row in rows)
    is_too_much = max_bytes is not None and total > max_bytes
    lines = []
    if is_too_much:
        lines.append(f"{amount(total)} lost channels-last or were copied, {amount(max_bytes or 0)} are allowed")
    if len(losses) > max_losses or is_too_much:
        lines += [f"{len(losses)} losses of channels-last, {max_losses} are allowed", *_largest(losses)]
    if len(mixed) > max_mixed or is_too_much:
        lines += [f"{len(mixed)} mixed convolutions, {max_mixed} are allowed", *_largest(mixed)]
    if lines:
        raise AssertionError("\n".join(lines))


def _largest(rows: Sequence[Loss | MixedConvolution]) -> list[str]:
    shown = sorted(rows, key=lambda row: -row.bytes)[:_MOST]
    rest = [f"  ... and {len(rows) - _MOST} more"] if len(rows) > _MOST else []
    return [f"  {printable(described(row))}" for row in shown] + rest
