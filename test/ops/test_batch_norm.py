"""Batch norm on channels-last: values, running statistics, every kind of derivative, formats, accuracy, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import FORMATS, canonical, channels_last
from selection import some_of
from torch.func import functional_call, vmap

import torch_nhwc
from torch_nhwc import functional
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import Preserving

pytestmark = pytest.mark.usefixtures("on_one_thread")
ops = torch.ops.nhwc
# So many rows a thread are computed by our kernels: a batch and a volume, channels that fill registers or do not.
SHAPES = [
    (2, 8, 24, 24),
    (3, 20, 31, 17),
    (1, 33, 600, 1),
    (600, 5, 1, 1),
    (1, 64, 8, 9, 10),
    (2, 3, 12, 7, 9),
    (4, 320, 18, 18),
]
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float64": (torch.float64, torch.float64),
    "bfloat16 with float32": (torch.bfloat16, torch.float32),
    "float16 with float32": (torch.float16, torch.float32),
}
NAMES = ("output", "running mean", "running variance", "input's gradient", "weight's gradient", "bias's gradient")


def tensors(shape, dtype=torch.float32, parameters=None, mean=0.0):
    """Return an input, running statistics, a weight, a bias and a gradient."""
    x, gradient = (torch.randn(shape) + mean).to(dtype), torch.randn(shape).to(dtype)
    numbers = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5, 1 + 0.1 * torch.randn(shape[1]), torch.randn(shape[1])
    return x, *(each.to(parameters or dtype) for each in numbers), gradient


def results(norm, x, running_mean, running_var, weight, bias, gradient, training=True, momentum=0.3, eps=1e-5):
    """Return what `NAMES` names, after one call on copies of the running statistics."""
    running = [None if each is None else each.clone() for each in (running_mean, running_var)]
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    out = norm(leaves[0], *running, *leaves[1:], training, momentum, eps)
    return [out.detach(), *running, *torch.autograd.grad(out, leaves, gradient)]


def error(value, exact):
    """Return the difference in units of the exact value, both by their norms."""
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def of_three(given, **options):
    """Return the results of ours on channels-last, of PyTorch's on contiguous, and of that in float64."""
    x, *numbers, gradient = given
    norm = ops.batch_norm if options.get("training", True) else native  # which leaves evaluation to more rows
    ours = results(norm, channels_last(x), *numbers, channels_last(gradient), **options)
    stock = results(F.batch_norm, *given, **options)
    exact = results(F.batch_norm, *(each.double() for each in given), **options)
    return ours, stock, exact


