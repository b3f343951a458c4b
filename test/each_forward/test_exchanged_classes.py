"""The exchange of a layer's class: what stays, which layers are exchanged, and the way back."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from selection import some_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import torch_nhwc as nhwc
from torch_nhwc.each_forward.exchange import bring_back, exchange, is_in_each_forward

CL, CL3D = torch.channels_last, torch.channels_last_3d


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
    return x.to(memory_format=CL if x.dim() == 4 else CL3D)


def results(layer, x, call=None):
    """The output, and the gradients of all parameters and of the input."""
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
    assert {row.action for row in report.plan.rows} == {nhwc.Action.EACH_FORWARD}
    assert report.outcomes == (None,) * len(report.plan.rows)
    assert isinstance(layer, type(plain)) or parametrize.is_parametrized(plain)
    expected, got = results(plain, x), results(layer, in_format(x))
    assert_equal_results(got, expected)
    if preserve or name != "3d_one_tap":  # which PyTorch leaves contiguous on one thread
        assert got[0].is_contiguous(memory_format=CL if x.dim() == 4 else CL3D)
    assert [id(parameter) for parameter in layer.parameters()] == objects
    assert list(layer.state_dict()) == names
    for parameter in layer.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad.is_contiguous()
    report.revert()
    assert type(layer) is type(plain) or parametrize.is_parametrized(plain)
    assert not is_in_each_forward(type(layer))


@pytest.mark.parametrize("name", ["2d", "transposed_3d", "own_forward", "weight_norm"])
def test_deep_copies_convert_too(name):
    layer = made(name)
    exchange(layer)
    other = copy.deepcopy(layer)
    assert is_in_each_forward(type(other))
    x = in_format(input_for(layer))
    assert torch.equal(other(x), layer(x))
    bring_back(other)
    assert type(other).__name__ == type(made(name)).__name__


@pytest.mark.parametrize("name", ["2d", "transposed_3d", "own_forward"])
def test_pickles_and_saved_models_convert_too_and_state_dicts_are_anybody_s(name):
    layer = made(name)
    report = nhwc.convert_(nn.Sequential(layer), each_forward=True)
    assert nhwc.Reason.SAVED_WHOLE.value in report.remarks
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = in_format(input_for(layer))
    for other in (pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))
    made(name).load_state_dict(layer.state_dict())


def test_a_parametrization_goes_and_comes_on_an_exchanged_layer():
    layer = made("weight_norm")
    exchange(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer).__name__ == "EachForwardConv2d"
    parametrizations.weight_norm(layer)
    x = in_format(input_for(layer))
    expected = layer(x)
    bring_back(layer)
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
    exchange(layer)
    got = results(layer, in_format(x), call(layer))
    assert_equal_results(got, results(plain, x))
    assert got[0].is_contiguous(memory_format=CL)


@pytest.mark.parametrize("name", ["2d", "transposed", "own_forward"])
def test_exported_programs_have_pytorch_s_operator_and_symbolically_traced_ones_ours(name):
    layer = made(name)
    exchange(layer)
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
    exchange(layer)
    x = torch.randn(2, 3, 6, 6)
    got = torch.vmap(lambda p: torch.func.functional_call(layer, p, (x,)))(parameters)
    torch.testing.assert_close(got, torch.stack([each(x) for each in layers]))


def test_script_says_what_to_do_instead():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3))
    nhwc.convert_(layer, each_forward=True)
    with pytest.raises(RuntimeError, match=r"takes no layer that converts its weight in each forward: use torch\.jit"):
        torch.jit.script(layer)


def test_preserving_and_each_forward_come_and_go_in_any_order():
    model = nn.Sequential(nn.Conv3d(4, 4, 1), nn.GroupNorm(2, 4))
    first = nhwc.convert_(model, each_forward=True)
    second = nhwc.convert_(model, preserve=True)
    assert type(model[0]).__name__ == "EachForwardPreservingConv3d"
    assert [row.layer for row in second.plan.layers] == ["Conv3d", "GroupNorm"]
    first.revert()
    assert type(model[0]).__name__ == "PreservingConv3d"
    second.revert()
    assert [type(layer) for layer in model] == [nn.Conv3d, nn.GroupNorm]
    nhwc.convert_(model, preserve=True, each_forward=True)
    nhwc.convert_(model, torch.contiguous_format)
    assert [type(layer) for layer in model] == [nn.Conv3d, nn.GroupNorm]
