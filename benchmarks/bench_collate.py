"""The time of a batch by `nhwc.data.collate`, and by `default_collate` followed by `.to(memory_format=...)`.

    python benchmarks/bench_collate.py [--case NAME ...] [--samples N] [--workers N] [--out FILE]

On one thread, as in a worker process; the two take turns. Each case is collated in this process, and in workers of a
`DataLoader` whose samples are in memory, where the time is that of a whole pass over 32 batches: there batches are
converted in the worker process, as by a user's `collate_fn`. Milliseconds of a batch, and a ratio of medians.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from stopwatch import seconds_in_turns, summary
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import torch_nhwc as nhwc
from torch_nhwc.layout import CHANNELS_LAST

BATCHES = 32
Samples = list[Any]


def images(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 255, shape).to(dtype)


def interleaved(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an image as decoders do: `[C, H, W]`, a view of `[H, W, C]`."""
    return images(dtype, *shape[1:], shape[0]).movedim(-1, 0)


def cropped() -> Tensor:
    return interleaved(torch.uint8, 3, 256, 256)[:, 16:240, 16:240]


def mixed() -> dict[str, Any]:
    """Return an image in a dict, with a mask and labels."""
    mask = torch.zeros(1, 224, 224, dtype=torch.int64)
    return {"image": interleaved(torch.uint8, 3, 224, 224), "mask": mask, "box": [0.0] * 4, "label": 1, "name": "a"}


# How many samples, how each is made, and the bar of the ratio.
CASES: dict[str, tuple[int, Callable[[], Any], float]] = {
    "uint8 HWC, 3x224x224": (32, partial(interleaved, torch.uint8, 3, 224, 224), 1.3),
    "uint8 HWC, 3x224x224, cropped": (32, cropped, 1.3),
    "uint8 HWC, 3x32x32": (256, partial(interleaved, torch.uint8, 3, 32, 32), 1.3),
    "uint8 CHW, 3x224x224": (32, partial(images, torch.uint8, 3, 224, 224), 1.0),
    "uint8 CHW, 3x32x32": (256, partial(images, torch.uint8, 3, 32, 32), 1.0),
    "float32 HWC, 3x224x224": (32, partial(interleaved, torch.float32, 3, 224, 224), 1.0),
    "float32 CHW, 3x224x224": (32, partial(images, torch.float32, 3, 224, 224), 1.0),
    "float32 CHW, 3x32x32": (256, partial(images, torch.float32, 3, 32, 32), 1.0),
    "float32 CHW, 1x224x224": (32, partial(images, torch.float32, 1, 224, 224), 1.0),
    "float32 volumes, 4x64x64x64": (4, partial(images, torch.float32, 4, 64, 64, 64), 1.0),
    "float32 volumes, 1x96x96x96": (4, partial(images, torch.float32, 1, 96, 96, 96), 1.0),
    "dicts, uint8 HWC, 3x224x224": (32, mixed, 1.0),
}


def stock(samples: Samples) -> Any:
    """Collate as users write it."""
    batch = default_collate(samples)
    image = batch["image"] if isinstance(batch, dict) else batch
    brought = image.to(memory_format=CHANNELS_LAST[image.dim()])
    return {**batch, "image": brought} if isinstance(batch, dict) else brought


COLLATE = {"ours": nhwc.data.collate, "stock": stock}


def a_pass(loader: DataLoader) -> None:
    for _ in loader:
        pass


def measure(name: str, samples: int, workers: int) -> dict[str, object]:
    """Return the milliseconds of a batch, in this process and in workers."""
    count, make, bar = CASES[name]
    batch = [make() for _ in range(count)]
    here = {way: lambda collate=collate: partial(collate, batch) for way, collate in COLLATE.items()}
    times = {"here": seconds_in_turns(here, samples)}
    if workers:
        loading = {"num_workers": workers, "persistent_workers": True, "batch_size": count}
        loaders = {way: DataLoader(batch * BATCHES, collate_fn=fn, **loading) for way, fn in COLLATE.items()}
        passes = {way: lambda loader=loader: partial(a_pass, loader) for way, loader in loaders.items()}
        taken = seconds_in_turns(passes, max(2, samples // 8))
        times["workers"] = {way: [each / BATCHES for each in values] for way, values in taken.items()}
    ms = {
        where: {way: summary([each * 1e3 for each in values]) for way, values in ways.items()}
        for where, ways in times.items()
    }
    ratios = {where: each["stock"]["median"] / each["ours"]["median"] for where, each in ms.items()}
    return {"case": name, "samples": count, "bar": bar, "ms": ms, "ratios": ratios}


def run(names: list[str], samples: int, workers: int, out: Path) -> None:
    """Measure cases, and write the results."""
    torch.set_num_threads(1)
    results = []
    for name in names:
        row = measure(name, samples, workers)
        print(name, {where: f"{ratio:.2f}x" for where, ratio in row["ratios"].items()}, flush=True)
        results.append(row)
    machine.write(out, "bench_collate.py", results, samples=samples, workers=workers)


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "collate-cpu.json")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1, help="of the loader; 0 leaves it out")
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    arguments = parser.parse_args()
    run(arguments.case or list(CASES), arguments.samples, arguments.workers, arguments.out)


if __name__ == "__main__":
    main()
