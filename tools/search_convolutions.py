"""Search for convolutions that PyTorch computes wrong on a CPU: `make search-convolutions`, for a new torch.

    python tools/search_convolutions.py [--shapes N] [--threads 1 2] [--isa AVX2] [--python PYTHON] [--safe WAY]

It draws random convolutions, computes each forward and backward in both formats, and compares with float64. Memory that
nobody wrote shows by `MALLOC_PERTURB_`. A damaged heap ends the process by glibc's checks, so cases run in forked ones.
The table says how many cases are wrong, and how many of those no rule of `RULES` flags: any above 0 is news.
`--safe functional` computes everything by `torch_nhwc.functional`; then nothing should be wrong.

The environment of `--python` needs torch, and torch_nhwc only for `--safe functional`. Its worker is this file, too.
"""

import argparse
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
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error that counts as right, relative to the largest value. Wrong results are mostly far from it."""
CHUNK = 2000
"""Convolutions that are sorted by the rules at a time, each lot into a process of its own."""
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


# The rules


def sees_whole_kernel(size: int, positions: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Return whether some position along an axis has every tap of the kernel inside of `size`."""
    first = -(-padding // stride)
    return first < positions and first * stride - padding + (kernel - 1) * dilation < size


def no_whole_kernel(case: Case) -> bool:
    """Return whether along some axis no output position sees the whole kernel; transposed, no input position does."""
    sizes, positions = (case.output, case.size) if case.transposed else (case.size, case.output)
    axes = zip(sizes, positions, case.kernel, case.stride, case.padding, case.dilation)
    return not all(sees_whole_kernel(*axis) for axis in axes)


def strided_pointwise(case: Case) -> bool:
    """Return whether a 1x1 convolution of fewer channels than a block of oneDNN's, 8 or 16, skips pixels.

    They are the channels of what is larger: the input, or the output of a transposed convolution.
    """
    channels = (case.out_channels if case.transposed else case.in_channels) // case.groups
    return len(case.size) == 2 and set(case.kernel) == {1} and max(case.stride) > 1 and channels < 16


def one_channel(case: Case) -> bool:
    """Return whether filters of one channel stride over a width from which a single column comes."""
    return not case.transposed and case.in_channels == case.groups and case.stride[-1] > 1 and case.output[-1] == 1


RULES = {"no whole kernel": no_whole_kernel, "strided 1x1": strided_pointwise, "one channel (h42)": one_channel}


def flags(case: Case) -> list[str]:
    """Return the names of the rules that flag a case."""
    return [name for name, rule in RULES.items() if rule(case)]


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
    is_pointwise = random.random() < 0.15

    def per_axis(values: range | tuple[int, ...]) -> tuple[int, ...]:
        """Draw one value for all axes, as most layers have, or one for each."""
        if random.random() < 0.5:
            return (random.choice(values),) * space
        return tuple(random.choice(values) for _ in range(space))

    transposed = random.random() < 0.3
    kernel = (1,) * space if is_pointwise else per_axis(range(1, 10))
    stride = per_axis((1, 2, 2, 3) if is_pointwise else (1, 1, 2, 2, 3, 4))
    dilation = per_axis((1, 1, 1, 2, 3))
    most = [(k - 1) * d for k, d in zip(kernel, dilation)]
    drawn = [random.choice((0, reach // 2, reach // 2, random.randint(0, reach))) for reach in most]
    more = per_axis((0, 0, 1)) if transposed else (0,) * space
    groups = random.choice((1, 1, 1, 2) if is_pointwise else (1, 1, 2, 3, 4, 8, 16, 32, 64))
    is_depthwise = groups > 1 and random.random() < 0.6
    channels = random.choice(range(1, 20) if is_pointwise else CHANNELS)
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
        size=per_axis(range(1, random.choice((5, 9, 17)))),
        bias=random.random() < 0.7,
        dtype=random.choice(tuple(LIMITS)),
    )


# The worker, whose environment has torch


def plain(case: Case, x: Any, weight: Any, bias: Any, functions: Any = None) -> Any:
    """Compute a convolution by PyTorch, or by functions of the same signatures."""
    import torch.nn.functional as F  # noqa: N812

    convolution = getattr(functions or F, f"conv{'_transpose' if case.transposed else ''}{len(case.size)}d")
    if case.transposed:
        more = case.output_padding, case.groups, case.dilation
        return convolution(x, weight, bias, case.stride, case.padding, *more)
    return convolution(x, weight, bias, case.stride, case.padding, case.dilation, case.groups)


def functional(case: Case, x: Any, weight: Any, bias: Any) -> Any:
    """Compute a convolution by torch_nhwc."""
    import torch_nhwc.functional

    return plain(case, x, weight, bias, torch_nhwc.functional)


WAYS = {"plain": plain, "functional": functional}


def errors(case: Case, layout: str, way: str) -> dict[str, float]:
    """Return the error of the output and of each gradient, relative to the largest value; NaN where there is one."""
    import torch

    def laid_out(value: Any) -> Any:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        # `Tensor.to` would leave the strides of one channel.
        wanted = formats[value.dim()] if layout == "channels-last" else torch.contiguous_format
        return torch.empty_like(value, memory_format=wanted).copy_(value)

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x = torch.randn(case.batch, case.in_channels, *case.size).to(dtype)
    weight = torch.randn(case.weight).to(dtype)
    gradient = torch.randn(case.batch, case.out_channels, *case.output).to(dtype)
    given = {"input": x, "weight": weight}
    if case.bias:
        given["bias"] = torch.randn(case.out_channels).to(dtype)

    def results(tensors: dict[str, Any], compute: Any, upstream: Any) -> dict[str, Any]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        y = compute(case, leaves["input"], leaves["weight"], leaves.get("bias"))
        y.backward(upstream)
        return {"output": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    exact = results({name: tensor.double() for name, tensor in given.items()}, plain, gradient.double())
    tensors = {name: laid_out(tensor) if tensor.dim() > 1 else tensor for name, tensor in given.items()}
    found = results(tensors, WAYS[way], laid_out(gradient))
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
    """Print the environment, then the result of each case, a line of JSON each."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"torch": torch.__version__, "capability": capability}), flush=True)
    first = settings["first"]
    for begin in range(first, first + settings["shapes"], CHUNK):
        # The heap that a case damages may end a later one: what a rule flags shares no process with what it does not.
        chunks: dict[tuple[str, ...], list[Run]] = {}
        for index in range(begin, min(begin + CHUNK, first + settings["shapes"])):
            for layout in FORMATS:
                chunks.setdefault((layout, *flags(draw(settings["seed"], index))), []).append((index, layout))
        for runs in chunks.values():
            for result in results_of(runs, settings):
                print(json.dumps(result), flush=True)


# The search


def environment(isa: str | None, threads: int) -> dict[str, str]:
    """Return the worker's environment variables."""
    chosen = {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    checks = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    passive = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    return {**os.environ, **checks, **chosen, **passive, "PYTHONPATH": str(ROOT)}


def is_wrong(result: dict[str, Any], case: Case) -> bool:
    """Return whether a result differs from float64, is not finite, or ended its process."""
    return "died" in result or not all(each <= LIMITS[case.dtype] for each in result.get("errors", {}).values())


def search(options: argparse.Namespace, isa: str | None, threads: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run all cases in a worker; return the counts, and the results that are wrong."""
    settings = {"way": options.safe or "plain", "threads": threads}
    settings |= {"seed": options.seed, "first": options.first, "shapes": options.shapes}
    command = [options.python, __file__, "--worker", json.dumps(settings)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(isa, threads))
    assert worker.stdout is not None
    lines = map(json.loads, worker.stdout)
    told = next(lines)
    rows: dict[str, dict[str, Counter[str]]] = {}
    wrong = []
    for number, result in enumerate(lines, 1):
        case = draw(options.seed, result["index"])
        flagged, is_bad = flags(case), is_wrong(result, case)
        counts = {
            "cases": True,
            "flagged": bool(flagged),
            "wrong": is_bad,
            "died": "died" in result,
            "raised": "raised" in result,
            "not flagged": is_bad and not flagged,
            **{rule: is_bad and flagged[0] == rule for rule in flagged},
        }
        row = rows.setdefault(f"{case.kind} {case.dtype}", {layout: Counter() for layout in FORMATS})
        row[result["format"]].update(counts)
        if is_bad:
            wrong.append({**result, "rules": flagged, **case._asdict()})
        if number % CHUNK == 0:
            print(f"{number} of {len(FORMATS) * options.shapes}: {len(wrong)} wrong", file=sys.stderr, flush=True)
    if worker.wait():
        sys.exit(f"search_convolutions: the worker ended with status {worker.returncode}")
    counted = {
        name: {layout: {what: n for what, n in counts.items() if n} for layout, counts in rows[name].items()}
        for name in sorted(rows)
    }
    missed = [each for each in wrong if not each["rules"]][:20]
    return {**told, "ONEDNN_MAX_CPU_ISA": isa or "unset", **settings, "counts": counted, "not flagged": missed}, wrong


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
    by_rule = ", ".join(f"{rule}: {sum(total[layout][rule] for layout in FORMATS)}" for rule in RULES)
    return "\n".join([*lines, "", f"Wrong by the first rule that flags it: {by_rule}. Raised an error: {raised}."])


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
    parser.add_argument("--isa", nargs="+", default=[None], help="values of ONEDNN_MAX_CPU_ISA, such as AVX2")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of another environment")
    parser.add_argument("--safe", choices=("functional",), help="how flagged convolutions are computed")
    parser.add_argument("--out", type=Path, help="add the counts to a file of results")
    parser.add_argument("--cases", type=Path, help="append each wrong result here, a line of JSON each")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker)
    runs = []
    for isa in options.isa:
        for threads in options.threads:
            run, wrong = search(options, isa, threads)
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
