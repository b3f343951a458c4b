"""Ask of real models what a newcomer asks: are they faster in channels-last here, and do they compute the same?

    python examples/demo.py

It takes a minute and a half, and on slow machines two. A model whose package, monai or transformers, is not installed
is left out. With matplotlib, the times are drawn as bars, in demo.svg.
"""

import copy
import logging
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_nhwc
from torch_nhwc.rendering import paragraphs, several, table
from torch_nhwc.running.calls import preserved_state, seconds
from torch_nhwc.running.comparison import distances, magnitudes, tensors_in
from torch_nhwc.running.machine import machine
from torch_nhwc.running.page_faults import advice, page_fault_share
from torch_nhwc.tuning.tuner import Race

CONTIGUOUS, BY_TORCH, OURS = WAYS = ("contiguous", "model.to", "torch_nhwc")
SECONDS = 70.0  # for all cases
FEWEST, LATEST = 3, 85.0  # each case has so many rounds, even if that takes longer, but not much longer
COLORS = {CONTIGUOUS: "#8b98a8", BY_TORCH: "#d98200", OURS: "#12a594"}
NOISY = "too noisy to say"
WORTH = 1.1  # as long as the interval reaches to such a gain, it is not said that there is none
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def segresnet() -> nn.Module:
    from monai.networks.nets.segresnet import SegResNet

    return SegResNet(spatial_dims=3, init_filters=16, in_channels=1, out_channels=2)


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    model = ResNetForImageClassification(ResNetConfig(return_dict=False))
    for module in model.modules():
        if isinstance(module, ResNetBottleNeckLayer):
            # With a scale of 1, sixteen untrained blocks multiply rounding errors until gradients are not comparable.
            nn.init.constant_(module.layer[-1].normalization.weight, 0.1)
    return model


class Case(NamedTuple):
    """A model, what it is called with, and whether that is for a gradient."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    trains: bool = False
    autocast: bool = False

    def run(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """Return the output of the model, or the gradients of a step of its training."""
        with torch.set_grad_enabled(self.trains), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = next(tensor for _, tensor in tensors_in(model(x)))
        if not self.trains:
            return {"output": output}
        output.double().square().mean().backward()
        gradients = {path: each.grad for path, each in model.named_parameters() if each.grad is not None}
        model.zero_grad(set_to_none=True)
        return gradients


CASES = (
    Case("SegResNet, inference", segresnet, (1, 1, 48, 48, 48)),
    Case("SegResNet, training", segresnet, (1, 1, 48, 48, 48), trains=True),
    Case("ResNet-50, inference", resnet50, (1, 3, 224, 224)),
    Case("ResNet-50, bfloat16", resnet50, (1, 3, 224, 224), autocast=True),
    Case("ResNet-50, training", resnet50, (2, 3, 224, 224), trains=True),
)


class Result(NamedTuple):
    """What was measured of a case: the race of the ways, each way's memory and error, and our page faults."""

    case: Case
    report: torch_nhwc.Report
    race: Race
    memory: dict[str, int]
    errors: dict[str, float]
    page_faults: float

    def speed(self, way: str) -> tuple[float, float, float]:
        """Return how many times as fast as contiguous a way is, and the limits of the 99 % interval."""
        ratio, low, high = self.race.compare(way, CONTIGUOUS)
        return 1 / ratio, 1 / high, 1 / low if low else float("inf")

    @property
    def best(self) -> str:
        """The way that is certainly faster than contiguous; of both, ours unless it is certainly slower."""
        faster = [way for way in (OURS, BY_TORCH) if self.race.compare(way, CONTIGUOUS).is_faster]
        if len(faster) == 2 and self.race.compare(OURS, BY_TORCH).is_slower:
            return BY_TORCH
        return faster[0] if faster else CONTIGUOUS

    @property
    def advice(self) -> str:
        """What to do with the model on this machine."""
        if self.best == CONTIGUOUS:
            may_gain = any(self.speed(way)[2] > WORTH for way in (OURS, BY_TORCH))
            return NOISY if may_gain else "leave it contiguous"
        return "convert it" if self.best == OURS else "use preserve=False"


