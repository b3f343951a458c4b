"""Search for convolutions that PyTorch computes wrong on a CPU: `make search-convolutions`, for a new torch.

    python tools/search_convolutions.py [--shapes N] [--threads 1 2] [--isa AVX2] [--python PYTHON] [--safe functional]

It draws random convolutions, computes each forward and backward in both formats, and compares with float64. Memory that
nobody wrote shows by `MALLOC_PERTURB_`. A damaged heap ends the process by glibc's checks, so cases run in forked ones.
The table says how many cases are wrong, and how many of those torch_nhwc would leave to PyTorch: any above 0 is news.
`--safe functional` computes everything by `torch_nhwc.functional`; then nothing should be wrong.

The environment of `--python` needs torch, and torch_nhwc only for `--safe functional`. Its worker is this file, too.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FORMATS = "contiguous", "channels-last"
Run = tuple[int, str]
"""The index of a case, and a format."""
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest error that counts as right, relative to the largest value. Wrong results are mostly far from it."""
CHUNK = 2000
"""Convolutions that are sorted by their ways at a time, each lot into a process of its own."""
SECONDS = 30
"""Longest time of a case: a damaged heap may block for ever instead of ending the process."""
LARGEST, MOST = 50_000, 2_000_000
"""Elements of a tensor, and multiplications of a forward pass: larger cases would take most of the time."""
CHANNELS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 48, 64


class Case(NamedTuple):
    """A convolution and its input. Every tuple has an entry for each spatial dimension."""

    transposed: bool
    batch: int
    groups: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    size: tuple[int, ...]
    bias: bool
    dtype: str

    @property
    def output(self) -> tuple[int, ...]:
        """Return the spatial size of the output."""
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, self.output_padding)
        if self.transposed:
            return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in axes)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in axes)

    @property
    def weight(self) -> tuple[int, ...]:
        """Return the shape of the weight."""
        first, second = self.out_channels, self.in_channels
        if self.transposed:
            first, second = second, first
        return first, second // self.groups, *self.kernel

    @property
    def is_small(self) -> bool:
        """Return whether the case takes little time."""
        x, y = self.in_channels * prod(self.size), self.out_channels * prod(self.output)
        multiplications = self.batch * prod(self.size if self.transposed else self.output) * prod(self.weight)
        return max(self.batch * x, self.batch * y, prod(self.weight)) <= LARGEST and multiplications <= MOST

    @property
    def kind(self) -> str:
        """Return the row of the table that counts the case."""
        per_group = self.in_channels // self.groups
        connected = "dense" if self.groups == 1 else "depthwise" if per_group == 1 else "grouped"
        return f"{len(self.size)}D {'transposed ' if self.transposed else ''}{connected}"


# The ways, by the library of this environment

SOUND = "pytorch", "batched", "restored"
FASTER = "linear", "along_depth", "slabs", "gathered"


def way_of(case: Case, layout: str) -> str:
    """Return the way of a convolution; where channels-last has a faster one, that of the contiguous convolution."""
    import torch

    import torch_nhwc  # noqa: F401

    x = torch.empty(case.batch, case.in_channels, *case.size, dtype=getattr(torch, case.dtype))
    tensors = [in_format(each, layout).requires_grad_() for each in (x, x.new_empty(case.weight))]
    arguments = case.stride, case.padding, case.dilation, case.groups
    more = (case.output_padding,) if case.transposed else ()
    bias = x.new_empty(case.out_channels) if case.bias else None
    way = str(torch.ops.nhwc.convolution_way(*tensors, bias, *arguments, *more)[0])
    return way_of(case, "contiguous") if way in FASTER else way


# Random cases


def draw(seed: int, index: int) -> Case:
    """Return the case of an index, the same one on every machine."""
    random = Random(f"{seed} {index}")
    while True:
        case = _draw(random)
        if min(case.output) >= 1 and case.is_small:
            return case


