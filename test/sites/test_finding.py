"""Which weights of a model are found, and that a model trains on as if nothing had happened."""

import copy
import pickle

import pytest
import torch
from bare_kernel import Kernels
from comparison import assert_trains_alike, assert_weights_arrive_in, layouts, quiet, strides_in, tensors
from reference import FORMATS, canonical_strides
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Reason
from torch_nhwc.planning import Action


class Own2d(nn.Conv2d):
    """A layer of the user's own."""


class OwnTransposed3d(nn.ConvTranspose3d):
    """Another, whose forward is its own as well."""

    def forward(self, x):
        return functional.conv_transpose3d(x, self.weight, self.bias) * 2


LAYERS = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), 2),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), 2),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), 2),
    "pointwise": (lambda: nn.Conv2d(4, 6, 1), 2),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 2),
    "conv3d": (lambda: nn.Conv3d(4, 6, (1, 3, 3)), 3),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 3), 3),
    "subclass": (lambda: Own2d(4, 6, 3), 2),
    "transposed_subclass": (lambda: OwnTransposed3d(4, 6, 3), 3),
    "lazy2d": (lambda: nn.LazyConv2d(6, 3), 2),
    "lazy_transposed2d": (lambda: nn.LazyConvTranspose2d(6, 3), 2),
    "lazy3d": (lambda: nn.LazyConv3d(6, 3), 3),
    "lazy_transposed3d": (lambda: nn.LazyConvTranspose3d(6, 3), 3),
}
LAZY = [name for name in LAYERS if "lazy" in name]


def made(name):
    """Return a layer in double, materialised where it was lazy, and an input for it."""
    make, rank = LAYERS[name]
    layer, x = make().double(), torch.randn(2, 4, *[5] * rank, dtype=torch.float64)
    with quiet():
        layer(x)
    return layer, x


def assert_converts(model, run, *, names, steps=3, **options):
    """Assert that only the named sites convert, that training equals a deep copy's, and that reverting is exact."""
    plain, before = copy.deepcopy(model), layouts(model)
    report = nhwc.convert_(model, strict=True, **options)
    assert sorted(row.full_name for row in report.plan.rows) == sorted(names)
    stored = tensors(model)
    for row in report.plan.rows:
        assert stored[row.full_name].stride() == canonical_strides(row.shape, FORMATS[row.rank])
    for name, (identity, strides) in layouts(model).items():
        assert identity == before[name][0]
        assert name in names or strides == before[name][1]
    assert_trains_alike(model, plain, run, steps)
    report.revert()
    assert layouts(model) == before
    assert_trains_alike(model, plain, run)


@pytest.mark.parametrize("name", LAYERS)
def test_every_convolution_layer_converts_and_its_weight_reaches_the_convolution_in_format(name):
    layer, x = made(name)
    assert_weights_arrive_in(torch.contiguous_format, layer, x)
    model = nn.ModuleDict({"a": nn.Sequential(layer)})
    assert_converts(model, lambda each: each["a"](x), names=["a.0.weight"])
    nhwc.convert_(layer)
    assert_weights_arrive_in(None, layer, x)


class Surroundings(nn.Module):
    """Everything with four or five dimensions that is no convolution's weight, and layers that are none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.sound = nn.Conv1d(4, 4, 1)
        self.sound_back = nn.ConvTranspose1d(4, 4, 1)
        self.words = nn.Embedding(5, 4)
        self.line = nn.Linear(4, 4)
        self.norm = nn.BatchNorm2d(4)
        self.position = nn.Parameter(torch.randn(1, 4, 6, 6))
        self.volume = nn.Parameter(torch.randn(1, 4, 2, 6, 6))
        self.register_buffer("table", torch.randn(2, 4, 6, 6))

    def forward(self, x):
        x = self.norm(self.conv(x)) + self.position + self.volume.mean(2) + self.table
        x = self.sound_back(self.sound(x.flatten(2)))
        return self.line(x.transpose(1, 2)) + self.words(torch.arange(4)).sum(0)


@pytest.mark.parametrize("has_example", [True, False])
def test_only_weights_of_2d_and_3d_convolutions_are_touched(has_example):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    options = {"example_inputs": x} if has_example else {}
    assert_converts(Surroundings().double(), lambda each: each(x), names=["conv.weight"], **options)


@pytest.mark.parametrize("name", LAZY)
def test_h10_a_lazy_layer_converts_when_it_materialises(name):
    make, rank = LAYERS[name]
    x = torch.randn(2, 4, *[5] * rank, dtype=torch.float64)
    layer = make().double()
    model = nn.Sequential(nn.Conv2d(3, 3, 3), layer)
    report = nhwc.convert_(model, strict=True)
    assert [row.reason for row in report.plan.rows] == [None, Reason.LAZY]
    with quiet():
        layer(x)
    assert layer.weight.stride() == strides_in([layer.weight])[0]
    assert not layer._forward_pre_hooks
    assert_weights_arrive_in(None, layer, x)
    report.revert()
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize(
    "passed_on",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["itself", "deepcopy", "pickle"],
)
def test_a_lazy_layer_converts_whatever_is_done_before_it_materialises(passed_on):
    model = nn.Sequential(nn.LazyConv2d(6, 3))
    nhwc.convert_(model)
    model = passed_on(model)
    model(torch.randn(2, 4, 5, 5))
    assert model[0].weight.stride() == (36, 1, 12, 4)
    assert not model[0]._forward_pre_hooks
    assert type(model[0]) is nn.Conv2d


class TiedTransposed(nn.Module):
    """An autoencoder whose decoder has the encoder's weight."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x))


