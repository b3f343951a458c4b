"""Our kernels in compiled graphs: opaque operators, exactly where the table of ways says that they compute."""

import pytest
import torch
from activations import channels_last, gradients
from compiled_graphs import HAS_NUMBERS, compiled
from convolution_cases import operands, way_of
from selection import exhaustive
from torch.utils.flop_counter import FlopCounterMode

import torch_nhwc as nhwc
from torch_nhwc import functional

ops = torch.ops.nhwc
OURS = {"kernels", "kernels_in_part", "winograd"}
FORWARD, BACKWARD = "nhwc.convolution_by_kernels.default", "nhwc.convolution_by_kernels_backward.default"
CASES = {
    "depthwise": ("conv2d", (2, 16, 13, 12), (16, 1, 7, 7), (1, 3, 1, 16)),
    "depthwise 3x3": ("conv2d", (2, 16, 13, 12), (16, 1, 3, 3), (1, 1, 1, 16)),
    "same": ("conv2d", (2, 16, 13, 12), (16, 1, 5, 5), (1, "same", 1, 16)),
    "groups": ("conv2d", (2, 16, 13, 12), (16, 4, 3, 3), (1, 1, 1, 4)),
    "dense": ("conv2d", (2, 32, 9, 8), (32, 32, 3, 3), (1, 1)),
    "one tap": ("conv2d", (2, 16, 9, 8), (24, 16, 1, 1), ()),
    "one tap, few outputs": ("conv3d", (2, 16, 9, 8, 8), (2, 16, 1, 1, 1), (1, 0, 1, 1)),
    "depthwise 3d": ("conv3d", (1, 16, 6, 7, 5), (16, 1, 3, 3, 3), (1, 1, 1, 16)),
    "transposed": ("conv_transpose2d", (2, 16, 9, 8), (16, 1, 5, 5), (2, 2, 1, 16)),
}
FEW = ["depthwise", "transposed"]
every_case = pytest.mark.parametrize("name", CASES)


def ours(operators):
    return {each for each in operators if "nhwc" in each}


def graph_call(function, arguments, dynamic=False):
    return compiled(lambda x, w, b: getattr(functional, function)(x, w, b, *arguments), dynamic)


def in_order(case):
    """Return what the operators take after the bias or the weight."""
    stride, padding, dilation, groups, *more = (*case[3], *(1, 0, 1, 1)[len(case[3]) :])
    axes = len(case[2]) - 2
    if more or "transpose" in case[0]:
        return [stride] * axes, [padding] * axes, [1] * axes, True, [dilation] * axes, groups
    return [stride] * axes, [padding] * axes, [dilation] * axes, False, [0] * axes, groups


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, exhaustive(torch.bfloat16)], ids=str)
def test_a_graph_has_our_operators_where_the_kernels_compute(name, dtype):
    function, *_ = case = CASES[name]
    x, w, b, arguments = operands(case, dtype)
    eager = gradients(getattr(functional, function), (x, w, b), arguments=arguments)
    leaves = [each.detach().requires_grad_() for each in (x, w, b)]
    sizes = [2 if each == "same" else each for each in arguments]
    way, inference = way_of(function, *leaves, sizes), way_of(function, x, w, b, sizes)
    call, operators = graph_call(function, arguments)
    out = gradients(call, (x, w, b))
    for got, expected in zip(out, eager):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride() or not HAS_NUMBERS
    assert (BACKWARD in operators) == (HAS_NUMBERS and way in OURS)
    assert (FORWARD in operators) == (HAS_NUMBERS and inference in ("kernels", "winograd"))
    seen = len(operators)
    gradients(call, (x, w, b))
    assert len(operators) == seen  # nothing was compiled again


def test_without_gradients_only_the_forward_may_be_ours():
    x, w, b, arguments = operands(CASES["depthwise"])
    call, operators = graph_call("conv2d", arguments)
    with torch.no_grad():
        torch.testing.assert_close(call(x, w, b), functional.conv2d(x, w, b, *arguments))
    is_ours = HAS_NUMBERS and way_of("conv2d", x, w, b, arguments) == "kernels"
    assert ours(operators) == ({FORWARD} if is_ours else set())


def test_a_frozen_weight_leaves_the_gradient_of_the_input():
    x, w, b, arguments = operands(CASES["depthwise 3d"])
    call, operators = graph_call("conv3d", arguments)
    given, expected = (x.detach().requires_grad_() for _ in range(2))
    call(given, w, b).square().sum().backward()
    functional.conv3d(expected, w, b, *arguments).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)
    way = way_of("conv3d", expected, w, b, arguments)
    assert (BACKWARD in operators) == (HAS_NUMBERS and way in OURS)


