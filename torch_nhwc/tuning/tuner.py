"""`tune`: measure which plan makes a model fastest."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.ops import named_dtype
from torch_nhwc.planning import Plan
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.plans import Options
from torch_nhwc.rendering import first_line, several, warn
from torch_nhwc.running.calls import arguments_of, copy_inputs, preserved_state
from torch_nhwc.running.comparison import distances, magnitudes, tolerance_of
from torch_nhwc.running.containers import tensors_in
from torch_nhwc.running.machine import machine
from torch_nhwc.running.page_faults import advice
from torch_nhwc.sites.finding import find
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.wrappers import reason_of
from torch_nhwc.tuning.decision import Tuning, TuningRow
from torch_nhwc.tuning.workload import LONG, Loss, Mode, Workload, loss_of, optimizer_for, optimizer_named, tuning_copy

CONTIGUOUS = "contiguous"
WEIGHTS = "weights only"
FULL = "full"
PRESERVED = "full, preserved"


def tune(
    model: nn.Module,
    example_inputs: Any,
    *,
    mode: Literal["inference", "training"] = "inference",
    budget_seconds: float = 60.0,
    preserve: bool = True,
    autocast: torch.dtype | str | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
    compile: bool = False,
) -> Tuning:
    """Find by measurement which plan makes a model fastest on this machine.

    `convert_(model, plan=tuning.plan)` applies it. Four candidates are timed in turns: the contiguous model,
    channels-last weights, channels-last weights and inputs, and the same with layers replaced that would lose the
    format. Clearly slower ones drop out, and the others are compared in pairs of one round until each pair is certainly
    different or equal within 3 %. The plan with the largest gain that is certain is chosen: in doubt the model stays
    contiguous. A plan under which the model computes something else is not chosen.

    With `compile=True`, `torch.compile` of the contiguous model and of the best converted one are candidates as well.
    If one of them wins, `tuning.compile` is true: convert by the plan, then call `torch.compile(model)`.

    Deep copies are tuned: nothing of the model changes. Ctrl-C ends the tuning with the best plan so far, once each
    candidate was measured.

    Args:
        model: Any module that `convert_` takes, on its device and in its dtype.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments, with the shapes that
            the model is called with in production.
        mode: `"inference"` times calls without gradients, `"training"` forward, backward and a step of the optimizer.
            A model that is in another mode is copied and put into this one.
        budget_seconds: How long it may take, roughly. The first two rounds are never cut short; a warning says early
            if they take much longer.
        preserve: Whether layers that lose channels-last may be replaced.
        autocast: The dtype of the autocast region in which the model is called, or its name; `None` is that of the
            region around this call, or none.
        optimizer: For training, an optimizer, whose class and groups are used, or a function of parameters that makes
            one, such as a class, or the name of a class of `torch.optim`. It takes its steps on the copy, with a
            learning rate of zero. `None` leaves them out.
        loss: For training, a function of the model's output that computes the loss; `None` takes the output's `loss`,
            or the mean of its squares. Weights that it holds itself get gradients.
        compile: Whether compiled models are measured, too. The time to compile them is not part of the budget, of which
            at most half is spent before.

    Raises:
        ValueError: An argument is none of these; a layer is lazy, or on the meta device; a model is already compiled
            and `compile` is true.
        TypeError: `model` is not a module, or a shape was given instead of tensors.
        RuntimeError: The model cannot be copied.
        KeyboardInterrupt: The user interrupted the first round.
        Exception: What the contiguous model raises on these inputs.

    Warns:
        UserWarning: The first two rounds take much longer than the budget.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> tuning = torch_nhwc.tune(model, x, budget_seconds=0.1)
        >>> tuning.table[0].name, tuning.choice in [row.name for row in tuning.table]
        ('contiguous', True)
    """
    region: torch.dtype | None = named_dtype(autocast)
    if isinstance(optimizer, str):
        optimizer = optimizer_named(optimizer) or optimizer
    _check(model, mode, budget_seconds, region, optimizer, loss, compile)
    arguments_of(model, example_inputs)  # raises for a shape
    tensors = [*model.parameters(), *model.buffers(), *(each for _, each in tensors_in(example_inputs))]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta" or any(map(is_lazy, model.parameters())):
        raise ValueError("tune: expected a model whose weights have values, not a lazy layer or one on the meta device")
    if region is None and torch.is_autocast_enabled(device.type):
        region = torch.get_autocast_dtype(device.type)
    started = time.monotonic()
    with preserved_state(), torch.inference_mode(False), torch.autocast(device.type, enabled=False):

        def workload_of_a_copy() -> Workload:
            copied = tuning_copy(model, mode)
            steps = None if optimizer is None else optimizer_for(copied, model, optimizer)
            return Workload(copied, example_inputs, mode, device, region, loss or loss_of, steps)

        workload = workload_of_a_copy()
        with workload.region():
            plans = policies(workload.model, copy_inputs(example_inputs), preserve)
        candidates = _Candidates(workload, plans)
        candidates.measure(started, budget_seconds, workload_of_a_copy if compile else None)
        choice = candidates.race.winner()
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        is_other = mode == "inference" and getattr(model, "training", False)  # a frozen program has no mode
        measured = ["Inference was measured, and the model is in training mode: mode='training' measures steps."]
        return Tuning(
            plan=candidates.plans[choice],
            choice=choice,
            compile=choice in candidates.compiled,
            is_decided=candidates.is_decided(choice),
            table=tuple(map(candidates.row, candidates.plans)),
            notes=(*candidates.reasons_for(choice), *candidates.notes, *(measured if is_other else ())),
            seconds=time.monotonic() - started,
            workload={
                "model": type(model).__name__,
                "mode": mode,
                "dtype": ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()})),
                "autocast": str(region).removeprefix("torch.") if region else None,
                "shapes": ["x".join(map(str, each.shape)) for _, each in tensors_in(example_inputs)],
                "optimizer": None if optimizer is None else name,
                "device": str(device),
            },
            machine=machine(device),
        )


def policies(model: nn.Module, example_inputs: Any, preserve: bool = True) -> dict[str, Plan]:
    """Return the plans that `tune` tries, by name, the contiguous one first; without one that would change nothing."""

    def planned(memory_format: torch.memory_format | None = None, preserve: bool = False, **options: Any) -> Plan:
        chosen = Options.of(memory_format, preserve=preserve, **options)
        return decide(find(model, example_inputs), chosen, with_gradients=False).plan

    plans = {CONTIGUOUS: planned(torch.contiguous_format)}
    weights = planned()
    if any(row.is_wanted for row in weights.rows):
        plans[WEIGHTS] = weights
    if not isinstance(model, torch.jit.ScriptModule):  # which cannot have a hook for its inputs
        if WEIGHTS in plans:
            plans[FULL] = planned(input_format="channels_last")
        preserved = planned(input_format="channels_last", preserve=True) if preserve else None
        if preserved and any(row.is_wanted for row in preserved.layers):
            plans[PRESERVED] = preserved
    return plans


class _Candidates:
    """The plans of the policies, their race, and how far their outputs are from the contiguous model's.

    A compiled candidate has a model of its own, in `compiled`, and the plan of the policy that was compiled.
    """

    def __init__(self, workload: Workload, plans: dict[str, Plan]) -> None:
        self.workload, self.plans = workload, plans
        self.race = Race([CONTIGUOUS])
        self.notes: list[str] = []
        self.expected: Any = None
        self.gradients: list[Tensor | None] = []
        self.is_random = False
        self.differences: dict[str, float] = {}
        self.compiled: dict[str, Workload] = {}
        self.compile_seconds: dict[str, float] = {}

    def measure(self, started: float, budget: float, copied: Callable[[], Workload] | None) -> None:
        """Run rounds until the budget is spent, the race is over, or the user interrupts it.

        With `copied`, which returns the workload of a copy of the model, compiled candidates enter the race after at
        most half of the budget. Compiling them is not part of it.

        Raises:
            KeyboardInterrupt: The user interrupted the first round.
        """
        try:
            begun = time.monotonic()
            call = self._prepare(CONTIGUOUS, self.workload)
            now = time.monotonic()
            # The contiguous model's outputs and gradients are computed twice, and those of the others once.
            self._warn_if_long(call, now - started, (now - begun + call) / 2, budget)
            for name in list(self.plans)[1:]:
                self.race.enter(name, partial(self._prepare, name, self.workload))
            self._run(started + (budget if copied is None else budget / 2))
            if copied is not None:
                compiling = time.monotonic()
                self._enter_compiled(copied)
                self._run(started + budget + time.monotonic() - compiling)
            choice = self.race.winner()
            workload = self.compiled.get(choice, self.workload)
            if workload.device.type == "cpu":
                self.notes += advice(workload.page_fault_share(self.plans[choice]))
        except KeyboardInterrupt:
            if not self.race.rounds:
                raise
            self.notes.append("It was interrupted: this is the best so far.")

    def _warn_if_long(self, call: float, spent: float, preparation: float, budget: float) -> None:
        """Warn if the preparations and the first two rounds will take much longer than the budget.

        Args:
            call: The seconds of a call of the contiguous model, which is a candidate's turn in a round if it is long.
            spent: The seconds that it took until now.
            preparation: The seconds that the preparation of each other candidate takes, about.
            budget: The seconds that the caller allows.
        """
        count = len(self.plans)
        total = spent + (count - 1) * preparation + 2 * count * call
        if call >= LONG and total > max(1.5 * budget, budget + 5):
            warn(
                f"torch_nhwc: tune: a round takes about {count * call:.0f} s: this takes about {total:.0f} s instead "
                f"of {budget:g}, since each candidate is prepared and the first two rounds are never cut short"
            )

    def _run(self, end: float) -> None:
        def is_late() -> bool:
            return time.monotonic() >= end

        self.race.run_round(self._sample, is_late)
        while not self.race.is_over() and (not is_late() or self.race.is_early()):
            self.race.run_round(self._sample, is_late)

    def _enter_compiled(self, copied: Callable[[], Workload]) -> None:
        """Add the compiled contiguous model and the compiled best of the converted ones to the race."""
        race = self.race
        converted = [name for name in race.measured if name != CONTIGUOUS]
        best = min(converted, key=lambda name: race.compare(name, CONTIGUOUS), default=CONTIGUOUS)
        for policy in dict.fromkeys((CONTIGUOUS, best)):
            name = f"{policy}, compiled"
            self.plans[name] = self.plans[policy]
            race.enter(name, partial(self._compile, name, copied))

    def _compile(self, name: str, copied: Callable[[], Workload]) -> None:
        self.compiled[name] = workload = copied()
        self.compile_seconds[name] = workload.compile(self.plans[name])
        self._prepare(name, workload)

    def row(self, name: str) -> TuningRow:
        """Return what was measured for a candidate."""
        race, difference, compile_seconds = self.race, self.differences.get(name), self.compile_seconds.get(name)
        if name not in race.measured:
            remark = race.failures.get(name, "not measured")
            return TuningRow(name, None, None, 0, None, None, None, None, difference, remark, compile_seconds)
        samples, over = race.samples(name), race.compare(name, CONTIGUOUS)
        low, high = (over.low, over.high) if over.is_known else (None, None)
        regret = over.ratio / race.compare(race.best(), CONTIGUOUS).ratio - 1
        # Of its own rounds the median would not fit the ratio: other candidates had others, on a machine that varies.
        seconds = statistics.median(race.samples(CONTIGUOUS)) * over.ratio
        values = (seconds, _spread(samples), len(samples), over.ratio, low, high, regret, difference)
        return TuningRow(name, *values, "", compile_seconds)

    def is_decided(self, choice: str) -> bool:
        """Return whether a plan won, or the contiguous model is certainly as fast as each that is left."""
        return choice != CONTIGUOUS or not any(CONTIGUOUS in pair for pair in self.race.open_pairs())

    def reasons_for(self, choice: str) -> list[str]:
        """Return the answer in a sentence, and another one if the race ended too early for its best answer."""
        open_pairs = self.race.open_pairs()
        reason = self._reason_for(choice, is_settled=not open_pairs)
        if not self.is_decided(choice):
            reason = f"Not decided. {reason}"
        elif not self.compiled.keys().isdisjoint([*self.race.measured, *self.race.failures]):
            reason = f"{'Compile' if choice in self.compiled else 'Do not compile'} the model: {reason}"
        of_choice = [pair for pair in open_pairs if choice in pair]
        if not of_choice:
            return [reason]
        names = ", ".join(repr(name) for name in self.race.running if any(name in pair for pair in of_choice))
        return [
            reason,
            f"Too few rounds to distinguish {names} within {_CLOSE:.0%}: the answer has the best lower bound of the "
            "speed over contiguous.",
        ]

    def _reason_for(self, choice: str, *, is_settled: bool) -> str:
        race = self.race
        named = race.best() if choice == CONTIGUOUS else choice
        if len(self.plans) == 1:
            return "There is nothing to decide: no plan changes anything in this model."
        if named == CONTIGUOUS:
            spread = _spread(race.samples(CONTIGUOUS))
            rounds = several(race.rounds, "round")
            return f"Nothing was faster than the contiguous model in {rounds}; its own calls spread by {spread:.0%}."
        over = race.compare(named, CONTIGUOUS)
        text = f"{named!r} is {1 / over.ratio:.2f} times as fast as contiguous"
        if choice == named:
            least = f"at least {1 / over.high:.2f} times" if over.is_faster else "by more than a quarter in every round"
            return f"{text}, {least}."
        if not over.is_known:
            return f"{text}, in too few rounds to say anything: give it a larger budget."
        why = f"that is equal within {_CLOSE:.0%}" if is_settled else "the noise is larger than the gain"
        limits = f"{1 / over.high:.2f} to {1 / over.low:.2f} times"
        return f"{text}, {limits}: {why}, and so the model stays contiguous."

    def _sample(self, name: str) -> float:
        return self.compiled.get(name, self.workload).sample(self.plans[name])

    def _prepare(self, name: str, workload: Workload) -> float:
        """Compare a candidate's output, and warm it up: the first calls of a process are slower than later ones.

        Returns:
            The seconds of a call.
        """
        # In training a compiled model's output would have to be compiled for evaluation, too.
        if not workload.is_compiled or workload.mode == "inference":
            self._compare_output(name, workload)
        if workload.mode == "training":
            self._compare_gradients(name, workload)
        return workload.warm_up(self.plans[name])

    def _compare_output(self, name: str, workload: Workload) -> None:
        """Note how far a plan's output is from the contiguous one's.

        Raises:
            ValueError: It is farther away than the dtype allows.
        """
        output = workload.output(self.plans[name])
        if name == CONTIGUOUS:
            self.expected = output
            self.is_random = not self.workload.compare(self.workload.output(self.plans[name], seed=1), output).is_within
            if self.is_random:
                self.notes.append("The model returns something else each time: outputs were not compared.")
        if self.is_random:
            return
        difference = self.workload.compare(output, self.expected)
        self.differences[name] = difference.largest / (difference.of or 1.0)
        if not difference.is_within:
            raise ValueError(f"its output is off by {self.differences[name]:.0e} of the largest")

    def _compare_gradients(self, name: str, workload: Workload) -> None:
        """Compare a plan's gradients with the contiguous ones, unless rounding errors are as large as they are.

        Raises:
            ValueError: They are plainly wrong.
        """
        wrong = 5 * tolerance_of(workload.dtypes()).model_gradients
        gradients = workload.gradients(self.plans[name])
        if wrong == math.inf:
            return
        # With dropout there is nothing to compare with.
        if name == CONTIGUOUS and _distance(workload.gradients(self.plans[name], seed=1), gradients) <= wrong / 10:
            self.gradients = gradients
        distance = _distance(gradients, self.gradients)
        if distance > wrong:
            raise ValueError(f"its gradients are off by {distance:.0%}")


def _distance(gradients: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return how far the worst gradient is off, as a share of its norm, or of a hundredth of the largest norm."""
    norms = [magnitudes(each, _norm).item() for each in expected]
    floor = max(norms, default=0.0) / 100
    found = zip(gradients, expected, norms)
    return max((distances(a, b, _norm).item() / (max(size, floor) or 1.0) for a, b, size in found), default=0.0)


