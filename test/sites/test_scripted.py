"""TorchScript modules: found, converted, trained on, saved again, and run where this package is not."""

import copy
import itertools

import pytest
import torch
from bare_kernel import Kernels
from comparison import assert_trains_alike, layouts, quiet, strides_in, tensors
from saved_files import assert_run_elsewhere, saved_and_loaded
from torch import Tensor, nn
from torch.nn import functional
from user_code import Standardised

import torch_nhwc as nhwc
from torch_nhwc import Reason
from torch_nhwc.planning import Action

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
X = torch.randn(2, 3, 8, 8, dtype=torch.float64)


class Own(nn.Conv2d):
    """A layer of the user's own: its class is lost in TorchScript."""

    def forward(self, x):
        return functional.conv2d(x, self.weight, self.bias, padding=1)


class Exported(nn.Module):
    """Convolves in another method than forward."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.kernel)


def layers():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3))


def script(model):
    return torch.jit.script(model)


def trace(model):
    return torch.jit.trace(model, X)


KERNELS = ["looped", "branched", "listed.0", "transposed", "blur"]
MODELS = {
    "layers": (layers, ["0.weight", "3.weight"]),
    "own": (lambda: nn.Sequential(Own(3, 3, 3), nn.ReLU()), ["0.weight"]),
    "own_root": (lambda: Own(3, 3, 3), ["weight"]),
    "kernels": (Kernels, KERNELS),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(Kernels()), nn.Conv2d(3, 3, 1)),
        [*(f"0.0.{name}" for name in KERNELS), "1.weight"],
    ),
}
COMPILERS = {
    "scripted": script,
    "traced": trace,
    "loaded": lambda model: saved_and_loaded(script(model)),
    "loaded_trace": lambda model: saved_and_loaded(trace(model)),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_compiler = pytest.mark.parametrize("compiler", COMPILERS)


def compiled(name, compiler):
    """Return a TorchScript model, and an unconverted one of the same values in ordinary Python."""
    plain = MODELS[name][0]().double()
    model = COMPILERS[compiler](copy.deepcopy(plain))
    plain.load_state_dict(model.state_dict())  # tracing has run the batch norms
    return model, plain


@every_compiler
@every_model
def test_h11_torchscript_converts_and_trains_on(name, compiler):
    model, plain = compiled(name, compiler)
    names = MODELS[name][1]
    if compiler == "traced":  # as a child of a Python module
        model, plain = nn.Sequential(nn.Conv2d(3, 3, 1).double(), model), nn.Sequential(nn.Conv2d(3, 3, 1), plain)
        plain.double().load_state_dict(model.state_dict())
        names = ["0.weight", *(f"1.{name}" for name in names)]
    before = layouts(model)
    assert sorted(row.full_name for row in nhwc.plan(model).rows) == sorted(names)

    report = nhwc.convert_(model, strict=True)
    stored = tensors(model)
    for row in report.plan.rows:
        assert [stored[row.full_name].stride()] == strides_in([stored[row.full_name]])
    assert all(layouts(model)[each] == before[each] for each in before if each not in names)
    assert_trains_alike(model, plain, lambda each: each(X), steps=3)
    assert all(row.action is Action.KEEP for row in nhwc.convert_(model).plan.rows)

    report.revert()
    assert layouts(model) == before
    assert_trains_alike(model, plain, lambda each: each(X))


def test_converted_models_save_and_run_without_this_package(tmp_path):
    expected = {}
    for name, compiler in itertools.product(MODELS, ("scripted", "traced")):
        model = compiled(name, compiler)[0].eval()
        rows = nhwc.convert_(model, strict=True).rows
        torch.jit.save(model, tmp_path / f"{name}-{compiler}.pt")
        strides = {row.full_name: row.target_strides for row in rows}
        expected[f"{name}-{compiler}.pt"] = "archive", X, model(X).detach(), strides
    assert_run_elsewhere(tmp_path, expected)


def test_methods_that_forward_does_not_call_are_looked_through():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), script(nn.Sequential(Exported())))
    assert [row.full_name for row in nhwc.convert_(model, strict=True).plan.rows] == ["0.weight", "1.0.kernel"]
    assert getattr(model[1], "0").kernel.stride() == (27, 1, 9, 3)


def test_a_module_traced_under_autocast_is_recognised():
    model = layers()
    with quiet(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(nn.Sequential(Own(3, 3, 3), model), X.float())
    assert [row.full_name for row in nhwc.plan(traced).rows] == ["0.weight", "1.0.weight", "1.3.weight"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_weight_that_is_computed_in_a_graph_is_refused_once_and_the_rest_converts(compiler):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(Standardised(3, 3, 3)), Standardised(3, 3, 3)).double()
    model = COMPILERS[compiler](model)
    with pytest.warns(UserWarning, match="2 of 3 weights refused"):
        report = nhwc.convert_(model)
    assert [(row.full_name, row.reason) for row in report.plan.rows] == [
        ("0.weight", None),
        ("1.0.<computed 0>", Reason.ON_THE_FLY),
        ("2.<computed 0>", Reason.ON_THE_FLY),
    ]


class TakesView(nn.Module):
    """Also computes with its weights; a view of a channels-last one raises."""

    def __init__(self):
        super().__init__()
        self.viewed, self.reshaped = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        norms = self.viewed.weight.detach().view(-1).norm() + self.reshaped.weight.reshape(-1).norm()
        return self.reshaped(self.viewed(x)) * norms


@every_compiler
def test_a_weight_that_code_takes_a_view_of_is_refused(compiler):
    model = TakesView().double().eval()
    scripted = COMPILERS[compiler](model)
    with pytest.warns(UserWarning, match="1 of 2 weights refused"):
        report = nhwc.convert_(scripted)
    assert [row.reason for row in report.rows] == [Reason.VIEWS_WEIGHT, None]
    torch.testing.assert_close(scripted(X), model(X))


def constants_of(frozen):
    return [node.inputsAt(1).toIValue() for node in frozen.graph.findAllNodes("aten::conv2d")]


@pytest.mark.parametrize("has_run", [False, True])
def test_the_constants_of_a_frozen_module_convert(has_run):
    plain = script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval())
    frozen, x = torch.jit.freeze(plain), torch.randn(2, 3, 8, 8)
    for _ in range(3 * has_run):
        frozen(x)  # from the third call on, by an optimised graph
    report = nhwc.convert_(nn.Sequential(nn.Conv2d(3, 3, 3), frozen), strict=True)
    assert [row.full_name for row in report.rows] == ["0.weight", "1.<constant 0>", "1.<constant 1>"]
    assert [each.stride() for each in constants_of(frozen)] == [(27, 1, 9, 3), (36, 1, 12, 4)]
    assert all(each.is_contiguous() for each in plain.parameters())  # which they were made of
    torch.testing.assert_close(frozen(x), plain(x))
    nhwc.convert_(frozen, torch.contiguous_format, strict=True)
    assert all(each.is_contiguous() for each in constants_of(frozen))
    torch.testing.assert_close(frozen(x), plain(x))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_weights_that_are_packed_for_onednn_are_refused_and_the_rest_converts():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 3, 2)).eval()
    fused = torch.jit.optimize_for_inference(script(layers))
    with pytest.warns(UserWarning, match="2 of 3 weights refused: '<constant 1>'.*convert before freezing"):
        report = nhwc.convert_(fused)
    assert sorted(str(row.reason) for row in report.rows) == ["None", "Reason.FROZEN", "Reason.FROZEN"]
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fused(x), layers(x))


def test_only_2d_and_3d_convolutions_are_sites():
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.sound = nn.Conv1d(3, 3, 1)
            self.kernel = nn.Parameter(torch.randn(3, 3, 1))
            self.position = nn.Parameter(torch.randn(1, 3, 8, 8))

        def forward(self, x):
            return functional.conv1d(self.sound((x + self.position).flatten(2)), self.kernel)

    for compiler in (script, trace):
        assert not nhwc.plan(compiler(Others().double())).rows
