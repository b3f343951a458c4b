"""Companions: gradients, optimizer state and averaged copies follow their weights."""

import copy
import warnings

import pytest
import torch
from guarding import unguarded
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torch_nhwc as nhwc
from torch_nhwc import Outcome
from torch_nhwc.converting import commit

STOCK = nn.utils.convert_conv2d_weight_memory_format
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def network():
    """Layers that move bytes, one that only restrides, and tensors that are no weights of convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 3, 3), nn.Flatten(), nn.Linear(108, 2),
    ).double()  # fmt: skip


def convolution_weights(model):
    return [module.weight for module in model.modules() if hasattr(module, "kernel_size")]


def train_step(model, optimizer, generator):
    x = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.double).to(next(model.parameters()).device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(make_optimizer, steps=2, device="cpu"):
    model = network().to(device)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        train_step(model, optimizer, generator)
    return model, optimizer


def state_tensors(optimizer, weight):
    return {key: value for key, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}


def count_calls(monkeypatch):
    """The lists that the operator of the walk is called with."""
    calls = []

    def counted(tensors, *arguments, **options):
        calls.append(list(tensors))
        return nhwc.lay_out_weights_(tensors, *arguments, **options)

    monkeypatch.setattr(commit, "lay_out_weights_", counted)
    return calls


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_and_state_of_every_optimizer_follow_and_stay_the_objects_they_are(name, device):
    model, optimizer = trained(OPTIMIZERS[name], device=device)
    before = {
        parameter: {key: (tensor, tensor.clone()) for key, tensor in state_tensors(optimizer, parameter).items()}
        for parameter in model.parameters()
    }
    gradients = {parameter: (parameter.grad, parameter.grad.clone()) for parameter in model.parameters()}
    unrelated = [p for p in model.parameters() if p.dim() != 4]
    pointers = [(p.data_ptr(), p.grad.data_ptr()) for p in unrelated]

    report = nhwc.convert_(model, optimizer=optimizer)

    for weight in convolution_weights(model):
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert weight.grad is gradients[weight][0]
        assert weight.grad.stride() == weight.stride()
        following = [tensor for tensor in state_tensors(optimizer, weight).values() if tensor.shape == weight.shape]
        assert following or name == "Adafactor"
        for tensor in following:
            assert tensor.stride() == weight.stride()
    for parameter, states in before.items():
        for key, (tensor, values) in states.items():
            assert optimizer.state[parameter][key] is tensor
            assert torch.equal(tensor, values)
        assert torch.equal(parameter.grad, gradients[parameter][1])
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in unrelated] == pointers
    assert {each.site for each in report.companions} == {row.full_name for row in report.plan.rows}


def test_factored_state_is_left_with_its_reason():
    model, optimizer = trained(OPTIMIZERS["Adafactor"])
    weight = model[0].weight
    pointers = {key: tensor.data_ptr() for key, tensor in state_tensors(optimizer, weight).items()}
    report = nhwc.convert_(model, optimizer=optimizer)
    assert {key: tensor.data_ptr() for key, tensor in state_tensors(optimizer, weight).items()} == pointers
    left = {each.label for each in report.companions if each.reason is nhwc.Reason.OTHER_SHAPE}
    assert left == {"row_var", "col_var"}


class Quantized(torch.Tensor):
    """State as a subclass, like the 8-bit ones of torchao."""


def test_state_of_a_tensor_subclass_is_left_with_its_reason_and_the_weight_converts():
    model, optimizer = trained(OPTIMIZERS["Adam"])
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].as_subclass(Quantized)
    strides = optimizer.state[weight]["exp_avg"].stride()
    report = nhwc.convert_(model, optimizer=optimizer)
    assert optimizer.state[weight]["exp_avg"].stride() == strides
    assert weight.stride() == optimizer.state[weight]["exp_avg_sq"].stride() == (27, 1, 9, 3)
    left = [each for each in report.companions if each.reason is not None]
    assert [(each.site, each.label, each.reason) for each in left] == [("0.weight", "exp_avg", nhwc.Reason.OTHER_KIND)]


STUCK = {
    "a slice of a flat buffer": lambda weight: torch.zeros(weight.numel() + 8).double()[8:].view(weight.shape),
    "packed bytes": lambda weight: torch.zeros(weight.shape, dtype=torch.uint8),
    "part of a graph": lambda weight: weight.detach().clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("kind", STUCK)
def test_state_that_cannot_follow_refuses_its_weight_and_no_other(kind):
    model, optimizer = trained(OPTIMIZERS["Adam"])
    weight = model[0].weight
    stuck = optimizer.state[weight]["exp_avg"] = STUCK[kind](weight)
    before = [(t, t.data_ptr(), t.stride()) for t in (weight, weight.grad, *state_tensors(optimizer, weight).values())]
    with pytest.warns(UserWarning, match=r"1 of 4 sites stay as they are: '0.weight' \(Conv2d\): .*state"):
        report = nhwc.convert_(model, optimizer=optimizer)
    assert report.plan.rows[0].reason is nhwc.Reason.STATE_IN_THE_WAY
    assert optimizer.state[weight]["exp_avg"] is stuck
    assert all((tensor.data_ptr(), tensor.stride()) == (pointer, strides) for tensor, pointer, strides in before)
    for other in convolution_weights(model)[1:]:
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[other]["exp_avg"].stride() == other.stride()


def test_two_parameters_over_one_storage_are_refused_together():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["momentum_buffer"] = STUCK["a slice of a flat buffer"](model[0].weight)
    with pytest.warns(UserWarning, match="2 of 3 sites stay as they are"):
        report = nhwc.convert_(model, optimizer=optimizer)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert [model[index].weight.stride() for index in range(3)] == [(27, 9, 3, 1), (27, 9, 3, 1), (27, 1, 9, 3)]
    assert optimizer.state[model[1].weight]["momentum_buffer"].stride() == (27, 9, 3, 1)
    assert report.plan.bytes_to_move == model[2].weight.nbytes


def test_state_that_cannot_follow_a_weight_in_format_is_left_with_its_reason():
    model, optimizer = trained(OPTIMIZERS["Adam"])
    nhwc.convert_(model, optimizer=optimizer)
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = STUCK["a slice of a flat buffer"](weight)
    report = nhwc.convert_(model, optimizer=optimizer)
    assert [each.label for each in report.companions if each.reason is nhwc.Reason.STATE_IN_THE_WAY] == ["exp_avg"]


def test_state_belongs_to_a_weight_by_identity_and_never_by_shape():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    foreign = nn.Parameter(torch.randn(3, 3, 3, 3))
    optimizer = torch.optim.SGD([foreign, model[0].weight], lr=0.1, momentum=0.9)
    for parameter in (foreign, model[0].weight):
        parameter.grad = torch.randn(3, 3, 3, 3)
    optimizer.step()
    nhwc.convert_(model, optimizer=optimizer)
    assert optimizer.state[foreign]["momentum_buffer"].is_contiguous()
    assert optimizer.state[model[0].weight]["momentum_buffer"].stride() == (27, 1, 9, 3)
    assert model[1].weight not in optimizer.state  # asking leaves nothing behind


def test_state_in_nested_containers_follows():
    layer = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    inner = torch.randn(4, 3, 3, 3)
    optimizer.state[layer.weight] = {"history": [inner, {"deep": inner.clone()}], "step": 3, "name": "x"}
    report = nhwc.convert_(layer, optimizer=optimizer)
    assert [each.label for each in report.companions] == ["history.0", "history.1.deep"]
    assert inner.stride() == optimizer.state[layer.weight]["history"][1]["deep"].stride() == (27, 1, 9, 3)


@pytest.mark.parametrize(("wrap", "label"), [(lambda t: t, "state"), (lambda t: [3, t], "state.1")])
def test_state_that_is_no_dict_follows(wrap, label):
    layer, momentum = nn.Conv2d(3, 4, 3), torch.randn(4, 3, 3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight] = wrap(momentum)
    report = nhwc.convert_(layer, optimizer=optimizer)
    assert [each.label for each in report.companions] == [label]
    assert momentum.stride() == (27, 1, 9, 3)


def test_several_optimizers_follow():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4))
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model[1].parameters()),
        torch.optim.Muon([model[3].weight], lr=0.1),
    ]
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    nhwc.convert_(model, optimizer=optimizers)
    assert optimizers[0].state[model[0].weight]["momentum_buffer"].stride() == (27, 1, 9, 3)
    assert optimizers[1].state[model[1].weight]["exp_avg"].stride() == (36, 1, 12, 4)


COPIES = {
    "AveragedModel": (AveragedModel, lambda copied: dict(copied.module.named_parameters())),
    "deep copy": (copy.deepcopy, lambda copied: dict(copied.named_parameters())),
    "mapping": (lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}, dict),
}


@pytest.mark.parametrize("kind", COPIES)
def test_h28_averaged_copies_follow(kind):
    make, tensors_of = COPIES[kind]
    model = network()
    copied = make(model)
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors_of(copied).items()}
    report = nhwc.convert_(model, ema=copied)
    for name, parameter in model.named_parameters():
        tensor, values = before[name]
        assert tensors_of(copied)[name] is tensor
        assert tensor.stride() == parameter.stride()
        assert torch.equal(tensor, values)
    assert [each.label for each in report.companions] == ["ema"] * 4
    if kind == "AveragedModel":
        copied.update_parameters(model)
    report.revert()
    assert all(tensor.is_contiguous() for tensor, _ in before.values())


def test_several_copies_and_their_gradients_follow_and_each_reverts_to_its_own_strides():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    odd = (108, 1, 36, 12)  # not dense
    copies[0][0].weight.data = torch.empty_strided((4, 3, 3, 3), odd).normal_()
    copies[0][0].weight.grad = torch.randn(4, 3, 3, 3)
    copies.append(nn.Sequential(nn.Conv2d(3, 4, 3)))
    nhwc.convert_(copies[2])
    report = nhwc.convert_(model, ema=copies, storage="fresh")
    outcomes = {"ema": [], "ema.grad": []}
    for row in report.companions:
        outcomes[row.label].append(row.outcome)
    assert outcomes == {"ema": [Outcome.FRESH, Outcome.FRESH, Outcome.KEPT], "ema.grad": [Outcome.FRESH]}
    for each in (copies[0][0].weight, copies[0][0].weight.grad, copies[1][0].weight):
        assert each.stride() == (27, 1, 9, 3)
    report.revert()
    assert copies[0][0].weight.stride() == odd
    assert copies[0][0].weight.grad.is_contiguous()
    assert copies[1][0].weight.is_contiguous()
    assert copies[2][0].weight.stride() == (27, 1, 9, 3)


class Raw(nn.Module):
    """Uses a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x):
        return nn.functional.conv2d(x, self.kernel)


