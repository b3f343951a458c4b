"""One table of calls: every operator and every function of `torch_nhwc.functional`, next to plain torch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from convolution_cases import operands
from torch import Tensor

from torch_nhwc import functional

aten, nhwc = torch.ops.aten, torch.ops.nhwc
CHECKS = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


class Call(NamedTuple):
    """A call of an operator or a function, as all properties need it.

    `make` returns the arguments, activations in channels-last; derivatives are by the tensors that require a gradient.
    `stock` computes the same from the same arguments in plain torch.
    """

    of: Any
    stock: Callable[..., Any]
    make: Callable[[], list[Any]]
    checks: tuple[str, ...] = CHECKS
    """Those of `torch.library.opcheck` that an operator passes."""


def leaf(*shape: int) -> Tensor:
    """Return an activation in channels-last to derive by."""
    return channels_last(torch.randn(shape)).requires_grad_()


def vector(size: int) -> Tensor:
    """Return the weight or the bias of a norm to derive by."""
    return (1 + 0.1 * torch.randn(size)).requires_grad_()


def statistics(size: int) -> tuple[Tensor, Tensor]:
    """Return a running mean and a running variance."""
    return torch.randn(size), torch.rand(size) + 0.5


def places(pooled: tuple[int, ...], voxels: int) -> Tensor:
    """Return indices of a pool into volumes of so many voxels, none of them twice."""
    count = pooled[-1] * pooled[-2] * pooled[-3]
    return channels_last(torch.rand(*pooled[:-3], voxels).argsort(-1)[..., :count].reshape(pooled))


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return what the forward of a norm saves: means and reciprocal deviations."""
    variance, mean = torch.var_mean(x, dims, correction=0)
    return mean, (variance + 1e-5).rsqrt()


def of_backward(x: Tensor, saved: tuple[Tensor, Tensor], *arguments: Any) -> list[Any]:
    """Return the arguments of a norm's backward, which higher orders call, not users."""
    return [leaf(*x.shape).detach(), x, *saved, torch.rand(x.shape[1]), *arguments, 1e-5, [True] * 3]


