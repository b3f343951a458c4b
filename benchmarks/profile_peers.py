"""Where the milliseconds of a call go, in PyTorch, in ours, in OpenVINO and in ONNX Runtime: by cause.

    python benchmarks/profile_peers.py [--model NAME ...] [--out FILE]

Each library's own profiler says how long each of its operators took in a call in inference; PyTorch's does not see what
oneDNN reorders inside of a convolution, which oneDNN prints itself. Each way has a process of its own, and the causes
are medians over the calls. `make bench-peers` runs it in the same environment as bench_peers.py.
"""

import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import torch
from bench_peers import made, process, versions
from layout_models import MODELS
from models import weights_of
from peers import CONTIGUOUS, onnxruntime_session, openvino_model, ours
from torch import Tensor, nn

CHOSEN = ("basic_unet3d", "dynunet3d", "resnet50")
CALLS = 5
CONVOLUTIONS, WEIGHTS, FORMATS = "convolutions", "weights reordered", "activations reordered or copied"
NORMS, ACTIVATIONS, OTHERS = "norms", "activation functions", "everything else"
CAUSES = (CONVOLUTIONS, WEIGHTS, FORMATS, NORMS, ACTIVATIONS, OTHERS)
# What an operator is for, by its name in any of the libraries; the first pattern that is found counts.
PATTERNS = {
    CONVOLUTIONS: "conv|nhwc::convolution",
    FORMATS: "reorder|copy_|clone|contiguous|transpose",
    NORMS: "norm|mvn",
    ACTIVATIONS: "relu|clamp_min|gelu|silu|swish|sigmoid",
}
Milliseconds = Counter[str]


def cause_of(operator: str) -> str:
    return next((cause for cause, names in PATTERNS.items() if re.search(names, operator.lower())), OTHERS)


@contextmanager
def printed(lines: list[str]) -> Iterator[None]:
    """Add the lines that are printed in the block, by libraries, too."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        lines += file.read().splitlines()


def reorders(lines: Iterable[str], weights: set[str]) -> Milliseconds:
    """Return the time of oneDNN's reorders, of weights and of activations."""
    found: Milliseconds = Counter()
    for line in lines:
        if line.startswith("onednn_verbose") and ",exec,cpu,reorder," in line:
            shape, milliseconds = line.rsplit(",", 2)[1:]
            found[WEIGHTS if shape in weights else FORMATS] += float(milliseconds)
    return found


def by_pytorch(model: nn.Module, x: Tensor) -> Iterator[Milliseconds]:
    """Yield the causes of each call: the operators' own time, and the reorders inside of convolutions apart."""
    shapes = [each.shape for each in weights_of(model)]
    weights = {"x".join(map(str, shape)) for a, b, *kernel in shapes for shape in ([a, b, *kernel], [b, a, *kernel])}
    while True:
        lines: list[str] = []
        verbose = torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)
        with printed(lines), verbose, torch.profiler.profile() as profile:
            model(x)
        found: Milliseconds = Counter()
        for event in profile.key_averages():
            found[cause_of(event.key)] += event.self_cpu_time_total / 1e3
        inside = reorders(lines, weights)
        found[CONVOLUTIONS] -= inside.total()
        yield found + inside


def by_ours(model: nn.Module, x: Tensor) -> Iterator[Milliseconds]:
    ours(model, x, "inference", 0)
    return by_pytorch(model, x)


def by_openvino(model: nn.Module, x: Tensor) -> Iterator[Milliseconds]:
    request = openvino_model(model, x, PERF_COUNT=True).create_infer_request()
    while True:
        request.infer([x.numpy()], share_inputs=True)
        found: Milliseconds = Counter()
        for node in request.get_profiling_info():
            found[cause_of(node.node_type)] += node.real_time.total_seconds() * 1e3
        yield found


def by_onnxruntime(model: nn.Module, x: Tensor) -> Iterator[Milliseconds]:
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime_session(model, x, enable_profiling=True, profile_file_prefix=f"{folder}/profile")
        (name,) = (each.name for each in session.get_inputs())
        for _ in range(CALLS + 1):
            session.run(None, {name: x.numpy()})
        events = json.loads(Path(session.end_profiling()).read_text())
    for call in (event for event in events if event["name"] == "model_run"):
        found: Milliseconds = Counter()
        for event in events:
            if event["cat"] == "Node" and call["ts"] <= event["ts"] < call["ts"] + call["dur"]:
                found[cause_of(event["args"]["op_name"])] += event["dur"] / 1e3
        yield found


PROFILES: dict[str, Callable[[nn.Module, Tensor], Iterator[Milliseconds]]] = {
    CONTIGUOUS: by_pytorch,
    "ours": by_ours,
    "OpenVINO": by_openvino,
    "ONNX Runtime": by_onnxruntime,
}


def measure(name: str, way: str) -> dict[str, object]:
    """Return the milliseconds of a model by cause; the first call, which prepares things, does not count."""
    model, x = made(name, "inference")
    with torch.no_grad():
        calls = PROFILES[way](model, x)
        taken = [next(calls) for _ in range(CALLS + 1)][1:]
    causes = {cause: statistics.median(each[cause] for each in taken) for cause in CAUSES}
    return {"model": name, "mode": "inference", "peer": way, "causes": causes, "commit": machine.commit()}


def run(names: Iterable[str], out: Path) -> None:
    models, ways = list(MODELS), list(PROFILES)
    for name in names:
        for way in ways:
            with process() as call:
                row = call(measure, name, way)
            print(*row.values(), flush=True)
            machine.add(
                *(out, "profile_peers.py", [row]),
                order=lambda each: (models.index(each["model"]), ways.index(each["peer"])),
                versions=versions(),
            )


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "peers-profile-cpu.json")
    parser.add_argument("--model", nargs="*", default=CHOSEN, choices=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(arguments.model, arguments.out)


if __name__ == "__main__":
    main()
