"""The forward pass of whole models before and after conversion, and that their outputs did not change.

    python benchmarks/bench_forward.py [--repeats N] [--threads N] [--out FILE]

Every time is a median of runs that take turns in one process.
"""

import statistics
import warnings
from functools import partial

import machine
import torch
from stopwatch import in_turns

import torch_nhwc as nhwc
from torch_nhwc.cli.models import MODELS, Example
from torch_nhwc.running import call, compare, copy_model, seconds


@torch.no_grad()
def run(example: Example, repeats: int) -> dict[str, object]:
    """Time one model: contiguous, with converted weights, and with channels-last inputs as well."""
    models = {"contiguous": example.model.eval()}
    models |= {way: copy_model(example.model) for way in ("converted", "channels_last_input")}
    nhwc.convert_(models["converted"])
    nhwc.convert_(models["channels_last_input"], input_format="channels_last")
    jobs = {way: partial(seconds, partial(call, model, example.inputs)) for way, model in models.items()}
    taken = in_turns(jobs, repeats)
    difference = compare(call(models["converted"], example.inputs), call(example.model, example.inputs), torch.float32)
    return {
        "model": example.name,
        "threads": torch.get_num_threads(),
        **{f"forward_{way}_ms": statistics.median(times) * 1e3 for way, times in taken.items()},
        "largest_output": difference.of,
        "largest_difference": difference.largest,
        "tolerance": difference.tolerance,
    }


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "forward-cpu.json")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    results = [run(make(), arguments.repeats) for make in MODELS.values()]
    machine.write(arguments.out, "bench_forward.py", results, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