def adjoint(function: Callable[[Tensor], Tensor], grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a function's input."""
    return torch.func.vjp(function, x)[1](grad)[0]


def circular(x: Tensor, pad: Any) -> Tensor:
    return F.pad(x, pad, mode="circular")


def unpooled(x: Tensor, indices: Tensor, size: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return F.max_unpool3d(x, indices, stride, stride, padding, size)


def convolved(
    x: Tensor, w: Tensor, b: Any, stride: Any, padding: Any, dilation: Any, groups: int, *more: Any
) -> Tensor:
    """Return a 2D convolution by arguments in the order of `compiled_convolution`."""
    if more:
        return F.conv_transpose2d(x, w, b, stride, padding, *more, groups, dilation)
    return F.conv2d(x, w, b, stride, padding, dilation, groups)


def rms_norm(x: Tensor, w: Tensor, b: Tensor, scale: float, eps: float, _: str) -> Tensor:
    sizes = [-1, *[1] * (x.dim() - 2)]
    return F.silu(F.normalize(x, eps=eps) * scale * w.view(sizes) + b.view(sizes))


IMAGE, VOLUME, POOLED = (2, 6, 4, 5), (2, 6, 4, 3, 5), (2, 6, 2, 3, 2)
WIDE = (2, 18, 3, 4)  # of so many channels that softmax goes over a view
ROWS = (2, 8, 16, 20)  # of so many rows that batch norm is ours
# A function's arguments after its activation, which is of a shape.
FUNCTIONS: dict[str, list[tuple[tuple[int, ...], Callable[[], list[Any]]]]] = {
    "group_norm": [
        (IMAGE, lambda: [3, vector(6), vector(6)]),
        (VOLUME, lambda: [6]),
        (IMAGE, lambda: [2, vector(6)]),
        (VOLUME, lambda: [2, None, vector(6).detach()]),
    ],
    "instance_norm": [(IMAGE, lambda: [None, None, vector(6), vector(6)]), ((1, *VOLUME[1:]), lambda: [])],
    "batch_norm": [
        (ROWS, lambda: [None, None, vector(8), vector(8), True]),
        (VOLUME, lambda: [None, None, None, None, True]),
        (ROWS, lambda: [*statistics(8), vector(8), vector(8), False]),
    ],
    "softmax": [(IMAGE, lambda: [1]), (VOLUME, lambda: [-4]), (WIDE, lambda: [1])],
    "log_softmax": [(IMAGE, lambda: [1]), (WIDE, lambda: [-3])],
    "cross_entropy": [
        (IMAGE, lambda: [torch.randint(0, 6, (2, 4, 5))]),
        (WIDE, lambda: [torch.randn(WIDE).softmax(1)]),
        (VOLUME, lambda: [torch.randint(0, 6, (2, 4, 3, 5)), torch.rand(6)]),
    ],
    "gelu": [(IMAGE, lambda: []), (VOLUME, lambda: [])],
    "normalize": [(IMAGE, lambda: []), (VOLUME, lambda: [2.0, 1, 0.5])],
    "avg_pool3d": [(VOLUME, lambda: [2]), (VOLUME, lambda: [(2, 1, 3), 2, (1, 0, 1), True, False])],
    "adaptive_avg_pool3d": [(VOLUME, lambda: [2]), (VOLUME, lambda: [(None, 2, 3)])],
    "adaptive_max_pool3d": [(VOLUME, lambda: [2]), (VOLUME, lambda: [(1, 2, 3)])],
    "max_unpool3d": [
        (POOLED, lambda: [places(POOLED, 96), 2]),
        (POOLED, lambda: [places(POOLED, 100), 2, (2, 2, 2), 0, (4, 7, 4)]),
    ],
    "pad": [(IMAGE, lambda: [(1, 2, 0, 3), "circular"]), (VOLUME, lambda: [(1, 2, 0, 3, 1, 0), "circular"])],
    "interpolate": [
        (IMAGE, lambda: [None, 2, "bilinear"]),
        (IMAGE, lambda: [(7, 9)]),
        (VOLUME, lambda: [None, (2, 1.5, 1), "nearest-exact"]),
        (VOLUME, lambda: [(5, 4, 7), None, "trilinear", True]),
    ],
    "pixel_shuffle": [((2, 6, 8, 5, 7), lambda: [2])],
    "pixel_unshuffle": [((2, 6, 3, 4, 6), lambda: [2])],
}
# What PyTorch's refuses in channels-last.
STOCK: dict[str, Callable[..., Tensor]] = {
    "pixel_shuffle": lambda x, factor: F.pixel_shuffle(x.contiguous(), factor),
    "pixel_unshuffle": lambda x, factor: F.pixel_unshuffle(x.contiguous(), factor),
}
# By the ways that they may take: the function, the shapes of input and weight, and the arguments after the bias.
CONVOLUTIONS = {
    "pytorch": ("conv2d", (2, 3, 5, 4), (4, 3, 3, 3), (1, 1)),
    "padded": ("conv2d", (2, 3, 2, 3), (4, 3, 5, 3), (1, (2, 1))),
    "kernels": ("conv2d", (2, 4, 6, 5), (4, 1, 3, 5), (2, 0, 1, 4)),
    "both gradients": ("conv2d", (2, 6, 9, 8), (6, 1, 5, 5), (1, 2, 1, 6)),
    "groups": ("conv2d", (2, 16, 6, 7), (16, 4, 3, 3), (1, 1, 1, 4)),
    "one tap": ("conv2d", (2, 2, 20, 16), (3, 2, 1, 1), ()),
    "strides": ("conv2d", (1, 8, 9, 7), (6, 8, 5, 3), (2, (2, 1))),
    "dilation": ("conv2d", (2, 6, 7, 8), (5, 6, 3, 3), (1, 2, 2)),
    "same, even": ("conv2d", (2, 4, 5, 4), (4, 4, 4, 3), (1, "same")),
    "sliced": ("conv2d", (2, 4, 5, 4), (6, 4, 1, 1), (2,)),
    "same": ("conv2d", (2, 4, 5, 4), (4, 4, 3, 3), (1, "same")),
    "same, small": ("conv2d", (2, 4, 1, 2), (6, 4, 2, 5), (1, "same")),
    "cut": ("conv_transpose2d", (2, 4, 2, 3), (4, 3, 5, 3), (1, (2, 1))),
    "widened": ("conv_transpose2d", (2, 4, 4, 1), (4, 1, 3, 3), (2,)),
    "extended": ("conv_transpose2d", (2, 4, 3, 4), (4, 3, 1, 1), (2, 0, 1)),
    "transposed groups": ("conv_transpose2d", (2, 4, 3, 4), (4, 3, 2, 2), (2, 0, 0, 2)),
    "transposed depthwise": ("conv_transpose2d", (2, 4, 3, 4), (4, 1, 3, 3), (2, 1, 0, 4)),
    "linear": ("conv3d", (1, 8, 4, 3, 5), (5, 8, 1, 1, 1), ()),
    "two samples": ("conv3d", (2, 6, 4, 3, 5), (5, 6, 3, 3, 3), (1, 1)),
    "along_depth": ("conv3d", (1, 6, 4, 3, 5), (5, 6, 3, 1, 1), (1, (1, 0, 0))),
    "restored": ("conv3d", (1, 7, 3, 3, 3), (4, 7, 3, 3, 3), (1, 1)),
    "sliced volume": ("conv3d", (1, 16, 4, 3, 5), (4, 16, 1, 1, 1), (2,)),
    "slabs": ("conv3d", (1, 16, 9, 10, 8), (24, 16, 2, 3, 3), (1, 1)),
    "winograd": ("conv3d", (1, 16, 8, 9, 8), (16, 16, 3, 3, 3), (1, 1)),
    "inner products": ("conv3d", (1, 128, 3, 4, 3), (64, 128, 3, 3, 3), (1, 1)),
    "strided tap": ("conv3d", (2, 4, 5, 4, 6), (6, 4, 1, 1, 1), ((2, 1, 3),)),
    "padded tap": ("conv3d", (2, 4, 5, 4, 6), (6, 4, 1, 1, 1), (1, (1, 0, 0))),
    "taps in groups": ("conv3d", (2, 4, 5, 4, 6), (6, 2, 1, 1, 1), ((1, 2, 2), 0, 1, 2)),
    "a tap a channel": ("conv3d", (2, 4, 5, 4, 6), (8, 1, 1, 1, 1), (1, 0, 1, 4)),
    "plane": ("conv3d", (2, 4, 5, 4, 6), (6, 4, 1, 3, 2), ((2, 2, 1), (0, 1, 1), (1, 1, 2))),
    "plane in groups": ("conv3d", (2, 4, 5, 4, 6), (6, 2, 1, 3, 3), (1, 0, 1, 2)),
    "padded plane": ("conv3d", (2, 4, 5, 4, 6), (6, 4, 1, 3, 3), (1, 1)),
    "depth": ("conv3d", (2, 4, 5, 4, 6), (6, 4, 3, 1, 1), ((2, 1, 2), (1, 0, 0), (2, 1, 1))),
    "depthwise volume": ("conv3d", (1, 6, 5, 4, 6), (6, 1, 3, 3, 3), (1, 1, 1, 6)),
    "transposed volume": ("conv_transpose3d", (1, 4, 2, 3, 2), (4, 3, 3, 3, 3), (2, 1, 1)),
    "transposed slabs": ("conv_transpose3d", (1, 16, 9, 10, 8), (16, 24, 2, 2, 2), (2,)),
    "one voxel": ("conv_transpose3d", (1, 4, 1, 1, 1), (4, 3, 2, 2, 2), (2,)),
}


def convolution(name: str) -> list[Any]:
    """Return the arguments of a convolution, all tensors to derive by."""
    *tensors, arguments = operands(CONVOLUTIONS[name])
    return [*(each.requires_grad_() for each in tensors), *arguments]


def in_lists(name: str, order: str) -> list[Any]:
    """Return them in an order, as operators take them: `s`tride, `p`adding, `d`ilation, `o`utput padding, `g`roups."""
    function, x, _, arguments = CONVOLUTIONS[name]
    names = "spogd" if "transpose" in function else "spdg"
    given = {"s": 1, "p": 0, "d": 1, "o": 0, "g": 1, "t": "transpose" in function} | dict(zip(names, arguments))
    for each in "spdo":
        given[each] = [given[each]] * (len(x) - 2) if type(given[each]) is int else given[each]
    return [
        *convolution(name)[:3],
        *(list(given[each]) if type(given[each]) is tuple else given[each] for each in order),
    ]


def of_gradients(name: str) -> list[Any]:
    """Return the arguments of the kernels' backward."""
    x, w, _, *others = in_lists(name, "spdtog")
    grad = torch.randn_like(aten.convolution(x, w, None, *others))
    return [channels_last(grad).requires_grad_(), x.detach(), w, *others, [True] * 3]


def on_activation(shape: tuple[int, ...], arguments: Callable[[], list[Any]]) -> list[Any]:
    return [leaf(*shape), *arguments()]


def calls_of_functions() -> dict[str, Call]:
    calls = {}
    for name, given in FUNCTIONS.items():
        for index, (shape, arguments) in enumerate(given):
            make = partial(on_activation, shape, arguments)
            key = f"functional.{name} {index}"
            calls[key] = Call(getattr(functional, name), STOCK.get(name, getattr(F, name)), make)
    for name, (function, *_) in CONVOLUTIONS.items():
        make = partial(convolution, name)
        key = f"functional.{function} {name}"
        calls[key] = Call(getattr(functional, function), getattr(F, function), make)
    return calls


def weight() -> Tensor:
    return torch.randn(4, 3, 2, 2).requires_grad_()


def of_linear() -> list[Any]:
    """Return the arguments of a linear layer so large that half precision may be computed in float32."""
    return [torch.randn(3, 16, 64).requires_grad_(), torch.randn(48, 64).requires_grad_(), vector(48)]


# Statistics that a schema may write to are not for functionalization.
WRITING = CHECKS[:2]
CALLS = {
    **calls_of_functions(),
    "functional.linear": Call(functional.linear, F.linear, of_linear),
    "functional.linear without a bias": Call(functional.linear, F.linear, lambda: of_linear()[:2]),
    "linear": Call(nhwc.linear.default, F.linear, of_linear),
    "convert_weight": Call(nhwc.convert_weight.default, lambda w: w.clone(), lambda: [weight()]),
    "convert_weights": Call(
        nhwc.convert_weights.default, lambda ws: ws[0].clone(), lambda: [[leaf(4, 3, 3, 2, 3), weight().detach()]]
    ),
    "group_norm": Call(nhwc.group_norm.default, F.group_norm, lambda: [leaf(*IMAGE), 2, vector(6), vector(6)]),
    "instance_norm": Call(
        nhwc.instance_norm.default,
        F.instance_norm,
        lambda: [leaf(*IMAGE), None, None, vector(6), vector(6)],
        checks=WRITING,
    ),
    "instance_norm, running": Call(
        nhwc.instance_norm.default,
        F.instance_norm,
        lambda: [leaf(*IMAGE), *statistics(6), vector(6), vector(6), True],
        checks=WRITING,
    ),
    "batch_norm": Call(
        nhwc.batch_norm.default,
        F.batch_norm,
        lambda: [leaf(*ROWS), None, None, vector(8), vector(8), True],
        checks=WRITING,
    ),
    "normalize": Call(
        nhwc.normalize.default, rms_norm, lambda: [leaf(*IMAGE), vector(6), vector(6), 2.5, 1e-12, "silu"]
    ),
    "gelu": Call(nhwc.gelu.default, F.gelu, lambda: [leaf(*IMAGE)]),
    "softmax": Call(nhwc.softmax.default, F.softmax, lambda: [leaf(*IMAGE), 1]),
    "log_softmax": Call(nhwc.log_softmax.default, F.log_softmax, lambda: [leaf(*VOLUME), 1]),
    "avg_pool3d": Call(nhwc.avg_pool3d.default, F.avg_pool3d, lambda: [leaf(*VOLUME), [2, 2, 2]]),
    "adaptive_avg_pool3d": Call(
        nhwc.adaptive_avg_pool3d.default, F.adaptive_avg_pool3d, lambda: [leaf(*VOLUME), [2, 3, 2]]
    ),
    "adaptive_max_pool3d": Call(
        nhwc.adaptive_max_pool3d.default,
        partial(F.adaptive_max_pool3d, return_indices=True),
        lambda: [leaf(*VOLUME), [2, 3, 2]],
    ),
    "max_unpool3d": Call(
        nhwc.max_unpool3d.default,
        unpooled,
        lambda: [leaf(*POOLED), places(POOLED, 96), [4, 6, 4], [2, 2, 2], [0, 0, 0]],
    ),
    "pad_circular": Call(nhwc.pad_circular.default, circular, lambda: [leaf(*IMAGE), [1, 2, 0, 1]]),
    "pad": Call(nhwc.pad.default, F.pad, lambda: [leaf(*IMAGE), [1, 2, 0, 1], "reflect"]),
    "pad, circular": Call(nhwc.pad.default, F.pad, lambda: [leaf(*IMAGE), [1, 2, 0, 1], "circular"]),
    "interpolate": Call(
        nhwc.interpolate.default,
        lambda x, size, factor, mode: F.interpolate(x, size, factor, mode),
        lambda: [leaf(*IMAGE), None, [2.0, 1.5], "bilinear"],
    ),
    "conv2d": Call(nhwc.conv2d.default, F.conv2d, lambda: in_lists("both gradients", "spdg")),
    "conv2d.padding": Call(nhwc.conv2d.padding, F.conv2d, lambda: in_lists("same", "spdg")),
    "conv3d": Call(nhwc.conv3d.default, F.conv3d, lambda: in_lists("depthwise volume", "spdg")),
    "conv3d.padding": Call(
        nhwc.conv3d.padding, F.conv3d, lambda: [*in_lists("two samples", "s"), "same", [1, 1, 1], 1]
    ),
    "conv_transpose2d": Call(
        nhwc.conv_transpose2d.default, F.conv_transpose2d, lambda: in_lists("transposed groups", "spogd")
    ),
    "conv_transpose3d": Call(
        nhwc.conv_transpose3d.default, F.conv_transpose3d, lambda: in_lists("transposed volume", "spogd")
    ),
    "compiled_convolution": Call(
        nhwc.compiled_convolution.default, convolved, lambda: in_lists("both gradients", "spdg")
    ),
    "compiled_convolution, transposed": Call(
        nhwc.compiled_convolution.default, convolved, lambda: in_lists("transposed groups", "spdgo")
    ),
    "compiled_convolution.padding": Call(
        nhwc.compiled_convolution.padding, convolved, lambda: in_lists("same", "spdg")
    ),
    "convolution_by_kernels": Call(
        nhwc.convolution_by_kernels.default, aten.convolution, lambda: in_lists("both gradients", "spdtog")
    ),
    "convolution_by_kernels, transposed": Call(
        nhwc.convolution_by_kernels.default, aten.convolution, lambda: in_lists("transposed depthwise", "spdtog")
    ),
    "convolution_by_kernels_backward": Call(
        nhwc.convolution_by_kernels_backward.default,
        lambda grad, x, w, *others: aten.convolution_backward(grad, x, w, [w.shape[0]], *others),
        lambda: of_gradients("both gradients"),
    ),
    "native_group_norm": Call(
        nhwc.native_group_norm.default, F.group_norm, lambda: [leaf(*IMAGE), 2, vector(6), vector(6), 1e-5]
    ),
    "native_instance_norm": Call(
        nhwc.native_instance_norm.default,
        lambda x, w, b, eps: F.instance_norm(x, None, None, w, b, eps=eps),
        lambda: [leaf(*IMAGE), vector(6), vector(6), 1e-5],
    ),
    "native_batch_norm": Call(
        nhwc.native_batch_norm.default,
        F.batch_norm,
        lambda: [leaf(*ROWS), None, None, vector(8), vector(8), True, 0.1, 1e-5],
        checks=CHECKS[:3],
    ),
    "native_group_norm_backward": Call(
        nhwc.native_group_norm_backward.default,
        lambda grad, x, mean, rstd, w, groups, *_: adjoint(lambda x: F.group_norm(x, groups, w), grad, x),
        lambda: of_backward(x := leaf(*IMAGE).detach(), moments(x.reshape(2, 2, -1), (2,)), 2),
    ),
    "native_batch_norm_backward": Call(
        nhwc.native_batch_norm_backward.default,
        lambda grad, x, mean, rstd, w, *_: adjoint(lambda x: F.batch_norm(x, None, None, w, None, True), grad, x),
        lambda: of_backward(x := leaf(*IMAGE).detach(), moments(x, (0, 2, 3)), True),
    ),
    "native_pad_circular": Call(nhwc.native_pad_circular.default, circular, lambda: [leaf(*IMAGE), [1, 2, 0, 1]]),
    "native_resample": Call(
        nhwc.native_resample.default,
        lambda x, mode, size, _: F.interpolate(x, size, mode="bilinear"),
        lambda: [leaf(*IMAGE), "linear", [7, 8], [0.0, 0.0]],
    ),
    "native_resample, reflect": Call(
        nhwc.native_resample.default,
        lambda x, mode, size, _: F.pad(x, [1, 3, 2, 0], mode),
        lambda: [leaf(*IMAGE), "reflect", [6, 9], [2.0, 1.0]],
    ),
    "native_resample_backward": Call(
        nhwc.native_resample_backward.default,
        lambda grad, mode, size, _: adjoint(
            lambda x: F.interpolate(x, grad.shape[2:], mode="trilinear", align_corners=True),
            grad,
            torch.zeros_like(grad)[..., :4, :3, :5],
        ),
        lambda: [leaf(2, 6, 5, 7, 8), "align_corners", [4, 3, 5], [0.0] * 3],
    ),
    "native_pad_circular_backward": Call(
        nhwc.native_pad_circular_backward.default,
        lambda grad, pad: adjoint(lambda x: circular(x, pad), grad, torch.zeros_like(grad)[..., 1:, 3:]),
        lambda: [leaf(2, 6, 5, 8), [1, 2, 0, 1]],
    ),
}
# The steps of norms and convolutions that wait: results have no memory. Their tests are those of
# norms with activations, and of results that wait.
IN_STEPS = {
    nhwc.norm_waiting.default,
    nhwc.norm_waiting_sum.default,
    nhwc.waiting_become_.default,
    nhwc.convolution_waiting.default,
    nhwc.convolution_activation.default,
    nhwc.pad_waiting.default,
    nhwc.bias_waiting.default,
    nhwc.bias_activation.default,
    nhwc.waiting_like.default,
    nhwc.records_inputs.default,
    nhwc.norm_activation.default,
    nhwc.normalize_waiting.default,
}
# Operators whose results have no gradient: the arguments and the options of a call.
ANSWERS: dict[Any, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    # opcheck copies weights into larger memory, which only "fresh" may leave.
    nhwc.convert_weight_.default: lambda: ([weight().detach()], {"storage": "fresh"}),
    nhwc.convert_weights_.default: lambda: ([[weight().detach()]], {"storage": "fresh"}),
    nhwc.set_strides_.default: lambda: ([[weight().detach()], [12, 1, 6, 3]], {"storage": "fresh"}),
    nhwc.copy_weight_.default: lambda: ([torch.zeros(4, 3, 2, 2), weight().detach()], {}),
    nhwc.plan_weights.default: lambda: ([[weight().detach()]], {}),
    nhwc.mismatched_layouts.default: lambda: ([[weight().detach()], [weight().detach()]], {}),
    nhwc.convolution_way.default: lambda: (in_lists("both gradients", "spdg"), {}),
    nhwc.convolution_way.padding: lambda: (in_lists("same", "spdg"), {}),
    nhwc.computes_in_float32.default: lambda: ([torch.bfloat16], {}),
    nhwc.cpu_capability.default: lambda: ([], {}),
    nhwc.runs_cuda_norms.default: lambda: ([torch.device("cpu")], {}),
    nhwc.set_cuda_norms.default: lambda: ([torch.device("cpu"), []], {}),
    nhwc.missing_cuda_image.default: lambda: ([torch.device("cpu")], {}),
    nhwc.sentence.default: lambda: (["UNDEFINED"], {}),
}
# Properties that a call does not have, by the names of their tests.
ANY_ORDER, OTHER_FORMATS = "gradients_are_right_to_any_order", "other_formats_are_pytorch_s_bit_for_bit"
SECOND = "batched_gradients_of_second_order"
OF_HIGHER_ORDER = (
    *(ANY_ORDER, "higher_orders", "forward_mode", "batched_gradients", SECOND, "vmap"),
    *("autocast", "autocast_around_the_backward"),
)
LACKS = {
    # As PyTorch's.
    "functional.adaptive_avg_pool3d 1": ("scripting",),
    "functional.max_unpool3d 0": ("tracing", "batched_gradients", SECOND),
    "functional.max_unpool3d 1": ("batched_gradients", SECOND),
    "max_unpool3d": ("batched_gradients", SECOND, "wrong_arguments"),  # which the function looks at
    "normalize": ("wrong_arguments",),  # PyTorch's has no factors
    # As those of PyTorch's other pools of maxima on channels-last.
    "functional.adaptive_max_pool3d 0": (SECOND,),
    "functional.adaptive_max_pool3d 1": (SECOND,),
    "adaptive_max_pool3d": (SECOND,),
    **dict.fromkeys(
        ("functional.linear", "functional.linear without a bias", "linear"), ("autocast_around_the_backward",)
    ),
    **dict.fromkeys(("functional.interpolate 0", "functional.interpolate 2"), ("scripting",)),
    "functional.conv2d same": ("scripting",),
    "functional.conv2d same, even": ("scripting",),
    "functional.conv2d same, small": ("scripting",),
    "instance_norm, running": ("vmap", "batched_gradients", SECOND),
    # A permutation, which PyTorch's kernel has for less dtypes.
    "functional.pixel_shuffle 0": ("wrong_arguments",),
    "functional.pixel_unshuffle 0": ("wrong_arguments",),
    # Too large to be differentiated by differences.
    "functional.conv3d slabs": (ANY_ORDER,),
    "functional.conv3d inner products": (ANY_ORDER,),
    "functional.conv_transpose3d transposed slabs": (ANY_ORDER,),
    # Of both formats, or products of matrices in both.
    "functional.conv3d linear": (OTHER_FORMATS,),
    "functional.conv3d padded tap": (OTHER_FORMATS,),
    "functional.conv3d sliced volume": (OTHER_FORMATS,),
    "functional.conv_transpose3d one voxel": (OTHER_FORMATS,),
    # Those of ours that PyTorch does not have give channels-last for every format.
    "convert_weight": (OTHER_FORMATS,),
    "convert_weights": (OTHER_FORMATS,),
    "convolution_by_kernels": (OTHER_FORMATS,),
    "convolution_by_kernels, transposed": (OTHER_FORMATS,),
    "convolution_by_kernels_backward": (OTHER_FORMATS, "tracing"),
    "native_group_norm": (OTHER_FORMATS,),
    "native_instance_norm": (OTHER_FORMATS,),
    "native_batch_norm": (OTHER_FORMATS,),
    "native_pad_circular": (OTHER_FORMATS,),
    "native_resample": (OTHER_FORMATS,),
    "native_resample, reflect": (OTHER_FORMATS,),
    "native_resample_backward": (OTHER_FORMATS,),
    "native_pad_circular_backward": (OTHER_FORMATS,),
    # The forward has the derivatives of higher order.
    "native_group_norm_backward": (OTHER_FORMATS, "tracing", *OF_HIGHER_ORDER),
    "native_batch_norm_backward": (OTHER_FORMATS, "tracing", *OF_HIGHER_ORDER),
}
