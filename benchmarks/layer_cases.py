"""The layers that preserve channels-last, as data: what is called, on which shapes, and which bars are set for it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from layout_models import channels_last
from machine import cache_bytes
from torch import Tensor
from torch.nn import functional as stock

from torch_nhwc import functional as ours

Call = Callable[..., Tensor]
MODES = FORWARD, BOTH = "forward", "forward with backward"
OVER_CONTIGUOUS, STOCK_OVER_OURS = "over_contiguous", "stock_over_ours"
POOLS = ("avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d")
NORMS = ("group_norm", "instance_norm")


class Case(NamedTuple):
    """A layer on one shape.

    `call` takes the functions of ours or of PyTorch, the input, and the parameters, whose shapes are given.
    """

    layer: str
    arguments: str
    shape: tuple[int, ...]
    call: Call
    parameters: tuple[tuple[int, ...], ...] = ()
    target: str | None = None
    dtypes: tuple[torch.dtype, ...] = ()  # all that are measured on the device, if it names none
    is_ours: bool = True

    @property
    def ways(self) -> dict[str, ModuleType]:
        """The functions that are measured, by name."""
        return {way: functions for way, functions in FUNCTIONS.items() if self.is_ours or functions is stock}

    @property
    def name(self) -> str:
        return f"{self.layer}({self.arguments}) {'x'.join(map(str, self.shape))}"

    def row(self, dtype: torch.dtype, mode: str) -> dict[str, object]:
        """Return what a row of results says of the case."""
        return {
            "layer": self.layer,
            "arguments": self.arguments,
            "shape": list(self.shape),
            "dtype": name_of(dtype),
            "mode": mode,
        }

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one sample of the input."""
        return torch.Size(self.shape[1:]).numel() * dtype.itemsize

    def of(self, functions: ModuleType) -> Call:
        """Return the call of our functions or of PyTorch's."""
        return partial(self.call, functions)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(case: Case, dtype: torch.dtype, way: str, device: str = "cpu") -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the input in a way's format, the parameters and the target, with the same values each time."""
    torch.manual_seed(0)
    x = torch.randn(case.shape, dtype=dtype, device=device)
    parameters = [torch.randn(shape, dtype=dtype, device=device) for shape in case.parameters]
    if way != "contiguous":
        x = channels_last(x)
        parameters = [channels_last(each) if each.dim() > 2 else each for each in parameters]
    targets = [torch.randint(case.shape[1], (case.shape[0], *case.shape[2:]), device=device)] if case.target else []
    for each in (x, *parameters):
        each.requires_grad_()
    return x, parameters, targets


def bars(case: Case, dtype: torch.dtype, mode: str) -> dict[str, float]:
    """Return the limits of ratios: at most so much over contiguous, at least so much of stock over ours."""
    is_float, is_forward = dtype == torch.float32, mode == FORWARD
    found: dict[str, float] = {}
    if case.layer in NORMS:
        if not is_float:
            limits = (1.1, 1.0) if case.shape[1] >= 16 else None
        elif case.layer == "instance_norm":
            limits = (0.6, 0.8)
        else:
            limits = (1.15, 1.0) if case.sample_bytes(dtype) <= cache_bytes("L2") else (1.5, 1.3)
        if limits:
            found[OVER_CONTIGUOUS] = limits[0] if is_forward else limits[1]
    if case.layer == "instance_norm" and is_float:
        found[STOCK_OVER_OURS] = 5
    if case.layer in ("group_norm", "batch_norm"):
        found[STOCK_OVER_OURS] = 1
    if case.layer in POOLS:
        found[OVER_CONTIGUOUS] = 0.5
    if case.layer in ("gelu", "softmax", "log_softmax", "cross_entropy", "pad"):
        found[OVER_CONTIGUOUS] = 1.1
    return found


