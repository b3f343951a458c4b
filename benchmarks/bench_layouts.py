r"""Whole models in three layouts: contiguous, channels-last, and channels-last with replaced layers.

    python benchmarks/bench_layouts.py [--device cpu|cuda] [--one-image] [--model NAME ...] [--compiled NAME ...]
        [--dtype NAME ...] [--seconds S] [--out FILE]

A model's copies take turns in one process, on one thread: a call in inference, and in training a step, which is
forward, a mean of squares, and backward. Times are milliseconds that a caller waits, minimum and median. The results of
models that are not measured again stay in the file, if they were taken on the same machine with the same torch. A model
whose library is missing is left out.

With `--one-image`, inference of 2D models on a batch of one small image, in float32, and into a file of its own.

Rows of bfloat16 also have the model in float32. Where oneDNN does not take bfloat16, PyTorch's convolutions take
minutes in it, so only the model with replaced layers is measured in bfloat16.

On a GPU, models of the size that people train or run, in bfloat16 autocast or bfloat16: contiguous, channels-last,
converted, and the first and the last of these under `torch.compile`, with the memory in use beyond the model and its
input at its highest. cuDNN chooses among its kernels by their time (`cudnn.benchmark`). cuda_layouts.py has them.

To measure a machine with AVX-512 as one without, name another file and set what bounds each library:

    MKL_ENABLE_INSTRUCTIONS=AVX2 \
        ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 TORCH_NHWC_CPU_CAPABILITY=avx2 \
        python benchmarks/bench_layouts.py --out benchmarks/results/layouts-avx2-cpu.json
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import cuda_layouts
import layout_models
import machine
import torch
from layout_models import CONTIGUOUS, ONE_IMAGE, PRESERVED, STEPS, Copies, LayoutModel, difference, layouts, replaced
from stopwatch import Stopwatch, in_turns, summary

MODELS = {**layout_models.MODELS, **ONE_IMAGE}
IN_FLOAT32 = {f"{layout} float32": layout for layout in (CONTIGUOUS, PRESERVED)}
SAMPLES = range(3, 15)


def copies(measured: LayoutModel, dtype: str, mode: str) -> Copies:
    """Return what is measured in a dtype, the reference for differences first."""
    torch.manual_seed(0)
    model = measured.make().train(mode == "training")
    x = torch.randn(measured.shape)
    made = layouts(measured, model, x)
    if dtype == "float32":
        return made
    halves = layouts(measured, copy.deepcopy(model).to(torch.bfloat16), x.to(torch.bfloat16))
    if not takes_bfloat16():
        halves = {PRESERVED: halves[PRESERVED]}
    return {**{name: made[layout] for name, layout in IN_FLOAT32.items()}, **halves}


def takes_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def measure(
    stopwatch: Stopwatch, name: str, measured: LayoutModel, dtype: str, mode: str, budget: float
) -> dict[str, object]:
    """Measure every layout of a model, and the largest difference of its results; what fails is among the errors."""
    made = copies(measured, dtype, mode)
    steps = {layout: partial(STEPS[mode], measured, *each) for layout, each in made.items()}
    computed, errors, took = {}, {}, 0.0
    for layout, step in steps.items():
        try:
            torch.manual_seed(0)
            computed[layout] = step().float()
            took += stopwatch.wall(step) * 1e-6
        except RuntimeError as error:
            errors[layout] = str(error).strip().split("\n")[0]
    samples = min(SAMPLES.stop, max(SAMPLES.start, int(budget / max(took, 1e-3))))
    taken = in_turns({layout: partial(stopwatch.wall, steps[layout]) for layout in computed}, samples, warm_up=0)
    reference = next(iter(made))
    return {
        "model": name,
        "shape": list(measured.shape),
        "dtype": dtype,
        "mode": mode,
        "samples": samples,
        "replaced": replaced(made[reference][0], made[PRESERVED][0]),
        "times": {layout: summary([each / 1e3 for each in values]) for layout, values in taken.items()},
        "differences": {layout: difference(each, computed[reference]) for layout, each in computed.items()}
        if reference in computed
        else {},
        "errors": errors,
        "commit": machine.commit(),
    }


def show(row: dict) -> None:
    times = ", ".join(f"{layout} {each['min']:.1f} ms" for layout, each in row["times"].items())
    print(f"{row['model']} {row['dtype']} {row['mode']}: {times}; replaced {row['replaced']}", flush=True)


def default_dtypes() -> list[str]:
    return ["float32", "bfloat16"] if takes_bfloat16() else ["float32"]


def run(names: Sequence[str], dtypes: Sequence[str], budget: float, out: Path) -> None:
    """Measure models, and write the file after each of them. One without its library is left out."""
    torch.set_num_threads(1)
    stopwatch, order = Stopwatch(), list(MODELS)
    for name in names:
        cases = [(dtype, mode) for dtype in dtypes for mode in MODELS[name].modes]
        try:
            rows = [measure(stopwatch, name, MODELS[name], *case, budget) for case in cases]
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        for row in rows:
            show(row)
        machine.add(
            *(out, "bench_layouts.py", rows),
            order=lambda row: (order.index(row["model"]), row["dtype"] != "float32", row["mode"]),
            **{"quick": budget == 0, "threads": 1, "seconds": budget},
        )


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one-image", action="store_true", help="the 2D models on a batch of one")
    parser.add_argument("--model", nargs="*", choices=list(MODELS | cuda_layouts.MODELS), help="all by default")
    parser.add_argument("--compiled", nargs="*", help="those that are also compiled on a GPU; all by default")
    parser.add_argument("--dtype", nargs="*", default=default_dtypes(), choices=["float32", "bfloat16"])
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="for each model, dtype and mode; 0 is for a look at what comes out"
    )
    arguments = parser.parse_args()
    out = arguments.out or machine.RESULTS / f"layouts-{arguments.device}.json"
    if arguments.device == "cuda":
        machine.switch_norms_on()
        names = arguments.model or cuda_layouts.CHOSEN
        compiled = names if arguments.compiled is None else arguments.compiled
        cuda_layouts.run(names, arguments.seconds, out, compiled)
    elif arguments.one_image:
        out = arguments.out or machine.RESULTS / "one-image-cpu.json"
        run(arguments.model or list(ONE_IMAGE), ["float32"], arguments.seconds, out)
    else:
        names = arguments.model or [name for name in MODELS if name not in ONE_IMAGE]
        run(names, arguments.dtype, arguments.seconds, out)


if __name__ == "__main__":
    main()
