"""What the guard at the step of fused optimizers costs.

    python benchmarks/bench_guard.py [--samples N] [--out FILE]

Steps of training of converted models with fused AdamW, on one thread and in float32: forward, backward and the
optimizer's step, that step alone, and the guard alone, which is a part of both where nothing has to be laid out. They
take turns; milliseconds, the least of all samples.
"""

from collections.abc import Callable
from pathlib import Path

import machine
import torch
from layout_models import first_tensor
from models import MODELS
from stopwatch import seconds_in_turns
from tables import table
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import torch_nhwc as nhwc


def many_layers() -> nn.Module:
    """Return a model of a thousand weights that are next to no work each."""
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(1000)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-50, batch 1 of 112x112": (MODELS["ResNet-50 (transformers)"], (1, 3, 112, 112)),
    "1,000 layers of 4x4x3x3, batch 1 of 8x8": (many_layers, (1, 4, 8, 8)),
}


def measure(name: str, samples: int) -> dict[str, object]:
    """Return the milliseconds of a step and of its parts."""
    make, shape = CASES[name]
    model = make().train()
    report = nhwc.convert_(model, input_format="channels_last")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(shape)
    (guard,) = (hook for hook in _global_optimizer_pre_hooks.values() if hook.__module__.startswith("torch_nhwc"))

    def step() -> None:
        optimizer.zero_grad()
        first_tensor(model(x)).square().mean().backward()
        optimizer.step()

    jobs = {"step": step, "optimizer": optimizer.step, "guard": lambda: guard(optimizer, (), {})}
    times = seconds_in_turns({job: lambda call=call: call for job, call in jobs.items()}, samples)
    assert not nhwc.check(model, report.plan, optimizer=optimizer)
    least = {job: min(taken) * 1e3 for job, taken in times.items()}
    return {"model": name, "parameters": len(list(model.parameters())), "ms": least}


def run(names: list[str], samples: int, out: Path) -> None:
    """Measure models, and write the results."""
    torch.set_num_threads(1)
    results = [measure(name, samples) for name in names]
    machine.write(out, "bench_guard.py", results, samples=samples)


def as_table(measured: dict) -> str:
    """Return a table with a row for each model."""
    rows = []
    for result in measured["results"]:
        ms = result["ms"]
        cells = [f"{ms['step']:.0f} ms", f"{ms['optimizer']:.1f} ms", f"{ms['guard']:.3f} ms"]
        rows.append([result["model"], str(result["parameters"]), *cells, f"{100 * ms['guard'] / ms['step']:.3f} %"])
    return table(["model", "parameters", "a step", "of the optimizer", "the guard", "of the step"], rows)


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "guard-cpu.json")
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    run(list(CASES), arguments.samples, arguments.out)


if __name__ == "__main__":
    main()
