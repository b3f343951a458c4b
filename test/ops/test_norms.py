"""What batch norm, group norm and instance norm have in common: changes before the backward, and wrong operands."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import canonical, channels_last, gradients
from torch import nn

import torch_nhwc

pytestmark = pytest.mark.usefixtures("on_one_thread")
ops = torch.ops.nhwc
CHANGES = ("weight", "bias", "running_mean", "running_var", "training")
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 with float32": (torch.bfloat16, torch.float32),
}


def call(functions, kind, x, numbers, training):
    names = ("running_mean", "running_var", "weight", "bias")
    if kind == "group_norm":
        return functions.group_norm(x, 2, *(numbers.get(name) for name in names[2:]))
    return getattr(functions, kind)(x, *(numbers.get(name) for name in names), training)


def normed(functions, kind, x, weight=None, bias=None):
    """Return the norm in training, without running statistics."""
    return call(functions, kind, x, {"weight": weight, "bias": bias}, True)


every_norm = pytest.mark.parametrize("kind", ["batch_norm", "group_norm", "instance_norm"])


@every_norm
def test_not_a_number_stays_where_it_stays_in_pytorch(kind):
    x = torch.randn(2, 8, 20, 20)
    x[0, 3, 2, 2], x[1, 6, 1, 1] = torch.nan, torch.inf
    ours, stock = normed(torch_nhwc.functional, kind, channels_last(x)), normed(F, kind, x)
    assert torch.equal(ours.isnan(), stock.isnan())


def gradients_after(functions, kind, x, numbers, training, change):
    """Return the gradients after a change between forward and backward, or the error that PyTorch reports."""
    own = {name: each.clone() for name, each in numbers.items()}
    leaves = [x.detach().requires_grad_()]
    leaves += [own[name].requires_grad_() for name in ("weight", "bias") if name in own]
    out = call(functions, kind, leaves[0], own, training)
    with torch.no_grad():
        if change == "training":
            call(functions, kind, x + 3, own, True)
        elif change is not None:
            own[change].mul_(2)
    gradient = torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype)
    try:
        return torch.autograd.grad(out, leaves, gradient)
    except RuntimeError as error:
        return "modified by an inplace operation" if "modified by an inplace operation" in str(error) else str(error)


def cases(kind):
    for training, is_affine, is_tracked in itertools.product([True, False], repeat=3):
        if kind == "group_norm" and (is_tracked or not training):
            continue
        if training or is_tracked:
            yield training, is_affine, is_tracked


@pytest.mark.parametrize("arrange", [channels_last, torch.clone], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("shape", [(2, 4, 20, 20), (1, 4, 12, 9, 8), (2, 4, 190, 180)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES)
@every_norm
def test_a_change_before_the_backward_is_pytorch_s_error_or_changes_nothing(kind, dtypes, shape, arrange):
    """PyTorch's instance norm copies what its backward reads; the others report a change of what they save."""
    dtype, of_numbers = DTYPES[dtypes]
    x = torch.randn(shape).to(dtype)
    for training, is_affine, is_tracked in cases(kind):
        numbers = {"weight": torch.rand(4) + 0.5, "bias": torch.randn(4)} if is_affine else {}
        if is_tracked:
            numbers |= {"running_mean": torch.randn(4), "running_var": torch.rand(4) + 0.5}
        numbers = {name: each.to(of_numbers) for name, each in numbers.items()}
        unchanged = gradients_after(torch_nhwc.functional, kind, arrange(x), numbers, training, None)
        for change in CHANGES:
            if change not in numbers and not (change == "training" and is_tracked):
                continue
            ours = gradients_after(torch_nhwc.functional, kind, arrange(x), numbers, training, change)
            stock = gradients_after(F, kind, x, numbers, training, change)
            assert isinstance(ours, str) == isinstance(stock, str), (change, training, ours, stock)
            if isinstance(stock, str):
                assert ours == stock
                continue
            if (kind, training, change) == ("batch_norm", False, "training"):
                continue  # PyTorch's gradients are those of the new statistics, without a word
            for own, expected in zip(ours, unchanged, strict=True):
                assert torch.equal(own, expected), (change, training)
            tolerance = {"rtol": 1e-3, "atol": 2e-2} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2.0}
            torch.testing.assert_close(ours[0], stock[0], rtol=tolerance["rtol"], atol=1e-2)
            torch.testing.assert_close(ours[1:], stock[1:], **tolerance)


def test_training_steps_between_evaluation_and_its_backward():
    layers = [torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval() for _ in range(2)]
    torch_nhwc.convert_(layers[0])
    images = torch.randn(2, 4, 5, 5)
    found = []
    for layer, arrange in zip(layers, (channels_last, torch.clone)):
        x = arrange(images).detach().requires_grad_()
        out = layer(x)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer.train()(x.detach() + 1).square().sum().backward()
        optimizer.step()
        layer.zero_grad()
        out.square().sum().backward()
        found.append((x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var))
    torch.testing.assert_close(*found)
    assert found[0][0].stride() == canonical(images.shape)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 6, 7), (2, 8, 3, 4, 5), (4, 6, 33), (2, 3, 200, 150)], ids=str)