def test_copies_follow_where_only_example_inputs_show_the_weight():
    model = nn.Sequential(Raw())
    averaged = AveragedModel(model)
    nhwc.convert_(model, ema=averaged, example_inputs=torch.randn(1, 3, 8, 8))
    assert averaged.module[0].kernel.stride() == model[0].kernel.stride() == (27, 1, 9, 3)


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        (nn.Sequential(), "nothing at '0.weight', the model has"),
        (nn.Sequential(nn.Conv2d(3, 5, 3)), r"shape \(5, 3, 3, 3\) at '0.weight', the model has \(4, 3, 3, 3\)"),
        ({"weight": torch.zeros(4, 3, 3, 3)}, "nothing at '0.weight'"),
    ],
)
def test_a_copy_of_another_model_raises_and_changes_nothing(ema, message):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=message):
        nhwc.convert_(model, ema=ema)
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": nn.Linear(2, 2)}, "expected an optimizer, or a list of them, got Linear"),
        ({"optimizer": [3]}, "expected an optimizer, or a list of them, got int"),
        ({"ema": [torch.zeros(3)]}, "expected ema to be a module, or names and tensors, got Tensor"),
    ],
)
def test_what_is_no_companion_raises(options, message):
    with pytest.raises(TypeError, match=message):
        nhwc.convert_(nn.Conv2d(3, 4, 3), **options)