def native(x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Call our kernels for any number of rows."""
    return ops.native_batch_norm(x, mean, variance, weight, bias, training, momentum, eps)[0]


def is_ours(out):
    return out.grad_fn.name() == "NhwcBatchNormBackward"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_statistics_and_gradients(shape, dtypes, training):
    given = tensors(shape, *DTYPES[dtypes])
    ours, stock, exact = of_three(given, training=training)
    for index in (0, 3):
        assert ours[index].stride() == canonical(shape)
    assert is_ours(ops.batch_norm(channels_last(given[0]).requires_grad_(), *given[1:5], True))
    for name, own, other, right in zip(NAMES, ours, stock, exact, strict=True):
        assert own.dtype == other.dtype, name
        least = 1e-13 if given[0].dtype == torch.float64 else torch.finfo(own.dtype).eps / 2
        assert error(own, right) <= 2 * error(other, right) + least, name


@pytest.mark.parametrize("corner", [False, True])
@pytest.mark.parametrize("mean", some_of([1, 10, 100, 1000], 1, 100))
def test_as_accurate_as_contiguous_far_from_zero(mean, corner):
    for shape in ((2, 16, 24, 24, 24), (4, 64, 40, 40), (2, 3, 250, 200)):
        given = tensors(shape, mean=float(mean))
        if corner:
            given[0].flatten(2)[..., 0] = 0
        for name, own, other, right in zip(NAMES, *of_three(given), strict=True):
            assert error(own, right) <= 2 * error(other, right) + torch.finfo(torch.float32).eps / 2, name


@pytest.mark.parametrize("training", [True, False])
def test_more_rows_make_no_larger_error(training):
    """PyTorch's are off by 1e-5 to 1e-3 here: in evaluation the gradients of the parameters, in training everything."""
    x, *numbers, gradient = tensors((1, 4, 512, 1024), mean=1.0)
    ours = results(ops.batch_norm, channels_last(x), *numbers, channels_last(gradient), training=training)
    exact = results(F.batch_norm, *(each.double() for each in (x, *numbers, gradient)), training=training)
    assert all(error(own, right) < 2e-6 for own, right in zip(ours, exact, strict=True))


@pytest.mark.parametrize(("rows", "training"), [(256, True), (319, True), (32767, False)])
@pytest.mark.parametrize("mean", [0, 1])
def test_pytorch_s_kernel_is_accurate_where_it_stays(rows, training, mean):
    for gradients_mean in (0, 1):  # of 1: the gradient of the weight is a small difference of large numbers
        x, *numbers, gradient = tensors((1, 16, rows, 1), mean=float(mean))
        numbers[0] = numbers[0] * 0 + mean
        given = (x, *numbers, gradient + gradients_mean)
        x = channels_last(x)
        assert not is_ours(ops.batch_norm(x.requires_grad_(), *numbers, training))
        stock = results(ops.batch_norm, x, *numbers, channels_last(given[-1]), training=training)
        exact = results(F.batch_norm, *(each.double() for each in given), training=training)
        assert all(error(own, right) < 1e-5 for own, right in zip(stock, exact, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(1, 32, 3, 12), (1, 4, 3, 3, 5)], ids=str)
def test_an_image_that_was_permuted_and_unsqueezed(shape, training):
    """PyTorch's gradient goes by the stride of the batch of 1, and is wrong for a contiguous gradient of the output."""
    x = torch.randn(*shape[2:], shape[1]).movedim(-1, 0)[None]
    assert x.stride() != channels_last(x).stride()
    statistics, gradient = (torch.zeros(shape[1]), torch.ones(shape[1])), torch.randn(shape)
    results = []
    for function, given in ((F.batch_norm, x.double().contiguous()), (functional.batch_norm, x)):
        running = [each.to(given.dtype, copy=True) for each in statistics]
        given.requires_grad_()
        out = function(given, *running, training=training)
        out.backward(gradient.to(given.dtype))
        results.append((out.detach(), given.grad, *running))
    for real, ours in zip(*results):
        torch.testing.assert_close(ours.double(), real, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_missing_parameters_and_statistics(training):
    x, mean, variance, weight, bias, gradient = tensors((2, 12, 20, 20))
    for has_weight, has_bias, is_tracked in itertools.product([False, True], repeat=3):
        if not (training or is_tracked):
            continue
        numbers = [each if is_tracked else None for each in (mean, variance)]
        numbers += [weight if has_weight else None, bias if has_bias else None]
        runs = []
        for norm, arrange in ((native, channels_last), (F.batch_norm, torch.clone)):
            given = arrange(x).detach().requires_grad_()
            own = [None if each is None else each.clone() for each in numbers]
            out = norm(given, *own, training, 0.2, 1e-3)
            assert is_ours(out) == (norm is native)
            out.backward(arrange(gradient))
            runs.append((out, given.grad, *own))
        torch.testing.assert_close(*runs)


def test_evaluation_gives_pytorch_s_output_and_a_gradient_without_the_input():
    x, *numbers, gradient = tensors((2, 8, 20, 20))
    x, gradient = channels_last(x), channels_last(gradient)
    x[0, 3, 2, 2], x[1, 6, 1, 1] = torch.nan, torch.inf
    expected = F.batch_norm(x, *numbers)
    out = native(x.requires_grad_(), *numbers)
    for each in (out, ops.batch_norm(x.detach(), *numbers)):  # the latter by PyTorch's operator
        torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)
    out.backward(gradient)
    assert x.grad.isfinite().all()
    exact = gradient.double() * (numbers[2] / (numbers[1].double() + 1e-5).sqrt()).view(1, 8, 1, 1)
    assert error(x.grad, exact) < 1e-7


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_tracer_s_check_without_a_gradient_sees_the_same_graph():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    torch_nhwc.convert_(model, input_format="channels_last")
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


def test_training_between_forward_and_backward_of_evaluation_changes_no_gradient():
    x, mean, variance, weight, bias, gradient = tensors((2, 8, 20, 20))
    x = channels_last(x)
    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(native(x, mean, variance, leaf, bias), leaf, gradient)
    out, versions = native(x, mean, variance, leaf, bias), (mean._version, variance._version)
    ops.batch_norm(x + 3, mean, variance, leaf, bias, True)
    assert (mean._version, variance._version) == versions  # PyTorch's operator increments none either
    (found,) = torch.autograd.grad(out, leaf, gradient)
    assert torch.equal(found, expected)


def test_constant_channels():
    x = torch.full((2, 8, 20, 20), 0.1)
    x[:, 4:] = 1e4
    x.requires_grad_()
    running = torch.zeros(8), torch.ones(8)
    out = ops.batch_norm(channels_last(x), *running, None, None, True, 1.0)
    assert out.abs().max() < 1e-3
    torch.testing.assert_close(running, (x[0, :, 0, 0].detach(), torch.zeros(8)), atol=1e-10, rtol=1e-6)


def test_models_of_several_weights_under_vmap():
    """As `torch.func.stack_module_state` is used: parameters and running statistics are batched."""
    layers = [torch.nn.BatchNorm2d(4).double() for _ in range(3)]
    state = {name: torch.stack([layer.state_dict()[name] for layer in layers]) for name in layers[0].state_dict()}
    x = channels_last(torch.randn(2, 4, 20, 20).double())

    def call(norm):
        mine = {name: each.clone() for name, each in state.items()}

        def one(m, v, w, b):
            return norm(x, m, v, w, b, True, 0.1, 1e-5)

        out = vmap(one)(*(mine[name] for name in ("running_mean", "running_var", "weight", "bias")))
        return out, mine

    torch.testing.assert_close(call(ops.batch_norm), call(F.batch_norm))
    assert functional_call(layers[0], {}, (x,)).shape == x.shape


def test_rows_for_each_thread_decide():
    for threads, channels, rows, training in (
        (1, 8, 320, True),
        (2, 8, 640, True),
        (1, 600, 320, True),
        (1, 2, 32768, False),
    ):
        torch.set_num_threads(threads)
        running = torch.zeros(channels), torch.ones(channels)
        for taken in (rows, rows - 1):
            x = channels_last(torch.randn(1, channels, taken, 1)).requires_grad_()
            assert is_ours(ops.batch_norm(x, *running, None, None, training)) == (taken == rows)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.BatchNorm2d, torch.nn.BatchNorm3d])
