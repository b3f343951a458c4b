"""The race: candidates are timed in turns, those that lose drop out, and paired differences decide."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch_nhwc.rendering import first_line
from torch_nhwc.tuning.intervals import EVEN, Interval, interval

# How many stay in the race beside the baseline, and those that are never dropped.
_STAY = 2
# After two rounds, what is so much slower or faster in both of them does not need an interval.
_FAR = 1.25
# How close two that are as fast as each other are to be known, and behind how many rounds that is looked at: seldom,
# since who looks often enough finds a difference.
_CLOSE = 0.01
_LOOKS = (5, 8, 12, 18, 27, 40, 60, 90, 140, 210, 320)


class Standing(NamedTuple):
    """What a race has come to for one candidate."""

    samples: int
    seconds: float
    """The median."""
    spread: float
    """The distance of the quartiles, in units of the median."""


class Race:
    """A race of named candidates; the first one is the baseline, which stays to the end."""

    def __init__(self, names: Iterable[str]) -> None:
        self.running = list(names)
        self.baseline = self.running[0]
        self.kept = {self.baseline}
        """Those that are never dropped."""
        self.failures: dict[str, str] = {}
        """Why candidates are out that could not be measured."""
        self.rounds = 0
        self._seconds: dict[str, dict[int, float]] = {name: {} for name in self.running}

    @property
    def measured(self) -> list[str]:
        """Those that have samples, and did not fail."""
        return [name for name, samples in self._seconds.items() if samples and name not in self.failures]

    def enter(self, names: Iterable[str]) -> None:
        """Lets others take part from the next round on."""
        for name in names:
            self._seconds[name] = {}
            self.running.append(name)

    def fail(self, name: str, why: str) -> None:
        """Takes a candidate out."""
        self.failures[name] = why
        self.running.remove(name)

    def run_round(self, measure: Callable[[str], float], is_late: Callable[[], bool] = lambda: False) -> None:
        """Takes one sample of each, every other round in reverse order; then those that lose are dropped.

        Args:
            measure: takes a sample of the candidate of a name.
            is_late: ends the round before the next sample; not the first round.

        Raises:
            Exception: what the baseline raised; of another candidate it is noted.
        """
        order = self.running[:: -1 if self.rounds % 2 else 1]
        for name in order:
            if self.rounds > 0 and is_late():
                break
            try:
                self._seconds[name][self.rounds] = measure(name)
            except Exception as error:  # code of the model's, which may not take channels-last
                if name == self.baseline:
                    raise
                self.fail(name, f"{type(error).__name__}: {first_line(str(error))}")
        self.rounds += 1
        self._drop_losers()

    def compare(self, name: str, other: str) -> Interval:
        """How many times as long a candidate takes as another one, by the rounds that both were in."""
        if name == other:
            return EVEN
        ratios = self._ratios(name, other)
        return interval(ratios) if ratios else Interval(1.0, 0.0, float("inf"))

    def standing(self, name: str) -> Standing:
        """What was measured of a candidate."""
        values = list(self._seconds[name].values())
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median,) * 3
        return Standing(len(values), median, (high - low) / median)

    def best_of(self, names: Iterable[str]) -> str:
        """The fastest of those that were measured, by their ratio to the baseline."""
        measured = self.measured
        return min((each for each in names if each in measured), key=lambda each: self.compare(each, self.baseline))

    def is_over(self) -> bool:
        """Whether more rounds would hardly tell more; asked after some rounds only."""
        if self.rounds not in _LOOKS:
            return self.rounds > _LOOKS[-1]
        best = self.best_of(self.running)
        return all(
            each.is_faster or each.is_slower or each.high < each.low * (1 + _CLOSE) ** 2
            for each in (self.compare(name, best) for name in self.running if name != best)
        )

    def winner(self, fixed: Sequence[str]) -> str:
        """The answer: the baseline, unless another one is ahead of it.

        Args:
            fixed: candidates that go before the others, which have to be faster than the best of them, with the whole
                interval.
        """
        best = self.best_of(fixed)
        others = [name for name in self.measured if name not in fixed]
        found = self.best_of(others) if others else best
        if found != best and all(self.compare(found, each).is_faster for each in (best, self.baseline)):
            return found
        is_ahead = self._is_far_ahead(best, self.baseline) or self.compare(best, self.baseline).is_faster
        return best if is_ahead else self.baseline

    def _is_far_ahead(self, name: str, other: str) -> bool:
        """Whether a candidate is faster than another one by far, in each of two rounds or more."""
        ratios = self._ratios(other, name)
        return len(ratios) >= 2 and min(ratios) > _FAR

    def _ratios(self, name: str, other: str) -> list[float]:
        mine, others = self._seconds[name], self._seconds[other]
        return [mine[index] / others[index] for index in mine if index in others]

    def _drop_losers(self) -> None:
        best = self.best_of(self.running)
        ranked = sorted(self.running, key=lambda name: self.compare(name, self.baseline), reverse=True)
        for name in ranked:
            is_known = len(self._ratios(name, best)) >= 3
            has_lost = self._is_far_ahead(best, name) or (is_known and self.compare(name, best).is_slower)
            if has_lost and name not in self.kept and len(self.running) > _STAY + 1:
                self.running.remove(name)
