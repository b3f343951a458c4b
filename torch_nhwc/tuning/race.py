"""Race candidates: they are timed in turns, ones that are clearly slower drop out, and paired ratios decide."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch_nhwc.rendering import first_line

# Student's distribution: 99 % are within, by degrees of freedom. The last value stands for all larger ones.
_QUANTILES = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947),
    *(2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)
# A ratio beyond this in each of two rounds decides without an interval.
_FAR = 1.25
# How precisely equal candidates are compared, and after which rounds that is checked. It is checked rarely, because
# whoever checks often enough finds a difference.
_CLOSE = 0.01
_CHECKS = (5, 8, 12, 18, 27, 40, 60, 90, 140, 210, 320)


class Interval(NamedTuple):
    """How many times as long a candidate takes as another one, with the limits of the 99 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high < 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low > 1

    @property
    def is_known(self) -> bool:
        """Whether the limits are within a factor of ten. A few samples that differ give wider ones."""
        return self.high < 10 * self.ratio


def interval(ratios: Sequence[float]) -> Interval:
    """Return the 99 % interval of a ratio that was measured several times.

    This is the trimmed mean of the logarithms, without the lowest and the highest tenth, and the interval of Tukey and
    McLaughlin around it, so that one disturbed pair does not decide. It is 99 % because a race looks at its intervals
    more than once.

    Args:
        ratios: At least one.
    """
    logarithms = sorted(map(math.log, ratios))
    count = len(logarithms)
    cut = count // 10
    kept = logarithms[cut : count - cut]
    mean = sum(kept) / len(kept)
    if len(kept) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    winsorized = [min(max(each, kept[0]), kept[-1]) for each in logarithms]
    error = statistics.stdev(winsorized) * math.sqrt(count) / len(kept)
    # If a clock gives the same number several times, that is no certainty.
    reach = max(_QUANTILES[min(len(kept) - 1, len(_QUANTILES)) - 1] * error, 1e-4)
    return Interval(*(math.exp(mean + each) for each in (0.0, -reach, reach)))


class Race:
    """A race of named candidates. The first one is the baseline, which is never dropped.

    Attributes:
        running: The candidates that take part in the next round.
        failures: By name, why candidates could not be measured.
        rounds: How many rounds there were.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.running = list(names)
        self.baseline = self.running[0]
        self.failures: dict[str, str] = {}
        self.rounds = 0
        self._seconds: dict[str, dict[int, float]] = {name: {} for name in self.running}

    @property
    def measured(self) -> list[str]:
        """The candidates that have samples and did not fail."""
        return [name for name, samples in self._seconds.items() if samples and name not in self.failures]

    def samples(self, name: str) -> list[float]:
        """Return the seconds that were measured for a candidate."""
        return list(self._seconds[name].values())

    def run_round(self, measure: Callable[[str], float], is_late: Callable[[], bool] = lambda: False) -> None:
        """Take one sample of each candidate, every other round in reverse order, and drop clearly slower ones.

        Args:
            measure: Takes a sample of the candidate with a name.
            is_late: Whether the round ends before the next sample. The first round is never cut short.

        Raises:
            Exception: What the baseline raised. Exceptions of other candidates are noted in `failures`.
        """
        for name in self.running[:: -1 if self.rounds % 2 else 1]:
            if self.rounds > 0 and is_late():
                break
            try:
                self._seconds[name][self.rounds] = measure(name)
            except Exception as error:  # the model's code may not work with channels-last
                if name == self.baseline:
                    raise
                self.failures[name] = f"{type(error).__name__}: {first_line(str(error))}"
        self.rounds += 1
        best = self.best()
        self.running = [
            name
            for name in self.running
            if name not in self.failures and (name in (self.baseline, best) or not self._has_lost(name, best))
        ]

    def compare(self, name: str, other: str) -> Interval:
        """Return how many times as long a candidate takes as another one, by the rounds with samples of both."""
        if name == other:
            return Interval(1.0, 1.0, 1.0)
        ratios = self._ratios(name, other)
        return interval(ratios) if ratios else Interval(1.0, 0.0, math.inf)

    def best(self) -> str:
        """Return the fastest candidate that was measured, by its ratio to the baseline."""
        return min(self.measured, key=lambda name: self.compare(name, self.baseline))

    def is_over(self) -> bool:
        """Return whether more rounds would hardly tell more."""
        if len(self.running) == 1:
            return True
        if self.rounds not in _CHECKS:
            return self.rounds > _CHECKS[-1]
        best = self.best()
        return all(
            each.is_faster or each.is_slower or each.high < each.low * (1 + _CLOSE) ** 2
            for each in (self.compare(name, best) for name in self.running if name != best)
        )

    def winner(self) -> str:
        """Return the fastest candidate if it is certainly faster than the baseline, else the baseline."""
        best = self.best()
        is_ahead = self.compare(best, self.baseline).is_faster or self._is_far_ahead(best, self.baseline)
        return best if is_ahead else self.baseline

    def _has_lost(self, name: str, best: str) -> bool:
        is_slower = len(self._ratios(name, best)) >= 3 and self.compare(name, best).is_slower
        return is_slower or self._is_far_ahead(best, name)

    def _is_far_ahead(self, name: str, other: str) -> bool:
        """Return whether a candidate is far faster than another one in each of two rounds or more."""
        ratios = self._ratios(other, name)
        return len(ratios) >= 2 and min(ratios) > _FAR

    def _ratios(self, name: str, other: str) -> list[float]:
        ours, others = self._seconds[name], self._seconds[other]
        return [ours[index] / others[index] for index in ours if index in others]
