"""Replaced convolutions, with everything that may be done to a layer; on small inputs, where PyTorch's are wrong."""

import copy
import pickle

import pytest
import torch
from activations import channels_last
from saved_files import saved_and_loaded
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import restore_class, swap_class
from torch_nhwc.nn.each_forward import EachForward
from torch_nhwc.nn.replacements import Preserving
from torch_nhwc.planning.faults import loses_gradient

LAYERS = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 5, padding=2), (2, 4, 2, 3)),
    "same": (lambda: nn.Conv2d(4, 6, (4, 5), padding="same"), (2, 4, 2, 3)),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 2, 3)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1, groups=2), (2, 4, 2, 1, 2)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 5, padding=2), (2, 4, 2, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1), (2, 4, 2, 1, 2)),
}


def with_loaded_state(layer):
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.weight)
    other.load_state_dict(layer.state_dict())
    return other


def each_forward(layer):
    swap_class(layer, EachForward)
    return layer


WAYS = {
    "alone": lambda layer: layer,
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "saved": saved_and_loaded,
    "state dict": with_loaded_state,
    "scripted": torch.jit.script,
    "each forward": each_forward,
    "parametrized": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [*WAYS, "traced"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_right_whatever_is_done_to_a_layer(name, way):
    make, shape = LAYERS[name]
    stock = make()
    x = channels_last(torch.randn(shape))
    exact = copy.deepcopy(stock).double()
    swap_class(stock, Preserving)
    layer = torch.jit.trace(stock, x, check_trace=False) if way == "traced" else WAYS[way](stock)
    out, expected = layer(x), exact(x.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(expected)
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient)
    if way != "parametrized":
        torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(next(layer.parameters()).grad).all()


def test_output_sizes_of_a_transposed_convolution():
    layer = nn.ConvTranspose2d(4, 6, 3, 2, 1)
    x = torch.randn(2, 4, 3, 3)
    expected = layer(x, output_size=[6, 6])
    swap_class(layer, Preserving)
    assert torch.equal(layer(x, output_size=[6, 6]), expected)
    restore_class(layer, Preserving)
    assert type(layer) is nn.ConvTranspose2d


def test_the_conversion_makes_the_training_of_strided_1x1_convolutions_wrong():
    assert loses_gradient(nn.Conv2d(3, 4, 1, stride=2))
    assert loses_gradient(nn.Conv2d(14, 4, 1, stride=(1, 2), groups=2))
    assert loses_gradient(nn.ConvTranspose2d(16, 4, 1, 2))  # whose output padding may be given with a call
    assert loses_gradient(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1, 2)))
    assert not loses_gradient(nn.Conv2d(3, 4, 1, 2).eval())
    assert not loses_gradient(nn.Conv2d(3, 4, 1, 2).requires_grad_(False))
    for layer in (nn.Conv2d(16, 4, 1, 2), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 2, 2), nn.Conv3d(3, 4, 1, 2)):
        assert not loses_gradient(layer)
    assert not loses_gradient(nn.ConvTranspose2d(4, 16, 1, 2))
    assert not loses_gradient(nn.GELU())


COUNTED = {
    "images": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.Conv2d(16, 8, 1, 2)),
            *(nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4)),
        ),
        (2, 3, 16, 16),
    ),
    "volumes": (
        lambda: nn.Sequential(
            *(nn.Conv3d(1, 8, 3), nn.Conv3d(8, 8, 1), nn.Conv3d(8, 8, 3, padding=1, groups=8)),
            *(nn.ConvTranspose3d(8, 4, 2, 2), nn.AvgPool3d(2), nn.Conv3d(4, 4, (3, 1, 1))),
        ),
        (1, 1, 12, 12, 12),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_of_operators_counts_what_it_counts_before_the_conversion(name):
    def count():
        with FlopCounterMode(display=False) as forward:
            output = model(x)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    make, shape = COUNTED[name]
    model, x = make(), torch.randn(shape)
    expected = count()
    report = nhwc.convert_(model, input_format="channels_last", optimizer=())
    assert not any(type(layer) in (nn.Conv2d, nn.Conv3d) for layer in model)  # what other counters look for
    assert count() == expected
    report.revert()
    assert count() == expected
