"""Norms with a residual and an activation in the same pass: values, gradients, and what is refused."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import TOLERANCES, assert_in_format, channels_last

import torch_nhwc
from torch_nhwc import functional

pytestmark = pytest.mark.usefixtures("on_one_thread")
ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}
# Rows that fill registers and that do not, few rows, more rows than a block, one channel in a group.
SHAPES = [(2, 12, 20, 21), (2, 64, 3, 3), (1, 5, 40, 7), (1, 24, 5, 6, 9), (1, 8, 60, 60), (3, 40, 4, 4)]
KINDS = ("group_norm", "instance_norm", "batch_norm", "evaluation")
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def norm(functions, kind, x, weight, bias, mean, variance, **following):
    if kind == "group_norm":
        groups = 2 if x.shape[1] % 2 == 0 else x.shape[1]
        return functions.group_norm(x, groups, weight, bias, **following)
    if kind == "instance_norm":
        return functions.instance_norm(x, None, None, weight, bias, **following)
    return functions.batch_norm(x, mean, variance, weight, bias, kind == "batch_norm", **following)


def operands(shape, dtype=torch.float32, has_residual=False):
    channels = shape[1]
    x, residual = (channels_last(torch.randn(shape) * 2 + 1).to(dtype).requires_grad_() for _ in range(2))
    weight, bias, mean = (torch.randn(channels).to(dtype) for _ in range(3))
    variance = torch.rand(channels).to(dtype) + 0.5
    return [x, weight.requires_grad_(), bias.requires_grad_(), mean, variance, residual if has_residual else None]


def followed(kind, tensors, activation):
    """Return what PyTorch's own functions give, one after the other."""
    *norms, residual = tensors
    out = norm(F, kind, *norms)
    return ACTIVATIONS[activation](out if residual is None else out + residual)


def in_one_pass(kind, tensors, activation):
    *norms, residual = tensors
    return norm(functional, kind, *norms, activation=activation, residual=residual, negative_slope=0.2)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@every_activation
@every_kind
def test_values_and_gradients_are_those_of_the_functions_in_turn(kind, activation, dtype, has_residual):
    # With a residual the output tells where ReLU6 is flat, as in PyTorch: in half precision a little less rounds to 6.
    rounds = has_residual and activation == "relu6" and dtype.itemsize == 2
    for shape in SHAPES:
        ours = operands(shape, dtype, has_residual)
        exact = [each if each is None else each.detach().double().requires_grad_() for each in ours]
        running = [None if each is None else each.detach().clone() for each in ours[3:5]]
        ours[3:5] = running
        exact[3:5] = [each.double().clone() for each in running]
        out, expected = in_one_pass(kind, ours, activation), followed(kind, exact, activation)
        assert_in_format(out)
        gradient = torch.randn(shape).to(dtype)
        given = [each for each in (*ours[:3], ours[5]) if each is not None]
        wanted = [each for each in (*exact[:3], exact[5]) if each is not None]
        found = torch.autograd.grad(out, given, gradient)
        right = torch.autograd.grad(expected, wanted, gradient.double())
        stock = torch.autograd.grad(followed(kind, ours, activation), ours[:3], gradient) if rounds else ()
        for index, (one, other) in enumerate(zip((out, *found, *running), (expected, *right, *exact[3:5]))):
            error, allowed = (one.double() - other).norm(), TOLERANCES[dtype] * other.norm()
            if rounds and 0 < index < 4:
                allowed += 3 * (stock[index - 1].double() - other).norm()
            assert error <= (allowed if index < 4 or not rounds else torch.inf), shape


@every_activation
def test_errors_are_not_larger_than_those_of_contiguous_pytorch(activation):
    tensors = operands((2, 32, 40, 40))
    exact = [each if each is None else each.detach().double().requires_grad_() for each in tensors]
    contiguous = [tensors[0].detach().contiguous().requires_grad_(), *tensors[1:]]
    gradient = torch.randn(2, 32, 40, 40)

    def results(out, given, grad):
        return [out, *torch.autograd.grad(out, given[:3], grad)]

    ours = results(in_one_pass("group_norm", tensors, activation), tensors, gradient)
    stock = results(followed("group_norm", contiguous, activation), contiguous, gradient)
    right = results(followed("group_norm", exact, activation), exact, gradient.double())
    for one, other, each in zip(ours, stock, right):
        assert (one.double() - each).norm() <= 2 * (other.double() - each).norm()


@every_activation
@every_kind
def test_derivatives_of_higher_order_forward_mode_and_transforms(kind, activation):
    x, weight, bias, mean, variance, residual = operands((2, 4, 3, 3), torch.float64, has_residual=True)

    def call(x, weight, bias, residual):
        following = {"activation": activation, "residual": residual, "negative_slope": 0.2}
        return norm(functional, kind, x, weight, bias, mean, variance, **following)

    given = (x, weight, bias, residual)
    # Batch norm would update the running statistics in each of the evaluations.
    if kind != "batch_norm":
        # Of those with exponentials, PyTorch's own take no batches of gradients in channels-last.
        is_linear = activation in (None, "relu", "relu6", "leaky_relu")
        assert torch.autograd.gradcheck(call, given, check_forward_ad=True, check_batched_grad=is_linear)
    if activation not in ("relu6",):
        assert torch.autograd.gradgradcheck(call, given)
    if kind == "group_norm":
        batched = torch.func.vmap(call, (0, None, None, 0))(x[None].detach(), weight, bias, residual[None].detach())
        assert torch.allclose(batched[0], call(*given))
        _, tangent = torch.func.jvp(lambda x: call(x, weight, bias, residual), (x,), (torch.ones_like(x),))
        assert tangent.shape == x.shape


