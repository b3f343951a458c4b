"""What only a GPU can answer, in order of worth, for a machine that is at hand for minutes.

    python tools/gpu_check.py [--out FOLDER] [--step NAME ...] [--minutes M]

Each step is a program with a time limit of its own, whose results and output are in the folder when it ends, so that
being cut off loses one step. A step that does not fit into the minutes that are left is not begun. `summary.json` says
how each ended, and on which GPU. A second run goes on with other steps, or other models or cases: `--step layouts
--model NAME`, `--step norms --case NAME`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Step(NamedTuple):
    """A program, how many seconds it may take, and what of this one's arguments it takes."""

    command: tuple[str, ...]
    seconds: int
    takes: str = ""


QUALIFY = """
import json, os, time, torch
os.environ["TORCH_NHWC_CUDA_NORMS"] = "measure"
from torch_nhwc.ops import qualification
torch.zeros(1, device="cuda")
seconds = []
for _ in range(3):
    start = time.perf_counter()
    found = qualification.qualify_norms()
    seconds.append(time.perf_counter() - start)
    if len(seconds) == 2:
        del os.environ["TORCH_NHWC_CUDA_NORMS"]
        qualification._qualified.clear()
how = ("first", "again", "from the file")
print(json.dumps({**found._asdict(), "least_bytes": found.least_bytes, "seconds": dict(zip(how, seconds))}))
"""
STEPS = {
    "qualification": Step((sys.executable, "-c", QUALIFY), 60),
    "tests": Step(
        (sys.executable, "-m", "pytest", "-m", "cuda", "--numprocesses", "10", "-p", "no:cacheprovider"), 240
    ),
    "layouts": Step(
        (sys.executable, "benchmarks/bench_layouts.py", "--device", "cuda", "--seconds", "1.5"), 420, "model"
    ),
    "operators": Step(
        (sys.executable, "benchmarks/bench_layers.py", "--device", "cuda", "--operators", "--seconds", "0.05"),
        180,
        "case",
    ),
    "norms": Step((sys.executable, "benchmarks/bench_layers.py", "--device", "cuda", "--seconds", "0.05"), 180, "case"),
    "sanitizer": Step(("compute-sanitizer", "--error-exitcode", "1", sys.executable, "test/ops/sanitized.py"), 300),
}
WITH_RESULTS = ("layouts", "operators", "norms")


def run(name: str, folder: Path, given: dict[str, list[str]], seconds: float) -> dict[str, object]:
    """Run a step, its output in a file of the folder; return how it ended."""
    step = STEPS[name]
    command = list(step.command)
    if name in WITH_RESULTS:
        command += ["--out", str(folder / f"{name}-cuda.json")]
    if given.get(step.takes):
        command += [f"--{step.takes}", *given[step.takes]]
    environment = os.environ | {"TORCH_NHWC_REQUIRE_GPU": "1", "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        try:
            limit = min(step.seconds, seconds)
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    last = (folder / f"{name}.log").read_text().strip().splitlines()[-1:]
    return {"step": name, "code": code, "seconds": round(time.monotonic() - start, 1), "said": "".join(last)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--step", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", nargs="*", default=[])
    parser.add_argument("--case", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ended, end = [], time.monotonic() + 60 * arguments.minutes
    given = {"model": arguments.model, "case": arguments.case}
    for name in arguments.step:
        left = end - time.monotonic()
        ended.append(run(name, arguments.out, given, left) if left > 20 else {"step": name, "code": None, "seconds": 0})
        print(json.dumps(ended[-1]), flush=True)
        (arguments.out / "summary.json").write_text(json.dumps(ended, indent=1) + "\n")
    return int(any(each["code"] != 0 for each in ended))


if __name__ == "__main__":
    sys.exit(main())