def test_running_statistics_of_instance_norm(shape, dtypes):
    """As PyTorch's: averages over the samples, in the statistics' dtype; and the version counts the change."""
    dtype, of_numbers = DTYPES[dtypes]
    x = (torch.randn(shape) * 3 + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    running = [(torch.randn(shape[1]).to(of_numbers), torch.rand(shape[1]).to(of_numbers))]
    running += [tuple(each.double() for each in running[0])]
    ops.instance_norm(channels_last(x), *running[0], None, None, True, 0.3)
    F.instance_norm(x.double(), *running[1], None, None, True, 0.3)
    # PyTorch's own are off by 1e-2 for bfloat16 with statistics of float32.
    tolerance = {torch.float32: 5e-7, torch.bfloat16: 5e-3}[of_numbers]
    for own, exact in zip(*running, strict=True):
        assert own.dtype == of_numbers
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)
    exact = x.double().flatten(2)
    torch.testing.assert_close(
        ops.native_instance_norm(channels_last(x), None, None, 1e-5)[3].double(),
        exact.var(2, correction=0),
        rtol=1e-6,
        atol=0,
    )
    assert all(each._version == 1 for each in running[0])


def test_instance_norm_keeps_the_format_for_running_statistics_of_any_dtype():
    x = torch.randn(2, 4, 6, 7).bfloat16()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        running = [(torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)) for _ in range(2)]
        weight = torch.rand(4).bfloat16()
        out = ops.instance_norm(channels_last(x), *running[0], weight, None, True, 0.5)
        expected = F.instance_norm(x, *running[1], weight, None, True, 0.5)
        assert out.stride() == canonical(x.shape)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(*running, rtol=1e-2, atol=1e-2)


