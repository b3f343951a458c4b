"""Layers that compute their weight: the weight that reaches the convolution is in format, and training is the same."""

import pickle

import pytest
import torch
from comparison import (
    WeightsAtConvolutions,
    assert_trains_alike,
    assert_weights_arrive_in,
    copied,
    layouts,
    quiet,
    strides_at_convolutions,
    strides_in,
    tensors,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from user_code import Locked

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Reason
from torch_nhwc.nn.hooks import LayOut, LayOutHook


class Scaled(nn.Module):
    """A user's parametrization, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return weight * self.scale

    def right_inverse(self, weight):
        return weight / self.scale.detach()


class Flattened(nn.Module):
    """Loses the memory format on its way."""

    def forward(self, weight):
        flat = weight.flatten(1)
        return (flat / flat.norm(dim=1, keepdim=True)).view(weight.shape)


def parametrized(layer, *steps):
    for step in steps:
        parametrize.register_parametrization(layer, "weight", step)
    return layer


def old_weight_norm(layer):
    with quiet():
        return nn.utils.weight_norm(layer)


def pruned_twice(layer):
    prune.l1_unstructured(layer, "weight", amount=0.2)
    return prune.ln_structured(layer, "weight", amount=0.25, n=2, dim=0)


COMPUTED = {
    "own": lambda layer: parametrized(layer, Scaled()),
    "own_that_loses_the_format": lambda layer: parametrized(layer, Flattened()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old_weight_norm": old_weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "pruned_in_channels": lambda layer: prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=1),
    "pruned_twice": pruned_twice,
}
LAYERS = {
    "2d": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 6, 6)),
    "pointwise": (lambda: nn.Conv2d(3, 8, 1), (2, 3, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3), (2, 3, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 6, 6)),
    "3d": (lambda: nn.Conv3d(3, 8, 3), (2, 3, 5, 5, 5)),
}


def model_with(layer, kind):
    """Return a computed layer between ordinary ones, in double, so that the smallest difference shows."""
    make, shape = LAYERS[layer]
    return nn.Sequential(COMPUTED[kind](make().double())), torch.randn(shape, dtype=torch.float64)


every_kind = pytest.mark.parametrize("kind", COMPUTED)


@pytest.mark.parametrize("layer", LAYERS)
@every_kind
def test_h09_the_weight_at_the_convolution_is_in_format_and_training_is_the_same(kind, layer):
    model, x = model_with(layer, kind)
    model.train(layer != "pointwise")
    model(x)
    plain, before = copied(model), layouts(model)
    at_first = strides_at_convolutions(copied(model), x)
    with WeightsAtConvolutions() as seen:
        copied(model)(x)
    assert at_first == strides_in(seen.weights, torch.contiguous_format)

    report = nhwc.convert_(model, strict=True)
    assert_weights_arrive_in(None, copied(model), x)
    assert_trains_alike(model, plain, lambda each: each(x), steps=4)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {name: identity for name, (identity, _) in layouts(model).items()} == {
        name: identity for name, (identity, _) in before.items()
    }

    again = nhwc.convert_(model, strict=True)  # h15: does nothing
    assert {row.action for row in again.plan.rows} == {nhwc.planning.Action.KEEP}
    report.revert()
    assert layouts(model) == before
    assert strides_at_convolutions(copied(model), x) == at_first


@every_kind
def test_planning_changes_neither_tensors_nor_the_use_counts_of_their_storages(kind):
    model, x = model_with("2d", kind)
    model(x)
    before, values = layouts(model), {name: tensor.clone() for name, tensor in tensors(model).items()}
    state = torch.get_rng_state()
    nhwc.plan(model)
    assert layouts(model) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in tensors(model).items())
    assert torch.equal(torch.get_rng_state(), state)

    weights = [site.full_name for site in nhwc.plan(model).rows if site.action.value == "convert"]
    pointers = {name: tensors(model)[name].data_ptr() for name in weights}
    report = nhwc.convert_(model)
    done = {row.full_name: outcome for row, outcome in zip(report.plan.rows, report.outcomes)}
    assert weights
    assert [done[name] for name in weights] == [Outcome.IN_PLACE] * len(weights)
    assert {name: tensors(model)[name].data_ptr() for name in weights} == pointers


def steps_of(model):
    """Our last steps, which are the price where a weight does not come out in format by itself."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [step for step in (*model.modules(), *hooks) if isinstance(step, (LayOut, LayOutHook))]


@every_kind
def test_converting_back_leaves_no_last_step(kind):
    model, x = model_with("2d", kind)
    at_first = strides_at_convolutions(model, x)
    nhwc.convert_(model, strict=True)
    nhwc.convert_(model, torch.contiguous_format, strict=True)
    assert strides_at_convolutions(model, x) == strides_in([model[0].weight], torch.contiguous_format)
    assert not steps_of(model) or at_first != strides_at_convolutions(model, x)
    assert all(tensors(model)[row.full_name].is_contiguous() for row in nhwc.plan(model).rows)


@pytest.mark.parametrize(
    ("kind", "is_copied"),
    [
        ("own", False),
        ("own_that_loses_the_format", True),
        ("spectral_norm", False),
        ("old_spectral_norm", False),
        ("weight_norm", True),
        ("old_weight_norm", True),
        ("pruned", False),
        ("pruned_twice", False),
    ],
)
def test_a_weight_that_is_copied_at_each_forward_is_remarked_upon(kind, is_copied):
    model, _ = model_with("2d", kind)
    report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} - {Reason.IN_FORMAT} == (
        {Reason.COPIED_EACH_FORWARD} if is_copied else {None}
    )
    assert len(steps_of(model)) == is_copied


