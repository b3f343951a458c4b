"""Companions: gradients, optimizer state and averaged copies follow their weights."""

import copy
import warnings

import pytest
import torch
from guarding import unguarded
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torch_nhwc as nhwc

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
    "codes": lambda weight: torch.zeros(weight.shape, dtype=torch.float8_e4m3fnuz),
    "part of a graph": lambda weight: weight.detach().clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("kind", STUCK)
def test_state_that_cannot_follow_refuses_its_weight_and_no_other(kind):
    model, optimizer = trained(OPTIMIZERS["Adam"])
    weight = model[0].weight
    stuck = optimizer.state[weight]["exp_avg"] = STUCK[kind](weight)
    before = [(t, t.data_ptr(), t.stride()) for t in (weight, weight.grad, *state_tensors(optimizer, weight).values())]
    with pytest.warns(UserWarning, match=r"1 of 4 weights refused: '0.weight' \(Conv2d\): .*state"):
        report = nhwc.convert_(model, optimizer=optimizer)
    assert report.plan.rows[0].reason is nhwc.Reason.STATE_IN_THE_WAY
    assert optimizer.state[weight]["exp_avg"] is stuck
    assert all((tensor.data_ptr(), tensor.stride()) == (pointer, strides) for tensor, pointer, strides in before)
    for other in convolution_weights(model)[1:]:
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[other]["exp_avg"].stride() == other.stride()


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


COPIES = {
    "AveragedModel": (AveragedModel, lambda copied: dict(copied.module.named_parameters())),
    "deep copy": (copy.deepcopy, lambda copied: dict(copied.named_parameters())),
    "state dict": (lambda model: copy.deepcopy(model.state_dict()), dict),
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


class Pairs:
    """An average that keeps the tensors of its first update, as Ultralytics' ModelEMA."""

    def __init__(self, model):
        self.ema, self._pairs = copy.deepcopy(model), None

    @torch.no_grad()
    def update(self, model):
        if self._pairs is None:
            ours, theirs = self.ema.state_dict(), model.state_dict()
            self._pairs = [(ours[name], theirs[name]) for name in ours]
        for own, other in self._pairs:
            own.lerp_(other, 0.5)


@pytest.mark.parametrize("storage", ["auto", "fresh", "detach"])
def test_a_companion_whose_memory_something_else_holds_is_a_warning(storage):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    average = Pairs(model)
    average.update(model)
    held = "ema of '0.weight', ema of '2.weight': something else holds this memory, such as a state dict"
    with pytest.warns(UserWarning, match=held) as warned:
        report = nhwc.convert_(model, ema=average.ema, storage=storage)
    assert [each.filename for each in warned] == [__file__]
    average._pairs = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average.update(model)
        average._pairs = None
        nhwc.convert_(model, torch.contiguous_format, ema=average.ema)
        report = nhwc.convert_(model, ema=average.ema)
    kept = average.ema.state_dict()
    with pytest.warns(UserWarning, match=held):
        report.revert()
    del kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_companions_as_they_usually_are_hold_no_memory_of_others(name):
    model, optimizer = trained(OPTIMIZERS[name])
    x = torch.randn(2, 3, 8, 8).double()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    averaged = [AveragedModel(model), copy.deepcopy(model)]
    averaged[0].update_parameters(model)
    states = optimizer.state_dict(), averaged[1](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for storage in ("auto", "fresh"):
            nhwc.convert_(model, optimizer=optimizer, ema=averaged, storage=storage).revert()
    del loss, states


def test_gradients_without_a_named_optimizer_are_a_warning():
    said = r"no optimizer was given: pass optimizer=, so .* optimizer=\(\) if there is none. .* optimizer on a CPU"
    model, optimizer = trained(OPTIMIZERS["Adam"])
    with pytest.warns(UserWarning, match=f"{said} is right only while torch_nhwc aligns it") as warned:
        nhwc.convert_(model).revert()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with unguarded(), pytest.warns(UserWarning, match=f"{said} is silently wrong"):
        nhwc.convert_(model).revert()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for named in ((), optimizer, [optimizer]):
            nhwc.convert_(model, optimizer=named)
            nhwc.convert_(model)  # nothing changes
            nhwc.convert_(model, torch.contiguous_format, optimizer=named)
        optimizer.zero_grad()
        nhwc.convert_(model)  # no sign of training


class Keeper:
    """Keeps an averaged copy, and is no module itself, as timm's ModelEma."""

    def __init__(self, model):
        self.shadow = copy.deepcopy(model)


class KeepingModule(nn.Module):
    """Keeps an averaged copy as a child, as timm's ModelEmaV3."""

    def __init__(self, model):
        super().__init__()
        self.average = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Keeper, TypeError, "got Keeper: pass the averaged module that a wrapper holds"),
        (lambda model: [torch.zeros(3)], TypeError, "a module, or a mapping of names to tensors, got Tensor"),
        (lambda model: model, ValueError, "an averaged copy of the model, got the model itself"),
        (KeepingModule, ValueError, r"nothing at '0.weight', the model has \(8, 3, 3, 3\): pass its \.average"),
        (lambda model: model.state_dict(), ValueError, "'0.weight' shares its memory with something"),
        (lambda model: nn.Sequential(), ValueError, "nothing at '0.weight', the model has"),
        (lambda model: {"weight": torch.zeros(8, 3, 3, 3)}, ValueError, "nothing at '0.weight'"),
        (
            lambda model: nn.Sequential(nn.Conv2d(3, 5, 3)),
            ValueError,
            r"shape \(5, 3, 3, 3\) at '0.weight', the model has \(8, 3, 3, 3\)",
        ),
    ],
)
def test_what_is_no_averaged_copy_or_shares_its_memory_is_refused(make, error, message):
    model = network()
    averaged = make(model)
    with pytest.raises(error, match=message):
        nhwc.convert_(model, ema=averaged)
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("optimizer", [nn.Linear(2, 2), [3]], ids=["Linear", "int"])
def test_what_is_no_optimizer_raises(optimizer, request):
    said = f"expected an optimizer, or a list of them, got {request.node.callspec.id}"
    with pytest.raises(TypeError, match=said):
        nhwc.convert_(nn.Conv2d(3, 4, 3), optimizer=optimizer)


def test_a_copy_that_lacks_a_replaced_layer_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
    with pytest.raises(ValueError, match="the averaged copy has no layer at '1', as the model has"):
        nhwc.convert_(model, ema=copy.deepcopy(model)[:1])
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.GELU]


def test_a_copy_with_a_computed_weight_is_refused_without_computing_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    other = copy.deepcopy(model)
    nn.utils.parametrizations.spectral_norm(other[0])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"the averaged copy has nothing at '0\.weight'"):
        nhwc.convert_(model, ema=other)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
