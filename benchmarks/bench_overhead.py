"""What calls cost by themselves: small tensors, on which the arithmetic is nothing.

    python benchmarks/bench_overhead.py [--rounds N] [--case NAME ...] [--out FILE]

PyTorch's call and ours take turns, `--rounds` times, on one thread; each sample is many calls. A row has the medians in
microseconds of one call, and those of the rounds' differences and ratios. A layer and its replacement are called on the
same channels-last input, without gradients and with the backward. Most other calls have a bar: for microseconds more
than PyTorch's, for times as long, or for microseconds alone.
"""

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import machine
import torch
from stopwatch import Stopwatch, in_turns
from torch import Tensor, nn

import torch_nhwc
from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import Preserving

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv2d 3x3": (lambda: nn.Conv2d(8, 8, 3, padding=1), (1, 8, 8, 8)),
    "Conv2d 3x3, depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (1, 8, 8, 8)),
    "Conv2d 3x3, depthwise, strided": (lambda: nn.Conv2d(8, 8, 3, 2, 1, groups=8), (1, 8, 8, 8)),
    "Conv2d 1x1": (lambda: nn.Conv2d(8, 8, 1), (1, 8, 8, 8)),
    "ConvTranspose2d 2x2, strided": (lambda: nn.ConvTranspose2d(8, 8, 2, 2), (1, 8, 8, 8)),
    "Conv2d 3x3 on 2x2 pixels": (lambda: nn.Conv2d(8, 8, 3, padding=1), (1, 8, 2, 2)),
    "Conv3d 3x3x3": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 4, 4, 4)),
    "Conv3d 3x3x3 on 2x2x2 voxels": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 2, 2, 2)),
    "Conv3d 1x1x1": (lambda: nn.Conv3d(8, 8, 1), (1, 8, 4, 4, 4)),
    "ConvTranspose3d 2x2x2, strided": (lambda: nn.ConvTranspose3d(8, 8, 2, 2), (2, 8, 4, 4, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (1, 8, 8, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (1, 8, 8, 8)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(8), (2, 8, 4, 4, 4)),
    "GELU": (nn.GELU, (1, 8, 8, 8)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), (1, 8, 4, 4, 4)),
}
CALLS_OF_A_SAMPLE = 50
FORWARD = "forward"
MODES = (FORWARD, "forward with backward")
WITHOUT_PROFIT = ("GELU", "Conv3d 1x1x1", "AvgPool3d")  # the layers that have bars: forward, and with backward
BARS_OF_LAYERS = dict(zip(MODES, (5.0, 10.0), strict=True))
Call = Callable[[], object]
Prepared = dict[str, Callable[[], Call]]


def compare(prepared: Prepared, rounds: int, calls: int = CALLS_OF_A_SAMPLE) -> dict[str, float]:
    """Return the medians of ours, of the best of the others, and of the rounds' differences and ratios.

    What is prepared for each sample, untimed, makes so many calls.
    """

    def sample(prepare: Callable[[], Call]) -> float:
        return Stopwatch().wall(prepare()) / calls

    taken = in_turns({name: partial(sample, prepare) for name, prepare in prepared.items()}, rounds)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    best = min((name for name in medians if name != "ours"), key=lambda name: medians[name], default="ours")
    pairs = list(zip(taken["ours"], taken[best], strict=True))
    return {
        "stock": medians[best],
        "replaced": medians["ours"],
        "more": statistics.median(ours - theirs for ours, theirs in pairs),
        "times": statistics.median(ours / theirs for ours, theirs in pairs),
    }


def repeated(call: Call, calls: int = CALLS_OF_A_SAMPLE) -> Callable[[], Call]:
    """Return what prepares a sample of one call, many times."""

    def play() -> None:
        for _ in range(calls):
            call()

    return lambda: play


def run(model: nn.Module, x: Tensor, mode: str, gradient: Tensor | None = None) -> None:
    with torch.set_grad_enabled(mode != FORWARD):
        out = model(x)
    if mode != FORWARD:
        out.backward(torch.ones_like(out) if gradient is None else gradient)


def measure(name: str, rounds: int) -> list[dict[str, object]]:
    make, shape = LAYERS[name]
    memory_format = CHANNELS_LAST[len(shape)]
    stock = make().to(memory_format=memory_format)  # type: ignore[call-overload]
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
    gradient = torch.ones_like(stock(x)).to(memory_format=memory_format)
    rows = []
    for mode in MODES:
        calls = {"stock": stock, "ours": replaced}
        prepared = {key: repeated(partial(run, layer, x, mode, gradient)) for key, layer in calls.items()}
        bar = BARS_OF_LAYERS[mode] if name in WITHOUT_PROFIT else None
        rows.append({"layer": name, "shape": shape, "mode": mode, "bar": bar, **compare(prepared, rounds)})
    return rows


def hook(is_in_format: bool) -> Prepared:
    """Prepare a model that has a hook for its inputs, and one whose caller converts them."""
    layer, hooked = nn.Identity(), nn.Sequential(nn.Conv2d(8, 8, 1))
    torch_nhwc.convert_(hooked, input_format="channels_last")
    hooked[0] = layer
    plain = nn.Sequential(layer)
    x = torch.randn(1, 8, 16, 16)
    if is_in_format:
        x = x.to(memory_format=torch.channels_last)
        return {"stock": repeated(lambda: plain(x)), "ours": repeated(lambda: hooked(x))}
    return {
        "stock": repeated(lambda: plain(x.to(memory_format=torch.channels_last))),
        "ours": repeated(lambda: hooked(x)),
    }


