"""Convolutions and batch norms that PyTorch computes wrong are replaced in training and in evaluation mode."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.planning import Action

KINDS = {"conv": "Conv2d", "norm": "BatchNorm2d", "up": "ConvTranspose2d", "point": "Conv2d", "strided": "Conv2d"}


def network():
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(3, 8, 3, padding=1),
        "norm": nn.BatchNorm2d(8),
        "up": nn.ConvTranspose2d(8, 8, 2),
        "point": nn.Conv2d(8, 8, 1),
        "strided": nn.Conv2d(8, 4, 1, stride=2),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def volumes():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ConvTranspose3d(4, 2, 2))


X = torch.randn(2, 3, 6, 6)
V = torch.randn(2, 2, 4, 4, 4)
MODELS = pytest.mark.parametrize(("make", "x"), [(network, X), (volumes, V)], ids=["images", "volumes"])


def replaced(model):
    return {path for path, module in model.named_modules() if "Preserving" in type(module).__name__}


def types(model):
    return [type(module) for module in model.modules()]


def results(model, x):
    """Return the output of a model, its gradients and its buffers after a backward pass."""
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def assert_alike(model, other, x):
    torch.testing.assert_close(results(model, x), results(other, x), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("is_training", "requires_grad", "preserve"), itertools.product([True, False], [True, False], [True, False])
)
def test_mode_gradients_and_the_option_say_what_is_replaced(is_training, requires_grad, preserve):
    model = network().train(is_training).requires_grad_(requires_grad)
    expected = {*KINDS} if preserve else {"strided"} if is_training and requires_grad else set()
    plan = nhwc.plan(model, preserve=preserve)
    report = nhwc.convert_(model, preserve=preserve)
    assert replaced(model) == {row.path for row in report.plan.layers} == expected
    assert report.plan == plan
    assert report.plan.preserve is preserve
    reason = None if preserve else Reason.STRIDED_POINTWISE
    rows = [(row.path, row.layer, row.action, row.reason) for row in plan.layers]
    assert rows == [(path, kind, Action.REPLACE, reason) for path, kind in KINDS.items() if path in expected]
    assert (Reason.WRONG_GRADIENTS.value in report.remarks) is (requires_grad and not preserve)
    report.revert()
    assert types(model) == types(network())


@MODELS
def test_a_model_that_is_converted_in_evaluation_mode_trains_right(make, x):
    model = make().eval()
    plan = nhwc.convert_(model, optimizer=()).plan
    assert plan == nhwc.plan(make())
    assert_alike(model.train(), make(), x)
    assert nhwc.check(model, plan) == []


def test_a_report_has_one_line_for_each_kind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    lines = str(nhwc.convert_(network())).splitlines()
    assert [line for line in lines if "replaced:" in line] == [
        "3 Conv2d replaced: right for every shape, fast where PyTorch is slow, also by fewer multiplications",
        "1 BatchNorm2d replaced: accurate for every size, and one pass with the activation after it",
        "1 ConvTranspose2d replaced: right for every shape, fast where PyTorch is slow, also by fewer multiplications",
    ]


def test_without_preserve_tools_find_the_classes_and_the_report_names_the_way_out(monkeypatch):
    """Quantization by class would leave a replaced layer as it is, between quantized ones."""
    fused = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), nn.ReLU()).eval()
    nhwc.convert_(fused, preserve=False)
    assert type(torch.ao.quantization.fuse_modules(fused, [["0", "1"]])[0]) is torch.ao.nn.intrinsic.ConvReLU2d
    report = nhwc.convert_(nn.Conv2d(3, 4, 1, stride=2), preserve=False)
    monkeypatch.setenv("COLUMNS", "300")
    assert "tools that fuse or quantize layers by their class, call eval() before convert_" in str(report)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Conv3d(2, 4, 1, stride=2), V),
        (lambda: nn.Conv3d(2, 4, (3, 1, 1), padding=1, padding_mode="replicate"), V),
        (lambda: nn.Conv3d(2, 4, (3, 1, 1), padding=(1, 1, 0), padding_mode="reflect"), V),
        (lambda: nn.Conv3d(2, 4, 1, padding=1), V),
        (lambda: nn.Conv3d(2, 4, 3, groups=2), V),
        (lambda: nn.ConvTranspose3d(2, 4, 3, stride=2), V),
    ],
    ids=["strided", "replicate", "reflect", "padded", "grouped", "overlapping"],
)
def test_volumes_of_every_kind_are_replaced(make, x):
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    stock = copy.deepcopy(model)
    nhwc.convert_(model, input_format="channels_last", optimizer=())
    assert replaced(model) == {"0"}
    assert_alike(model, stock, x)


def test_a_second_call_changes_nothing_and_a_context_restores_the_classes():
    model = network()
    with nhwc.channels_last(model):
        assert replaced(model) == {*KINDS}
    assert types(model) == types(network())
    nhwc.convert_(model)
    before = types(model)
    report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.layers] == [Reason.REPLACED] * len(KINDS)
    assert Reason.SAVED_WHOLE.value not in report.remarks
    report.revert()
    assert types(model) == before
    nhwc.convert_(model, preserve=False)
    assert types(model) == before


def test_contiguous_takes_the_classes_back_and_ignores_the_option():
    model = network()
    for preserve in (True, False):
        nhwc.convert_(model)
        report = nhwc.convert_(model, torch.contiguous_format, preserve=preserve)
        assert not report.plan.layers
        assert types(model) == types(network())


def test_convolutions_of_a_rank_that_was_not_requested_are_right_too():
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.Flatten(0, 1), nn.Conv2d(4, 4, 3))
    nhwc.convert_(model, torch.channels_last)
    assert replaced(model) == {"0", "2"}
    assert model[0].weight.is_contiguous()


@MODELS
def test_results_are_those_of_the_contiguous_model(make, x):
    model, stock = make(), make()
    nhwc.convert_(model, input_format="channels_last", optimizer=())
    assert replaced(model)
    assert_alike(model, stock, x)
    assert_alike(model.eval(), stock.eval(), x)


class TestPlans:
    """Plans of one mode, for a model in the same or the other."""

    @pytest.mark.parametrize("is_training", [True, False])
    @MODELS
    def test_of_one_mode_applies_to_a_model_in_the_other(self, make, x, is_training):
        plan = nhwc.plan(make().train(is_training))
        model = make().train(not is_training)
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert replaced(model) == {row.path for row in plan.layers} == {row.path for row in nhwc.plan(make()).layers}
        assert report.plan == plan
        assert report.plan.digest == plan.digest
        assert nhwc.check(model, plan) == nhwc.check(model.train(), plan) == []
        assert_alike(model, make(), x)
        report.revert()
        assert types(model) == types(make())

    def test_leaves_out_what_a_filter_left_out(self):
        plan = nhwc.plan(network(), filter_fn=lambda module, path: path != "up")
        report = nhwc.convert_(model := network(), plan=plan)
        assert replaced(model) == {*KINDS} - {"up"}
        assert [row.reason for row in report.plan.layers] == [None, None, Reason.FILTERED, None, None]

    def test_of_a_model_with_other_layers_raises(self):
        plan = nhwc.plan(network())
        other, missing, more = network(), network(), network()
        other.norm = nn.InstanceNorm2d(8)
        missing.norm = nn.Identity()
        more.gelu = nn.GELU()
        for model, message in (
            (other, "it has a InstanceNorm2d at 'norm', the plan a BatchNorm2d"),
            (missing, "it has no such layer at 'norm', the plan a BatchNorm2d"),
            (more, r"the plan does not know 'gelu' \(GELU\)"),
        ):
            before = types(model)
            for call in (lambda model: nhwc.convert_(model, plan=plan), lambda model: nhwc.check(model, plan)):
                with pytest.raises(ValueError, match=message):
                    call(model)
            assert types(model) == before

    @pytest.mark.parametrize("is_training", [True, False])
    def test_without_preserve_replaces_what_would_train_wrong(self, is_training):
        plan = nhwc.plan(network().train(not is_training), preserve=False)
        model = network().train(is_training)
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert replaced(model) == {"strided"}  # because of the plan, or of the mode
        report.revert()
        assert types(model) == types(network())

    def test_of_another_device_replaces_layers_on_a_cpu(self):
        plan = nhwc.plan(network())
        rows = [row._replace(action=Action.KEEP, reason=Reason.OTHER_DEVICE) for row in plan.layers]
        model = network()
        nhwc.convert_(model, plan=dataclasses.replace(plan, layers=tuple(rows)))
        assert replaced(model) == {*KINDS}

    def test_of_contiguous_fits_models_with_layers_that_lose(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
        plan = nhwc.plan(model, torch.contiguous_format)
        assert nhwc.check(model, plan) == []

    def test_names_a_layer_that_is_of_pytorch_s_class_again(self):
        model = network()
        plan = nhwc.convert_(model).plan
        model.conv.__class__ = nn.Conv2d
        (deviation,) = nhwc.check(model, plan)
        assert (deviation.site, deviation.what) == ("conv", "layer")
        nhwc.training.restore_(model, plan)
        assert nhwc.check(model, plan) == []


def test_averaged_copies_go_along():
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    other = copy.deepcopy(model)
    report = nhwc.convert_(model, ema=[averaged, other])
    assert replaced(averaged.module) == replaced(other) == replaced(model) == {*KINDS}
    averaged.update_parameters(model)
    report.revert()
    assert types(averaged.module) == types(other) == types(model) == types(network())


def test_weights_of_each_forward_and_replaced_layers_compose():
    model = network()
    report = nhwc.convert_(model, each_forward=True)
    assert type(model.conv).__name__ == "EachForwardPreservingConv2d"
    assert replaced(model) == {*KINDS}
    assert_alike(model, network(), X)
    report.revert()
    assert types(model) == types(network())


def test_parametrized_and_padded_layers_are_replaced():
    def make():
        torch.manual_seed(0)
        circular = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        return nn.Sequential(circular, nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding="same")))

    model = make()
    nhwc.convert_(model, input_format="channels_last")
    assert replaced(model) == {"0", "1"}
    assert_alike(model, make(), X)


def test_subclasses_are_replaced_if_they_call_pytorch_s_function():
    class Named(nn.Conv2d):
        """Nothing of its own."""

    class Standardized(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean(), bias)

    class Doubled(nn.Conv2d):
        def forward(self, input):
            return 2 * super().forward(input)

    class Multiplied(nn.Conv2d):
        def forward(self, input):
            return input @ self.weight[0, 0]

    layers = [layer(3, 3, 3) for layer in (Named, Standardized, Doubled, Multiplied, nn.Conv2d)]
    model = nn.Sequential(*layers)
    model[4]._conv_forward = lambda input, weight, bias: input  # on the layer itself
    report = nhwc.convert_(model)
    assert replaced(model) == {"0", "1", "2"}
    assert [row.reason for row in report.plan.layers] == [*[None] * 3, Reason.OTHER_CLASS, Reason.FORWARD_REPLACED]


@pytest.mark.usefixtures("process_group")
def test_layers_inside_of_ddp_stay_and_replaced_ones_train_there():
    wrapped = DistributedDataParallel(network())
    with pytest.warns(UserWarning, match="weights refused"):
        report = nhwc.convert_(wrapped)
    assert {row.action for row in report.plan.layers} == {Action.KEEP}
    assert not replaced(wrapped)

    model = network()
    plan = nhwc.convert_(model, optimizer=()).plan
    wrapped = DistributedDataParallel(model)
    assert_alike(wrapped, DistributedDataParallel(network()), X)
    assert nhwc.check(wrapped, plan) == []


@MODELS
def test_state_dicts_are_those_of_the_unconverted_model(make, x):
    model, stock = make(), make()
    nhwc.convert_(model, optimizer=())
    assert [*model.state_dict()] == [*stock.state_dict()]
    stock.load_state_dict(model.state_dict())
    assert_alike(model, stock, x)
    model.load_state_dict(make().state_dict())
    assert_alike(model, make(), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()),
        lambda: network().to("meta"),
        lambda: torch.jit.script(network()),
        lambda: nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3))] * 3),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    ],
    ids=["lazy", "meta", "scripted", "shared", "nothing"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:torch_nhwc", "ignore:Lazy modules")
def test_every_kind_of_model_converts_and_reverts(make):
    model = make()
    before = [type(module) for module in model.modules()]
    plan = nhwc.plan(model)
    report = nhwc.convert_(model)
    assert report.plan == plan
    assert Plan.from_json(plan.to_json()) == plan
    report.revert()
    assert [type(module) for module in model.modules()] == before


def test_a_deep_model_converts_and_reverts():
    model = nn.Conv2d(2, 2, 3)
    for _ in range(3000):
        model = nn.Sequential(model)
    report = nhwc.convert_(model)
    assert [row.action for row in report.plan.layers] == [Action.REPLACE]
    assert [row.full_name for row in report.rows] == ["0." * 3000 + "weight"]
    report.revert()
    while isinstance(model, nn.Sequential):
        model = model[0]
    assert type(model) is nn.Conv2d


def test_the_functions_like_pytorch_s_leave_the_classes():
    model = network()
    nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    assert replaced(model) == {"strided"}
