"""The convolutions of known networks, pass by pass: PyTorch's on contiguous and on channels-last, and ours.

    python benchmarks/bench_convolutions.py [--only TEXT] [--seconds S] [--threads N] [--out FILE]

The three take turns in one process: the result, the gradient of the input, and the gradients of weight and bias, each
by itself. GFLOP/s are of minima, ratios medians over rounds; the peak is that of a loop of fused multiplications and
additions in registers, in the same run. A row that our table leaves to PyTorch says so.
"""

import ctypes
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import machine
import torch
from layout_models import channels_last
from stopwatch import Stopwatch, in_turns
from torch import Tensor
from torch.nn import functional as stock

from torch_nhwc import functional as ours

PASSES = ("forward", "input gradient", "weight gradient")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(NamedTuple):
    """A convolution of a network: `size` is the side of a square or a cube."""

    network: str
    batch: int
    channels: int
    outputs: int
    size: int
    kernel: int | tuple[int, ...]
    stride: int = 1
    groups: int = 1
    axes: int = 2
    dilation: int = 1

    @property
    def name(self) -> str:
        parts = [f"{self.channels} to {self.outputs}", "x".join(map(str, self.taps))]
        parts += [f"stride {self.stride}"] if self.stride > 1 else []
        parts += [f"dilation {self.dilation}"] if self.dilation > 1 else []
        parts += [f"{self.groups} groups"] if self.groups > 1 else []
        return f"{self.network}: {', '.join(parts)}, on {self.batch}x{'x'.join([str(self.size)] * self.axes)}"

    @property
    def kind(self) -> str:
        """Return how many channels share a filter, and the dimensions."""
        inputs = self.channels // self.groups
        kind = "dense" if self.groups == 1 else "depthwise" if inputs == 1 else f"groups of {inputs}"
        return f"{kind}, {self.axes}D"

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the kernel's size along each axis."""
        return self.kernel if isinstance(self.kernel, tuple) else (self.kernel,) * self.axes

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(self.dilation * (taps // 2) for taps in self.taps)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(self.batch, self.channels, *[self.size] * self.axes, dtype=dtype)
        weight = torch.randn(self.outputs, self.channels // self.groups, *self.taps, dtype=dtype)
        return x, weight, torch.randn(self.outputs, dtype=dtype)

    def call(self, functions: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        function = getattr(functions, f"conv{self.axes}d")
        return function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    @property
    def flops(self) -> float:
        found = 2.0 * self.batch * self.outputs * (self.channels // self.groups)
        for taps, padding in zip(self.taps, self.padding, strict=True):
            found *= taps * ((self.size + 2 * padding - self.dilation * (taps - 1) - 1) // self.stride + 1)
        return found


def _depthwise(
    network: str, batch: int, channels: int, size: int, kernel: int, stride: int = 1, axes: int = 2
) -> Layer:
    return Layer(network, batch, channels, channels, size, kernel, stride, channels, axes)


LAYERS = [
    Layer("ResNet-50", 2, 3, 64, 224, 7, 2),
    Layer("ResNet-50", 2, 64, 64, 56, 3),
    Layer("ResNet-50", 2, 64, 256, 56, 1),
    Layer("ResNet-50", 2, 128, 128, 56, 3, 2),
    Layer("ResNet-50", 2, 128, 128, 28, 3),
    Layer("ResNet-50", 2, 256, 256, 14, 3),
    Layer("ResNet-50", 2, 1024, 256, 14, 1),
    Layer("ResNet-50", 2, 512, 512, 7, 3),
    Layer("DeepLab", 1, 256, 256, 32, 3, dilation=6),
    Layer("RegNet", 4, 64, 64, 56, 3, groups=8),
    Layer("RegNet", 4, 112, 112, 56, 3, groups=7),
    Layer("RegNet", 4, 168, 168, 28, 3, groups=7),
    Layer("RegNet", 4, 448, 448, 28, 3, 2, groups=28),
    Layer("ResNeXt", 4, 128, 128, 56, 3, groups=32),
    Layer("ResNeXt", 4, 256, 256, 28, 3, groups=32),
    Layer("ResNeXt", 4, 512, 512, 14, 3, groups=32),
    Layer("ResNeXt", 4, 1024, 1024, 7, 3, groups=32),
    _depthwise("ConvNeXt", 4, 96, 56, 7),
    _depthwise("ConvNeXt", 4, 192, 28, 7),
    _depthwise("ConvNeXt", 4, 384, 14, 7),
    _depthwise("ConvNeXt", 4, 768, 7, 7),
    _depthwise("EfficientNet", 4, 96, 112, 3, 2),
    _depthwise("EfficientNet", 4, 144, 56, 3),
    _depthwise("EfficientNet", 4, 144, 56, 5, 2),
    _depthwise("EfficientNet", 4, 240, 28, 5),
    _depthwise("EfficientNet", 4, 672, 14, 5),
    _depthwise("MobileNet", 4, 32, 112, 3),
    _depthwise("MobileNet", 4, 144, 56, 3, 2),
    _depthwise("MobileNet", 4, 576, 14, 3),
    _depthwise("MobileNet, one image of 128 pixels", 1, 192, 16, 3, 2),
    _depthwise("MobileNet, one image of 128 pixels", 1, 384, 8, 3),
    _depthwise("EfficientNet, one image of 128 pixels", 1, 240, 16, 5),
    _depthwise("RepLKNet", 2, 128, 56, 13),
    _depthwise("RepLKNet", 2, 128, 56, 31),
    Layer("Autoencoder", 1, 128, 128, 64, 3),
    Layer("Autoencoder", 1, 256, 128, 64, 3),
    Layer("Autoencoder", 1, 512, 512, 16, 3),
    Layer("Autoencoder", 1, 128, 3, 64, 3),
    Layer("U-Net", 1, 64, 64, 128, 3),
    Layer("U-Net", 1, 128, 128, 64, 3, 2),
    Layer("DynUNet", 2, 16, 16, 48, 3, axes=3),
    Layer("DynUNet", 2, 32, 32, 32, 3, axes=3),
    Layer("DynUNet", 2, 16, 32, 32, 3, 2, axes=3),
    Layer("DynUNet", 1, 320, 320, 4, 3, axes=3),
    Layer("SegResNet", 1, 32, 32, 24, 3, axes=3),
    Layer("3D networks", 2, 16, 2, 48, 1, axes=3),
    Layer("3D networks", 2, 64, 64, 24, 1, axes=3),
    Layer("3D networks", 2, 32, 32, 24, (1, 3, 3), axes=3),
    Layer("3D networks", 2, 32, 32, 24, (3, 1, 1), axes=3),
    Layer("SegResNet", 1, 1, 8, 48, 3, axes=3),
    _depthwise("MedNeXt", 1, 32, 32, 3, axes=3),
    _depthwise("MedNeXt", 1, 32, 32, 5, axes=3),
    _depthwise("MedNeXt", 1, 64, 16, 7, axes=3),
    _depthwise("MedNeXt", 1, 64, 32, 3, 2, axes=3),
]


def jobs(layer: Layer, dtype: torch.dtype, pass_: str) -> dict[str, Callable[[], object]]:
    """Return the pass as PyTorch computes it in both formats, and ours."""
    made = {}
    for way, functions in (("contiguous", stock), ("channels-last", stock), ("ours", ours)):
        x, weight, bias = layer.tensors(dtype)
        if way != "contiguous":
            x, weight = channels_last(x), channels_last(weight)
        if pass_ == "forward":
            made[way] = torch.no_grad()(partial(layer.call, functions, x, weight, bias))
            continue
        wanted = [x] if pass_ == "input gradient" else [weight, bias]
        for each in wanted:
            each.requires_grad_()
        out = layer.call(functions, x, weight, bias)
        gradient = torch.randn_like(out)
        made[way] = partial(torch.autograd.grad, out, wanted, gradient, retain_graph=True)
    return made


def way_of(layer: Layer, dtype: torch.dtype, pass_: str) -> str:
    """Return the way of the table that a pass takes."""
    x, weight, bias = layer.tensors(dtype)
    x.requires_grad_(pass_ == "input gradient")
    weight.requires_grad_(pass_ == "weight gradient")
    sizes = [layer.stride] * layer.axes, list(layer.padding), [layer.dilation] * layer.axes
    with torch.set_grad_enabled(pass_ != "forward"):
        return torch.ops.nhwc.convolution_way(channels_last(x), channels_last(weight), bias, *sizes, layer.groups)[0]


def measure(layer: Layer, dtype: str, pass_: str, seconds: float) -> dict[str, object]:
    """Return one row: GFLOP/s of each way, and what ours gains."""
    calls = jobs(layer, DTYPES[dtype], pass_)
    stopwatch = Stopwatch()
    for call in calls.values():
        call()
    one_round = sum(stopwatch.wall(call) for call in calls.values()) * 1e-6
    samples = min(200, max(5, math.ceil(seconds / one_round)))
    taken = in_turns({way: partial(stopwatch.wall, call) for way, call in calls.items()}, samples)

    def gain(over: str) -> float:
        return statistics.median(theirs / own for theirs, own in zip(taken[over], taken["ours"], strict=True))

    return {
        "layer": layer.name,
        "kind": layer.kind,
        "dtype": dtype,
        "pass": pass_,
        "way": way_of(layer, DTYPES[dtype], pass_),
        **{f"{way}, GFLOP/s": layer.flops / min(times) / 1e3 for way, times in taken.items()},
        "over channels-last": gain("channels-last"),
        "over contiguous": gain("contiguous"),
    }


def peak() -> float:
    """Return the GFLOP/s of a loop of fused multiplications and additions of float32 in registers, on one thread."""
    has_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    bits = 512 if has_avx512 and "AVX2" not in machine.bounds().get("ONEDNN_MAX_CPU_ISA", "") else 256
    names = [f"sum{index}" for index in range(12)]  # an array of them would be in memory
    step = " ".join(f"{name} = {name} * factor + factor;" for name in names)
    kept = ", ".join(f'"+v"({name})' for name in names)  # so that each round is computed
    source = f"""
    typedef float Register __attribute__((vector_size({bits // 8})));
    float sum(long rounds) {{
      const Register factor = (Register){{}} + 0.999f;
      Register {", ".join(f"{name} = factor" for name in names)};
      for (long round = 0; round < rounds; ++round) {{
        {step}
        asm volatile("" : {kept});
      }}
      return {" + ".join(f"{name}[0]" for name in names)};
    }}"""
    flags = ["-O3", "-mfma", "-mavx2", *(["-mavx512f"] if bits == 512 else []), "-fPIC", "-shared"]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/peak.so"
        subprocess.run(["cc", *flags, "-x", "c", "-", "-o", library], input=source, text=True, check=True)
        loop = ctypes.CDLL(library).sum
    rounds = 10_000_000
    microseconds = min(Stopwatch().wall(partial(loop, ctypes.c_long(rounds))) for _ in range(5))
    return 2 * 12 * (bits // 32) * rounds / microseconds / 1e3


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "passes-cpu.json")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each pass of a layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=list(DTYPES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    top = peak()
    torch.set_num_threads(arguments.threads)
    print(f"peak of one thread, float32: {top:.0f} GFLOP/s")
    rows = []
    for layer in LAYERS:
        for dtype in arguments.dtype if arguments.only in layer.name else ():
            for pass_ in PASSES:
                row = measure(layer, dtype, pass_, arguments.seconds)
                rows.append(row)
                rates = " ".join(f"{row[f'{way}, GFLOP/s']:7.1f}" for way in ("contiguous", "channels-last", "ours"))
                gains = f"{row['over channels-last']:6.2f} {row['over contiguous']:6.2f}"
                print(f"{rates}  {gains}  {row['way']:16} {dtype:8} {pass_:15} {layer.name}", flush=True)
    how = {"threads": arguments.threads, "peak GFLOP/s": top}
    machine.write(arguments.out, "bench_convolutions.py", rows, **how)


if __name__ == "__main__":
    main()
