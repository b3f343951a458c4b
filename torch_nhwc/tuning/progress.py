"""How far long work is, on a terminal, where tqdm is installed."""

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """A bar of seconds, against a budget; nothing is shown where there is no terminal, or no tqdm."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._start = time.monotonic()
        self._bar = _bar(budget) if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """The seconds of the budget that are left."""
        return self.budget - self.seconds

    @property
    def share(self) -> float:
        """Of the budget that is gone."""
        return self.seconds / self.budget

    def show(self, what: str) -> None:
        """Says what is being done."""
        if self._bar is not None:
            self._bar.n = min(round(self.seconds, 1), self.budget)
            self._bar.set_description(what)


def _bar(budget: float) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=budget, unit="s", leave=False, bar_format="{desc} |{bar}| {n:.0f} of {total:.0f} s")