def test_weights_gradients_state_and_copies_go_in_one_call(monkeypatch):
    model, optimizer = trained(OPTIMIZERS["Adam"])
    calls = count_calls(monkeypatch)
    nhwc.convert_(model, optimizer=optimizer, ema=AveragedModel(model))
    assert [len(call) for call in calls] == [4 * (1 + 1 + 2 + 1)]


def test_companions_of_a_weight_in_format_follow():
    model, optimizer = trained(OPTIMIZERS["Adam"])
    STOCK(model, torch.channels_last)
    pointers = [weight.data_ptr() for weight in convolution_weights(model)]
    nhwc.convert_(model, optimizer=optimizer)
    assert [weight.data_ptr() for weight in convolution_weights(model)] == pointers
    for weight in convolution_weights(model):
        assert weight.grad.stride() == optimizer.state[weight]["exp_avg"].stride() == weight.stride()


KINDS = {
    "SGD": lambda p, **options: torch.optim.SGD(p, lr=0.05, momentum=0.9, **options),
    "Adam": lambda p, **options: torch.optim.Adam(p, lr=0.01, **options),
    "AdamW": lambda p, **options: torch.optim.AdamW(p, lr=0.01, **options),
    "Adagrad": lambda p, **options: torch.optim.Adagrad(p, lr=0.05, **options),
}
VARIANTS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def losses_of_20_steps(make_optimizer, device, between=lambda model, optimizer: None):
    """Twenty steps, with something done after the tenth."""
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(20):
        if step == 10:
            between(model, optimizer)
        losses.append(train_step(model, optimizer, generator))
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_h06_converting_in_the_middle_of_training_changes_neither_losses_nor_parameters(kind, variant, device):
    if (kind, variant, device) == ("Adagrad", "fused", "cuda"):
        pytest.skip("PyTorch has no such optimizer")

    def make(parameters):
        return KINDS[kind](parameters, **VARIANTS[variant])

    expected = losses_of_20_steps(make, device)
    if variant == "fused" and device == "cpu":  # what plain PyTorch does
        with unguarded():
            wrong, _ = losses_of_20_steps(make, device, lambda model, _: STOCK(model, torch.channels_last))
        assert wrong[:11] == pytest.approx(expected[0][:11], rel=1e-9)
        assert wrong != pytest.approx(expected[0], rel=1e-4)
    reverted = losses_of_20_steps(
        make, device, lambda model, optimizer: nhwc.convert_(model, optimizer=optimizer).revert(optimizer)
    )
    for actual in (
        losses_of_20_steps(make, device, lambda model, optimizer: nhwc.convert_(model, optimizer=optimizer)),
        reverted,
    ):
        assert actual[0] == pytest.approx(expected[0], rel=1e-9)
        torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_reverting_takes_along_the_state_that_has_come_since(kind):
    reports = []

    def there(parameters):
        """Converts first, so that all state comes after it."""
        parameters = list(parameters)
        return KINDS[kind](parameters, fused=True)

    def back(model, optimizer):
        reports.pop().revert(optimizer)
        for weight in convolution_weights(model):
            assert weight.is_contiguous()
            states = state_tensors(optimizer, weight).values()
            assert all(state.is_contiguous() for state in states if state.shape == weight.shape)

    def run(convert):
        torch.manual_seed(0)
        model = network()
        if convert:
            reports.append(nhwc.convert_(model))
        optimizer = there(model.parameters())
        generator = torch.Generator().manual_seed(0)
        losses = []
        for step in range(20):
            if step == 10 and convert:
                back(model, optimizer)
            losses.append(train_step(model, optimizer, generator))
        return losses

    assert run(True) == pytest.approx(run(False), rel=1e-9)


