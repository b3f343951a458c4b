"""The forward pass of whole models before and after conversion, and that their outputs did not change.

    python benchmarks/bench_forward.py [--repeats N] [--threads N] [--out FILE]

Every time is a median of interleaved runs in one process (torch_nhwc/demo.py has the method).
"""

import argparse
from pathlib import Path

import machine
import torch

from torch_nhwc import demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=machine.ROOT / "benchmarks/results/forward-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = [demo.run(make(), repeats=arguments.repeats).as_dict() for make in demo.MODELS.values()]
    machine.write(arguments.out, "bench_forward.py", results, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
