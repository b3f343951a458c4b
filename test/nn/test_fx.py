"""Replaced layers in graphs of `torch.fx`: calls of the layers, as PyTorch's own are."""

import copy
import io
import pickle

import pytest
import torch
from losing_layers import LAYERS, known_subclass
from reference import FORMATS
from torch import fx, nn

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import Preserving, is_preserving


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 18, 3), nn.BatchNorm2d(18), nn.ReLU())
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.loss(self.layers(x), x[:, 0, 1:-1, 1:-1].abs().long())


def layers(*kinds):
    return lambda: nn.Sequential(*(kind() for kind in kinds))


MODELS = {
    "batch norm": (WithLoss, (2, 3, 24, 24)),
    **{name: (layers(make), shape) for name, (make, shape) in LAYERS.items()},
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_has_the_calls_of_the_stock_model_and_our_numbers(name, is_training):
    make, shape = MODELS[name]
    model = make().train(is_training)
    stock = fx.symbolic_trace(copy.deepcopy(model))
    for layer in model.modules():
        if not isinstance(layer, (nn.Sequential, WithLoss, nn.ReLU)):
            swap_class(layer, Preserving)
    x = torch.randn(shape).contiguous(memory_format=FORMATS[len(shape)])
    traced = fx.symbolic_trace(copy.deepcopy(model))
    assert traced.code == stock.code
    for graph in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        results = []
        for each in (copy.deepcopy(model), graph):  # batch norm counts its calls
            given = x.clone().requires_grad_()
            output = each(given)
            gradients = torch.autograd.grad(output.square().sum(), [given, *each.parameters()])
            results.append([output, *gradients, *each.buffers()])
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)
            assert ours.stride() == expected.stride()


def test_a_converted_model_is_traced_and_the_graph_is_reverted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8), nn.Softmax2d())
    nhwc.convert_(model)
    traced = fx.symbolic_trace(model)
    x = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(traced(x), model(x))
    nhwc.convert_(traced, torch.contiguous_format)
    assert not any(is_preserving(type(layer)) for layer in traced.modules())


def test_a_subclass_of_another_package_is_traced_into_as_before():
    layer = known_subclass()
    expected = fx.symbolic_trace(nn.Sequential(copy.deepcopy(layer))).code
    swap_class(layer, Preserving)
    assert fx.symbolic_trace(nn.Sequential(layer)).code == expected


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_name_classes_by_plain_strings(protocol):
    layer = nn.GroupNorm(2, 4)
    swap_class(layer, Preserving)
    assert layer.__module__ == nn.GroupNorm.__module__
    assert type(layer).__module__ == "torch_nhwc.nn.replacements"
    data = pickle.dumps(layer, protocol)
    assert b"ModuleName" not in data
    assert type(pickle.loads(data)) is type(layer)


def test_weights_only_files_load_replaced_layers():
    layer = nn.GroupNorm(2, 4)
    swap_class(layer, Preserving)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    allowed = [type(layer), torch.nn.GroupNorm, set]
    with torch.serialization.safe_globals(allowed):
        assert type(torch.load(file, weights_only=True)) is type(layer)
