"""What is taken for an averaged copy, and what is refused because it is not kept."""

import copy
import importlib

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))


class ModelEma:
    """timm's first: no module itself."""

    def __init__(self, model):
        self.ema = copy.deepcopy(model)


class ModelEmaV3(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)


class EMA(nn.Module):
    """ema_pytorch's: keeps the live model out of its modules."""

    def __init__(self, model):
        super().__init__()
        self.ema_model = copy.deepcopy(model)
        self.online_model = [model]


def diffusers_ema(model):
    return importlib.import_module("diffusers.training_utils").EMAModel(model.parameters())


KEPT = {
    "ModelEma": (ModelEma, lambda wrapper: wrapper.ema[0].weight),
    "ModelEmaV3": (ModelEmaV3, lambda wrapper: wrapper.module[0].weight),
    "EMA": (EMA, lambda wrapper: wrapper.ema_model[0].weight),
    "EMAModel": (diffusers_ema, lambda wrapper: wrapper.shadow_params[0]),
    "AveragedModel": (torch.optim.swa_utils.AveragedModel, lambda wrapper: wrapper.module[0].weight),
}


@pytest.mark.parametrize("kind", KEPT)
def test_h28_wrappers_are_followed(kind):
    make, averaged = KEPT[kind]
    model = network()
    wrapper = make(model)
    before = averaged(wrapper), averaged(wrapper).detach().clone()
    plan = nhwc.plan(model, ema=wrapper)
    report = nhwc.convert_(model, ema=wrapper)
    assert averaged(wrapper) is before[0]
    assert torch.equal(*before)
    assert averaged(wrapper).stride() == (27, 1, 9, 3)
    assert nhwc.check(model, plan, ema=wrapper) == []
    report.revert()
    assert averaged(wrapper).stride() == (27, 9, 3, 1)
    nhwc.convert_(model)
    nhwc.restore_(model, plan, ema=wrapper)
    assert averaged(wrapper).stride() == (27, 1, 9, 3)


class Keeper:
    """Of a class that is not known."""

    def __init__(self, model):
        self.decay, self.shadow = 0.9, copy.deepcopy(model)


class KeeperOfTensors:
    """What people write by hand: names and tensors, beside the model that is trained."""

    def __init__(self, model):
        self.model, self.options = model, {"decay": 0.9}
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class KeepingModule(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.average = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Keeper, TypeError, r"got Keeper \(give its \.shadow\)"),
        (KeeperOfTensors, TypeError, r"got KeeperOfTensors \(give its \.shadow\)"),
        (lambda model: model, ValueError, "an averaged copy of the model, got the model itself"),
        (KeepingModule, ValueError, r"nothing at '0.weight', the model has \(4, 3, 3, 3\): give its \.average"),
    ],
)
def test_the_error_names_where_others_keep_it(make, error, message):
    model = network()
    with pytest.raises(error, match=message):
        nhwc.convert_(model, ema=make(model))
    assert model[0].weight.is_contiguous()


def test_a_list_of_another_length_is_refused():
    model = network()
    ema = diffusers_ema(model[0])
    with pytest.raises(ValueError, match=r"the EMAModel keeps 2 averaged parameters, the model has 4: give dict\(zip"):
        nhwc.convert_(model, ema=ema)


def views_of(model):
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("make", [nn.Module.state_dict, views_of])
def test_tensors_that_nobody_keeps_are_refused(make, is_converted):
    model = network()
    averaged = copy.deepcopy(model)
    report = nhwc.convert_(model)
    if is_converted:
        nhwc.convert_(averaged)
    else:
        report.revert()
    before = averaged[0].weight.stride()
    with pytest.raises(ValueError, match=r"'0.weight' shares its memory with something else.*give the module"):
        nhwc.convert_(model, ema=make(averaged))
    with pytest.raises(ValueError, match="shares its memory"):
        report.revert(ema=make(averaged))
    assert averaged[0].weight.stride() == model[0].weight.stride() == before


def tied_copy(model):
    model[1] = model[0]
    return copy.deepcopy(model.state_dict())


MAPPINGS = {
    "parameters": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "a kept state dict": lambda model: copy.deepcopy(model.state_dict()),
    "one with vars": lambda model: copy.deepcopy(model).state_dict(keep_vars=True),
    "one of tied weights": tied_copy,
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_of_tensors_that_are_kept_follow(kind):
    model = network()
    mapping = MAPPINGS[kind](model)
    other = mapping["0.weight"].detach() if kind == "parameters" else None  # a view of a parameter itself harms nothing
    nhwc.convert_(model, ema=mapping)
    assert mapping["0.weight"].stride() == (27, 1, 9, 3)
    assert other is None or other.is_contiguous()


def test_a_state_dict_of_kernels_of_size_one_is_refused_as_well():
    model = nn.Conv2d(4, 8, 1)
    averaged = copy.deepcopy(model)
    with pytest.raises(ValueError, match="'weight' shares its memory with something else"):
        nhwc.convert_(model, ema=averaged.state_dict())
    kept = copy.deepcopy(averaged.state_dict())
    nhwc.convert_(model, ema=kept)
    assert kept["weight"].stride() == model.weight.stride() == (4, 1, 4, 4)