def test_h33_the_autocast_cache_is_cleared():
    layer = nn.Conv2d(3, 8, 3)
    x = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)

    def strides_at_the_convolution(convert):
        seen = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
                if "convolution" in str(function):
                    seen.append(arguments[1].stride())
                return function(*arguments, **(keywords or {}))

        with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
            layer(x)
            convert(layer)
            layer(x)
        return seen

    stock = strides_at_the_convolution(lambda model: STOCK(model, torch.channels_last))
    assert stock == [(27, 9, 3, 1)] * 2  # what plain PyTorch does
    nhwc.convert_(layer, "contiguous_format")
    assert strides_at_the_convolution(nhwc.convert_) == [(27, 9, 3, 1), (27, 1, 9, 3)]


def test_averaged_copies_of_computed_weights_are_laid_out_too():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    averaged = AveragedModel(model)
    report = nhwc.convert_(model, ema=averaged)
    assert averaged.module[0].weight.stride() == model[0].weight.stride() == (27, 1, 9, 3)
    report.revert()
    assert averaged.module[0].weight.stride() == model[0].weight.stride() == (27, 9, 3, 1)


def test_lists_of_averaged_parameters_are_told_how_to_come():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(TypeError, match=r"got Tensor: for a list of averaged parameters, give dict\(zip"):
        nhwc.convert_(model, ema=[parameter.detach() for parameter in model.parameters()])


