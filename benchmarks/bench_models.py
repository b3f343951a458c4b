"""The conversion of whole models, every single one in a fresh process, as it happens to users.

    python benchmarks/bench_models.py [--device cpu|cuda] [--rounds N] [--models NAME ...] [--sources NAME ...]
        [--out FILE]

A process makes one model, with weights that are its own or that were loaded, does one job to it on one thread, and
reports the time and by how much the resident set was larger, at its highest, than before the job or after it, whichever
is more. The jobs take turns; the figures are medians over the rounds, and the least. The file is written after each
model and source; earlier results of what is not measured again stay in it, if they were taken on such a machine with
such a torch. On a GPU all is done in one process: cuda_models.py.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cuda_models
import machine
import torch
from jobs import JOBS, memcpy
from machine import forget_peak, resident
from models import MODELS, SOURCES, moved_of, weights_of
from stopwatch import in_turns

from torch_nhwc.running.calls import seconds

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["diffusers", "monai.networks.nets.unet", "torch_nhwc", "transformers", "diffusers.models"]
PROCESSES.set_forkserver_preload(PRELOADED)


def run_here(model_name: str, source: str, job_name: str, folder: Path) -> dict[str, float | None]:
    """Do one job to one model, in the process that was started for it."""
    torch.set_num_threads(1)
    with torch.no_grad():
        model = SOURCES[source](MODELS[model_name], folder)
        weights = weights_of(model)
        for weight in weights:
            weight.sum()  # resident, whatever it came from
        job: Callable[[], object] = memcpy(model) if job_name == "memcpy" else lambda: JOBS[job_name](model)
    moved = moved_of(weights)
    forget_peak()
    before = resident("VmRSS")
    try:
        milliseconds: float | None = seconds(job) * 1e3
    except RuntimeError:
        assert job_name == "module.to"  # which has one format for 2D and 3D layers
        milliseconds = None
    extra = max(0, resident("VmHWM") - max(before, resident("VmRSS")))
    if job_name == "ours":
        assert all(weight.stride()[1] == 1 for weight in moved)
    return {
        "ms": milliseconds,
        "extra_bytes": extra,
        "bytes": sum(weight.nbytes for weight in weights),
        "moved_bytes": sum(weight.nbytes for weight in moved),
        "largest_bytes": max(weight.nbytes for weight in weights),
    }


def run_in_a_process(*arguments: object) -> dict[str, float | None]:
    # Forked from a server that has imported the libraries and done nothing else.
    with ProcessPoolExecutor(1, PROCESSES) as fresh:
        return fresh.submit(run_here, *arguments).result()


def cases(models: list[str], sources: list[str]) -> Iterator[tuple[str, str]]:
    for model in models:
        for source in sources:
            if source != "from_pretrained" or "monai" not in model:
                yield model, source


def measure(model: str, source: str, rounds: int) -> dict[str, object]:
    """Measure one model from one source, each job in `rounds` processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        in_processes = {job: partial(run_in_a_process, model, source, job, Path(folder)) for job in (*JOBS, "memcpy")}
        runs = in_turns(in_processes, rounds, warm_up=0)
    sizes = {name: runs["stock"][0][name] for name in ("bytes", "moved_bytes", "largest_bytes")}
    jobs = {
        job: {
            "ms": None if seen[0]["ms"] is None else statistics.median(run["ms"] for run in seen),
            "min_ms": None if seen[0]["ms"] is None else min(run["ms"] for run in seen),
            "extra_bytes": statistics.median(run["extra_bytes"] for run in seen),
        }
        for job, seen in runs.items()
    }
    return {"model": model, "source": source, **sizes, "jobs": jobs}


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="5 on the CPU, 15 on a GPU")
    parser.add_argument("--sources", nargs="*", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or {"cpu": 5, "cuda": 15}[arguments.device]
    out = arguments.out or machine.RESULTS / f"models-{arguments.device}.json"
    if arguments.device == "cuda":
        return cuda_models.run(arguments.models, arguments.rounds, out)
    order = list(cases(list(MODELS), list(SOURCES)))
    for case in cases(arguments.models, arguments.sources):
        measured = measure(*case, arguments.rounds)
        figures = {job: each["ms"] and round(each["ms"], 2) for job, each in measured["jobs"].items()}
        print(*case, figures, flush=True)
        machine.add(
            *(out, "bench_models.py", [measured]),
            order=lambda row: order.index((row["model"], row["source"])),
            rounds=arguments.rounds,
        )


if __name__ == "__main__":
    main()