def measure(case: Case, end: float, latest: float, advance: Callable[[float], None]) -> Result:
    """Measure a case in the three ways, then revert ours and check that everything is as before."""
    started = time.monotonic()
    torch.manual_seed(0)
    model, x = case.make().train(case.trains), torch.randn(case.shape)
    last = FORMATS[x.dim()]
    models = {CONTIGUOUS: model, BY_TORCH: copy.deepcopy(model).to(memory_format=last), OURS: copy.deepcopy(model)}
    report = torch_nhwc.convert_(models[OURS], input_format="channels_last")
    steps = {way: partial(case.run, each, x) for way, each in models.items()}
    steps[BY_TORCH] = partial(case.run, models[BY_TORCH], x.to(memory_format=last))

    with preserved_state(*models.values()):  # training changes the running statistics
        exact = case._replace(autocast=False).run(copy.deepcopy(model).double(), x.double())
        computed, memory = {}, {}
        for way, step in steps.items():
            computed[way], memory[way] = watched(step)
        race = Race(WAYS)
        while not race.rounds or time.monotonic() < (end if race.rounds >= FEWEST else latest):
            race.running = [*WAYS]  # none drops out: each has a row in the table
            race.run_round(lambda way: seconds(steps[way]))
            advance(min(1.0, (time.monotonic() - started) / (end - started)))
        page_faults = page_fault_share(steps[OURS])

    report.revert()
    for (name, before), after in zip(model.state_dict().items(), models[OURS].state_dict().values(), strict=True):
        assert after.stride() == before.stride(), name
        assert torch.equal(after, before), name
    for name, after in steps[OURS]().items():
        assert torch.equal(after, computed[CONTIGUOUS][name]), name
    errors = {way: error(each, exact) for way, each in computed.items()}
    return Result(case, report, race, memory, errors, page_faults)


