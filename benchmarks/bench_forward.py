"""The forward pass of whole models before and after conversion, and that their outputs did not change.

    python benchmarks/bench_forward.py [--repeats N] [--threads N] [--out FILE]

Every time is a median of interleaved runs in one process (torch_nhwc/cli/demo.py has the method).
"""

import machine
import torch

from torch_nhwc.cli import demo, models


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "forward-cpu.json")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = [demo.run(make(), repeats=arguments.repeats).as_dict() for make in models.MODELS.values()]
    machine.write(arguments.out, "bench_forward.py", results, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
