"""torchao quantizes converted models, which keep the format."""

from functools import partial

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason

pytestmark = pytest.mark.exhaustive  # importing torchao takes seconds


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(16 * 4 * 4, 32)
    return nn.Sequential(*layers).eval()


def is_convolution(module, path):
    return isinstance(module, nn.Conv2d)


def quantize_linear(model, name):
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, name)())


def quantize_convolutions(model):
    from torchao import quantization
    from torchao.quantization import granularity

    config = quantization.IntxWeightOnlyConfig(torch.int8, granularity.PerAxis(0))
    quantization.quantize_(model, config, filter_fn=is_convolution)


@torch.no_grad()
def outputs(model):
    torch.manual_seed(1)
    return model(torch.randn(2, 16, 8, 8))


QUANTIZE = {
    "weights of linear layers": partial(quantize_linear, name="Int8WeightOnlyConfig"),
    "linear layers, dynamically": partial(quantize_linear, name="Int8DynamicActivationInt8WeightConfig"),
    "weights of convolutions": quantize_convolutions,
}


@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=list(QUANTIZE))
def test_what_is_converted_before_keeps_the_format(quantize):
    model, expected = network(), network()
    quantize(expected)
    assert not torch.equal(outputs(expected), outputs(model))
    nhwc.convert_(model, input_format="channels_last", strict=True)
    quantize(model)
    integers = getattr(model[0].weight, "qdata", model[0].weight)
    assert integers.stride() == (144, 1, 48, 16)
    assert model[0](torch.randn(2, 16, 8, 8)).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(outputs(model), outputs(expected), rtol=1e-5, atol=1e-5)


def test_quantized_convolutions_are_refused():
    model = network()
    quantize_convolutions(model)
    expected = outputs(model)
    with pytest.warns(UserWarning, match="2 of 2 weights refused: .*of a tensor subclass"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.rows] == [Reason.SUBCLASS] * 2
    with pytest.raises(RuntimeError, match="of a tensor subclass"):
        nhwc.convert_(model, strict=True)
    assert torch.equal(outputs(model), expected)
