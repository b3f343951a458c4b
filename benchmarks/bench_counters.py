"""The model of a GPU against a GPU: what the kernels' accesses cost, counted by test/cpp/gpu_model.cpp and by hardware.

    python benchmarks/bench_counters.py [--out FILE]

Nsight Compute (`ncu`) reads the hardware's counters while this program converts one weight of each element size. Where
it cannot, the result says why.
"""

import csv
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence

import machine
import torch
from count_accesses import gpu_model

import torch_nhwc as nhwc
from torch_nhwc.layout import CHANNELS_LAST

CASES = [
    ((256, 128, 3, 3), torch.float32),
    ((64, 64, 3, 3, 3), torch.bfloat16),
    ((128, 96, 5, 5), torch.uint8),
]
COUNTERS = {
    "load_sectors": ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"],
    "store_sectors": ["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"],
    "shared_passes": [
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    ],
}


def convert_all() -> None:
    """Run one kernel for each case, for the profiler."""
    for shape, dtype in CASES:
        weight = torch.zeros(shape, dtype=dtype, device="cuda")
        out = torch.empty_like(weight, memory_format=CHANNELS_LAST[len(shape)])
        nhwc.ops.copy_weight_(out, weight)
    torch.cuda.synchronize()


def ncu_command(ncu: str) -> list[str]:
    metrics = ",".join(metric for metrics in COUNTERS.values() for metric in metrics)
    how = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--metrics", metrics]
    kernels = ["--kernel-name-base", "demangled", "--kernel-name", "regex:nhwc::cuda"]
    return [ncu, *how, *kernels, sys.executable, __file__, "--convert-only"]


def counters_in(output: str) -> list[dict[str, int]]:
    """Return the counts of each kernel in ncu's table, whose values are quoted and whose second line has units."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    return [
        {
            name: sum(round(float(row[metric].replace(",", ""))) for metric in metrics)
            for name, metrics in COUNTERS.items()
        }
        for row in rows
    ]


def read_counters() -> list[dict[str, int]] | str:
    """Return the hardware's counts of each case, or why there are none."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        return "ncu is missing"
    run = subprocess.run(ncu_command(ncu), capture_output=True, text=True)
    try:
        counts = counters_in(run.stdout)
    except (KeyError, ValueError, AttributeError) as error:
        counts, run.returncode = [], run.returncode or repr(error)
    if run.returncode == 0 and len(counts) == len(CASES):
        return counts
    said = [line for line in (run.stdout + run.stderr).splitlines() if "ERROR" in line or "rror:" in line]
    return f"ncu read {len(counts)} of {len(CASES)} kernels ({run.returncode}): {' '.join(said[:3])}"


def modelled(shape: Sequence[int], dtype: torch.dtype, shared_bytes: int, processors: int) -> dict[str, int]:
    """Return the model's counts for a device with these limits."""
    limits = gpu_model.Limits(shared_bytes=shared_bytes, processors=processors)
    matrices = shape[0], shape[1], math.prod(shape[2:])
    _, counts = gpu_model.count((dtype, dtype), matrices, limits=limits)
    return {name: getattr(counts, name) for name in COUNTERS}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "counters-cuda.json")
    parser.add_argument("--convert-only", action="store_true", help="what is run under ncu")
    arguments = parser.parse_args()
    if arguments.convert_only:
        return convert_all()
    properties = torch.cuda.get_device_properties("cuda")
    limits = {
        "shared_bytes": properties.shared_memory_per_block_optin,
        "processors": properties.multi_processor_count,
    }
    read = read_counters()
    results = [
        {
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "modelled": modelled(shape, dtype, **limits),
            "read": None if isinstance(read, str) else read[index],
        }
        for index, (shape, dtype) in enumerate(CASES)
    ]
    why = read if isinstance(read, str) else None
    machine.write(arguments.out, "bench_counters.py", results, unreadable=why, gpu=machine.gpu())
    print(why or "counters of all kernels read")


if __name__ == "__main__":
    main()