def test_one_optimizer_for_each_parameter_is_looked_at_once():
    """As in "optimizer in backward": thousands of optimizers, and the work of each must not grow with their number."""

    class CountingState(dict):
        looked_at = 0

        def get(self, *arguments):
            CountingState.looked_at += 1
            return super().get(*arguments)

    model = nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(200)))
    optimizers = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.state = CountingState(optimizer.state)
    report = nhwc.convert_(model, optimizer=optimizers)
    assert len(report.companions) == 2 * 200
    assert CountingState.looked_at == 200
    assert optimizers[0].state[model[0].weight]["momentum_buffer"].stride() == (18, 1, 6, 2)
    report.revert()
    assert optimizers[-2].state[model[-1].weight]["momentum_buffer"].is_contiguous()
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        nhwc.convert_(model, optimizer=[*optimizers, torch.optim.SGD([torch.zeros(1, requires_grad=True)])])


def test_gradients_without_a_named_optimizer_are_a_warning():
    said = "no optimizer was given: the state of one stays as it is, .* a fused one on a CPU"
    model, optimizer = trained(OPTIMIZERS["Adam"])
    with pytest.warns(UserWarning, match=f"{said} is right only by the guard at its step") as told:
        nhwc.convert_(model).revert()
    assert len(told) == 1
    assert told[0].filename == __file__
    with unguarded(), pytest.warns(UserWarning, match=f"{said} steps silently wrong"):
        nhwc.convert_(model).revert()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for named in ((), optimizer, [optimizer]):
            nhwc.convert_(model, optimizer=named)
            nhwc.convert_(model)  # nothing changes
            nhwc.convert_(model, torch.contiguous_format, optimizer=named)
        optimizer.zero_grad()
        nhwc.convert_(model)  # no sign of training


def test_a_warning_about_gradients_that_is_an_error_changes_nothing():
    model, _ = trained(OPTIMIZERS["Adam"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no optimizer was given"):
            nhwc.convert_(model)
    assert all(weight.is_contiguous() for weight in convolution_weights(model))