def group_norm(groups: int, functions: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functions.group_norm(x, groups, weight, bias)


def instance_norm(functions: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functions.instance_norm(x, weight=weight, bias=bias)


def batch_norm(functions: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functions.batch_norm(x, None, None, weight, bias, training=True)


def over_channels(layer: str, functions: ModuleType, x: Tensor) -> Tensor:
    return getattr(functions, layer)(x, 1)


def with_arguments(layer: str, arguments: Sequence[Any], functions: ModuleType, x: Tensor) -> Tensor:
    return getattr(functions, layer)(x, *arguments)


def cross_entropy(functions: ModuleType, x: Tensor, target: Tensor) -> Tensor:
    return functions.cross_entropy(x, target)


def circular(functions: ModuleType, x: Tensor) -> Tensor:
    return functions.pad(x, (1,) * 2 * (x.dim() - 2), mode="circular")


def norm_cases() -> Iterator[Case]:
    small, large = ((4, 32, 32, 32), (4, 32, 8, 12, 12)), ((4, 128, 96, 96), (2, 32, 48, 48, 48))
    for shape in (*small, *large):
        affine = ((shape[1],),) * 2
        for groups in (8, 32):
            yield Case("group_norm", str(groups), shape, partial(group_norm, groups), affine)
        yield Case("instance_norm", "affine", shape, instance_norm, affine)
    wide, narrow = (2, 512, 32, 32), (2, 16, 48, 48, 48)
    yield Case("group_norm", "32", wide, partial(group_norm, 32), ((512,),) * 2)
    yield Case("group_norm", "8", narrow, partial(group_norm, 8), ((16,),) * 2)
    # Few rows of many or odd channels.
    for shape, groups in (((64, 512, 1, 1), 32), ((64, 1023, 2, 2), 3), ((64, 257, 4, 4), 1), ((64, 512, 4, 4), 32)):
        yield Case("group_norm", str(groups), shape, partial(group_norm, groups), ((shape[1],),) * 2)
    for shape in ((1, 64, 64, 64), (1, 32, 48, 48, 48)):
        yield Case("instance_norm", "affine", shape, instance_norm, ((shape[1],),) * 2)
    # Few rows and many, few channels and many, within each cache and beyond.
    for shape in (
        *((4, 16, 32, 32), (4, 512, 16, 16), (8, 256, 28, 28), (32, 64, 56, 56), (32, 8, 112, 112)),
        *((2, 64, 32, 32, 32), (2, 16, 64, 64, 64), (1, 32, 96, 96, 96)),
    ):
        yield Case("batch_norm", "training", shape, batch_norm, ((shape[1],),) * 2)


def channel_cases() -> Iterator[Case]:
    for channels in (2, 4, 8, 21, 64, 150, 512):
        side, edge = (128, 32) if channels < 64 else (48, 12)
        for shape in ((2, channels, side, side), (2, channels, edge, edge, edge)):
            for layer in ("softmax", "log_softmax"):
                yield Case(layer, "1", shape, partial(over_channels, layer))
            yield Case("cross_entropy", "classes", shape, cross_entropy, target="classes")


def pool_cases() -> Iterator[Case]:
    shape = (2, 32, 32, 32, 32)
    for layer, text, arguments in (
        ("avg_pool3d", "2", (2,)),
        ("avg_pool3d", "3, 2, 1", (3, 2, 1)),
        ("adaptive_avg_pool3d", "4", (4,)),
        ("adaptive_avg_pool3d", "1", (1,)),
        ("adaptive_max_pool3d", "4", (4,)),
    ):
        yield Case(layer, text, shape, partial(with_arguments, layer, arguments))


def other_cases() -> Iterator[Case]:
    for shape in ((4, 64, 56, 56), (2, 32, 32, 32, 32)):
        yield Case("gelu", "", shape, partial(with_arguments, "gelu", ()))
        yield Case("pad", '1, "circular"', shape, circular)
    yield Case("normalize", "RMS, silu", (1, 96, 4, 60, 104), root_mean_square, ((96,),))


def norm_cases_on_gpu() -> Iterator[Case]:
    """Yield group norm with one group, with 32 and with one channel in each, and instance norm.

    The first shapes have at least 64 MB in each dtype, the others are the deep levels of a U-Net, and blocks of a
    diffusion model.
    """
    for shape in (
        *((32, 256, 64, 64), (4, 32, 512, 512), (2, 64, 64, 64, 64), (1, 32, 128, 128, 64)),
        *((8, 320, 32, 32), (2, 1280, 16, 16), (2, 320, 8, 8, 8), (2, 128, 16, 16, 16), (1, 32, 32, 32, 32)),
    ):
        affine = ((shape[1],),) * 2
        for groups in sorted({1, 32, shape[1]}):
            yield Case("group_norm", str(groups), shape, partial(group_norm, groups), affine)
        yield Case("instance_norm", "affine", shape, instance_norm, affine)


def passes_on_gpu() -> Iterator[Case]:
    """Yield batch norm, and norms with the activation after them, of 64 MB and less, in bfloat16."""
    half = (torch.bfloat16,)
    for shape in ((32, 128, 64, 64), (32, 256, 14, 14), (2, 64, 64, 64, 64), (2, 32, 128, 128, 128)):
        of_channels = ((shape[1],),) * 2
        yield Case("batch_norm", "training", shape, batch_norm, of_channels, dtypes=half)
        yield Case("batch_norm", "training, relu", shape, partial(followed, "batch", "relu"), of_channels, dtypes=half)
        for kind, activation in (("instance", "leaky_relu"), ("group", "silu")):
            call = partial(followed, kind, activation)
            yield Case(f"{kind}_norm", activation, shape, call, of_channels, dtypes=half)
        yield Case("bias", "silu", shape, biased, of_channels[:1], dtypes=half)
    # Of Wan's decoder, the last and the first level of a video of 480 by 832.
    for shape in ((1, 96, 4, 480, 832), (1, 384, 4, 60, 104)):
        yield Case("normalize", "RMS, silu", shape, root_mean_square, ((shape[1],),), dtypes=half)


def followed(kind: str, activation: str, functions: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    options = {"activation": activation} if functions is ours else {}
    calls: dict[str, Callable[[], Tensor]] = {
        "batch": lambda: functions.batch_norm(x, None, None, weight, bias, training=True, **options),
        "instance": lambda: functions.instance_norm(x, weight=weight, bias=bias, **options),
        "group": lambda: functions.group_norm(x, 32, weight, bias, **options),
    }
    out = calls[kind]()
    return out if options else getattr(stock, activation)(out)


def biased(functions: ModuleType, x: Tensor, bias: Tensor) -> Tensor:
    """Return a convolution's result with its bias and an activation, which is one pass in inference."""
    if functions is ours:
        return torch.ops.nhwc.bias_activation(x, bias, None, "silu", 0.0)
    return functions.silu(x + bias.view(-1, *[1] * (x.dim() - 2)))


def root_mean_square(functions: ModuleType, x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm of video autoencoders, and the activation after it."""
    scale = x.shape[1] ** 0.5
    if functions is ours:
        return functions.normalize(x, weight=weight, scale=scale, activation="silu")
    return functions.silu(functions.normalize(x, dim=1) * scale * weight.view(-1, *[1] * (x.dim() - 2)))


def operator_cases_on_gpu() -> Iterator[Case]:
    """Yield what follows convolutions in networks, and convolutions that are slow in one of the formats, in bfloat16.

    Ours are among them only where a GPU has a kernel of ours.
    """
    half = (torch.bfloat16,)
    plane, volume = (32, 128, 64, 64), (2, 64, 64, 64, 64)

    def one(layer: str, arguments: str, shape: tuple[int, ...], call: Call, *parameters: tuple[int, ...]) -> Case:
        is_ours = layer == "interpolate" or (layer == "pad" and "constant" not in arguments)
        return Case(layer, arguments, shape, call, parameters, dtypes=half, is_ours=is_ours)

    for shape in (plane, volume):
        of_channels, axes = (shape[1],), len(shape) - 2
        yield one("batch_norm", "training", shape, batch_norm, of_channels, of_channels)
        yield one("batch_norm", "evaluation", shape, batch_norm_in_evaluation, of_channels, of_channels)
        yield one("prelu", "", shape, lambda functions, x, slope: functions.prelu(x, slope), of_channels)
        yield one("add", "bias", shape, add_bias, of_channels)
        yield one("cat", "two", shape, lambda functions, x: torch.cat([x, x], 1))
        for mode in ("constant", "reflect", "replicate", "circular"):
            yield one("pad", f'1, "{mode}"', shape, partial(padded, mode))
        smaller = (*shape[:2], *(side // 2 for side in shape[2:]))
        for mode in ("nearest", "trilinear" if axes == 3 else "bilinear"):
            yield one("interpolate", f'2, "{mode}"', smaller, partial(enlarged, mode))
        for kernel in (3, 7) if axes == 2 else (3, 5, 7):
            weight = (shape[1], 1, *[kernel] * axes)
            depthwise = one(f"conv{axes}d", f"depthwise {kernel}", shape, partial(convolution, shape[1]), weight)
            yield depthwise._replace(is_ours=axes == 3)
        transposed = (shape[1], shape[1] // 2, *[2] * axes)
        yield one(f"conv_transpose{axes}d", "2, stride 2", smaller, enlarging, transposed)
        yield one("cross_entropy", "classes", (2, 21, *shape[2:]), cross_entropy)._replace(target="classes")
    for channels in (1, 32, 320):
        side = 64 if channels < 320 else 16
        wide = (max(32, channels), channels, 3, 3, 3)
        yield one("conv3d", "3", (2, channels, side, side, side), partial(convolution, 1), wide)


def batch_norm_in_evaluation(functions: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functions.batch_norm(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias)


def add_bias(functions: ModuleType, x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.view(-1, *[1] * (x.dim() - 2))


def padded(mode: str, functions: ModuleType, x: Tensor) -> Tensor:
    return functions.pad(x, (1,) * 2 * (x.dim() - 2), mode)


def enlarged(mode: str, functions: ModuleType, x: Tensor) -> Tensor:
    return functions.interpolate(x, scale_factor=2, mode=mode)


def convolution(groups: int, functions: ModuleType, x: Tensor, weight: Tensor) -> Tensor:
    axes = x.dim() - 2
    padding = [size // 2 for size in weight.shape[2:]]
    return getattr(functions, f"conv{axes}d")(x, weight, None, 1, padding, 1, groups)


def enlarging(functions: ModuleType, x: Tensor, weight: Tensor) -> Tensor:
    return getattr(functions, f"conv_transpose{x.dim() - 2}d")(x, weight, stride=2)


CASES_ON_GPU = [*norm_cases_on_gpu(), *passes_on_gpu()]
OPERATORS_ON_GPU = list(operator_cases_on_gpu())
CASES = [*norm_cases(), *channel_cases(), *pool_cases(), *other_cases()]
FUNCTIONS = {"ours": ours, "stock_channels_last": stock, "contiguous": stock}
