"""What the GPU kernels' accesses to memory cost, counted without a GPU by test/cpp/gpu_model.cpp.

    python benchmarks/count_accesses.py [--out FILE]

No time is measured, so that every machine gives the same figures.
"""

import itertools
import math
import statistics
import sys

import machine
import torch

sys.path.append(str(machine.ROOT / "test/cpp"))

import gpu_model

TAPS = (4, 8, 9, 16, 25, 27, 49, 125)
# The channels of the weights, and by how many elements their memory is off a multiple of 16 bytes.
GROUPS = {
    "channels in whole sectors of 32 bytes": ((32, 64, 192, 320, 512), 0),
    "3, 4, 7 or 33 channels": ((3, 4, 7, 33), 0),
    "memory off by an element": ((64, 320), 1),
}


def count(
    kind: tuple[torch.dtype, torch.dtype],
    matrices: tuple[int, int, int],
    offset: int = 0,
    limits: gpu_model.Limits | None = None,
) -> gpu_model.Counts:
    """Count the accesses for one weight: so many matrices of rows and columns."""
    size = math.prod(matrices)
    source, _ = gpu_model.allot(size * kind[0].itemsize, offset * kind[0].itemsize)
    destination, _ = gpu_model.allot(size * kind[1].itemsize, 0)
    weight = gpu_model.Weight(source.data_ptr(), destination.data_ptr(), *matrices, gpu_model.number_of(kind))
    counts = gpu_model.Counts()
    assert gpu_model.run([weight], limits, counts=counts) == 1
    return counts


def matrices_of(kind: tuple[torch.dtype, torch.dtype], channels: int, taps: int, back: bool) -> tuple[int, int, int]:
    """Return the matrices of a weight of about 64 KB."""
    filters = max(2, (64 << 10) // (channels * taps * kind[0].itemsize))
    return (filters, taps, channels) if back else (filters, channels, taps)


def measure(kind: tuple[torch.dtype, torch.dtype], group: str) -> dict[str, object]:
    """Count for the weights of one kind: requested bytes over those of touched sectors, passes over the fewest."""
    channels, offset = GROUPS[group]
    weights = itertools.product(channels, TAPS, (False, True))
    counted = [count(kind, matrices_of(kind, *weight), offset) for weight in weights]
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