def test_an_infinite_activation_in_instance_norm():
    x = torch.randn(2, 6, 40, 40)
    x[0, 0, 3, 3], x[1, 1, 39, 39], x[0, 2, 0, 0], x[1, 2, 5, 5] = torch.inf, -torch.inf, torch.inf, -torch.inf
    x[1, 3, 7, 7] = torch.nan
    running = [(torch.zeros(6), torch.ones(6)) for _ in range(2)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        ours = ops.instance_norm(channels_last(x), *running[0])
        stock = F.instance_norm(x, *running[1], use_input_stats=True)
        torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*running, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert running[0][0][:4].tolist()[:2] == [torch.inf, -torch.inf]


def backward_of(kind, gradient, x, mean, rstd, weight):
    if kind == "group_norm":
        return ops.native_group_norm_backward(gradient, x, mean, rstd, weight, 2, 1e-5, [True] * 3)
    return ops.native_batch_norm_backward(gradient, x, mean, rstd, weight, kind == "training", 1e-5, [True] * 3)


KINDS = ("group_norm", "training", "evaluation")
WRONG = {
    "a short mean": (lambda o: o | {"mean": o["mean"][..., :1]}, "a mean of Float and of shape .*, got one of Float"),
    "a long mean": (lambda o: o | {"mean": o["mean"].repeat(1, 2)}, "a mean of Float and of shape"),
    "a mean of another dtype": (lambda o: o | {"mean": o["mean"].double()}, "a mean of Float .*, got one of Double"),
    "no rstd": (lambda o: o | {"rstd": o["rstd"][:0]}, "a reciprocal deviation of Float and of shape .*strides"),
    "an rstd of half": (lambda o: o | {"rstd": o["rstd"].half()}, "a reciprocal deviation .*, got one of Half"),
    "a scalar": (lambda o: o | {"rstd": o["rstd"].sum()}, "a reciprocal deviation .*of shape \\[\\]"),
    "a short gradient": (lambda o: o | {"gradient": o["gradient"][:1]}, "a gradient of Float .*of shape \\[1, 8"),
    "a gradient of another dtype": (lambda o: o | {"gradient": o["gradient"].double()}, "a gradient of Float"),
    "a short weight": (lambda o: o | {"weight": o["weight"][:7]}, "of 8 elements, got one of shape \\[7\\]"),
    "a weight of another dtype": (lambda o: o | {"weight": o["weight"].double()}, "running statistics of Float"),
    "no samples": (lambda o: o | {name: o[name][:0] for name in ("x", "gradient")}, "an input with elements"),
    "no channels": (
        lambda o: o | {name: o[name][:, :0] for name in ("x", "gradient")} | {"weight": o["weight"][:0]},
        "an input with elements",
    ),
    "two dimensions": (lambda o: o | {"x": o["x"][0, 0]}, "an input of . (to|or) 5 dimensions, got 2"),
    "integers": (lambda o: o | {"x": o["x"].int()}, "an input of float, double, half or bfloat16, got Int"),
}


def operands(kind):
    sizes = (2, 2) if kind == "group_norm" else (8,)
    x, gradient = (channels_last(torch.randn(2, 8, 4, 5)) for _ in range(2))
    numbers = {"mean": torch.randn(sizes), "rstd": torch.rand(sizes) + 0.5, "weight": torch.rand(8)}
    return {"gradient": gradient, "x": x} | numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_operands_of_the_backward_are_an_error(wrong, kind):
    change, text = WRONG[wrong]
    given = change(operands(kind))
    for each in (given, {name: value.to("meta") for name, value in given.items()}):
        with pytest.raises(RuntimeError, match=text):
            backward_of(kind, **each)
    if given["x"].is_floating_point():  # the composed backward, which derivatives of higher order call
        with pytest.raises(RuntimeError, match=text):
            backward_of(kind, **given | {"x": given["x"].requires_grad_()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gradient", "mean", "rstd"])
def test_operands_of_the_backward_on_another_device_are_an_error(name, kind):
    given = operands(kind)
    with pytest.raises(RuntimeError, match=r"expected a .* on cpu, got one of .* on meta"):
        backward_of(kind, **given | {name: given[name].to("meta")})


@pytest.mark.parametrize("kind", KINDS)
def test_operands_of_any_strides(kind):
    given = operands(kind)
    expected = backward_of(kind, **given)
    spread = {name: torch.stack([each, each], dim=-1)[..., 0] for name, each in given.items()}
    assert not spread["mean"].is_contiguous()
    assert torch.equal(
        torch.cat([each.flatten() for each in expected]),
        torch.cat([each.flatten() for each in backward_of(kind, **spread)]),
    )
    spread = given | {name: given[name].t().contiguous().t() for name in ("mean", "rstd")}
    for own, other in zip(expected, backward_of(kind, **spread), strict=True):
        assert torch.equal(own, other)
        assert own.stride() == other.stride()


@pytest.mark.parametrize("shape", [(1, 64, 48, 48), (1, 16, 24, 24, 24), (5, 32, 40, 40)], ids=str)
@every_norm
def test_threads_give_the_same_numbers_every_time(kind, shape):
    x, gradient = (channels_last(torch.randn(shape) + mean) for mean in (10, 0))
    tensors = x, torch.rand(shape[1]), torch.randn(shape[1])

    def run(threads):
        torch.set_num_threads(threads)
        running = {"running_mean": torch.zeros(shape[1]), "running_var": torch.ones(shape[1])}

        def norm(x, weight, bias):
            return call(torch_nhwc.functional, kind, x, running | {"weight": weight, "bias": bias}, True)

        return [*gradients(norm, tensors, gradient), *running.values()]

    expected = run(1)
    for threads in (1, 2, 4, 5):
        first, second = run(threads), run(threads)
        assert all(map(torch.equal, first, second))
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 8, 4, 5), torch.float32), ((1, 6, 2, 3, 2), torch.bfloat16)])
@pytest.mark.parametrize("kind", [*KINDS, "instance_norm"])
def test_other_devices_get_the_same_from_pytorchs_own_kernels(kind, shape, dtype):
    """The kernels of all devices that are no CPU, run here on the tensors of one."""
    elsewhere = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    x, gradient = (channels_last(torch.randn(shape).to(dtype)) for _ in range(2))
    mean, variance, weight, bias = (torch.rand(shape[1]).to(dtype) + 0.5 for _ in range(4))
    is_training = kind == "training"

    def both(name, *arguments):
        operator, runs = getattr(ops, name).default, []
        for function in (operator, partial(operator.redispatch, elsewhere)):
            given = copy.deepcopy(arguments)  # running statistics change
            runs.append([*function(*given), *given])
        torch.testing.assert_close(*runs, **({"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}))
        assert runs[0][0].stride() == runs[1][0].stride()
        return runs[0]

    if kind == "instance_norm":
        both("native_instance_norm", x, weight, bias, 1e-5)
    elif kind == "group_norm":
        saved = both("native_group_norm", x, 2, weight, bias, 1e-5)[1:3]
        both("native_group_norm_backward", gradient, x, *saved, weight, 2, 1e-5, [True] * 3)
    else:
        saved = both("native_batch_norm", x, mean, variance, weight, bias, is_training, 0.1, 1e-5)[1:3]
        both("native_batch_norm_backward", gradient, x, *saved, weight, is_training, 1e-5, [True] * 3)


@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm3d(8, affine=True)])
def test_parameters_on_another_device_are_refused_as_by_pytorch(make):
    model = nn.Sequential(make())
    torch_nhwc.convert_(model)
    x = channels_last(torch.randn(1, 8, *[6] * (3 if isinstance(model[0], nn.InstanceNorm3d) else 2)))
    model(x)
    model.to("meta")
    with pytest.raises(RuntimeError, match="not on the expected device"):
        model(x)


def test_numbers_are_no_activations():
    number = torch.tensor(1.0)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        torch.ops.nhwc.batch_norm(number, None, None, None, None, True, 0.1, 1e-5)
    for pad in (torch.ops.nhwc.native_pad_circular, torch.ops.nhwc.native_pad_circular_backward):
        with pytest.raises(RuntimeError, match="expected two numbers for each spatial dimension"):
            pad(number, [0, 2, 3, 1])
