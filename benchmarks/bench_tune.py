"""What `tune` decides for whole models, and how fast that is compared with each policy when it is measured again.

    python benchmarks/bench_tune.py [--model NAME ...] [--dtype NAME ...] [--mode NAME ...] [--missing]
                                    [--budget S] [--seconds S] [--out FILE]

Each model is tuned in a process of its own, on one thread; every candidate is then timed in another fresh process, in
turns: a call in inference, and in training a step with SGD. Ratios are a candidate's time over that of the decision, of
pairs in one round, with their 99 % intervals: more than 1 is faster than the candidate.

The file is written after each case, a model in one dtype and mode. What is not measured again stays in it, if it was
taken on such a machine with such a torch; `--missing` measures only what is not there. All 18 cases in float32 take
about 45 minutes. In bfloat16, on a processor without arithmetic for it, only a few models are measured unless others
are named.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import machine
import torch
from bench_layouts import default_dtypes
from layout_models import MODELS, MODES, first_tensor
from stopwatch import raced, summary
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tuning import Tuning
from torch_nhwc.tuning.tuner import policies
from torch_nhwc.tuning.workload import Workload, optimizer_for

CHOSEN = (
    *("resnet50", "convnext_t", "mobilenet_v2", "efficientnet_b0", "unet2d", "vae_kl"),
    *("segresnet3d", "dynunet3d", "basic_unet3d"),
)
# In bfloat16, where that is emulated: a step of others takes some ten seconds.
IN_BFLOAT16 = ("mobilenet_v2", "efficientnet_b0", "unet2d")
OPTIMIZER = torch.optim.SGD
ROUNDS = range(2, 21)
# The level of the intervals, in percent.
LEVEL = 99
Case = tuple[str, str, str]


def loss_of(output: Any) -> torch.Tensor:
    return first_tensor(output).float().square().mean()


def made(name: str, dtype: str, mode: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model and its keyword arguments."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured, kind = MODELS[name], getattr(torch, dtype)
    model = measured.make().to(kind).train(mode == "training")
    shape = measured.shape
    return model, {"x": torch.randn(shape).to(kind), **measured.extra_inputs(shape[0], kind)}


class Called(nn.Module):
    """A model with a first argument `x`, whatever its name is in the model, and others by their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
        return first_tensor(self.model(x, **extra))


def options(mode: str) -> dict[str, Any]:
    return {"optimizer": OPTIMIZER, "loss": loss_of} if mode == "training" else {}


def tune(name: str, dtype: str, mode: str, budget: float) -> str:
    """Tune a model, and return the decision as JSON."""
    model, inputs = made(name, dtype, mode)
    tuning = nhwc.tune(Called(model), inputs, mode=mode, budget_seconds=budget, **options(mode))
    print(tuning, flush=True)
    return tuning.to_json()


def compare(name: str, dtype: str, mode: str, decided: str, seconds: float) -> dict[str, object]:
    """Compare the decision with each policy, in as many rounds as the seconds allow, within limits."""
    model, inputs = made(name, dtype, mode)
    model = Called(model)
    tuning = Tuning.from_json(decided)
    plans = policies(model, inputs)
    steps = optimizer_for(model, model, OPTIMIZER) if mode == "training" else None
    workload = Workload(model, inputs, mode, torch.device("cpu"), None, loss_of, steps)
    for plan in plans.values():
        workload.sample(plan)
    race = raced(plans, lambda policy: workload.sample(plans[policy]), ROUNDS, seconds)
    over = {policy: race.compare(policy, tuning.choice)._asdict() for policy in plans}
    return {
        "model": name,
        "dtype": dtype,
        "mode": mode,
        "shape": list(inputs["x"].shape),
        "choice": tuning.choice,
        "seconds": tuning.seconds,
        "rounds": race.rounds,
        "times": {policy: summary([each * 1e3 for each in race.samples(policy)]) for policy in plans},
        "over": over,
        "best": min(over, key=lambda policy: over[policy]["ratio"]),
        "commit": machine.commit(),
    }


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def show(row: dict) -> None:
    over = ", ".join(
        f"{policy} {each['ratio']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
        for policy, each in row["over"].items()
    )
    case = f"{row['model']} {row['dtype']} {row['mode']}"
    print(f"{case}: {row['choice']} in {row['seconds']:.0f} s; over {over}", flush=True)


def cases(names: Iterable[str] | None, dtypes: Iterable[str] | None, modes: Iterable[str]) -> Iterator[Case]:
    """Return the cases; without names and dtypes, those that take a reasonable time."""
    for dtype in dtypes or ("float32", "bfloat16"):
        is_slow = dtypes is None and dtype not in default_dtypes()
        for name in names or (IN_BFLOAT16 if is_slow else CHOSEN):
            yield from ((name, dtype, mode) for mode in modes)


def run(chosen: Iterable[Case], budget: float, seconds: float, out: Path) -> None:
    """Tune and compare cases, and write the file after each of them."""
    order = list(MODELS)
    for case in chosen:
        row = apart(compare, *case, apart(tune, *case, budget), seconds)
        show(row)
        machine.add(
            *(out, "bench_tune.py", [row]),
            order=lambda each: (each["dtype"] != "float32", order.index(each["model"]), each["mode"]),
            **{"quick": budget < 10, "threads": 1, "level": LEVEL, "budget": budget, "seconds": seconds},
        )


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "tune-cpu.json")
    parser.add_argument("--model", nargs="*", choices=[name for name in MODELS if not MODELS[name].decodes])
    parser.add_argument("--dtype", nargs="*", choices=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--missing", action="store_true", help="only what the file has no result of")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the tuning of each; 1 is for a look")
    parser.add_argument("--seconds", type=float, default=75.0, help="for comparing it then, about")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of this process, too: the file says under how many its results were taken
    there = {machine.case_of(row) for row in machine.earlier_results(arguments.out)} if arguments.missing else ()
    chosen = [case for case in cases(arguments.model, arguments.dtype, arguments.mode) if case not in there]
    run(chosen, arguments.budget, arguments.seconds, arguments.out)


if __name__ == "__main__":
    main()
