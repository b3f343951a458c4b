"""How much longer one thing takes than another, and how sure that is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Of Student's distribution: 99 % lie within, by degrees of freedom; the last one goes for all that are more.
_QUANTILES = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947),
    *(2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


class Interval(NamedTuple):
    """How many times as long something takes as something else, and the limits between which that lies."""

    ratio: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Whether it is the faster one, with the whole interval."""
        return self.high < 1

    @property
    def is_slower(self) -> bool:
        """Whether it is the slower one, with the whole interval."""
        return self.low > 1

    @property
    def is_known(self) -> bool:
        """Whether the limits are within a factor of ten: of few samples that differ they are not."""
        return self.high < 10 * self.ratio


EVEN = Interval(1.0, 1.0, 1.0)


def interval(ratios: Sequence[float], quantiles: Sequence[float] = _QUANTILES) -> Interval:
    """The interval of a ratio that was measured several times, 99 % of it by default.

    Of the logarithms: their trimmed mean, where the least and the largest tenth do not count, and the interval of
    Tukey and McLaughlin around it, so that one disturbed pair does not decide. 99 and not 95 %, since a race looks at
    its intervals more than once.

    Args:
        ratios: at least one.
        quantiles: of Student's distribution, by degrees of freedom.
    """
    logarithms = sorted(map(math.log, ratios))
    count = len(logarithms)
    cut = count // 10
    kept = logarithms[cut : count - cut]
    mean = sum(kept) / len(kept)
    if len(kept) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    winsorized = [min(max(each, kept[0]), kept[-1]) for each in logarithms]
    center = sum(winsorized) / count
    deviation = math.sqrt(sum((each - center) ** 2 for each in winsorized) / (count - 1))
    error = deviation * count / (len(kept) * math.sqrt(count))
    # That the clock gave one number several times is no certainty.
    reach = max(quantiles[min(len(kept) - 1, len(quantiles)) - 1] * error, 1e-4)
    return Interval(*(math.exp(mean + each) for each in (0.0, -reach, reach)))