def error(computed: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two elements, in units of the largest exact one."""
    off = max(distances(computed[name], each).item() for name, each in exact.items())
    return off / max(magnitudes(each).item() for each in exact.values())


def watched(step: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
    """Return what a step computes, and the most bytes that PyTorch's allocator held for it at once."""
    with without_stderr(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        computed = step()
    events = [each for each in profile.kineto_results.events() if each.name() == "[memory]"]
    return computed, max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what is written to the standard error: each start of the profiler is a line there."""
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows what is measured and how many cases are done; without rich it shows nothing."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda name, done: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(CASES))
        yield lambda name, done: progress.update(task, description=f"Measuring {name}", completed=done)


def as_table(results: list[Result]) -> str:
    rows = []
    for result in results:
        titles = dict(zip(WAYS, (result.case.name, f"-> {result.advice}", "")))
        for way in WAYS:
            speed = "1" if way == CONTIGUOUS else "{:.2f} ({:.2f}-{:.2f})".format(*result.speed(way))
            if not result.race.compare(way, CONTIGUOUS).is_known:
                speed = f"{result.speed(way)[0]:.2f} (unknown)"
            took = f"{statistics.median(result.race.samples(way)) * 1e3:.0f} ms"
            memory, off = f"{result.memory[way] / 1e6:.0f} MB", f"{result.errors[way]:.0e}"
            rows.append([titles[way], way, took, speed, memory, off])
    return table(rows, ["", "", "time", "speed (99 %)", "memory", "error"])


def replaced(results: list[Result]) -> Iterator[str]:
    """Yield what was replaced in each model, and what that gives, in the words of the report."""
    for name, report in {result.case.name.split(",")[0]: result.report for result in results}.items():
        layers = Counter((row.layer, row.gains) for row in report.plan.layers if row.is_wanted)
        yield f"Replaced in {name}: {'; '.join(f'{count} {kind}, {gains}' for (kind, gains), count in layers.items())}."


def draw(results: list[Result], path: str) -> bool:
    """Draw the times of each case as bars, and return whether matplotlib is installed to do it."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    here = machine()
    figure = Figure(figsize=(8, 1 + 1.1 * len(results)), layout="constrained")
    figure.suptitle(f"Time of a call, or of a training step\n{here['processor']}, {several(here['threads'], 'thread')}")
    figure.supxlabel("Grey band: within the noise (99 %), not told apart from contiguous.", fontsize="small")
    for axes, result in zip(figure.subplots(len(results), squeeze=False).flat, results):
        draw_case(axes, result)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
    return True


def draw_case(axes: Any, result: Result) -> None:
    """Draw a bar for each way whose time is known; none if the case was too noisy.

    The time is the contiguous model's median times the ratio of times in the same rounds. The grey band is where a bar
    with the interval of that ratio is not told apart from contiguous.
    """
    contiguous = statistics.median(result.race.samples(CONTIGUOUS)) * 1e3
    ratios = {way: result.race.compare(way, CONTIGUOUS) for way in WAYS}
    known = {way: over for way, over in ratios.items() if over.is_known and result.advice != NOISY}
    name = result.case.name
    if result.case.autocast and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        name += " (PyTorch has no fast convolutions in it on this CPU)"
    axes.set_title(name, loc="left", fontsize="medium")
    axes.set_yticks(range(len(WAYS)), WAYS)
    axes.set_xticks([])
    axes.set_ylim(len(WAYS) - 0.4, -0.6)
    axes.set_xlim(0, 1.4 * contiguous * max((over.ratio for over in known.values()), default=1.0))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    for place, (way, color) in enumerate(COLORS.items()):
        milliseconds, text = 0.0, NOISY
        if way in known:
            over = known[way]
            milliseconds = contiguous * over.ratio
            text = f"{milliseconds:.0f} ms"
            if over.is_faster or over.is_slower:
                text += f", {1 / over.ratio:.2f}x"
            elif way != CONTIGUOUS:
                text += ", not told apart"
                least, most = milliseconds / over.high, milliseconds / over.low
                axes.barh(place, most - least, 0.95, least, color="gainsboro")
            axes.barh(place, milliseconds, 0.6, color=color)
        axes.annotate(text, (milliseconds, place), (5, 0), textcoords="offset points", va="center")


def conclusion(results: list[Result]) -> str:
    """Return what this machine gains, and how to ask the same of another model, in a sentence."""
    here = machine()
    gains = {result.case.name: result.speed(result.best)[0] for result in results if result.best != CONTIGUOUS}
    where = f"On this {here['processor']} ({here['capability']}, {here['threads']} threads)"
    if gains:
        most = max(gains, key=gains.__getitem__)
        what = f"channels-last makes {len(gains)} of {len(results)} faster, up to {gains[most]:.1f} times ({most})"
    elif any(result.advice == NOISY for result in results):
        what = "the times vary too much to say whether channels-last is faster: run this again while nothing else runs"
    else:
        what = "channels-last makes none of these faster, so leave them contiguous"
    return f"{where} {what}; `torch-nhwc tune --factory my_model:build` asks the same of your model."


def main() -> None:
    results: list[Result] = []
    missing: dict[str, str | None] = {}
    start = time.monotonic()
    with progress_bar() as show:
        for done, case in enumerate(CASES):
            show(case.name, done)
            now = time.monotonic()
            end = now + max(1.0, (start + SECONDS - now) / (len(CASES) - done))
            advance = partial(lambda case, done, part: show(case.name, done + part), case, done)
            try:
                results.append(measure(case, end, start + LATEST, advance))
            except ModuleNotFoundError as error:
                missing[case.name.split(",")[0]] = error.name
    for name, package in missing.items():
        print(f"{name} is left out: {package} is missing, type `pip install 'torch-nhwc[models]'`.")
    if not results:
        return
    print(as_table(results))
    most = max(results, key=lambda result: result.page_faults)
    notes = [
        "SegResNet: 48x48x48 voxels, as a sliding window cuts them. ResNet-50: an image of 224x224, two in training.",
        "Contiguous, model.to(memory_format=...) and torch_nhwc.convert_ take turns. Speed is of times in one round.",
        "Memory: the peak of a step, besides the weights. Error: the largest difference from float64, of the "
        "output or in training of the gradients, in units of the largest value.",
        *replaced(results),
        *advice(most.page_faults, most.case.name),
        "Reverted: strides, weights and results are as before.",
    ]
    if draw(results, "demo.svg"):
        notes.append("Drawn: demo.svg.")
    print(paragraphs([*notes, conclusion(results)]), end="")


if __name__ == "__main__":
    # Other packages' remarks.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main()
