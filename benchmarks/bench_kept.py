"""The picture of the README: which layers of a 3D U-Net keep channels-last, and how long a training step takes.

    python benchmarks/bench_kept.py [--samples N] [--out FILE]

The model as it is, after `model.to(memory_format=...)` and after `convert_`, with one volume as input. The copies take
turns on one thread: a step is forward, a mean of squares, and backward.
"""

import copy
from collections.abc import Callable
from functools import partial

import layout_models
import machine
import torch
from layout_models import CONTIGUOUS, Copies, channels_last, training
from stopwatch import STOPWATCHES, in_turns, summary
from torch import nn

import torch_nhwc as nhwc

NAME = "dynunet3d"
MODEL = layout_models.MODELS[NAME]
BY_TORCH, OURS = "model.to", "convert_"


def copies() -> Copies:
    """Return the model in each way, with the input as the way needs it."""
    torch.manual_seed(0)
    model, x = MODEL.make(), torch.randn(MODEL.shape)
    by_torch, ours = (copy.deepcopy(model) for _ in range(2))
    nhwc.convert_(ours, input_format="channels_last")
    return {
        CONTIGUOUS: (model, x),
        BY_TORCH: (by_torch.to(memory_format=torch.channels_last_3d), channels_last(x)),
        OURS: (ours, x),
    }


def formats(model: nn.Module, step: Callable[[], object]) -> list[str]:
    """Return the format of each layer's output, in the order of execution."""
    with nhwc.trace(model) as trace:
        step()
    containers = {name for name, module in model.named_modules() if next(module.children(), None)}
    return [each.outputs[0].format for each in trace.modules if each.path not in containers and each.outputs]


def measure(samples: int) -> list[dict[str, object]]:
    """Return the formats and the milliseconds of each way."""
    made, stopwatch = copies(), STOPWATCHES["cpu"]()
    steps = {way: partial(training, MODEL, *each) for way, each in made.items()}
    found = {way: formats(made[way][0], step) for way, step in steps.items()}
    taken = in_turns({way: partial(stopwatch.wall, step) for way, step in steps.items()}, samples)
    return [
        {
            "model": NAME,
            "shape": list(MODEL.shape),
            "way": way,
            "formats": found[way],
            "ms": summary([each / 1e3 for each in taken[way]]),
        }
        for way in made
    ]


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "kept-cpu.json")
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.samples)
    machine.write(arguments.out, "bench_kept.py", rows, samples=arguments.samples, threads=1)


if __name__ == "__main__":
    main()
