"""The same models by PyTorch's converters and compilers, by OpenVINO and ONNX Runtime, and by torch_nhwc.

    python benchmarks/bench_peers.py [--one-image] [--model NAME ...] [--mode NAME ...] [--peer NAME ...] [--missing]
                                     [--budget S] [--seconds S] [--out FILE]

`make bench-peers` runs it in an environment of its own, which has OpenVINO, ONNX Runtime, and the torch that is there.

In float32 on one thread: a call in inference, and in training forward and backward, without the optimizer. Every peer
has a process of its own. The processes take turns, so that all peers are timed in the same rounds; ratios are of
pairs in one round, with their 99 % intervals. A peer that fails, or whose process dies, has a row with the reason.

With `--one-image`, inference of 2D models on a batch of one small image, into a file of its own.

The faults of PyTorch that docs/hazards.md lists are small models here, which are computed once and not timed. The file
is written after each model and mode. What is not measured again stays in it, if it was taken on such a machine with
such a torch.

Compiling takes most of the time: ten to twelve minutes for a model and its training step, a quarter of an hour for the
faults, two hours for all of it. `tune` gets half of the minute that is its default.
"""

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import machine
import torch
from bench_models import PRELOADED, PROCESSES
from bench_tune import LEVEL, Called, loss_of
from layout_models import MODELS, MODES, ONE_IMAGE, LayoutModel, difference
from peers import CONTIGUOUS, FAULTS, PEERS, Call
from stopwatch import raced, summary
from torch import Tensor, nn

from torch_nhwc.running.calls import seconds

CHOSEN = (
    *("dynunet3d", "basic_unet3d", "segresnet3d", "resnet50", "convnext_t", "efficientnet_b0"),
    *("mednext3d_k5", "plain_conv_unet3d"),
)
CHOSEN_OF_ONE_IMAGE = (
    *("resnet50_64px", "resnet50_128px", "resnet50_224px"),
    *("mobilenet_v2_128px", "mobilenet_v2_224px", "efficientnet_b0_224px"),
)
ROUNDS = range(5, 16)
# A call that takes fewer seconds is warmed up in each turn, since another process has just used the caches.
LONG = 1.0
# Gradients that are mere rounding have a norm below this part of the largest one.
ROUNDING = 1e-6
PROCESSES.set_forkserver_preload([*PRELOADED, "torch._dynamo"])
Case = tuple[str, str]
Apart = Callable[..., Any]


def all_models() -> dict[str, LayoutModel]:
    return {**{name: each for name, each in MODELS.items() if not each.decodes}, **ONE_IMAGE, **FAULTS}


