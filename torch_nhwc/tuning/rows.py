"""What was measured of a candidate, as plain data."""

from typing import NamedTuple


class TuningRow(NamedTuple):
    """A row says what was measured of one candidate.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> row = torch_nhwc.tune(model, x, budget_seconds=0.1).table[0]
        >>> row.name, row.ratio, row.difference
        ('contiguous', 1.0, 0.0)
    """

    name: str
    seconds: float | None
    """Of a call, the median of the rounds; `None` where it could not be measured."""
    spread: float | None
    """The distance of the quartiles, in units of the median."""
    samples: int
    ratio: float | None
    """How many times as long it takes as the contiguous model, by the rounds in which both were timed."""
    low: float | None
    """The lower end of the 99 % interval of the ratio; `None` where there are too few samples for one."""
    high: float | None
    """The upper end."""
    regret: float | None
    """By which share it is slower than the best that was seen."""
    difference: float | None
    """How far its output lies from the contiguous model's, in units of the largest output; `None` if not compared."""
    remark: str
    """Why it is out, where it could not be measured, or computes something else."""