def test_layers_count_batches_and_average_as_pytorch_s(kind, track, momentum):
    shape = (2, 6, 20, 20) if kind is torch.nn.BatchNorm2d else (2, 6, 3, 16, 16)
    ours, stock = (kind(6, momentum=momentum, track_running_stats=track, eps=1e-3) for _ in range(2))
    swap_class(ours, Preserving)
    for step in range(4):
        x = torch.randn(shape) * 2 + step
        for layer in (ours, stock):
            layer.train(step != 2)
        torch.testing.assert_close(ours(channels_last(x)), stock(x))
        torch.testing.assert_close(ours.state_dict(), stock.state_dict())
    assert ours(channels_last(x)).is_contiguous(memory_format=FORMATS[x.dim()])
    voxel = torch.randn(1, 6, *(1,) * (x.dim() - 2))
    for text, given in (("expected [45]D input", torch.randn(2, 6)), ("more than 1 value per channel", voxel)):
        for layer in (ours, stock):
            with pytest.raises(ValueError, match=text):
                layer.train()(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x, c: (x[0], None, None, None, None, True, 0.1, 1e-5), "expected an input of 4 or 5 dimensions, got 3"),
        (lambda x, c: (x[:0], None, None, None, None, True, 0.1, 1e-5), "an input with elements"),
        (lambda x, c: (x, c, c, torch.ones(7), None, True, 0.1, 1e-5), "running statistics of 8 elements"),
        (lambda x, c: (x, c, c, c.double(), None, True, 0.1, 1e-5), "running statistics of Float"),
        (lambda x, c: (x.half(), c, c, c.half(), None, True, 0.1, 1e-5), "or all of float for an input of half"),
        (lambda x, c: (x, c, None, None, None, True, 0.1, 1e-5), "both running statistics, or in training none"),
        (lambda x, c: (x, None, None, None, None, False, 0.1, 1e-5), "both running statistics, or in training none"),
    ],
)
def test_bad_input_of_the_native_operator(given, text):
    with pytest.raises(RuntimeError, match=text):
        ops.native_batch_norm(*given(channels_last(torch.randn(2, 8, 4, 5)), torch.ones(8)))


