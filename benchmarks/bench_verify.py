"""What `verify` finds in whole models: planted faults, and whether anything else is said to differ.

    python benchmarks/bench_verify.py [--model NAME ...] [--dtype NAME ...] [--out FILE]

The models and modes are those of bench_tune.py, on small inputs. Each is converted with `preserve=True` and compared
with the model, where nothing may differ; then once more with faults planted in four convolutions in its middle: a
kernel that is wrong in channels-last, a backward that is (in training), a weight that was scrambled, and PyTorch's own
group norm, which is inaccurate for a large mean. Nothing is timed, so that other work on the machine does no harm. The
results of other models stay in the file, if they were taken on such a machine with such a torch.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine
import torch
from bench_layouts import MODES
from bench_tune import CHOSEN
from layout_models import MODELS
from torch import Tensor, nn
from torch.nn import functional

import torch_nhwc as nhwc

SMALL = {"unet2d": (2, 3, 16, 16), "vae_kl": (2, 3, 16, 16), "basic_unet3d": (1, 1, 32, 32, 32)}
KERNEL, BACKWARD, WEIGHT, GROUP_NORM = "wrong kernel", "wrong backward", "scrambled weight", "PyTorch's group norm"
FAULTS = {
    KERNEL: lambda row: row.what == "output" and "channels-last" in row.inputs,
    BACKWARD: lambda row: row.what.startswith("gradient of ") and "channels-last" in row.inputs,
    WEIGHT: lambda row: row.what == "weight" and row.tolerance == 0,
    GROUP_NORM: lambda row: row.what == "output" and row.inputs.startswith("a large mean") and row.before_differs,
}
Inputs = tuple[Tensor, ...]


def is_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


class _FlippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(1) if is_channels_last(gradient) else gradient


Forward = Callable[[Tensor], Tensor]


def with_forward(layer: nn.Module, change: Callable[[Forward, Tensor], Tensor]) -> None:
    """Give a layer another forward, which calls its own."""
    base = type(layer)
    layer.__class__ = type(
        base.__name__, (base,), {"forward": lambda self, x: change(lambda each: base.forward(self, each), x)}
    )


def without_last_channel(forward: Forward, x: Tensor) -> Tensor:
    """Run a forward like a kernel that leaves out the remainder of its channels."""
    y = forward(x)
    return torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1) if is_channels_last(x) else y


def with_wrong_backward(forward: Forward, x: Tensor) -> Tensor:
    return _FlippedGradient.apply(forward(x))


def with_group_norm(forward: Forward, x: Tensor) -> Tensor:
    return forward(functional.group_norm(x, math.gcd(x.size(1), 32)))


def scramble(weight: Tensor) -> None:
    """Reverse the filters of a weight, which keeps its sum and its norm."""
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def made(name: str, dtype: str, mode: str) -> tuple[nn.Module, Inputs]:
    """Return a model and a small input."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured, kind = MODELS[name], getattr(torch, dtype)
    model = measured.make().to(kind).train(mode == "training")
    shape = SMALL.get(
        name, (2, measured.shape[1], *[64 if len(measured.shape) == 4 else 16] * (len(measured.shape) - 2))
    )
    inputs = torch.randn(shape).to(kind), *measured.extra_inputs(shape[0], kind).values()
    copied = copy.deepcopy(model).train()
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            module.momentum = 1.0
    with torch.no_grad():
        copied(*inputs)
        for own, other in zip(model.buffers(), copied.buffers()):  # with which activations do not vanish on the way
            own.copy_(other)
    return model, inputs


def in_the_middle(model: nn.Module, inputs: Inputs, number: int) -> list[str]:
    """Return the paths of convolutions on images, from the middle of the order in which they run."""
    ran: dict[str, None] = {}
    handles = [
        module.register_forward_hook(
            lambda module, given, output, path=path: ran.setdefault(path) if is_image(given[0], output) else None
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d)
    ]
    copy.deepcopy(model)(*inputs)
    for handle in handles:
        handle.remove()
    paths = list(ran)
    start = (len(paths) - number) // 2
    return paths[start : start + number]