@pytest.mark.parametrize("threads", [1, 2])
def test_results_do_not_depend_on_what_else_a_thread_does(threads):
    torch.set_num_threads(threads)
    tensors = operands((1, 16, 90, 90))
    out = in_one_pass("group_norm", tensors, "silu")
    expected = followed("group_norm", [each if each is None else each.double() for each in tensors], "silu")
    assert (out - expected).norm() <= 4e-6 * expected.norm()


def test_what_is_no_number_stays_none():
    x = channels_last(torch.randn(2, 8, 20, 20))
    x[0, 3, 2, 2], x[1, 6, 1, 1] = torch.nan, torch.inf
    for activation, kind in itertools.product(("relu", "relu6", "leaky_relu", "silu"), ("group_norm", "batch_norm")):
        numbers = (torch.ones(8), torch.zeros(8), None, None, None)
        ours = in_one_pass(kind, [x, *numbers], activation)
        stock = followed(kind, [x.contiguous(), *numbers], activation)
        assert torch.equal(ours.isnan(), stock.isnan())


@every_kind
def test_torchscript_and_the_compiler_take_them(kind):
    x, weight, bias, mean, variance, residual = (
        each if each is None else each.detach() for each in operands((2, 8, 9, 10), has_residual=True)
    )
    for activation in ("silu", "gelu_tanh", None):
        expected = in_one_pass(kind, [x, weight, bias, mean.clone(), variance.clone(), residual], activation)
        following = {"activation": activation, "residual": residual, "negative_slope": 0.2}
        if kind != "instance_norm":
            function = getattr(functional, "group_norm" if kind == "group_norm" else "batch_norm")
            scripted = torch.jit.script(function)
            if kind == "group_norm":
                out = scripted(x, 2, weight, bias, **following)
            else:
                numbers = (mean.clone(), variance.clone(), weight, bias, kind == "batch_norm")
                out = scripted(x, *numbers, **following)
            assert torch.allclose(out, expected, atol=1e-5)
        tensors = (x, weight, bias, mean.clone(), variance.clone())
        torch.compiler.reset()
        compiled = torch.compile(lambda: norm(functional, kind, *tensors, **following), backend="eager", fullgraph=True)
        assert torch.allclose(compiled(), expected, atol=1e-5)


def test_an_activation_that_does_not_exist_is_refused():
    x = channels_last(torch.randn(2, 8, 4, 4))
    for kind in KINDS[:3]:
        with pytest.raises(ValueError, match="expected relu, relu6, leaky_relu, silu, gelu or gelu_tanh, got 'tanh'"):
            norm(functional, kind, x, None, None, None, None, activation="tanh")


def test_the_operators_check_their_arguments():
    x = channels_last(torch.randn(2, 8, 6, 6))
    mean, deviation, waiting = torch.ops.nhwc.norm_waiting(x, None, None, None, None, 2, True, 0.1, 1e-5, False)
    assert mean.shape == deviation.shape == (2, 2)
    assert waiting.shape == x.shape
    assert waiting.stride() == x.stride()
    options = (None, None, None, 2, True, 1e-5, False)
    with pytest.raises(ValueError, match='got "tanh"'):
        torch.ops.nhwc.norm_activation(x, mean, deviation, *options, "tanh", 0.0)
    with pytest.raises(RuntimeError, match="expected leaky_relu and one slope, or one for each channel, on cpu"):
        torch.ops.nhwc.norm_activation(x, mean, deviation, *options, "relu", 0.0, torch.ones(1))
    with pytest.raises(RuntimeError, match=r"got leaky_relu and \[3\] on cpu"):
        torch.ops.nhwc.norm_activation(x, mean, deviation, *options, "leaky_relu", 0.0, torch.ones(3))
    with pytest.raises(RuntimeError, match="expected dense statistics of double"):
        torch.ops.nhwc.norm_activation(x, mean.float(), deviation, *options, "relu", 0.0)
    with pytest.raises(RuntimeError, match=r"expected dense statistics of double and of shape \[2, 2\]"):
        torch.ops.nhwc.norm_activation(x, mean[:1], deviation, *options, "relu", 0.0)
    with pytest.raises(RuntimeError, match="same sizes, strides and dtype"):
        torch.ops.nhwc.waiting_become_(waiting, x[:1])
    # What is not computed in two steps: a contiguous activation, another device, one value in a group.
    for other in (x.contiguous(), x.to("meta"), channels_last(torch.randn(1, 2, 1, 1)), torch.randn(3, 4)):
        assert torch.ops.nhwc.norm_waiting(other, None, None, None, None, 2, True, 0.1, 1e-5, False)[2] is None


def test_opcheck():
    tensors = operands((2, 8, 5, 6))
    mean, deviation, _ = torch.ops.nhwc.norm_waiting(*tensors[:1], None, None, *tensors[1:3], 2, True, 0.1, 1e-5, False)
    for activation, residual in (("silu", None), ("relu", tensors[0].detach())):
        parameter = float("inf")
        arguments = (tensors[0], mean, deviation, *tensors[1:3], residual, 2, True, 1e-5, False, activation, parameter)
        torch.library.opcheck(torch.ops.nhwc.norm_activation.default, arguments)
    assert torch_nhwc.functional.group_norm(tensors[0], 2, activation="silu").requires_grad