def blocks(mode: str) -> Prepared:
    """Prepare ten blocks on small images: contiguous, in channels-last, and converted by default with a hook."""
    block = (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
    contiguous = nn.Sequential(*(copy.deepcopy(layer) for _ in range(10) for layer in block))
    plain, converted = copy.deepcopy(contiguous).to(memory_format=torch.channels_last), copy.deepcopy(contiguous)  # type: ignore[call-overload]
    torch_nhwc.convert_(converted, input_format="channels_last")
    x = torch.randn(1, 8, 16, 16)
    inputs = {"contiguous": x, "channels-last": x.to(memory_format=torch.channels_last), "ours": x}
    models = (contiguous, plain, converted)
    return {
        name: repeated(partial(run, model, given, mode), 5)
        for (name, given), model in zip(inputs.items(), models, strict=True)
    }


def each_of(make: Callable[[], list[nn.Module]], convert: Callable[[nn.Module], object]) -> Callable[[], Call]:
    """Return what prepares a sample of one conversion for each of some new modules."""

    def prepare() -> Call:
        modules = make()

        def play() -> None:
            for each in modules:
                convert(each)

        return play

    return prepare


def layers(count: int) -> list[nn.Module]:
    return [nn.Conv2d(8, 8, 3) for _ in range(count)]


def in_format(converter: Callable[[nn.Module, torch.memory_format], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda layer: converter(layer, torch.channels_last)


def drop_in(is_again: bool) -> Prepared:
    """Prepare PyTorch's converter and ours, on new layers or on converted ones."""
    names = {"stock": torch.nn.utils, "ours": torch_nhwc}
    converters = {name: in_format(each.convert_conv2d_weight_memory_format) for name, each in names.items()}
    make: Callable[[], list[nn.Module]] = partial(layers, 10)
    if is_again:
        converted = [layer.to(memory_format=torch.channels_last) for layer in make()]  # type: ignore[call-overload]
        make = lambda: converted  # noqa: E731
    return {name: each_of(make, convert) for name, convert in converters.items()}


def convert(count: int, others: Sequence[Callable[[nn.Module], object]] = ()) -> Prepared:
    """Prepare `convert_` of a model of so many layers, and what PyTorch has for it."""

    def make() -> list[nn.Module]:
        return layers(10) if count == 1 else [nn.Sequential(*layers(count))]

    return {name: each_of(make, each) for name, each in zip(("ours", "stock"), (torch_nhwc.convert_, *others))}


def importing() -> Prepared:
    """Prepare an import of the package, after that of torch, in a new process, which says how long it took."""
    code = "import time, torch; start = time.perf_counter(); import torch_nhwc; print(time.perf_counter() - start)"

    def prepare() -> Call:
        seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        return lambda: time.sleep(seconds)

    return {"ours": prepare}


def to_channels_last(layer: nn.Module) -> object:
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# Each call: how it is prepared, the calls of a sample, which figure counts, and the bar for it, if it has one.
CALLS: dict[str, tuple[Callable[[], Prepared], int, str, float | None]] = {
    "hook of `input_format`, over `.to(memory_format=...)`": (partial(hook, False), CALLS_OF_A_SAMPLE, "more", 10),
    "hook of `input_format`, input in format": (partial(hook, True), CALLS_OF_A_SAMPLE, "more", 5),
    "ten blocks, inference": (partial(blocks, FORWARD), 5, "times", 1.15),
    "ten blocks, training": (partial(blocks, MODES[1]), 5, "times", 1.15),
    "drop-in on one Conv2d": (partial(drop_in, False), 10, "replaced", 100),
    "drop-in on one Conv2d, again": (partial(drop_in, True), 10, "replaced", 100),
    "`convert_` of one Conv2d, over `.to(memory_format=...)`": (
        partial(convert, 1, [to_channels_last]),
        10,
        "replaced",
        100,
    ),
    "`convert_` of 2,000 layers, each": (partial(convert, 2000), 2000, "replaced", 20),
    "`import torch_nhwc` after torch": (importing, 1, "replaced", 1e5),
}
FEW_ROUNDS = {"`convert_` of 2,000 layers, each": 10, "`import torch_nhwc` after torch": 5}


def measure_call(name: str, rounds: int) -> dict[str, object]:
    prepare, calls, of, bar = CALLS[name]
    figures = compare(prepare(), min(rounds, FEW_ROUNDS.get(name, rounds)), calls)
    return {"call": name, **figures, "of": of, "bar": bar}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "overhead-cpu.json")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--case", nargs="*", default=[*LAYERS, *CALLS], help="the layers and calls; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [row for name in LAYERS if name in arguments.case for row in measure(name, arguments.rounds)]
    results += [measure_call(name, arguments.rounds) for name in CALLS if name in arguments.case]
    machine.write(arguments.out, "bench_overhead.py", results, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