def made(name: str, mode: str) -> tuple[nn.Module, Tensor]:
    """Return a model and its input, without dropout, which draws numbers in the order of memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = all_models()[name]
    model = Called(measured.make().train(mode == "training"))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    return model, torch.randn(measured.shape)


def infer(call: Call, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return call(x)


def step(call: Call, model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    output = call(x)
    loss_of(output).backward()
    return output.detach()


STEPS = {"inference": infer, "training": step}


def reference(name: str, mode: str, folder: Path) -> None:
    """Compute a model in float64, and save its output and its gradients."""
    model, x = made(name, mode)
    output = STEPS[mode](model.double(), model, x.double())
    torch.save((output, [parameter.grad for parameter in model.parameters()]), folder / "reference.pt")


def differences(output: Tensor, model: nn.Module, folder: Path) -> dict[str, float]:
    """Return how far an output and the gradients are from those in float64.

    The output's largest difference is in units of its largest value, and that of a gradient, of all the farthest one's,
    is a norm in units of the gradient's norm.
    """
    expected, gradients = torch.load(folder / "reference.pt")
    found = {"output": difference(output, expected)}
    pairs = [(parameter.grad, each) for parameter, each in zip(model.parameters(), gradients) if each is not None]
    if pairs:
        least = ROUNDING * max(each.norm() for _, each in pairs)
        found["gradients"] = max(
            ((ours - each).norm() / each.norm()).item() for ours, each in pairs if each.norm() > least
        )
    return found


class Prepared:
    """A model by one peer, in the process of that peer."""

    current: "Prepared"

    def __init__(self, name: str, mode: str, peer: str, budget: float, folder: Path) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)  # nothing was compiled before
        for each in PEERS[peer].imports:
            importlib.import_module(each)
        model, x = made(name, mode)
        machine.forget_peak()
        self.before = machine.resident("VmRSS")
        start = time.perf_counter()
        call = PEERS[peer].prepare(model, x, mode, budget)
        self.run = partial(STEPS[mode], call, model, x)
        output = self.run()
        self.figures: dict[str, Any] = {"seconds": time.perf_counter() - start, "preparing_bytes": self.peak()}
        self.figures["differences"] = differences(output, model, folder)

    def peak(self) -> int:
        """Return how many bytes more than before there were at most since the last time, or the start."""
        highest = machine.resident("VmHWM") - self.before
        machine.forget_peak()
        return highest

    def sample(self) -> float:
        taken = seconds(self.run)
        return taken if taken > LONG else seconds(self.run)


def prepare(*arguments: Any) -> dict[str, Any]:
    Prepared.current = Prepared(*arguments)
    return Prepared.current.figures


def sample() -> float:
    return Prepared.current.sample()


def peak() -> int:
    return Prepared.current.peak()


@contextmanager
def process() -> Iterator[Apart]:
    """Yield what calls a function in a process of its own, always the same one."""
    with ProcessPoolExecutor(1, PROCESSES) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def failure(error: Exception) -> str:
    """Return the kind of an error and the last line that it says, which in libraries is the reason.

    After the reason, PyTorch's compiler adds advice.
    """
    reason = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
    return f"{type(error).__name__}: {(reason.strip().splitlines() or [''])[-1]}"


def measure(name: str, mode: str, peers: Iterable[str], budget: float, limit: float) -> list[dict[str, object]]:
    """Measure a model by some peers, in as many rounds as the seconds allow, within limits; a fault in none."""
    rows: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with process() as call:
            call(reference, name, mode, folder)
        calls: dict[str, Apart] = {}
        for peer in peers:
            rows[peer] = {"model": name, "mode": mode, "peer": peer, "shape": list(all_models()[name].shape)}
            call = stack.enter_context(process())
            try:
                rows[peer] |= call(prepare, name, mode, peer, budget, folder)
                calls[peer] = call
            except Exception as error:  # whatever a library raises is its row's result
                rows[peer]["failure"] = failure(error)
        if name not in FAULTS and CONTIGUOUS in calls:
            for peer, figures in timed(calls, limit).items():
                rows[peer] |= figures
    return [{**row, "commit": machine.commit()} for row in rows.values()]


def timed(calls: dict[str, Apart], limit: float) -> dict[str, dict[str, Any]]:
    """Return the times of peers that take turns, and how many times as fast as the contiguous model they are."""
    for call in calls.values():
        call(peak)
    race = raced(calls, lambda peer: calls[peer](sample), ROUNDS, limit)
    figures: dict[str, dict[str, Any]] = {peer: {"failure": reason} for peer, reason in race.failures.items()}
    for peer in race.measured:
        figures[peer] = {
            "samples": race.rounds,
            "times": summary([each * 1e3 for each in race.samples(peer)]),
            "over": race.compare(CONTIGUOUS, peer)._asdict(),
            "running_bytes": calls[peer](peak),
        }
    return figures


def show(row: dict) -> None:
    what = row.get("failure") or f"{row['seconds']:.1f} s to the first result, off by {row['differences']}"
    if "over" in row:
        over = row["over"]
        what += f", {row['times']['median']:.1f} ms, {over['ratio']:.2f} ({over['low']:.2f} to {over['high']:.2f})"
    print(f"{row['model']} {row['mode']} {row['peer']}: {what}", flush=True)


def versions() -> dict[str, str]:
    """Return the versions of the other libraries."""
    found = {}
    for name in ("openvino", "onnxruntime", "onnxscript"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def run(
    chosen: Iterable[Case],
    peers: Iterable[str],
    budget: float,
    limit: float,
    out: Path,
    there: Container[tuple[str, str, str]] = (),
) -> None:
    """Measure cases by the peers that are not there yet, and write the file after each of them.

    The contiguous model takes part in each.
    """
    models, names = list(all_models()), list(PEERS)
    for name, mode in chosen:
        wanted = {peer for peer in peers if mode in PEERS[peer].modes and (name, mode, peer) not in there}
        if not wanted:
            continue
        taking_part = [peer for peer in names if peer in wanted or peer == CONTIGUOUS]
        rows = measure(name, mode, taking_part, budget, limit)
        for row in rows:
            show(row)
        machine.add(
            *(out, "bench_peers.py", rows),
            order=lambda row: (models.index(row["model"]), row["mode"], names.index(row["peer"])),
            **{"quick": limit == 0, "threads": 1, "level": LEVEL, "budget": budget, "seconds": limit},
            versions=versions(),
        )


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--one-image", action="store_true", help="the 2D models on a batch of one")
    parser.add_argument("--model", nargs="*", choices=list(all_models()))
    parser.add_argument("--mode", nargs="*", choices=MODES)
    parser.add_argument("--peer", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--missing", action="store_true", help="only what the file has no result of")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds that `tune` may take")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the rounds of each, about; 0 is for a look")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of this process, too: the file says under how many its results were taken
    is_of_one = arguments.one_image
    out = arguments.out or machine.RESULTS / ("peers-one-image-cpu.json" if is_of_one else "peers-cpu.json")
    there = {machine.case_of(row) for row in machine.earlier_results(out)} if arguments.missing else ()
    models = arguments.model or (CHOSEN_OF_ONE_IMAGE if is_of_one else (*CHOSEN, *FAULTS))
    modes = arguments.mode or (["inference"] if is_of_one else MODES)
    chosen = [(name, mode) for name in models for mode in modes]
    run(chosen, arguments.peer, arguments.budget, arguments.seconds, out, there)


if __name__ == "__main__":
    main()
