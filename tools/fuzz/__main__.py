"""Generate cases at scale, in child processes that show unwritten memory, and whose crash is a result.

    python tools/fuzz [--scale 0.01] [--seed 7] [--isa AVX2] [--operators 9] [--layers 9] [--networks 9]
        [--convolutions 9]

Each part has a file here, with `draw`, which makes a case of plain data from a random generator, and `check`, which
raises if the case fails. Without counts, all parts run in full, times the scale; otherwise, those that are named run.
A case depends on the seed, its part and its number alone, so that the command that is printed with it repeats it.
"""

import argparse
import faulthandler
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

# What weights and their conversions are in plain torch: the tests' own reference.
sys.path.append(str(Path(__file__).parents[2] / "test/support"))

# For each part, its cases in full, and those that one process runs.
PARTS = {
    "operators": (200_000, 5_000),
    "layers": (20_000, 1_000),
    "networks": (5_000, 250),
    "convolutions": (5_000, 500),
}
# What shows memory that nobody wrote; and for computations of PyTorch that may damage the heap, what ends them then.
UNWRITTEN = {"MALLOC_PERTURB_": "165"}
CHECKED = {"convolutions": {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0", "OMP_WAIT_POLICY": "passive"}}
LEVELS = ("baseline", "avx2", "avx2_128", "avx512", "avx512_vbmi")
HANGS_AFTER = 300  # seconds in one case


def generator(seed: int, part: str, number: int) -> Random:
    """Return the random generator of a case."""
    return Random(f"{seed} {part} {number}")


def merge(total: dict[str, float], figures: Mapping[str, float]) -> None:
    """Add counts, which are integers, and keep the largest of each float."""
    for name, value in figures.items():
        total[name] = total.get(name, 0) + value if isinstance(value, int) else max(total.get(name, 0.0), value)


def run_cases(part: str, seed: int, first: int, count: int) -> None:
    """Run cases in this process, and write a line of JSON before and after each."""
    faulthandler.enable()
    # No timer of faulthandler: that is a thread, which may hold a lock of the heap while a part forks.
    faulthandler.register(signal.SIGALRM, chain=True)
    module, figures = importlib.import_module(part), dict[str, float]()
    for number in range(first, first + count):
        signal.alarm(HANGS_AFTER)
        print(json.dumps({"at": number}), flush=True)
        case = module.draw(generator(seed, part, number))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                merge(figures, module.check(case))
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            print(json.dumps({"failed": f"{type(error).__name__} at {where}: {error}", "case": repr(case)}), flush=True)
    print(json.dumps({"figures": figures}), flush=True)


class Run:
    """The cases of one part, by child processes one after another."""

    def __init__(self, part: str, seed: int, isa: str | None) -> None:
        self.part, self.seed = part, seed
        self.environment = UNWRITTEN | CHECKED.get(part, {}) | ({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})
        self.failures, self.done, self.figures = 0, 0, dict[str, float]()

    def all(self, first: int, count: int, levels: tuple[str, ...]) -> None:
        size = PARTS[self.part][1]
        end = first + count
        while first < end:
            # A process ends at a multiple of the size, so that a case always has the same instruction set.
            stop = min(end, (first // size + 1) * size)
            environment = self.environment | {"TORCH_NHWC_CPU_CAPABILITY": levels[first // size % len(levels)]}
            first = self._batch(first, stop, environment)

    def _batch(self, first: int, stop: int, environment: dict[str, str]) -> int:
        """Run cases in one process, and return the number of the first one that it has left."""
        command = [sys.executable, str(Path(__file__).parent), f"--{self.part}", str(stop - first)]
        command += ["--first", str(first), "--seed", str(self.seed), "--child"]
        at, is_whole = first, False
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=-1, stderr=errors, text=True, env=os.environ | environment) as child,
        ):
            for line in child.stdout or ():
                data = json.loads(line) if line.startswith("{") else {}
                at = data.get("at", at)
                if "failed" in data:
                    self._report(at, 1, environment, data["failed"], data["case"])
                if "figures" in data:
                    is_whole = True
                    merge(self.figures, data["figures"])
            code = child.wait()
            errors.seek(0)
            said = errors.read()[-3000:]
        if code:
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            self._report(at, 1, environment, f"the process died of {how}, with the case or one before it: {said}")
            self._print_command(first, at + 1 - first, environment)
        self.done += at + 1 - first
        return stop if is_whole else at + 1

    def _report(self, number: int, count: int, environment: dict[str, str], why: str, case: str = "") -> None:
        self.failures += 1
        print(f"FAILED {self.part} {number}: {why}\n  {case}", flush=True)
        self._print_command(number, count, environment)

    def _print_command(self, first: int, count: int, environment: dict[str, str]) -> None:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        which = f"--{self.part} {count} --first {first} --seed {self.seed} --child"
        print(f"  repeat: {variables} python tools/fuzz {which}", flush=True)


def levels() -> tuple[str, ...]:
    """Return the instruction sets that this CPU has kernels for."""
    from torch_nhwc.ops import cpu_capability

    best = cpu_capability()
    return LEVELS[: LEVELS.index(best) + 1] if best in LEVELS else (best,)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, (count, _) in PARTS.items():
        parser.add_argument(
            f"--{part}", type=int, metavar="COUNT", help=f"cases of tools/fuzz/{part}.py; full: {count}"
        )
    parser.add_argument("--scale", type=float, default=1.0, help="the share of the full counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--isa", help="the instruction sets that oneDNN may use, such as AVX2")
    parser.add_argument("--child", action="store_true", help="run the cases in this process")
    options = parser.parse_args()
    named: dict[str, Any] = {part: getattr(options, part) for part in PARTS if getattr(options, part) is not None}
    counts = named or {part: max(1, round(count * options.scale)) for part, (count, _) in PARTS.items()}
    if options.child:
        for part, count in counts.items():
            run_cases(part, options.seed, options.first, count)
        return 0
    found, runnable = 0, levels()
    for part, count in counts.items():
        start, run = time.monotonic(), Run(part, options.seed, options.isa)
        run.all(options.first, count, runnable)
        found += run.failures
        print(f"{part}: {run.done} cases, {run.failures} failed, {time.monotonic() - start:.0f} s", flush=True)
        for name, value in sorted(run.figures.items()):
            print(f"  {name}: {value if isinstance(value, int) else f'{value:.2g}'}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
