"""Replaced layers with drawn arguments and inputs, forward and backward, against float64 and contiguous PyTorch."""

import copy
import math
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from drawing import draw_convolution, expect, in_order, order_of_dims
from reference import FORMATS
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import REPLACEMENTS, Preserving, is_preserving

# Ours may be this many times as far from float64 as contiguous PyTorch is, and the floor of its dtype on top, in units
# of the largest value.
MULTIPLE = 4
FLOOR = {torch.float64: 2e-14, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
Arguments = dict[str, Any]
# A layer's arguments, and the shape of its input.
Drawn = tuple[Arguments, list[int]]


def _sizes(random: Random, space: int, least: int = 1, scale: int = 1) -> list[int]:
    largest = 20 if space == 2 else 9
    return [scale * random.randint(least, largest) for _ in range(space)]


def _shape(random: Random, channels: int, space: int, least: int = 1) -> list[int]:
    scale = 1 if random.random() < 0.99 else {2: 8, 3: 5}[space]  # a sum over few numbers is always accurate
    return [random.choice((1, 1, 2, 3)), channels, *_sizes(random, space, least, scale)]


def _space(random: Random, layer_type: type) -> int:
    """Return the dimensions that a class is for, or any where it is for both."""
    last = layer_type.__name__[-2:]
    return int(last[0]) if last in ("2d", "3d") else random.choice((2, 3))


def _channels(random: Random) -> int:
    return random.choice((1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 40, 64))


def _flag(random: Random) -> bool:
    return random.random() < 0.5


def _group_norm(random: Random, layer_type: type) -> Drawn:
    groups, each = random.choice((1, 2, 3, 4, 8)), random.choice((1, 2, 3, 4, 5, 8))
    arguments = {"num_groups": groups, "num_channels": groups * each, "affine": _flag(random)}
    return arguments | {"eps": random.choice((1e-5, 1e-3))}, _shape(
        random, groups * each, _space(random, layer_type), 2
    )


def _norm(random: Random, layer_type: type) -> Drawn:
    channels = _channels(random)
    arguments = {"num_features": channels, "affine": _flag(random), "track_running_stats": _flag(random)}
    arguments |= {"momentum": random.choice((0.1, 0.5, None)), "eps": random.choice((1e-5, 1e-3))}
    return arguments, _shape(random, channels, _space(random, layer_type), 2)


def _gelu(random: Random, layer_type: type) -> Drawn:
    arguments = {"approximate": random.choice(("none", "tanh"))}
    return arguments, _shape(random, _channels(random), _space(random, layer_type))


def _softmax(random: Random, layer_type: type) -> Drawn:
    space = _space(random, layer_type)
    dims = {} if layer_type is nn.Softmax2d else {"dim": random.choice((1, -space - 1))}
    return dims, _shape(random, _channels(random), space)


def _cross_entropy(random: Random, layer_type: type) -> Drawn:
    arguments = {
        "reduction": random.choice(("mean", "sum", "none")),
        "label_smoothing": random.choice((0.0, 0.0, 0.1)),
        "ignore_index": random.choice((-100, 0)),
    }
    return arguments, _shape(random, max(2, _channels(random)), random.choice((2, 3)))


def _avg_pool(random: Random, layer_type: type) -> Drawn:
    kernel = [random.randint(1, 3) for _ in range(3)]
    arguments = {
        "kernel_size": tuple(kernel),
        "stride": random.choice((None, 1, 2, (1, 2, 2))),
        "padding": tuple(random.randint(0, size // 2) for size in kernel),
        "ceil_mode": _flag(random),
        "count_include_pad": _flag(random),
        "divisor_override": random.choice((None, None, 3)),
    }
    return arguments, _shape(random, _channels(random), 3, 3)


def _max_unpool(random: Random, layer_type: type) -> Drawn:
    arguments = {"kernel_size": random.choice((2, 3, (1, 2, 3))), "stride": random.choice((None, 1, (2, 1, 2)))}
    return arguments, _shape(random, _channels(random), 3)


def _adaptive_pool(random: Random, layer_type: type) -> Drawn:
    sizes = random.choice((1, 2, tuple(random.choice((1, 2, 3, 5, 7, None)) for _ in range(3))))
    return {"output_size": sizes}, _shape(random, _channels(random), 3)


def _circular_pad(random: Random, layer_type: type) -> Drawn:
    space = _space(random, layer_type)
    shape = _shape(random, _channels(random), space)
    pads = [random.randint(0, size) for size in reversed(shape[2:]) for _ in range(2)]
    return {"padding": tuple(pads)}, shape


def _convolution(random: Random, layer_type: type) -> Drawn:
    drawn = draw_convolution(random, _space(random, layer_type), "Transpose" in layer_type.__name__)
    arguments: Arguments = {
        "in_channels": drawn.in_channels,
        "out_channels": drawn.out_channels,
        "kernel_size": drawn.kernel,
        "stride": drawn.stride,
        "padding": drawn.padding,
        "dilation": drawn.dilation,
        "groups": drawn.groups,
        "bias": drawn.bias,
    }
    if drawn.transposed:
        arguments["output_padding"] = drawn.output_padding
    else:
        arguments["padding_mode"] = random.choice(("zeros", "zeros", "circular", "reflect", "replicate"))
        if random.random() < 0.1:
            arguments |= {"padding": random.choice(("same", "valid")), "stride": 1}
    return arguments, [drawn.batch, drawn.in_channels, *drawn.size]


def _linear(random: Random, layer_type: type) -> Drawn:
    shape = _shape(random, _channels(random), random.choice((2, 3)))
    return {"in_features": shape[-1], "out_features": _channels(random), "bias": _flag(random)}, shape


def _pixel_shuffle(random: Random, layer_type: type) -> Drawn:
    factor, shape = random.choice((1, 2, 3)), _shape(random, _channels(random), random.choice((2, 3)))
    if layer_type is nn.PixelShuffle:
        shape[-3] *= factor * factor
        return {"upscale_factor": factor}, shape
    shape[-2:] = [factor * size for size in shape[-2:]]
    return {"downscale_factor": factor}, shape


# For each class of the table, what draws its arguments and its input's shape.
GENERATORS: dict[type[nn.Module], Callable[[Random, type], Drawn]] = {
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm2d: _norm,
    nn.InstanceNorm3d: _norm,
    nn.BatchNorm2d: _norm,
    nn.BatchNorm3d: _norm,
    nn.GELU: _gelu,
    nn.Linear: _linear,
    nn.Softmax: _softmax,
    nn.Softmax2d: _softmax,
    nn.LogSoftmax: _softmax,
    nn.CrossEntropyLoss: _cross_entropy,
    nn.AvgPool3d: _avg_pool,
    nn.AdaptiveAvgPool3d: _adaptive_pool,
    nn.AdaptiveMaxPool3d: _adaptive_pool,
    nn.MaxUnpool3d: _max_unpool,
    nn.CircularPad2d: _circular_pad,
    nn.CircularPad3d: _circular_pad,
    nn.PixelShuffle: _pixel_shuffle,
    nn.PixelUnshuffle: _pixel_shuffle,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.ConvTranspose2d: _convolution,
    nn.ConvTranspose3d: _convolution,
}


# Classes that take another tensor next to the input.
OF_TWO = [nn.CrossEntropyLoss, nn.MaxUnpool3d]
# Classes whose outputs are in no format of the input's.
OF_OTHER_FORMATS = [nn.CrossEntropyLoss, nn.Linear]
# Classes that also take an input without a batch.
UNBATCHED = [nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.CircularPad2d, nn.CircularPad3d, nn.Softmax2d]
UNBATCHED += [nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def _draw_layer(random: Random) -> tuple[type[nn.Module], Arguments, list[int]]:
    """Draw a layer that PyTorch takes and a conversion replaces."""
    while True:
        layer_type = random.choice([each for each, row in REPLACEMENTS.items() if row.on_cpu])
        for _ in range(50):  # where few arguments make a replacement, or none
            arguments, shape = GENERATORS[layer_type](random, layer_type)
            try:
                layer = layer_type(**arguments)
                if layer_type not in OF_TWO and layer(torch.zeros(shape)).numel() == 0:
                    continue  # which PyTorch refuses in some dtypes
            except (RuntimeError, ValueError):
                continue
            if is_preserving(type(_replaced(layer))):
                return layer_type, arguments, shape


def _replaced(layer: nn.Module) -> nn.Module:
    if type(layer) is nn.Linear:  # which a conversion replaces on some machines, in models with a convolution
        swap_class(layer, Preserving)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nhwc.convert_(layer, preserve=True)
    return layer


def draw(random: Random) -> dict[str, Any]:
    layer_type, arguments, shape = _draw_layer(random)
    is_unbatched = layer_type in UNBATCHED and random.random() < 0.05
    return {
        "layer": layer_type,
        "arguments": arguments,
        "shape": shape[1:] if is_unbatched else shape,
        "dtype": random.choice(DTYPES),
        "mean": random.choice((0, 0, 0, 1, 10)),
        "is_training": random.random() < 0.8,
        "probabilities": random.random() < 0.2,
        "is_unbatched": is_unbatched,
        "order": None if random.random() < 0.7 else order_of_dims(random, len(shape) - is_unbatched),
        "gradient_order": _gradient_order(random, layer_type, len(shape) - is_unbatched),
        "is_sliced": random.random() < 0.1,
        "threads": random.choice((1, 1, 2)),
        "seed": random.getrandbits(60),
    }


def _gradient_order(random: Random, layer_type: type, rank: int) -> list[int] | None:
    """Draw an order of the gradient's dimensions.

    PyTorch's batch norm computes wrong gradients from an odd one, for a batch of 1 and contiguous inputs as well.
    """
    order = None if random.random() < 0.5 else order_of_dims(random, rank)
    return order if layer_type not in (nn.BatchNorm2d, nn.BatchNorm3d) else order and [*range(rank)]


def _run(layer: nn.Module, x: Tensor, more: tuple[Tensor, ...], gradient: Tensor | None) -> dict[str, Tensor]:
    """Return everything that a layer computes forward and backward, by name."""
    x = x.detach().requires_grad_()
    y = layer(x, *more)
    if gradient is None:
        gradient = torch.ones_like(y)
    y.backward(gradient.to(y.dtype) if gradient.shape == y.shape else torch.ones_like(y))
    results = {"output": y.detach(), "input's gradient": x.grad}
    results |= {f"{name}'s gradient": each.grad for name, each in layer.named_parameters()}
    results |= {name: each for name, each in layer.named_buffers() if each.is_floating_point() and name != "weight"}
    return {name: each for name, each in results.items() if each is not None}


def _in_format(x: Tensor, order: list[int] | None) -> Tensor:
    if order is None and x.dim() in FORMATS:
        return x.contiguous(memory_format=FORMATS[x.dim()])
    return in_order(x, order if order and len(order) == x.dim() else [*range(x.dim())])


def _error(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the largest difference, in units of the largest value or of `least`; infinite where one is not finite."""
    largest = max(expected.abs().max().item(), least) if expected.numel() else 1.0
    difference = (actual.double() - expected).abs().max().item() / largest if expected.numel() else 0.0
    return difference if difference == difference else float("inf")


def check(case: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(case["seed"])
    torch.set_num_threads(case["threads"])
    dtype, name = case["dtype"], case["layer"].__name__
    plain = case["layer"](**case["arguments"])
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    # What the dtype cannot hold is rounded before, so that all three have the same numbers.
    plain = plain.to(dtype)
    reference, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    expect(is_preserving(type(_replaced(ours))), f"a layer of class {type(ours).__name__} was not replaced")
    for each in (plain, reference, ours):
        each.train(case["is_training"])
    x = (torch.randn(case["shape"]) + case["mean"]).to(dtype)
    more = _target(case, x)
    exactly = tuple(each.double() if each.is_floating_point() else each for each in more)
    y = copy.deepcopy(reference)(x.double(), *exactly)
    gradient = torch.randn(y.shape).to(dtype)
    given = _in_format(x, case["order"])
    if case["is_sliced"]:
        given = torch.cat([given, given], dim=-1)[..., : x.shape[-1]]
    expected = _run(reference, x.double(), exactly, gradient.double())
    try:  # PyTorch's own convolutions may be wrong, or end the process
        theirs = {} if isinstance(plain, nn.modules.conv._ConvNd) else _run(plain, x, more, gradient)
    except NotImplementedError:  # then ours may have the dtype, on channels-last at least
        theirs = {}
    try:
        own = _run(ours, given, more, _in_format(gradient, case["gradient_order"]))
    except NotImplementedError:
        expect(not theirs, f"not implemented for {dtype}")
        return {f"{name}: cases without the dtype": 1}
    theirs = theirs or {what: value.to(dtype) for what, value in expected.items()}
    expect(own.keys() == expected.keys(), f"{own.keys()} instead of {expected.keys()}")
    figures: dict[str, float] = {f"{name}: cases": 1}
    parameters = dict(plain.named_parameters())
    for what, value in expected.items():
        expect(own[what].shape == value.shape, f"{what}: shape {own[what].shape}, not {value.shape}")
        expect(own[what].dtype == theirs[what].dtype, f"{what}: {own[what].dtype}, not {theirs[what].dtype}")
        # A parameter's gradient of few numbers may be a small difference of large sums.
        is_sum = what.removesuffix("'s gradient") in parameters
        least = 0.3 * math.sqrt(gradient.double().square().sum().item() / y.shape[1]) if is_sum else 1e-3
        errors = {whose: _error(of[what], value, least) for whose, of in (("ours", own), ("contiguous", theirs))}
        expect(errors["ours"] <= MULTIPLE * errors["contiguous"] + FLOOR[dtype], f"{what}: errors {errors}")
        for whose, error in errors.items():
            figure = f"{name}, {str(dtype).removeprefix('torch.')}: {whose}"
            figures[figure] = max(float(error), figures.get(figure, 0.0))
    is_in_format = case["order"] is None and not case["is_sliced"] and not case["is_unbatched"]
    if is_in_format and not given.is_contiguous() and case["layer"] not in OF_OTHER_FORMATS:
        is_kept = own["output"].is_contiguous(memory_format=FORMATS[x.dim()])
        expect(is_kept, "the output is not channels-last")
    return figures


def _target(case: dict[str, Any], x: Tensor) -> tuple[Tensor, ...]:
    """Return what the layer is given besides its input."""
    if case["layer"] is nn.MaxUnpool3d:
        layer = nn.MaxUnpool3d(**case["arguments"])
        empty = torch.empty(x.shape, device="meta")
        voxels = layer(empty, empty.long()).shape[2:].numel()
        places = torch.rand(*x.shape[:2], voxels).argsort(-1)[..., : x.shape[2:].numel()]
        return (places.reshape(x.shape),)
    if case["layer"] is not nn.CrossEntropyLoss:
        return ()
    if case["probabilities"] and case["arguments"]["ignore_index"] < 0:
        return (torch.rand(x.shape).to(x.dtype).softmax(1),)
    target = torch.randint(0, x.shape[1], (x.shape[0], *x.shape[2:]))
    target.view(-1)[0] = 1  # not the ignored class alone, whose mean is NaN
    return (target,)