def _norm(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum().sqrt().reshape(1).cpu()


# A ratio beyond this in each of two rounds decides without an interval.
_FAR = 1.25
# Two candidates are equal if their interval is not wider than this.
_CLOSE = 0.03
# After which rounds the intervals are looked at. That is rarely, because whoever looks often enough finds a difference.
_CHECKS = (5, 8, 12, 18, 27, 40, 60, 90, 140, 210, 320)


class Interval(NamedTuple):
    """How many times as long a candidate takes as another one, with the limits of the 99 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Return whether the whole interval is below 1."""
        return self.high < 1

    @property
    def is_slower(self) -> bool:
        """Return whether the whole interval is above 1."""
        return self.low > 1

    @property
    def is_known(self) -> bool:
        """Return whether the limits are within a factor of ten. A few samples that differ give wider ones."""
        return self.high < 10 * self.ratio


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
        self._rounds_before_entry = 0

    @property
    def measured(self) -> list[str]:
        """The candidates that have samples and did not fail."""
        return [name for name, samples in self._seconds.items() if samples and name not in self.failures]

    def samples(self, name: str) -> list[float]:
        """Return the seconds that were measured for a candidate."""
        return list(self._seconds[name].values())

    def enter(self, name: str, prepare: Callable[[], object]) -> None:
        """Add a candidate to those that are running, after it was prepared.

        An exception of the preparation is noted in `failures`, and the candidate does not run.
        """
        self._seconds[name] = {}
        self._rounds_before_entry = self.rounds
        if self._succeeds(name, prepare):
            self.running.append(name)

    def run_round(self, measure: Callable[[str], float], is_late: Callable[[], bool] = lambda: False) -> None:
        """Take one sample of each candidate, every other round in reverse order, and drop clearly slower ones.

        The round ends before the next sample if it is late, but a candidate's first two rounds are never cut short:
        two may decide, and one never does.

        Raises:
            Exception: What the baseline raised. Exceptions of other candidates are noted in `failures`.
        """

        def take(name: str) -> None:
            self._seconds[name][self.rounds] = measure(name)

        is_early = self.is_early()
        for name in self.running[:: -1 if self.rounds % 2 else 1]:
            if not is_early and is_late():
                break
            self._succeeds(name, partial(take, name))
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

    def is_early(self) -> bool:
        """Return whether a running candidate has fewer than two samples."""
        return any(len(self.samples(name)) < 2 for name in self.running)

    def is_over(self) -> bool:
        """Return whether more rounds would hardly change the answer."""
        is_checked = self.rounds - self._rounds_before_entry in _CHECKS
        return len(self.running) == 1 or (is_checked and not self.open_pairs())

    def open_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of running candidates that are neither certainly different nor equal within 3 %."""
        return [pair for pair in combinations(self.running, 2) if not self._is_settled(*pair)]

    def winner(self) -> str:
        """Return the candidate that is faster than the baseline by the largest certain factor, else the baseline."""
        surest = min(self.running, key=lambda name: self.compare(name, self.baseline).high)
        best = self.best()
        return best if surest == self.baseline and self._is_far_ahead(best, self.baseline) else surest

    def _succeeds(self, name: str, function: Callable[[], object]) -> bool:
        try:
            function()
        except Exception as error:  # the model's code may not work with channels-last, or not compiled
            if name == self.baseline:
                raise
            self.failures[name] = f"{type(error).__name__}: {first_line(str(error)).removesuffix('.')}"
        return name not in self.failures

    def _is_settled(self, name: str, other: str) -> bool:
        if self._is_far_ahead(name, other) or self._is_far_ahead(other, name):
            return True
        each = self.compare(name, other)
        return each.is_faster or each.is_slower or each.high < each.low * (1 + _CLOSE)

    def _has_lost(self, name: str, best: str) -> bool:
        # Two samples may follow each other, in rounds of opposite order, and share a disturbance.
        is_slower = self.compare(name, best).is_slower or self._is_far_ahead(best, name)
        return is_slower and len(self._ratios(name, best)) >= 3

    def _is_far_ahead(self, name: str, other: str) -> bool:
        """Return whether a candidate is far faster than another one in each of two rounds or more."""
        ratios = self._ratios(other, name)
        return len(ratios) >= 2 and min(ratios) > _FAR

    def _ratios(self, name: str, other: str) -> list[float]:
        ours, others = self._seconds[name], self._seconds[other]
        return [ours[index] / others[index] for index in ours if index in others]


# Student's distribution: 99 % are within, by degrees of freedom. The last value stands for all larger ones.
_QUANTILES = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947),
    *(2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


def interval(ratios: Sequence[float]) -> Interval:
    """Return the 99 % interval of a ratio that was measured several times.

    This is the trimmed mean of the logarithms, without the lowest and the highest tenth, and the interval of Tukey and
    McLaughlin around it, so that one disturbed pair does not decide. It is 99 % because a race looks at its intervals
    more than once.
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


def _spread(samples: list[float]) -> float:
    """Return the distance of the quartiles in units of the median."""
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return (high - low) / median


def _check(model: Any, mode: Any, budget: Any, autocast: Any, optimizer: Any, loss: Any, compiles: Any) -> None:
    """Raise an error for an argument that is not valid."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune: expected a torch.nn.Module, got {type(model).__name__}")
    if mode not in get_args(Mode):
        raise ValueError(f"tune: expected mode to be 'inference' or 'training', got {mode!r}")
    if not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise ValueError(f"tune: expected budget_seconds to be a positive number, got {budget!r}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise ValueError(f"tune: expected autocast to be a floating dtype or None, got {autocast!r}")
    if mode == "inference" and (optimizer is not None or loss is not None):
        raise ValueError("tune: an optimizer and a loss are for mode='training'")
    if optimizer is not None and not (callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise ValueError(
            f"tune: expected an optimizer, its class or name, or a function that makes one, got {optimizer!r}"
        )
    if not isinstance(compiles, bool):
        raise ValueError(f"tune: expected compile to be True or False, got {compiles!r}")
    if compiles and any(reason_of(module) is Reason.COMPILED for module in model.modules()):
        raise ValueError("tune: compile=True is for a model that is not compiled yet: give the one that was compiled")