def _draw(random: Random) -> Case:
    space = random.choice((2, 3))
    kind = random.random()
    is_pointwise = kind < 0.15
    # AMX packs taps as channels: products of powers of 2.
    is_packed = 0.15 <= kind < 0.25

    def per_axis(values: range | tuple[int, ...]) -> tuple[int, ...]:
        """Draw one value for all axes, as most layers have, or one for each."""
        if random.random() < 0.5:
            return (random.choice(values),) * space
        return tuple(random.choice(values) for _ in range(space))

    transposed = random.random() < 0.3
    kernel = (1,) * space if is_pointwise else per_axis((1, 4, 8) if is_packed else range(1, 10))
    stride = per_axis((1, 2, 2, 3) if is_pointwise else (1, 4, 8) if is_packed else (1, 1, 2, 2, 3, 4))
    if random.random() < 0.1:
        stride = tuple(k + random.randint(0, 2) for k in kernel)
    dilation = per_axis((1, 1, 1, 2, 3))
    most = [0 if is_packed else (k - 1) * d for k, d in zip(kernel, dilation)]
    drawn = [random.choice((0, reach // 2, reach // 2, reach, random.randint(0, reach))) for reach in most]
    more = per_axis((0, 0, 1, 2)) if transposed else (0,) * space
    groups = random.choice((1, 1, 1, 2) if is_pointwise or is_packed else (1, 1, 2, 3, 4, 8, 16, 32, 64))
    is_depthwise = groups > 1 and random.random() < 0.6
    channels = random.choice(range(1, 20) if is_pointwise else (8, 12, 16, 24) if is_packed else CHANNELS)
    return Case(
        transposed=transposed,
        batch=random.choice((1, 1, 2, 3, 4)),
        groups=groups,
        in_channels=groups * (1 if is_depthwise else channels),
        out_channels=groups * (random.choice((1, 1, 2, 3)) if is_depthwise else random.choice(CHANNELS)),
        kernel=kernel,
        stride=stride,
        padding=tuple(drawn),
        dilation=dilation,
        output_padding=tuple(min(m, max(s, d) - 1) for m, s, d in zip(more, stride, dilation)),
        size=per_axis((4, 8, 16, 32) if is_packed else range(1, random.choice((5, 9, 17, 40)))),
        bias=random.random() < 0.7,
        dtype=random.choice(tuple(LIMITS)),
    )


# The worker, whose environment has torch


def in_format(tensor: Any, layout: str) -> Any:
    """Return a tensor in a format, with canonical strides; `Tensor.to` would leave those of one channel."""
    import torch

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats[tensor.dim()] if layout == "channels-last" else torch.contiguous_format
    return torch.empty_like(tensor, memory_format=wanted).copy_(tensor)


def convolve(functions: Any, case: Case, x: Any, weight: Any, bias: Any) -> Any:
    """Compute a convolution by `torch.nn.functional`, or by functions of the same signatures."""
    name = f"conv{'_transpose' if case.transposed else ''}{len(case.size)}d"
    last = (case.output_padding, case.groups, case.dilation) if case.transposed else (case.dilation, case.groups)
    return getattr(functions, name)(x, weight, bias, case.stride, case.padding, *last)


def errors(case: Case, layout: str, way: str) -> dict[str, float]:
    """Return the error of the output and of each gradient, relative to the largest value; NaN where there is one."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    functions = importlib.import_module("torch_nhwc.functional") if way == "functional" else F
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x = torch.randn(case.batch, case.in_channels, *case.size).to(dtype)
    weight = torch.randn(case.weight).to(dtype)
    gradient = torch.randn(case.batch, case.out_channels, *case.output).to(dtype)
    given = {"input": x, "weight": weight}
    if case.bias:
        given["bias"] = torch.randn(case.out_channels).to(dtype)

    def results(functions: Any, tensors: dict[str, Any], upstream: Any) -> dict[str, Any]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        y = convolve(functions, case, leaves["input"], leaves["weight"], leaves.get("bias"))
        y.backward(upstream)
        return {"output": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    exact = results(F, {name: tensor.double() for name, tensor in given.items()}, gradient.double())
    tensors = {name: in_format(tensor, layout) if tensor.dim() > 1 else tensor for name, tensor in given.items()}
    found = results(functions, tensors, in_format(gradient, layout))
    return {
        name: ((found[name].double() - right).abs().max() / right.abs().max().clamp_min(1e-6)).item()
        for name, right in exact.items()
    }


def compute(runs: list[Run], settings: dict[str, Any], writing: int) -> None:
    """Write a line of JSON for each case, into a pipe."""
    import torch

    torch.set_num_threads(settings["threads"])
    with os.fdopen(writing, "w", buffering=1) as out:
        for index, layout in runs:
            signal.alarm(SECONDS)
            result: dict[str, Any] = {"index": index, "format": layout}
            try:
                result["errors"] = errors(draw(settings["seed"], index), layout, settings["way"])
            except Exception as error:
                result["raised"] = f"{type(error).__name__}: {error}".splitlines()[0]
            out.write(json.dumps(result) + "\n")


def in_child(runs: list[Run], settings: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Compute cases in a forked process; return the results and the signal that ended it, or 0."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            compute(runs, settings, writing)
        finally:  # Never return into a copy of the worker.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    return found, os.waitpid(child, 0)[1] & 0x7F


def results_of(runs: list[Run], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compute cases in processes; the case without a result is the one that ended its process."""
    while runs:
        found, ended_by = in_child(runs, settings)
        yield from found
        runs = runs[len(found) :]
        if runs:
            (index, layout), *runs = runs
            yield {"index": index, "format": layout, "died": ended_by}


def work(settings: dict[str, Any]) -> None:
    """Print the environment, then the result of each case, a line of JSON each; standard input has the cases."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"torch": torch.__version__, "capability": capability}), flush=True)
    for runs in json.load(sys.stdin):
        for result in results_of(runs, settings):
            print(json.dumps(result), flush=True)


# The search


def environment(threads: int) -> dict[str, str]:
    """Return the worker's environment variables."""
    checks = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    passive = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    return {**os.environ, **checks, **passive, "PYTHONPATH": str(ROOT)}


def is_wrong(result: dict[str, Any], case: Case) -> bool:
    """Return whether a result differs from float64, is not finite, or ended its process."""
    return "died" in result or not all(each <= LIMITS[case.dtype] for each in result.get("errors", {}).values())


def search(options: argparse.Namespace, threads: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run all cases in a worker; return the counts, and the results that are wrong."""
    import torch

    torch.set_num_threads(threads)  # which ways may depend on
    settings = {"way": options.safe or "plain", "threads": threads}
    settings |= {"seed": options.seed, "first": options.first, "shapes": options.shapes}
    ways, lots = {}, dict[tuple[int, str, str], list[Run]]()
    for index in range(options.first, options.first + options.shapes):
        case = draw(options.seed, index)
        for layout in FORMATS:
            ways[index, layout] = way = way_of(case, layout)
            # The heap that a case damages may end a later one: cases of different ways share no process.
            lots.setdefault((index // CHUNK, layout, way), []).append((index, layout))
    command = [options.python, __file__, "--worker", json.dumps(settings)]
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(threads))
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin as cases:
        json.dump([*lots.values()], cases)
    lines = map(json.loads, worker.stdout)
    told = next(lines)
    rows: dict[str, dict[str, Counter[str]]] = {}
    wrong = []
    for number, result in enumerate(lines, 1):
        case, way = draw(options.seed, result["index"]), ways[result["index"], result["format"]]
        is_flagged, is_bad = way not in SOUND, is_wrong(result, case)
        counts = {
            "cases": True,
            "flagged": is_flagged,
            "wrong": is_bad,
            "died": "died" in result,
            "raised": "raised" in result,
            "not flagged": is_bad and not is_flagged,
            way: is_bad,
        }
        row = rows.setdefault(f"{case.kind} {case.dtype}", {layout: Counter() for layout in FORMATS})
        row[result["format"]].update({what: int(is_counted) for what, is_counted in counts.items()})
        if is_bad:
            wrong.append({**result, "way": way, **case._asdict()})
        if number % CHUNK == 0:
            print(f"{number} of {len(FORMATS) * options.shapes}: {len(wrong)} wrong", file=sys.stderr, flush=True)
    if worker.wait():
        sys.exit(f"search_convolutions: the worker ended with status {worker.returncode}")
    counted = {
        name: {layout: {what: n for what, n in counts.items() if n} for layout, counts in rows[name].items()}
        for name in sorted(rows)
    }
    missed = [each for each in wrong if each["way"] in SOUND][:20]
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "unset")
    return {**told, "ONEDNN_MAX_CPU_ISA": isa, **settings, "counts": counted, "not flagged": missed}, wrong


def as_table(run: dict[str, Any]) -> str:
    """Return the counts of a run as a Markdown table."""
    total = {layout: Counter[str]() for layout in FORMATS}
    for row in run["counts"].values():
        for layout in FORMATS:
            total[layout].update(row[layout])
    lines = ["| convolutions | flagged |" + "".join(f" {layout}: wrong (died) | not flagged |" for layout in FORMATS)]
    lines.append("| --- " * 6 + "|")
    for name, row in {**run["counts"], "all": total}.items():
        cells = [name, f"{row[FORMATS[0]].get('flagged', 0)} of {row[FORMATS[0]].get('cases', 0)}"]
        for layout in FORMATS:
            wrong, died, missed = (row[layout].get(what, 0) for what in ("wrong", "died", "not flagged"))
            cells += [f"{wrong} ({died})", str(missed)]
        lines.append(f"| {' | '.join(cells)} |")
    raised = sum(total[layout]["raised"] for layout in FORMATS)
    counted = "cases", "flagged", "wrong", "died", "raised", "not flagged"
    by_way = ", ".join(f"{way}: {n}" for way, n in sorted(sum(total.values(), Counter()).items()) if way not in counted)
    return "\n".join([*lines, "", f"Wrong by the way of torch_nhwc: {by_way or 'none'}. Raised an error: {raised}."])


def write(out: Path, runs: list[dict[str, Any]]) -> None:
    """Write runs next to those of a file, in the place of earlier ones of the same kind."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import machine

    names = "torch", "capability", "ONEDNN_MAX_CPU_ISA", "threads", "way"
    present = json.loads(out.read_text())["results"] if out.exists() else []
    by_kind = {tuple(run[name] for name in names): run for run in [*present, *runs]}
    command = "python tools/search_convolutions.py"
    out.write_text(machine.compact({"command": command, "machine": machine.describe(), "results": [*by_kind.values()]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", type=int, default=5000, help="how many convolutions, each in both formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the index of the first convolution of the seed's")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA, such as AVX2")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of another environment")
    parser.add_argument("--safe", choices=("functional",), help="how convolutions are computed")
    parser.add_argument("--out", type=Path, help="add the counts to a file of results")
    parser.add_argument("--cases", type=Path, help="append each wrong result here, a line of JSON each")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker)
    if options.isa:  # before oneDNN is loaded
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.isa
    runs = []
    for threads in options.threads:
        run, wrong = search(options, threads)
        runs.append(run)
        how = f"ONEDNN_MAX_CPU_ISA {run['ONEDNN_MAX_CPU_ISA']}, threads {threads}, {run['way']}"
        print(f"\ntorch {run['torch']}, {run['capability']}, {how}\n{as_table(run)}", flush=True)
        if options.cases:
            with options.cases.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in wrong)
    if options.out:
        write(options.out, runs)


if __name__ == "__main__":
    main()
