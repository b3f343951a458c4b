"""Layers that convert their weight in each forward: strides, dtypes and gradients, however they are called."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from reference import FORMATS
from selection import some_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.each_forward import EachForward, is_in_each_forward


class OwnForward(nn.Conv2d):
    """Calls the function itself, with names for its arguments."""

    def forward(self, x, scale=2):
        return F.conv2d(input=x, weight=self.weight * scale, bias=self.bias, padding=1)


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, self.weight - self.weight.mean(), bias)


class CallsTheMethod(nn.Conv3d):
    def forward(self, x):
        return self._conv_forward(F.pad(x, (1, 1) * 3), self.weight, self.bias)


LAYERS = {
    "2d": lambda: nn.Conv2d(6, 8, 3, stride=2, groups=2),
    "2d_same": lambda: nn.Conv2d(6, 8, 3, padding="same", bias=False),
    "2d_circular": lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"),
    "2d_1x1": lambda: nn.Conv2d(6, 8, 1),
    "2d_depthwise": lambda: nn.Conv2d(6, 6, 3, groups=6),
    "3d": lambda: nn.Conv3d(6, 8, 3),
    "3d_one_tap": lambda: nn.Conv3d(6, 8, 1),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3, stride=2),
    "transposed_3d": lambda: nn.ConvTranspose3d(6, 8, 3),
    "lazy": lambda: nn.LazyConv2d(8, 3),
    "lazy_transposed_3d": lambda: nn.LazyConvTranspose3d(8, 3),
    "own_forward": lambda: OwnForward(6, 8, 3),
    "own_conv_forward": lambda: OwnConvForward(6, 8, 3),
    "calls_the_method": lambda: CallsTheMethod(6, 8, 3),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv2d(6, 8, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.ConvTranspose2d(6, 8, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Conv2d(6, 8, 3), "weight", amount=0.3),
    "weight_norm_by_hook": lambda: torch.nn.utils.weight_norm(nn.Conv3d(6, 8, 3)),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:Lazy modules are a new feature")


def made(name):
    torch.manual_seed(0)
    return LAYERS[name]()


def input_for(layer):
    size = (2, 6, 5, 7) if "2d" in type(layer).__name__.lower() or isinstance(layer, nn.Conv2d) else (2, 6, 4, 5, 7)
    torch.manual_seed(1)
    return torch.randn(size)


def in_format(x):
    return x.to(memory_format=FORMATS[x.dim()])


class Conversions(TorchDispatchMode):
    """Counts the weights that the operator has converted."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.nhwc.convert_weight.default
        return func(*args, **(kwargs or {}))


def results(layer, x, call=None):
    """Return the output, and the gradients of all parameters and of the input."""
    torch.manual_seed(2)  # of what lazy layers draw
    x = x.detach().clone().requires_grad_()
    output = layer(x) if call is None else call(x)
    output.square().mean().backward()
    return [output, *(parameter.grad for parameter in layer.parameters()), x.grad]


def assert_equal_results(got, expected):
    assert len(got) == len(expected)
    for each, other in zip(got, expected):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_layer_and_in_format(name, preserve):
    plain, model = made(name), nn.Sequential(made(name))
    layer = model[0]
    x = input_for(layer)
    objects = [id(parameter) for parameter in layer.parameters()]
    names = list(layer.state_dict())
    report = nhwc.convert_(model, each_forward=True, preserve=preserve, strict=True)
    assert {row.action for row in report.plan.rows} == {nhwc.planning.Action.EACH_FORWARD}
    assert report.outcomes == (None,) * len(report.plan.rows)
    assert isinstance(layer, type(plain)) or parametrize.is_parametrized(plain)
    expected, got = results(plain, x), results(layer, in_format(x))
    assert_equal_results(got, expected)
    if preserve or name != "3d_one_tap":  # which PyTorch leaves contiguous on one thread
        assert got[0].is_contiguous(memory_format=FORMATS[x.dim()])
    assert [id(parameter) for parameter in layer.parameters()] == objects
    assert list(layer.state_dict()) == names
    for parameter in layer.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad.is_contiguous()
    report.revert()
    assert type(layer) is type(plain) or parametrize.is_parametrized(plain)
    assert not is_in_each_forward(type(layer))


@pytest.mark.parametrize("name", some_of(["2d", "transposed", "own_forward", "weight_norm"], "2d", "own_forward"))
@pytest.mark.parametrize(
    "call",
    [
        lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True),
        pytest.param(lambda layer: torch.compile(layer, fullgraph=True), marks=pytest.mark.exhaustive),
        lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
        lambda layer: lambda x: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
        lambda layer: torch.jit.trace(layer, input_for(layer), check_trace=False),
        nn.DataParallel,
    ],
    ids=["compiled", "inductor", "checkpointed", "functional_call", "traced", "data_parallel"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_results_are_right_however_it_is_called(name, call):
    torch._dynamo.reset()
    plain, layer = made(name), made(name)
    x = input_for(layer)
    swap_class(layer, EachForward)
    got = results(layer, in_format(x), call(layer))
    assert_equal_results(got, results(plain, x))
    assert got[0].is_contiguous(memory_format=torch.channels_last)


def test_script_says_what_to_do_instead():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3))
    nhwc.convert_(layer, each_forward=True)
    with pytest.raises(RuntimeError, match=r"takes no layer that converts its weight in each forward: use torch\.jit"):
        torch.jit.script(layer)


def test_no_bytes_move_where_the_weight_is_in_format():
    layer = made("2d")
    nhwc.convert_weight_(layer.weight)
    swap_class(layer, EachForward)
    with Conversions() as seen:
        layer(in_format(input_for(layer)))
    assert seen.count == 0


@pytest.mark.parametrize("name", ["2d", "3d", "transposed", "transposed_3d"])
def test_autocast_casts_in_the_same_pass(name):
    layer, plain = made(name), made(name)
    swap_class(layer, EachForward)
    x = input_for(layer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        with Conversions() as seen:
            output = layer(x)
    assert seen.count == 1
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    output.sum().backward()
    expected.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.is_contiguous()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=0.02, atol=0.2)
