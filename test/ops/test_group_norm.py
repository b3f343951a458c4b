"""Group norm and instance norm on channels-last: values, every kind of derivative, formats, errors."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_as_accurate, channels_last, error
from selection import some_of

import torch_nhwc  # noqa: F401  registers the operators

ops = torch.ops.nhwc
# Shape and groups: 3D to 5D, channels that fill registers and that do not, one and two positions, a group for each
# channel, a sample larger than a cache, groups of many neighbours, in small and in large samples.
SHAPES = [
    ((2, 16, 8, 9, 10), 4),
    ((3, 20, 7, 9), 5),
    ((2, 33, 5), 3),
    ((2, 6, 40, 41), 6),
    ((1, 64, 3, 3), 64),
    ((2, 320, 16, 16), 32),
    ((1, 256, 40, 40), 32),
    ((2, 3, 2, 2), 1),
    ((1, 7, 130, 1), 7),
    ((2, 24, 1, 1, 2), 2),
    ((3, 24, 1, 1), 4),
    ((3, 257, 8, 8), 1),
    ((2, 1023, 4, 4), 3),
    ((2, 255, 9, 7), 5),
    ((1, 1023, 16, 3, 4), 3),
    ((2, 63, 3, 3, 9), 1),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def tensors(shape, dtype=torch.float32, mean=0.0, parameters=None):
    """Return an input, a weight, a bias and a gradient."""
    channels = shape[1]
    weight, bias = (1 + 0.1 * torch.randn(channels)).to(parameters or dtype), torch.randn(channels) * 0.1
    return (torch.randn(shape) + mean).to(dtype), weight, bias.to(weight.dtype), torch.randn(shape).to(dtype)


def assert_as_accurate_as_contiguous(groups, x, weight, bias, gradient):
    ours, stock = (lambda *each, norm=norm: norm(each[0], groups, *each[1:]) for norm in (ops.group_norm, F.group_norm))
    assert_as_accurate(ours, stock, (x, weight, bias), gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_values_and_gradients(shape, groups, dtype):
    assert_as_accurate_as_contiguous(groups, *tensors(shape, dtype))
    if dtype in (torch.bfloat16, torch.float16):
        assert_as_accurate_as_contiguous(groups, *tensors(shape, dtype, parameters=torch.float32))


@pytest.mark.parametrize("corner", [False, True])
@pytest.mark.parametrize("mean", some_of([3, 10, 100, 1000, 3000], 100, 3000))
def test_h36_as_accurate_as_contiguous_far_from_zero(mean, corner):
    """PyTorch's channels-last kernel is off by 1e-3 where the mean is ten deviations from zero, and useless further."""
    for shape, groups in (((2, 16, 24, 24, 24), 4), ((4, 64, 20, 20), 8), ((2, 32, 31, 17), 32)):
        x, weight, bias, gradient = tensors(shape, mean=float(mean))
        if corner:
            x.flatten(2)[..., 0] = 0
        assert_as_accurate_as_contiguous(groups, x, weight, bias, gradient)


def test_a_drift_and_constants_are_summed_around_their_own_mean():
    """Blocks whose mean is far from that of the blocks before them, and channels without any deviation."""
    x = torch.randn(1, 16, 96, 96) + torch.linspace(0, 4000, 96).view(1, 1, 96, 1)
    x[:, 4:8] = 1e4
    exact = F.group_norm(x.double(), 4)
    assert error(ops.group_norm(channels_last(x), 4), exact) < 1e-6
    # A group of one value: what is left of rounding, over eps.
    flat = torch.full((1, 8, 30, 30), 0.1)
    assert ops.group_norm(channels_last(flat), 2).abs().max() < 1e-4


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("channels", "rows"), [(257, 64), (96, 12), (1030, 40)])
def test_groups_of_many_neighbours_are_summed_around_their_own_mean(channels, rows, groups):
    """The first rows, by which the mean is guessed, are far from it; and what is no finite number stays so."""
    x = torch.randn(3, channels // groups * groups, rows, 1) + 100
    x[:, :, : rows // 2] += 1e4
    x[1, -1, -1], x[2, 0, 0] = torch.inf, torch.nan
    ours, exact = ops.group_norm(channels_last(x), groups), F.group_norm(x.double(), groups)
    assert torch.equal(ours.isnan(), exact.isnan())
    assert error(ours[:1], exact[:1]) < 1e-6
    assert error(ops.group_norm(channels_last(x[:1].double()), groups), exact[:1]) < 1e-11


def test_h76_a_first_layer_whose_input_needs_no_gradient():
    x, weight, bias, gradient = tensors((1, 64, 32, 32))
    parameters = [each.requires_grad_() for each in (weight, bias)]
    ours = torch.autograd.grad(ops.group_norm(channels_last(x), 8, weight, bias), parameters, channels_last(gradient))
    stock = torch.autograd.grad(F.group_norm(x, 8, weight, bias), parameters, gradient)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 6, 7), (1, 8, 3, 4, 5), (3, 4, 9)], ids=str)
def test_instance_norm(shape, track):
    mean, variance = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5
    x, weight, bias, gradient = tensors(shape)
    for train in (True, False):

        def call(norm, is_on_input=train or not track):
            def normed(x, weight, bias):
                running = (mean.clone(), variance.clone()) if track else (None, None)
                return norm(x, *running, weight, bias, is_on_input, 0.2, 1e-4)

            return normed

        assert_as_accurate(call(ops.instance_norm), call(F.instance_norm), (x, weight, bias), gradient, factor=4)


@pytest.mark.parametrize(("deviation", "eps"), [(1e-3, 1.0), (1e-4, 1e-3), (0.0, 0.3)])
def test_the_running_variance_is_right_beside_a_large_eps(deviation, eps):
    x = torch.randn(2, 3, 9, 9) * deviation + 1
    ours, stock = (torch.nn.InstanceNorm2d(3, eps=eps, momentum=1.0, track_running_stats=True) for _ in range(2))
    ops.instance_norm(channels_last(x), ours.running_mean, ours.running_var, None, None, True, 1.0, eps)
    stock(x)
    torch.testing.assert_close(ours.running_var, stock.running_var, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(ours.running_mean, stock.running_mean)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: (x[0, 0], 2, None, None, 1e-5), "expected an input of 3 to 5 dimensions, got 2"),
        (lambda x: (x, 3, None, None, 1e-5), "a number of groups that divides the 8 channels, got 3"),
        (lambda x: (x, 2, torch.ones(7), None, 1e-5), "running statistics of 8 elements, got one of shape"),
        (lambda x: (x, 2, torch.ones(8).double(), None, 1e-5), "a weight, a bias and running statistics of Float"),
        (lambda x: (x[:0], 2, None, None, 1e-5), "an input with elements"),
    ],
)
def test_bad_input_of_the_native_operator(given, text):
    with pytest.raises(RuntimeError, match=text):
        ops.native_group_norm(*given(channels_last(torch.randn(2, 8, 4, 5))))
