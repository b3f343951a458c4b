"""What `preserve` replaces in models that train: convolutions and batch norms that PyTorch computes wrong."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.planning import Action

FAULTS = {
    "conv": ("Conv2d", Reason.SMALL_INPUTS),
    "norm": ("BatchNorm2d", Reason.BATCH_STATISTICS),
    "up": ("ConvTranspose2d", Reason.SMALL_INPUTS),
    "strided": ("Conv2d", Reason.STRIDED_POINTWISE),
}
CONVOLUTIONS = {"conv", "up"}


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
    expected = {"strided"}
    if preserve and is_training:
        expected |= {"norm"} | (CONVOLUTIONS if requires_grad else set())
    plan = nhwc.plan(model, preserve=preserve)
    report = nhwc.convert_(model, preserve=preserve)
    assert replaced(model) == {row.path for row in report.plan.layers} == expected
    assert report.plan == plan
    assert report.plan.preserve is preserve
    of_all = {(path, kind, Action.EXCHANGE, reason) for path, (kind, reason) in FAULTS.items()}
    assert {(row.path, row.layer, row.action, row.reason) for row in plan.layers} == {
        each for each in of_all if each[0] in expected
    }
    has_wrong_gradients = is_training and requires_grad and not preserve
    is_for_inference = preserve and not (is_training and requires_grad)
    assert (Reason.WRONG_GRADIENTS.value in report.remarks) is has_wrong_gradients
    assert (Reason.FOR_INFERENCE.value in report.remarks) is is_for_inference
    report.revert()
    assert types(model) == types(network())


def test_only_the_layer_counts():
    """One that is frozen, or in evaluation mode, stays in a model that trains."""
    model = network()
    model.conv.weight.requires_grad_(False)
    model.up.eval()
    model.norm.eval()
    report = nhwc.convert_(model)
    assert replaced(model) == {"strided"}
    assert Reason.FOR_INFERENCE.value in report.remarks


def test_a_batch_norm_without_running_statistics_is_replaced_in_evaluation_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    (row,) = nhwc.convert_(model).plan.layers
    assert (row.path, row.reason) == ("1", Reason.BATCH_STATISTICS)


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

    @MODELS
    def test_of_training_mode_applies_to_a_model_in_evaluation_mode(self, make, x):
        plan = nhwc.plan(make())
        model = make().eval()
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert replaced(model) == {row.path for row in plan.layers}
        assert report.plan == plan
        assert report.plan.digest == plan.digest
        assert nhwc.check(model, plan) == nhwc.check(model.train(), plan) == []
        assert_alike(model, make(), x)
        report.revert()
        assert types(model) == types(make())

    @MODELS
    def test_of_evaluation_mode_applies_to_a_model_that_trains(self, make, x):
        plan = nhwc.plan(make().eval())
        model = make()
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert replaced(model) == {row.path for row in nhwc.plan(make()).layers}  # what would be wrong otherwise
        assert nhwc.check(model, plan) == []
        report.revert()
        assert types(model) == types(make())

    @pytest.mark.parametrize("is_training", [True, False])
    def test_without_replaced_layers_stays_so(self, is_training):
        plan = nhwc.plan(network().train(not is_training), preserve=False)
        model = network().train(is_training)
        assert nhwc.convert_(model, plan=Plan.from_json(plan.to_json())).plan == plan
        assert replaced(model) == {"strided"}

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
    assert replaced(averaged.module) == replaced(other) == replaced(model) == {*FAULTS}
    averaged.update_parameters(model)
    report.revert()
    assert types(averaged.module) == types(other) == types(model) == types(network())


def test_weights_of_each_forward_and_replaced_layers_compose():
    model = network()
    report = nhwc.convert_(model, each_forward=True)
    assert type(model.conv).__name__ == "EachForwardPreservingConv2d"
    assert replaced(model) == {*FAULTS}
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


def test_subclasses_with_code_of_their_own_stay():
    class Named(nn.Conv2d):
        """Nothing of its own."""

    class Standardized(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean(), bias)

    class Doubled(nn.Conv2d):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(Named(3, 3, 3), Standardized(3, 3, 3), Doubled(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[3]._conv_forward = lambda input, weight, bias: input  # on the layer itself
    report = nhwc.convert_(model)
    assert replaced(model) == {"0"}
    assert [row.reason for row in report.plan.layers] == [
        Reason.SMALL_INPUTS,
        *[Reason.OTHER_CLASS] * 2,
        Reason.FORWARD_REPLACED,
    ]


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_layers_inside_of_ddp_stay_and_replaced_ones_train_there(one_process):
    wrapped = DistributedDataParallel(network())
    with pytest.warns(UserWarning, match="sites stay as they are"):
        report = nhwc.convert_(wrapped)
    assert {row.action for row in report.plan.layers} == {Action.KEEP}
    assert not replaced(wrapped)

    model = network()
    plan = nhwc.convert_(model, optimizer=()).plan
    wrapped = DistributedDataParallel(model)
    assert_alike(wrapped, DistributedDataParallel(network()), X)
    assert nhwc.check(wrapped, plan) == []


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "through",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, V if isinstance(model[0], nn.Conv3d) else X, check_trace=False),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["scripted", "traced", "copied", "pickled"],
)
@MODELS
def test_a_whole_converted_model_is_the_same_elsewhere(make, x, through):
    model = make()
    nhwc.convert_(model, optimizer=())
    other = through(copy.deepcopy(model))
    if not isinstance(other, torch.jit.ScriptModule):
        assert replaced(other) == replaced(model)
    other.load_state_dict(make().state_dict())  # a trace has run
    assert_alike(other, make(), x)
    if isinstance(other, torch.jit.ScriptModule):
        torch.jit.save(other, file := io.BytesIO())
        file.seek(0)
        again = torch.jit.load(file)
        again.load_state_dict(make().state_dict())
        assert_alike(again, make(), x)


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
    assert [row.action for row in report.plan.layers] == [Action.EXCHANGE]
    report.revert()
    while isinstance(model, nn.Sequential):
        model = model[0]
    assert type(model) is nn.Conv2d


def test_the_functions_like_pytorch_s_leave_the_classes():
    model = network()
    nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    assert replaced(model) == {"strided"}