def test_h14_what_is_shared_is_converted_once_and_stays_shared():
    model, x = TiedTransposed().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    report = nhwc.convert_(model, strict=True)
    rows = [(row.full_name, row.reason) for row in report.plan.rows]
    assert rows == [("encode.weight", None), ("decode.weight", Reason.TIED)]
    assert_weights_arrive_in(None, model, x)
    assert_trains_alike(model, plain, lambda each: each(x), steps=3)


def test_parameters_and_buffers_that_reach_a_convolution_are_sites_when_example_inputs_are_given():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert not nhwc.plan(Kernels()).rows
    model = nn.Sequential(Kernels().double())
    plan = nhwc.plan(model, example_inputs=x)
    assert {(row.full_name, row.layer, row.groups) for row in plan.rows} == {
        ("0.looped", "Kernels", 1),
        ("0.branched", "Kernels", 1),
        ("0.listed.0", "ParameterList", 1),
        ("0.transposed", "Kernels", 1),
        ("0.blur", "Kernels", 3),
    }
    names = [row.full_name for row in plan.rows]
    assert_converts(model, lambda each: each(x), names=names, example_inputs=x)
    nhwc.convert_(model, plan=plan)
    assert_weights_arrive_in(None, model, x)


class Hypernetwork(nn.Module):
    """Its weight is another layer's output."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 4 * 3 * 3 * 3)

    def forward(self, x):
        return functional.conv2d(x, self.line(torch.ones(5, dtype=x.dtype)).view(4, 3, 3, 3))


def test_a_weight_that_is_made_in_forward_is_refused_and_the_rest_converts():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Hypernetwork(), nn.Conv2d(4, 4, 3)).double()
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"1 of 3 weights refused: '1.<computed>' \(Hypernetwork\)"):
        report = nhwc.convert_(model, example_inputs=x)
    reasons = {row.full_name: row.reason for row in report.plan.rows}
    assert reasons == {"0.weight": None, "2.weight": None, "1.<computed>": Reason.ON_THE_FLY}
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)


def test_meta_weights_are_restrided():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, device="meta"), nn.Conv2d(4, 4, 1), nn.Conv3d(4, 4, 3, device="meta"))
    report = nhwc.convert_(model, strict=True)
    assert [row.reason for row in report.plan.rows] == [Reason.META, None, Reason.META]
    assert [row.device for row in report.plan.rows] == ["meta", "cpu", "meta"]
    assert report.plan.bytes_to_move == 0
    assert [model[index].weight.stride() for index in range(3)] == strides_in([layer.weight for layer in model])
    report.revert()
    assert all(layer.weight.is_contiguous() for layer in model)


def test_fake_weights_are_planned_and_not_changed():
    with FakeTensorMode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))
    before = layouts(model)
    report = nhwc.convert_(model, strict=True)
    assert {row.reason for row in report.plan.rows} == {Reason.FAKE}
    assert report.plan.rows[0].target_strides == (27, 1, 9, 3)
    assert set(report.outcomes) == {None}
    assert layouts(model) == before


def with_weight(weight):
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return layer


REFUSED = {
    "sparse": (lambda: with_weight(torch.randn(4, 3, 3, 3).to_sparse()), Reason.UNSUPPORTED),
    "other_rank": (lambda: with_weight(torch.randn(4, 3, 3, 3, 3)), Reason.UNSUPPORTED),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_converted_has_a_reason_and_the_rest_converts(kind):
    make, reason = REFUSED[kind]
    model = nn.Sequential(nn.Conv2d(3, 3, 3), make(), nn.Conv3d(3, 3, 3))
    with pytest.warns(UserWarning, match="1 of 3 weights refused: '1.*weight'") as caught:
        report = nhwc.convert_(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [row.reason for row in report.plan.rows] == [None, reason, None]
    assert [row.action for row in report.plan.rows] == [Action.CONVERT, Action.REFUSE, Action.CONVERT]
    assert list(report.outcomes) == [Outcome.IN_PLACE, None, Outcome.IN_PLACE]
    report.revert()
    assert [model[index].weight.is_contiguous() for index in (0, 2)] == [True, True]


@pytest.mark.parametrize("tie", ["one parameter", "one storage"])
def test_a_filter_keeps_all_that_is_tied_to_what_it_leaves_out(tie):
    first, second, third = (nn.Conv2d(3, 4, 3) for _ in range(3))
    second.weight = first.weight if tie == "one parameter" else nn.Parameter(first.weight.data)
    report = nhwc.convert_(nn.Sequential(first, second, third), filter_fn=lambda module, path: path != "1")
    assert [row.reason for row in report.plan.rows] == [Reason.FILTERED, Reason.FILTERED, None]
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert first.weight.stride() == second.weight.stride() == (27, 9, 3, 1)


class WithoutGroups(nn.Conv2d):
    """Does not call the constructor of its base."""

    def __init__(self):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))


def test_an_exported_program_is_an_error_that_says_what_to_do():
    program = torch.export.export(nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),))
    with pytest.raises(
        TypeError, match=r"got ExportedProgram: convert the model before exporting it, or the \.pt2 file"
    ):
        nhwc.convert_(program)


def test_odd_layers_do_not_stop_the_others():
    empty, gone = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    empty.weight = None
    del gone.weight
    model = nn.Sequential(empty, gone, WithoutGroups(), nn.Conv2d(3, 4, 3))
    with pytest.warns(UserWarning, match="its weight is not a tensor"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [Reason.NO_WEIGHT, Reason.NO_WEIGHT, None, None]
    assert [row.groups for row in report.plan.rows] == [1, 1, 0, 1]
    assert model[2].weight.stride() == model[3].weight.stride() == (27, 1, 9, 3)
