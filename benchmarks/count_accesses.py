"""What the GPU kernels' accesses to memory cost, counted without a GPU by test/cpp/gpu_model.cpp.

    python benchmarks/count_accesses.py [--out FILE]

No time is measured, so that every machine gives the same figures.
"""

import itertools
import statistics
import sys

import machine
import torch

sys.path.append(str(machine.ROOT / "test/cpp"))

import gpu_model

# The channels of the weights, and by how many elements their memory is off a multiple of 16 bytes.
GROUPS = {
    "channels in whole sectors of 32 bytes": ((32, 64, 192, 320, 512), 0),
    "3, 4, 7 or 33 channels": ((3, 4, 7, 33), 0),
    "memory off by an element": ((64, 320), 1),
}


def measure(kind: tuple[torch.dtype, torch.dtype], group: str) -> dict[str, object]:
    """Count for the weights of one kind: requested bytes over those of touched sectors, passes over the fewest."""
    channels, offset = GROUPS[group]
    weights = itertools.product(channels, gpu_model.TAPS, (False, True))
    counted = [gpu_model.count(kind, gpu_model.matrices_of(kind, *weight), offset)[1] for weight in weights]
    return {
        "kind": " to ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in kind)),
        "bytes": kind[0].itemsize,
        "is_cast": kind[0] != kind[1],
        "group": group,
        "weights": len(counted),
        "least_load_efficiency": min(counts.load_efficiency for counts in counted),
        "least_store_efficiency": min(counts.store_efficiency for counts in counted),
        "mean_conflict_degree": statistics.mean(counts.conflict_degree for counts in counted),
        "most_conflict_degree": max(counts.conflict_degree for counts in counted),
    }


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "accesses-model.json")
    arguments = parser.parse_args()
    cases = [
        (kind, group)
        for kind, group in itertools.product(gpu_model.KINDS, GROUPS)
        if GROUPS[group][1] * kind[0].itemsize % 16 == 0 or kind[0].itemsize < 16
    ]
    results = [measure(*case) for case in cases]
    machine.write(arguments.out, "count_accesses.py", results)


if __name__ == "__main__":
    main()
