"""Subclasses of norms and convolutions with a forward of their own, such as timm's: what they call is ours."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from reference import canonical_strides
from torch import nn
from torch.nn import functional
from torch.nn.functional import group_norm

import torch_nhwc as nhwc
from torch_nhwc import Reason
from torch_nhwc.nn.replacements import is_preserving

LAST = torch.channels_last


class BatchNormAct(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`."""

    def __init__(self, channels, drop=nn.Identity, act=nn.ReLU):
        super().__init__(channels)
        self.drop, self.act = drop(), act(inplace=True)

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        training = self.training or self.running_mean is None
        momentum = 0.0 if self.momentum is None else self.momentum
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, momentum, self.eps)
        return self.act(self.drop(x))


class GroupNormAct(nn.GroupNorm):
    """As timm's, whose branch for half precision is decided when the layer is made."""

    is_fast: torch.jit.Final[bool]

    def __init__(self, channels, groups=8, is_fast=False):
        super().__init__(groups, channels)
        self.drop, self.act, self.is_fast = nn.Identity(), nn.ReLU(inplace=True), is_fast

    def forward(self, x):
        if self.is_fast:
            x = fast_group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))


def is_half(x: torch.Tensor) -> bool:
    return x.dtype == torch.half


def fast_group_norm(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float):
    if is_half(x):
        return F.group_norm(x, groups, eps=eps)
    return F.group_norm(x, groups, weight, bias, eps)


class GroupNorm1(nn.GroupNorm):
    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class GroupNorm1NoBias(GroupNorm1):
    """Inherits a forward that is not PyTorch's."""

    def __init__(self, channels):
        super().__init__(channels)
        self.bias = None


class NormThenAct(nn.GroupNorm):
    """Calls the forward of its base."""

    def forward(self, x):
        return super().forward(x).relu()


class NamedGroupNorm(nn.GroupNorm):
    """Names the function alone, and has defaults of both kinds."""

    def forward(self, x, scale=1.0, *, is_checked=True):
        if is_checked and x.dim() != 4:
            raise ValueError("images are expected")
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps) * scale


class InstanceNormAct(nn.InstanceNorm2d):
    def forward(self, x):
        self._check_input_dim(x)
        return torch.sigmoid(functional.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps))


EPSILON = 1e-5


class OtherWays(nn.GroupNorm):
    """Calls the function in a way that globals of the forward may not reach."""

    @property
    def normed(self):
        return self.by_name

    def by_name(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def other_way(forward):
    return type("OtherWay", (OtherWays,), {"forward": forward})(4, 16)


def imported(self, x):
    from torch.nn.functional import group_norm as theirs

    return theirs(x, self.num_groups, self.weight, self.bias, self.eps)


def set_later(self, x):
    return F.group_norm(x, self.num_groups, self.weight, self.bias, EPSILON)


class ScaledStdConv2d(nn.Conv2d):
    """As timm's, of NFNets: the weight is standardised in each forward."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=1e-6,
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv2dSame(nn.Conv2d):
    """As timm's, which pads and convolves in a function."""

    def forward(self, x):
        return conv2d_same(x, self.weight, self.bias, self.stride)


def conv2d_same(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: tuple[int, int]):
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, bias, stride)


NORMS = {
    "batch_norm": lambda: BatchNormAct(16),
    "batch_norm_silu": lambda: BatchNormAct(16, lambda: nn.Dropout(0.0), nn.SiLU),
    "group_norm": lambda: GroupNormAct(16),
    "group_norm_fast": lambda: GroupNormAct(16, is_fast=True),
    "group_norm_1": lambda: GroupNorm1(16),
    "group_norm_1_no_bias": lambda: GroupNorm1NoBias(16),
    "super": lambda: NormThenAct(4, 16),
    "named": lambda: NamedGroupNorm(4, 16),
    "instance_norm": lambda: InstanceNormAct(16, affine=True),
    "path": lambda: other_way(lambda self, x: torch.nn.functional.group_norm(x, 4, self.weight, self.bias)),
    "method": lambda: other_way(lambda self, x: self.by_name(x) if self.affine else F.group_norm(x, 4)),
    "property": lambda: other_way(lambda self, x: self.normed(x) if self.affine else F.group_norm(x, 4)),
    "nested": lambda: other_way(lambda self, x: F.group_norm(x, 4, *(each for each in self.parameters()))),
    "imported": lambda: other_way(imported),
    "set_later": lambda: other_way(set_later),
}
CONVOLUTIONS = {
    "standardised": lambda: ScaledStdConv2d(16, 8, 3, 2, 1),
    "standardised_same": lambda: ScaledStdConv2d(16, 8, 3, padding="same"),
    "standardised_1x1": lambda: ScaledStdConv2d(16, 8, 1),
    "standardised_depthwise": lambda: ScaledStdConv2d(16, 16, 3, groups=16),
    "same": lambda: Conv2dSame(16, 8, 2, 2),
}
LAYERS = NORMS | CONVOLUTIONS


