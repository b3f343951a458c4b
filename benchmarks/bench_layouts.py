"""Whole models in four layouts: contiguous, weights alone, weights and input, and with replaced layers as well.

    python benchmarks/bench_layouts.py [--model NAME ...] [--dtype NAME ...] [--compile [NAME ...]] [--seconds S]
                                       [--out FILE]

A model's copies take turns in one process, on one thread: a call in inference, and in training a step, which is
forward, a mean of squares, and backward. Milliseconds, minimum and median; gains are ratios of minima, and more than 1
is faster than contiguous. With `--compile`, torch.compile (inductor, its default mode) of the contiguous model and of
the preserved one takes turns with them, and the seconds of its first call are noted. The results of models that are not
measured again stay in the file, if they were taken on such a machine with such a torch.

bfloat16 is measured if oneDNN can use it. Otherwise a convolution is so slow in it that nobody would use it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import machine
import torch
from layout_models import GAINS_WITH_AMX, MODELS, LayoutModel, channels_last
from stopwatch import in_turns, summary
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.running import seconds

CONTIGUOUS, WEIGHTS, FULL, PRESERVED = "contiguous", "weights", "full", "preserved"
COMPILED = {"compiled contiguous": CONTIGUOUS, "compiled preserved": PRESERVED}
MODES = ("inference", "training")
FEWEST, MOST = 4, 15
LEAST_GAIN = 0.98


def layouts(model: nn.Module, x: Tensor) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the copies of a model, each with its input."""
    converted = {name: copy.deepcopy(model) for name in (WEIGHTS, FULL, PRESERVED)}
    for name, each in converted.items():
        nhwc.convert_(each, preserve=name == PRESERVED)
    inputs = {name: x if name == WEIGHTS else channels_last(x) for name in converted}
    return {CONTIGUOUS: (model, x), **{name: (each, inputs[name]) for name, each in converted.items()}}


def replaced(before: nn.Module, after: nn.Module) -> dict[str, int]:
    """Count the layers of each class that have another class after the conversion."""
    pairs = zip(before.modules(), after.modules(), strict=True)
    return dict(Counter(type(a).__name__ for a, b in pairs if type(a) is not type(b)))


def inference(measured: LayoutModel, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return measured.call(model, x)


def training(measured: LayoutModel, model: nn.Module, x: Tensor) -> Tensor:
    """Take a step without the optimizer's part, and return the loss."""
    loss = measured.call(model, x).float().square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def compiled(step: Callable[..., Tensor], measured: LayoutModel, model: nn.Module, x: Tensor) -> tuple[Callable, float]:
    """Return the step of a compiled copy, and how long its first call took."""
    torch._dynamo.reset()
    run = partial(step, measured, torch.compile(copy.deepcopy(model)), x)
    return run, seconds(run)


def measure(name: str, dtype: torch.dtype, mode: str, with_compile: bool, budget: float) -> dict[str, object]:
    """Measure every layout of a model in one dtype and mode, and the largest difference of its results."""
    measured = MODELS[name]
    torch.manual_seed(0)
    model = measured.make().to(dtype).train(mode == "training")
    x = torch.randn(measured.shape).to(dtype)
    made = layouts(model, x)
    step = training if mode == "training" else inference
    steps = {layout: partial(step, measured, *each) for layout, each in made.items()}
    computed, took = {}, {}
    for layout, run in steps.items():
        torch.manual_seed(0)
        took[layout] = seconds(lambda layout=layout, run=run: computed.update({layout: run().float()}))
    compile_seconds, errors = {}, {}
    for layout, of in COMPILED.items() if with_compile else ():
        try:
            steps[layout], compile_seconds[layout] = compiled(step, measured, *made[of])
        except Exception as error:  # whatever a compiler raises
            errors[layout] = str(error).strip().split("\n")[0]
    samples = min(MOST, max(FEWEST, int(budget / sum(took.values()))))
    taken = in_turns({layout: partial(seconds, run) for layout, run in steps.items()}, samples, warm_up=0)
    times = {layout: summary([each * 1e3 for each in values]) for layout, values in taken.items()}
    largest = computed[CONTIGUOUS].abs().max()
    row = {
        "model": name,
        "shape": list(x.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "samples": samples,
        "exchanged": replaced(model, made[PRESERVED][0]),
        "times": times,
        "gains": {layout: times[CONTIGUOUS]["min"] / each["min"] for layout, each in times.items()},
        "preserved_over_full": times[FULL]["min"] / times[PRESERVED]["min"],
        "differences": {
            layout: ((each - computed[CONTIGUOUS]).abs().max() / largest).item() for layout, each in computed.items()
        },
        "compile_seconds": compile_seconds,
        "errors": errors,
        "commit": machine.commit(),
    }
    return {**row, "bars": bars(row)}


def bars(row: dict) -> dict[str, float]:
    """Return the least gains that a row has to reach; without a replaced layer there is only noise to compare."""
    if not row["exchanged"]:
        return {}
    found = {"preserved_over_full": LEAST_GAIN}
    if row["dtype"] == "bfloat16" or row["shape"][0] >= 2:
        found["preserved"] = LEAST_GAIN
    with_amx = GAINS_WITH_AMX.get((row["model"], row["dtype"], row["mode"]))
    if with_amx and machine.has_amx():
        found["preserved"] = round(0.95 * with_amx, 3)
    return found


def show(row: dict) -> None:
    times = ", ".join(
        f"{layout} {each['min']:.1f} ms ({row['gains'][layout]:.2f}x)" for layout, each in row["times"].items()
    )
    rest = f"{row['preserved_over_full']:.2f} over full, replaced {row['exchanged']}, {row['compile_seconds'] or ''}"
    print(f"{row['model']} {row['dtype']} {row['mode']}: {times}; {rest} {row['errors'] or ''}", flush=True)


def default_dtypes() -> list[str]:
    return ["float32", "bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["float32"]


def run(names: Sequence[str], dtypes: Sequence[str], with_compile: Sequence[str], budget: float, out: Path) -> None:
    """Measure models, and write the file after each of them."""
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # what was compiled before would take no time
    order = list(MODELS)
    for name in names:
        rows = []
        for dtype in dtypes:
            for mode in MODES:
                rows.append(measure(name, getattr(torch, dtype), mode, name in with_compile, budget))
                show(rows[-1])
        machine.add(
            *(out, "bench_layouts.py", rows),
            order=lambda row: (order.index(row["model"]), row["dtype"] != "float32", row["mode"]),
            **{"quick": budget == 0, "threads": 1, "seconds": budget},
        )


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "layouts-cpu.json")
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", nargs="*", default=default_dtypes(), choices=["float32", "bfloat16"])
    parser.add_argument("--compile", nargs="*", default=[], choices=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="for each model, dtype and mode; 0 is for a look at what comes out"
    )
    arguments = parser.parse_args()
    run(arguments.model, arguments.dtype, arguments.compile, arguments.seconds, arguments.out)


if __name__ == "__main__":
    main()