@pytest.mark.parametrize("name", FEW)
def test_dynamic_sizes_are_pytorch_s(name):
    function, *_ = case = CASES[name]
    x, w, b, arguments = operands(case)
    call, operators = graph_call(function, arguments, dynamic=True)
    for given in (x, channels_last(torch.randn(3, 16, 21, 20))):
        got, expected = (
            gradients(call, (given, w, b)),
            gradients(getattr(functional, function), (given, w, b), arguments=arguments),
        )
        for each, real in zip(got, expected):
            torch.testing.assert_close(each, real, rtol=1e-4, atol=1e-4)
    assert not ours(operators)


def test_autocast():
    x, w, b, arguments = operands(CASES["depthwise"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        way = way_of("conv2d", x, w.detach().requires_grad_(), b, arguments)
        call, operators = graph_call("conv2d", arguments)
        got = gradients(call, (x, w, b))
        expected = gradients(functional.conv2d, (x, w, b), arguments=arguments)
    for each, real in zip(got, expected):
        torch.testing.assert_close(each, real, rtol=3e-2, atol=3e-2 * float(real.abs().max()))
    assert got[0].dtype == torch.bfloat16
    assert (BACKWARD in operators) == (HAS_NUMBERS and way in OURS)


def test_inductor_trains_as_eager_does():
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 7, padding=3, groups=16), torch.nn.GELU(), torch.nn.Conv2d(16, 4, 3)
    )
    model.to(memory_format=torch.channels_last)
    nhwc.convert_(model)
    x = channels_last(torch.randn(2, 16, 13, 12))
    steps = []
    for call in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        out = call(x)
        out.square().sum().backward()
        steps.append([out.detach(), *(each.grad.clone() for each in model.parameters())])
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-4)
    assert steps[0][0].stride() == steps[1][0].stride()


@pytest.mark.parametrize("strict", [False, exhaustive(True)])
def test_exported_programs_have_pytorch_s_convolution(strict):
    model = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)
    nhwc.convert_(model)
    program = torch.export.export(model, (channels_last(torch.randn(2, 16, 13, 12)),), strict=strict)
    for each in (program, program.run_decompositions()):
        targets = {str(node.target) for node in each.graph.nodes if node.op == "call_function"}
        assert not ours(targets)
        assert any("conv" in target for target in targets)


def test_the_operators_refuse_what_the_kernels_do_not_compute():
    case = CASES["depthwise"]
    x, w, b, _ = operands(case)
    sizes = in_order(case)

    def refuses(match, *arguments, of=ops.convolution_by_kernels):
        with pytest.raises(RuntimeError, match=match):
            of(*arguments)

    dtypes = "must be on one device, and all of float, double, half or bfloat16"
    refuses(dtypes, x, w.double(), b, *sizes)
    refuses(dtypes, x, w.to("meta"), b, *sizes)
    float8 = [each.to(torch.float8_e4m3fn) for each in (x, w, b)]
    refuses(dtypes, *float8, *sizes)
    for grad in (x, x.half()):
        refuses(dtypes, grad, *float8[:2], *sizes, [True] * 3, of=ops.convolution_by_kernels_backward)
    fit = "do not fit, or stride, padding, dilation or output padding have not a number for each axis"
    refuses(fit, x[:, 1:], w, b, *sizes)
    refuses(fit, x[:, :0], w[:, :0], b, *sizes[:-1], 1)
    for index in (1, 2, 4):
        refuses(fit, x, w, b, *[[] if at == index else each for at, each in enumerate(sizes)])
    refuses(fit, x, w[:0], None, *sizes)
    which = r"must be depthwise or, but for double, of one group. With groups, for a gradient of the"
    refuses(which, x, torch.randn(16, 8, 7, 7), b, *sizes[:-1], 2)
    dense, seven = [[1, 1], [3, 3], [1, 1], False, [0, 0], 1], torch.randn(16, 16, 7, 7)
    refuses(which, x, x, seven, *dense, [True] * 3, of=ops.convolution_by_kernels_backward)
    refuses(which, x, seven, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)
    doubles = [torch.randn(shape, dtype=torch.double) for shape in ((1, 4, 8, 8), (4, 4, 1, 1))]
    refuses(which, *doubles, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    grad = torch.randn(1, 16, 1, 1)
    refuses("the gradient has sizes", grad, x, w, *sizes, [True] * 3, of=ops.convolution_by_kernels_backward)


def test_whoever_observes_pytorch_s_operators_sees_its_convolution():
    x, w, b, arguments = operands(CASES["depthwise"])
    stride, padding, dilation, groups = arguments
    sizes = ([stride] * 2, [padding] * 2, [dilation] * 2, groups)
    with FlopCounterMode(display=False) as counter:
        out = ops.compiled_convolution(x, w, b, *sizes)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(out, functional.conv2d(x, w, b, *arguments))
