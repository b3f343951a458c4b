"""What the memory of activations costs: calls as the process is, and with variables set that its allocator reads.

    python benchmarks/bench_memory.py [--model NAME ...] [--rounds N] [--out FILE]

Every model, mode and setting in fresh processes, on one thread, which take turns: the least processor time of a call or
a step, its least page faults, and by how much the resident set is larger at its highest than before the first one.
"""

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import layout_models
import machine
import torch
from bench_tune import apart
from layout_models import MODES, STEPS
from stopwatch import in_turns

import torch_nhwc as nhwc
from torch_nhwc.running import page_faults

SETTINGS = {
    "as it is": {},
    page_faults.KEEP_MEMORY: dict(each.split("=") for each in page_faults.KEEP_MEMORY.split()),
    page_faults.HUGE_PAGES: dict([page_faults.HUGE_PAGES.split("=")]),
}
MODELS = {
    "plain_conv_unet3d": layout_models.MODELS["plain_conv_unet3d"],
    "segresnet3d": layout_models.MODELS["segresnet3d"]._replace(shape=(1, 1, 96, 96, 96)),
}
CALLS = 4  # the first one finds no memory that is kept


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_here(name: str, mode: str) -> dict[str, float]:
    """Measure a converted model in the process that was started for it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = MODELS[name]
    model = measured.make().train(mode == "training")
    nhwc.convert_(model)
    x = layout_models.channels_last(torch.randn(measured.shape))
    machine.forget_peak()
    before, calls = machine.resident("VmRSS"), []
    for _ in range(CALLS):
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        STEPS[mode](measured, model, x)
        taken = time.process_time() - start
        calls.append((taken * 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    milliseconds, counts = zip(*calls, strict=True)
    return {"ms": min(milliseconds), "faults": min(counts), "bytes": machine.resident("VmHWM") - before}


def run_with(variables: Mapping[str, str], name: str, mode: str) -> dict[str, float]:
    with environment(variables):
        return apart(run_here, name, mode)


def measure(name: str, mode: str, rounds: int) -> dict[str, object]:
    jobs = {setting: partial(run_with, variables, name, mode) for setting, variables in SETTINGS.items()}
    runs = in_turns(jobs, rounds, warm_up=0)
    settings = {setting: {key: min(run[key] for run in seen) for key in seen[0]} for setting, seen in runs.items()}
    return {"model": name, "shape": list(MODELS[name].shape), "mode": mode, "settings": settings}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "memory-cpu.json")
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    results = []
    for name in arguments.model:
        for mode in MODES:
            results.append(measure(name, mode, arguments.rounds))
            print(results[-1], flush=True)
    machine.write(arguments.out, "bench_memory.py", results, rounds=arguments.rounds, threads=1)


if __name__ == "__main__":
    main()
