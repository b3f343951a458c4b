"""The candidates of a model: racing them within a budget, and what that has shown."""

import math

import torch
from torch import Tensor

from torch_nhwc.planning.plans import Plan
from torch_nhwc.running.outputs import TOLERANCES
from torch_nhwc.tuning.policies import CONTIGUOUS, FULL, PRESERVED
from torch_nhwc.tuning.progress import Progress
from torch_nhwc.tuning.race import Race
from torch_nhwc.tuning.rows import TuningRow
from torch_nhwc.tuning.search import CALLS, is_searchable, search
from torch_nhwc.tuning.workload import Workload

# The share of the budget by whose end the fixed policies have been timed, where there is something to search.
_FIXED_SHARE = 0.5
# A search is worth its calls of the model where there is time for three times as many, in rounds that decide.
_ROOM = 4 * CALLS


class Trials:
    """The candidates' plans, and their race."""

    def __init__(self, workload: Workload, progress: Progress, fixed: dict[str, Plan]) -> None:
        self.workload, self.progress = workload, progress
        self.plans = dict(fixed)
        self.fixed = list(fixed)
        self.race = Race(fixed)
        self.differences: dict[str, float | None] = {}
        """How far outputs lie from the contiguous model's, by name; `None` where that cannot be told."""
        self.expected: Tensor | None = None
        self.is_random = False
        """Whether the model computes something else each time."""
        self.notes: list[str] = []

    def run(self) -> None:
        """The fixed policies, and then whatever a search finds."""
        if len(self.fixed) == 1:
            self.race.run_round(self._measure)
            return
        full = [name for name in (FULL, PRESERVED) if name in self.fixed]
        may_search = bool(full) and is_searchable(self.plans[full[0]])
        self._race_until(_FIXED_SHARE if may_search else 1.0)
        full = [name for name in full if name in self.race.measured]
        if not (may_search and full):
            return
        fastest = self.race.best_of(full)
        if self.progress.left > _ROOM * self.race.standing(fastest).seconds:
            self.progress.show("looking for what is better mixed")
            self._enter_found(self.plans[fastest])
        self.race.kept.add(self.race.best_of(self.fixed))
        self._race_until(1.0)

    def _enter_found(self, full: Plan) -> None:
        """Has what a search finds take part."""
        try:
            found = search(self.workload, self.plans[CONTIGUOUS], full)
        except Exception as error:  # of code of the model's, in which hooks are called now
            self.notes.append(f"The search beyond the fixed policies failed: {type(error).__name__}: {error}")
            return
        self.plans |= found
        self.race.enter(found)

    def rows(self) -> tuple[TuningRow, ...]:
        """What was measured."""
        best = self.race.best_of(self.plans)
        return tuple(self._row(name, best) for name in self.plans)

    def remarks(self, choice: str) -> list[str]:
        """What is to be said of the choice."""
        race = self.race
        if len(self.fixed) == 1:
            return ["There is nothing to decide: no plan changes anything in this model."]
        best = race.best_of(self.plans)
        of_best = race.compare(best, CONTIGUOUS)
        spread = race.standing(CONTIGUOUS).spread
        noise = f"the contiguous model's own calls spread by {spread:.0%}"
        if choice != CONTIGUOUS:
            won = race.compare(choice, CONTIGUOUS)
            least = f"at least {1 / won.high:.2f} times" if won.is_faster else "by more than a quarter in every round"
            remarks = [f"{choice!r} is {1 / won.ratio:.2f} times as fast as contiguous, {least}."]
            if best != choice:
                regret = max(0.0, race.compare(choice, best).ratio - 1)
                remarks.append(f"{best!r} came out {regret:.1%} faster, which is within the noise.")
            return remarks
        if best == CONTIGUOUS and race.rounds == 1:
            return ["Nothing was faster than the contiguous model in a single round: a larger budget would say more."]
        if best == CONTIGUOUS:
            return [f"Nothing was faster than the contiguous model; {noise}."]
        text = f"{best!r} came out {1 / of_best.ratio:.2f} times as fast as contiguous"
        if not of_best.is_known:
            return [f"{text}, in too few rounds to say anything: give it a larger budget."]
        limits = f"{1 / of_best.high:.2f} to {1 / of_best.low:.2f} times"
        return [f"{text}, {limits}: the noise is larger than the gain ({noise}), and so the model stays contiguous."]

    def _race_until(self, share: float) -> None:
        """Rounds until the share of the budget is spent, or more of them would hardly tell more."""
        race = self.race

        def is_late() -> bool:
            return self.progress.share >= share

        while len(race.running) > 1 and (race.rounds == 0 or not (is_late() or race.is_over())):
            race.run_round(self._measure, is_late)

    def _measure(self, name: str) -> float:
        best = self.race.best_of(self.plans) if self.race.measured else name
        self.progress.show(f"{name}; best so far: {best}")
        plan = self.plans[name]
        if name not in self.differences:
            self._compare_output(name, plan)
        return self.workload.sample(plan)

    def _compare_output(self, name: str, plan: Plan) -> None:
        """Notes how far a plan's output lies from the contiguous one's.

        Raises:
            ValueError: farther than the dtype allows.
        """
        output = self.workload.output(plan)
        if name == CONTIGUOUS:
            self.expected = output
            self.is_random = relative_difference(self.workload.output(plan, seed=1), output) > self._tolerance()
        if self.is_random or self.expected is None:
            if name == CONTIGUOUS:
                self.notes.append("The model returns something else each time: outputs were not compared.")
            self.differences[name] = None
            return
        difference = self.differences[name] = relative_difference(output, self.expected)
        if difference > self._tolerance():
            raise ValueError(f"its output is off by {difference:.0e} of the largest")

    def _tolerance(self) -> float:
        dtypes = {each.dtype for each in self.workload.model.parameters() if each.is_floating_point()}
        dtypes |= {self.workload.autocast} if self.workload.autocast else set()
        if self.workload.device.type == "cuda":  # where products may be of fewer bits than their dtype has
            dtypes.add(torch.float16)
        return max((TOLERANCES[each] for each in dtypes if each in TOLERANCES), default=max(TOLERANCES.values()))

    def _row(self, name: str, best: str) -> TuningRow:
        race, difference = self.race, self.differences.get(name)
        if name not in race.measured:
            remark = race.failures.get(name, "not measured")
            return TuningRow(name, None, None, 0, None, None, None, None, difference, remark)
        standing, over = race.standing(name), race.compare(name, CONTIGUOUS)
        low, high = (over.low, over.high) if over.is_known else (None, None)
        regret = max(0.0, race.compare(name, best).ratio - 1)  # other rounds are compared than with the baseline
        seconds, spread = standing.seconds, standing.spread
        return TuningRow(name, seconds, spread, standing.samples, over.ratio, low, high, regret, difference, "")


def relative_difference(output: Tensor, expected: Tensor) -> float:
    """The largest difference of two outputs in units of the largest expected one, where they are finite."""
    if output.shape != expected.shape or not torch.equal(output.isfinite(), expected.isfinite()):
        return math.inf
    finite = expected.isfinite()
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    return (output - expected)[finite].abs().max().item() / largest if largest else 0.0