@pytest.mark.parametrize("preserve", [True, "at_once"])
@pytest.mark.parametrize("without", ["tracking", "statistics"])
def test_a_layer_in_evaluation_that_has_no_statistics_is_accurate(without, preserve):
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(8, affine=False, track_running_stats=without != "tracking")).eval()
    if without == "statistics":
        model[0].running_mean = model[0].running_var = None
    x = torch.randn(1, 8, 90, 90) + 1000
    torch_nhwc.convert_(model, preserve=preserve)
    with torch.no_grad():
        exact, stock, ours = (model(each) for each in (x.double(), x, channels_last(x)))
    assert (ours - exact).norm() <= 2 * (stock - exact).norm()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 8, 20, 20), (3, 5, 40, 41), (1, 40, 8, 40, 41), (2, 256, 34, 34)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_infinite_activations_make_the_running_mean_infinite(dtype, shape, threads):
    """As in PyTorch, wherever they are among the rows that a thread sums; only both signs have no mean."""
    x, *numbers, gradient = tensors(shape, dtype)
    rows = x.movedim(1, -1).flatten(0, -2).clone()
    last = len(rows) - 1
    rows[0, 0], rows[last, 1], rows[last // 2, 2] = torch.inf, -torch.inf, torch.nan
    rows[1, 3], rows[last - 1, 3] = torch.inf, -torch.inf
    rows[3, 4] = rows[last // 3, 4] = rows[last, 4] = -torch.inf
    x = rows.view(x.movedim(1, -1).shape).movedim(-1, 1)
    torch.set_num_threads(threads)
    ours = results(ops.batch_norm, x, *numbers, channels_last(gradient))
    stock = results(F.batch_norm, x.contiguous(), *numbers, gradient)
    expected = [torch.inf, -torch.inf, torch.nan, torch.nan, -torch.inf]
    torch.testing.assert_close(ours[1][:5], torch.tensor(expected, dtype=dtype), equal_nan=True)
    for name, own, other in zip(NAMES, ours, stock, strict=True):
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 5e-2}
        if name == "weight's gradient":  # a small difference of large numbers
            tolerance["atol"] *= 10
        torch.testing.assert_close(
            own, other, equal_nan=True, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_activations_whose_squares_exceed_floats_are_normalised():
    x, *numbers, _ = tensors((2, 8, 20, 20))
    x[:, 2] *= 1e25
    x[:, 5] = x[:, 5].abs() * 1e37
    means = numbers[0].clone()
    ours = ops.batch_norm(channels_last(x), means, numbers[1].clone(), None, None, True)
    exact = F.batch_norm(x.double(), *(each.double() for each in numbers[:2]), None, None, True)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(means, 0.9 * numbers[0] + 0.1 * x.double().mean((0, 2, 3)).float())