def made(name, training=True):
    """Return a layer after a plain convolution, and an input of so many pixels that no kernel of PyTorch's stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 1), LAYERS[name]()).train(training)
    return model, torch.randn(2, 4, 24, 24)


def results(model, x):
    """Return the output, its gradients, and the buffers afterwards."""
    output = model(x)
    gradients = torch.autograd.grad((output * output.detach().cos()).sum(), list(model.parameters()))
    return [output, *gradients, *model.buffers()]


@pytest.mark.parametrize("each_forward", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_formats_and_the_way_back(name, training, each_forward):
    model, x = made(name, training)
    plain = copy.deepcopy(model).double()
    names, layer_type = [*model.state_dict()], type(model[1])
    report = nhwc.convert_(model, input_format="channels_last", each_forward=each_forward, strict=True)
    assert [row.reason for row in report.plan.layers] == [None, None]
    assert isinstance(model[1], layer_type)
    assert is_preserving(type(model[1]))
    with nhwc.trace(model) as trace:
        got = results(model, x)
    for each, exact in zip(got, results(plain, x.double()), strict=True):
        torch.testing.assert_close(each.double(), exact.double(), rtol=1e-4, atol=1e-3)
    assert got[0].stride() == canonical_strides(got[0].shape, LAST)
    assert "no loss, no mixed convolution" in str(trace)
    assert [*model.state_dict()] == names
    report.revert()
    assert type(model[1]) is layer_type


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "super"])
def test_norms_are_as_accurate_as_on_contiguous_activations(name):
    torch.manual_seed(0)
    make = {"batch_norm": BatchNormAct, "group_norm": GroupNormAct, "super": lambda channels: NormThenAct(8, channels)}
    model = nn.Sequential(nn.Conv2d(64, 64, 1), make[name](64))
    nn.init.constant_(model[0].bias, 0.0 if name == "batch_norm" else 30.0)
    x = torch.randn(2, 64, 56, 56)
    exact = copy.deepcopy(model).double()(x.double())

    def error():
        return (model(x) - exact).abs().max()

    contiguous = error()
    nhwc.convert_(model, input_format="channels_last")
    assert error() <= 1.2 * contiguous


# By name: the modes in which the layer's own forward runs. Those of globals cost nothing.
MODES = {
    **dict.fromkeys(("batch_norm", "group_norm", "group_norm_fast", "group_norm_1", "group_norm_1_no_bias"), 0),
    **dict.fromkeys(("named", "instance_norm"), 0),
    **dict.fromkeys(("super", "path", "method", "property", "nested", "imported", "set_later"), 1),
    **dict.fromkeys(CONVOLUTIONS, 1),
}


@pytest.mark.parametrize("name", MODES)
def test_our_functions_are_globals_of_a_forward_that_calls_them_in_no_other_way(name):
    model, x = made(name)
    nhwc.convert_(model, input_format="channels_last")
    pushed = []
    with pytest.MonkeyPatch.context() as patch:
        enter = torch.overrides.TorchFunctionMode.__enter__
        patch.setattr(torch.overrides.TorchFunctionMode, "__enter__", lambda mode: pushed.append(mode) or enter(mode))
        model(x)
    assert len(pushed) == MODES[name]


def test_what_a_package_sets_later_is_seen(monkeypatch):
    model, x = made("set_later")
    nhwc.convert_(model)
    before = model(x)
    monkeypatch.setitem(globals(), "EPSILON", 10.0)
    assert model(x).std() < before.std() / 2
    monkeypatch.setattr(F, "relu", torch.zeros_like)  # by a module that stands for PyTorch's
    model, x = made("named")
    nhwc.convert_(model)
    assert not type(model[1]).forward.__globals__["functional"].relu(x).any()


def test_defaults_of_a_forward_stay():
    model, x = made("named")
    nhwc.convert_(model)
    norm, x = model[1], model[0](x)
    torch.testing.assert_close(norm(x, 2.0), 2 * norm(x))
    assert norm(x[..., 0], is_checked=False).shape == x.shape[:-1]
    with pytest.raises(ValueError, match="images"):
        norm(x[..., 0])


def test_dropout_and_activation_are_the_layer_s_own():
    called = []
    model = nn.Sequential(nn.Conv2d(4, 16, 1), BatchNormAct(16, nn.Dropout))
    for part in (model[1].drop, model[1].act):
        part.register_forward_hook(lambda module, inputs, output: called.append((type(module), output.stride()[1])))
    nhwc.convert_(model, input_format="channels_last")
    output = model(torch.randn(2, 4, 8, 8))
    assert called == [(nn.Dropout, 1), (nn.ReLU, 1)]
    assert 0.5 < (output == 0).float().mean() < 0.95  # half of the negative and of the positive ones


def test_layers_copy_and_pickle_as_their_own_class():
    model, x = made("batch_norm")
    nhwc.convert_(model)
    x = x.to(memory_format=LAST)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[1]) is type(model[1])
        assert type(copied[1]).__name__ == "PreservingBatchNormAct"
        torch.testing.assert_close(copied(x), copy.deepcopy(model)(x), rtol=0, atol=0)


# TorchScript has no `super`, and compiles the functions that convolutions call as they are.
SCRIPTED = {
    **dict.fromkeys(("batch_norm", "batch_norm_silu"), "nhwc::batch_norm"),
    **dict.fromkeys(("group_norm", "group_norm_fast", "group_norm_1", "group_norm_1_no_bias"), "nhwc::group_norm"),
    "instance_norm": "nhwc::instance_norm",
    **dict.fromkeys((name for name in CONVOLUTIONS if name != "same"), "nhwc::conv2d"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_and_traced_layers_keep_our_operator_and_the_format(name):
    model, x = made(name, training=False)
    nhwc.convert_(model)
    x = x.to(memory_format=LAST)
    scripted = torch.jit.script(model)
    assert SCRIPTED[name] in str(getattr(scripted, "1").inlined_graph)
    for program in (scripted, torch.jit.trace(model, x)):
        torch.testing.assert_close(program(x), model(x))
        assert program(x).stride() == model(x).stride()
    assert is_preserving(type(model[1]))


@pytest.mark.parametrize(
    "name", ["batch_norm", "group_norm", "group_norm_fast", "named", "instance_norm", "super", "standardised"]
)
def test_compiled_and_exported_layers_compute_the_same(name):
    model, x = made(name, training=False)
    nhwc.convert_(model)
    x = x.to(memory_format=LAST)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, expected in zip(results(compiled, x), results(model, x)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    assert not any("nhwc" in str(node.target) for node in program.graph.nodes)


def test_weights_that_are_computed_need_no_remark_once_their_layer_is_replaced():
    model = nn.Sequential(ScaledStdConv2d(4, 8, 3))
    x = torch.randn(2, 4, 8, 8)
    (row,) = nhwc.plan(model, example_inputs=x, preserve=False).rows
    assert row.reason is Reason.COMPUTED_IN_FORWARD
    (row,) = nhwc.plan(model, example_inputs=x).rows
    assert row.reason is None
    report = nhwc.convert_(model, plan=nhwc.plan(model, example_inputs=x))
    assert report.rows[0].reason is None
    assert [row.reason for row in nhwc.plan(model, example_inputs=x).rows] == [Reason.IN_FORMAT]


def test_a_layer_that_is_left_out_computes_as_before():
    model = nn.Sequential(ScaledStdConv2d(4, 8, 1), ScaledStdConv2d(8, 8, 3))
    nhwc.convert_(model, filter_fn=lambda module, path: path == "1")
    assert [is_preserving(type(layer)) for layer in model] == [False, True]
    assert model[0](torch.randn(2, 4, 8, 8)).is_contiguous()
    # As is one whose weight has become contiguous again.
    model[1].weight = nn.Parameter(model[1].weight.detach().contiguous())
    assert model(torch.randn(2, 4, 8, 8)).is_contiguous()


def test_a_norm_that_stays_has_a_remark_that_fits():
    class Own(nn.GroupNorm):
        def forward(self, x):
            return (x - x.mean()) / x.std()

    report = nhwc.convert_(nn.Sequential(nn.Conv2d(4, 8, 1), Own(2, 8)))
    assert Reason.GROUP_NORM.value in report.remarks
    assert "torch_nhwc.functional.group_norm" in Reason.GROUP_NORM.value
    report = nhwc.convert_(nn.Sequential(nn.Conv2d(4, 8, 1), GroupNormAct(8)))
    assert Reason.GROUP_NORM.value not in report.remarks