@pytest.mark.parametrize("kind", [kind for kind in COMPUTED if "old" in kind or "pruned" in kind])
def test_h23_a_converted_model_can_be_pickled_and_saved_where_pytorch_can(kind, tmp_path):
    model, x = model_with("2d", kind)
    nhwc.convert_(model, strict=True)
    model = copied(model)
    torch.save(model, tmp_path / "model.pt")
    for again in (pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert_weights_arrive_in(None, copied(again), x)
        assert_trains_alike(again, copied(model), lambda each: each(x), steps=2)


def test_a_parametrization_that_is_removed_leaves_a_weight_in_format():
    # Not a deep copy: PyTorch shares a parametrized layer's class with it, and removing takes from the class.
    (model, x), (plain, _) = (model_with("2d", "weight_norm") for _ in range(2))
    plain.load_state_dict(model.state_dict())
    nhwc.convert_(model)
    for each in (model, plain):
        parametrize.remove_parametrizations(each[0], "weight")
    assert_weights_arrive_in(None, model, x)
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)


@pytest.mark.parametrize(
    ("kind", "remove"),
    [
        ("pruned", lambda layer: prune.remove(layer, "weight")),
        ("pruned_twice", lambda layer: prune.remove(layer, "weight")),
        ("old_weight_norm", nn.utils.remove_weight_norm),
        ("old_spectral_norm", nn.utils.remove_spectral_norm),
    ],
)
def test_what_computes_the_weight_can_be_removed(kind, remove):
    model, x = model_with("2d", kind)
    model.eval()
    plain = copied(model)
    nhwc.convert_(model)
    for each in (model, plain):
        each(x)
        remove(each[0])
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)
    assert not steps_of(model)
    nhwc.convert_(model, strict=True)
    assert_weights_arrive_in(None, model, x)


@pytest.mark.parametrize("layer", ["2d", "pointwise"])
def test_after_another_round_of_pruning_a_second_call_lays_out_the_weight(layer):
    model, x = model_with(layer, "pruned")
    nhwc.convert_(model)
    plain = copied(model)
    for each in (model, plain):
        prune.random_unstructured(each[0], "weight", amount=torch.tensor(3).item())
        each[0].weight_mask.copy_(plain[0].weight_mask)
    nhwc.convert_(model)
    assert_weights_arrive_in(None, model, x)
    assert len(steps_of(model)) == (layer == "pointwise")


def test_a_weight_that_cannot_be_computed_beforehand_is_refused_and_the_rest_converts():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), parametrized(nn.Conv2d(3, 8, 3), Locked()))
    before = layouts(model[1])
    with pytest.warns(UserWarning, match="a parametrization that cannot be evaluated on its own"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [None, Reason.COMPUTED]
    assert layouts(model[1]) == before
    assert model[0].weight.stride() == (27, 1, 9, 3)


def test_originals_that_are_tied_arrive_in_format_in_both_layers():
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Conv2d(3, 3, 3)) for _ in range(2))).double()
    first, second = (layer.parametrizations.weight for layer in model)
    second.original0, second.original1 = first.original0, first.original1
    plain, x = copied(model), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    nhwc.convert_(model, strict=True)
    assert second.original1 is first.original1
    assert_weights_arrive_in(None, model, x)
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)