def is_image(x: Tensor, y: Tensor) -> bool:
    """Return whether both have several channels and pixels, so that channels-last is another order."""
    return all(each.size(1) >= 4 and each[0, 0].numel() > 1 for each in (x, y))


def plant(before: nn.Module, after: nn.Module, paths: Sequence[str], has_backward: bool) -> dict[str, str]:
    """Plant a fault in each of four layers, and return the path of each fault."""
    kernel, backward, weight, norm = paths
    with_forward(after.get_submodule(kernel), without_last_channel)
    with_forward(after.get_submodule(backward), with_wrong_backward)
    scramble(after.get_submodule(weight).weight)
    for model in (before, after):
        with_forward(model.get_submodule(norm), with_group_norm)
    planted = {KERNEL: kernel, WEIGHT: weight, GROUP_NORM: norm}
    return planted | ({BACKWARD: backward} if has_backward else {})


def measure(name: str, dtype: str, mode: str) -> dict[str, object]:
    """Return what `verify` reports for a converted model without and with faults."""
    before, inputs = made(name, dtype, mode)
    paths = in_the_middle(before, inputs, 4)
    has_backward, start = mode == "training", time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nhwc.convert_(after := copy.deepcopy(before), preserve=True, example_inputs=inputs)
    clean = nhwc.verify(before, after, inputs, backward=has_backward)
    planted = plant(before, after, paths, has_backward)
    faulty = nhwc.verify(before, after, inputs, backward=has_backward)
    found = {
        fault: next((row for row in faulty.differing if row.path == path and FAULTS[fault](row)), None)
        for fault, path in planted.items()
    }
    # The rows of the whole model, whose path is empty, differ because its layers do.
    alarms = [*clean.differing, *(row for row in faulty.differing if row.path not in ("", *planted.values()))]
    return {
        "model": name,
        "dtype": dtype,
        "mode": mode,
        "shape": list(inputs[0].shape),
        "comparisons": len(clean.rows),
        "uncompared": [
            row.path
            for row in clean.rows
            if row.verdict not in (nhwc.verifying.Verdict.EQUAL, nhwc.verifying.Verdict.DIFFERS)
        ],
        "false_alarms": [f"{row.path}: {row.what} ({row.inputs})" for row in alarms],
        "planted": planted,
        "found": {fault: {"error": row.error, "allowed": row.tolerance} for fault, row in found.items() if row},
        "first": faulty.first.path if faulty.first else None,
        "seconds": round(time.process_time() - start, 1),
        "commit": machine.commit(),
    }


def is_met(row: dict) -> bool:
    """Return whether all planted faults were found, the first of them first, and nothing else."""
    first = row["planted"][KERNEL]
    return row["found"].keys() == row["planted"].keys() and row["first"] == first and not row["false_alarms"]


def run(names: Sequence[str], dtypes: Sequence[str], out: Path) -> None:
    """Measure models, and write the file after each of them."""
    order = list(MODELS)
    for name in names:
        results = []
        for dtype in dtypes:
            for mode in MODES:
                row = measure(name, dtype, mode)
                results.append(row)
                found = f"{len(row['found'])} of {len(row['planted'])} found, {len(row['false_alarms'])} false alarms"
                print(f"{name} {dtype} {mode}: {found}, {row['seconds']} s", *row["false_alarms"][:3], flush=True)
        machine.add(
            *(out, "bench_verify.py", results),
            order=lambda row: (order.index(row["model"]), row["dtype"] != "float32", row["mode"]),
            threads=1,
        )


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "verify-cpu.json")
    parser.add_argument("--model", nargs="*", default=list(CHOSEN), choices=list(MODELS))
    parser.add_argument("--dtype", nargs="*", default=["float32"], choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    run(arguments.model, arguments.dtype, arguments.out)


if __name__ == "__main__":
    main()
