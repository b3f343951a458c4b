"""Layers that convert their weight in each forward: strides, dtypes and gradients, however they are called."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from reference import FORMATS, canonical_strides, in_channels_last
from selection import some_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import restore_class, swap_class
from torch_nhwc.nn.each_forward import EachForward, is_in_each_forward, weight_for


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


def test_a_parametrization_can_be_removed_and_added_after_the_swap():
    layer = made("weight_norm")
    swap_class(layer, EachForward)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer).__name__ == "EachForwardConv2d"
    parametrizations.weight_norm(layer)
    x = in_format(input_for(layer))
    expected = layer(x)
    restore_class(layer, EachForward)
    assert type(layer).__mro__[1] is nn.Conv2d
    torch.testing.assert_close(layer(x), expected)


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


@pytest.mark.parametrize("name", ["2d", "transposed", "own_forward"])
def test_exported_programs_have_pytorch_s_operator_and_symbolically_traced_ones_ours(name):
    layer = made(name)
    swap_class(layer, EachForward)
    x = in_format(input_for(layer))
    exported = torch.export.export(nn.Sequential(layer), (x,))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("aten.clone.default") == 1
    assert not any("nhwc" in target for target in targets)
    torch.testing.assert_close(exported.module()(x), layer(x))
    if name == "2d":
        traced = torch.fx.symbolic_trace(layer)
        assert "nhwc.convert_weight" in traced.code
        torch.testing.assert_close(traced(x), layer(x))


def test_vmap_over_an_ensemble():
    layers = [nn.Conv2d(3, 4, 3) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(layers)
    layer = copy.deepcopy(layers[0])
    swap_class(layer, EachForward)
    x = torch.randn(2, 3, 6, 6)
    got = torch.vmap(lambda p: torch.func.functional_call(layer, p, (x,)))(parameters)
    torch.testing.assert_close(got, torch.stack([each(x) for each in layers]))


def test_script_says_what_to_do_instead():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3))
    nhwc.convert_(layer, each_forward=True)
    with pytest.raises(RuntimeError, match=r"takes no layer that converts its weight in each forward: use torch\.jit"):
        torch.jit.script(layer)


@pytest.mark.parametrize(
    "shape", [(8, 3, 3, 3), (1, 1, 3, 3), (8, 4, 1, 1), (6, 1, 3, 3), (2, 3, 1, 3, 1), (0, 3, 2, 2)], ids=str
)
@pytest.mark.parametrize("start", [torch.contiguous_format, None], ids=["contiguous", "channels_last"])
def test_a_weight_gets_canonical_strides_and_no_bytes_move_where_they_need_not(shape, start):
    weight = nn.Parameter(nhwc.convert_weight(torch.randn(shape), start))
    moves = start is not None and not weight.is_contiguous(memory_format=FORMATS[len(shape)])
    with Conversions() as seen:
        result = weight_for(weight, groups=2)
    assert in_channels_last(result)
    assert torch.equal(result, weight)
    assert seen.count == moves
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    assert torch.equal(gradient, torch.ones(shape))
    assert gradient.stride() == weight.stride() or not moves


def test_filters_of_one_channel_and_other_ranks_stay_contiguous():
    weight = nn.Parameter(torch.randn(8, 1, 3, 3))
    assert weight_for(weight, groups=1) is weight
    last = nhwc.convert_weight(weight.detach())
    assert weight_for(last, groups=1).stride() == canonical_strides(last.shape, torch.contiguous_format)
    line = torch.randn(3, 4, 5)
    assert weight_for(line, groups=1) is line


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
