"""torchao quantizes converted models, which keep the format."""

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


def quantize(model):
    from torchao import quantization
    from torchao.quantization import granularity

    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())  # linear layers
    config = quantization.IntxWeightOnlyConfig(torch.int8, granularity.PerAxis(0))
    quantization.quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Conv2d))


@torch.no_grad()
def test_what_is_converted_before_keeps_the_format_and_what_is_quantized_is_refused():
    model, expected, x = network(), network(), torch.randn(2, 16, 8, 8)
    quantize(expected)
    nhwc.convert_(model, input_format="channels_last", strict=True)
    quantize(model)
    assert model[0].weight.qdata.stride() == (144, 1, 48, 16)
    assert model[0](x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)
    with pytest.warns(UserWarning, match="2 of 2 sites stay as they are: .*of a tensor subclass"):
        report = nhwc.convert_(expected)
    assert [row.reason for row in report.rows] == [Reason.SUBCLASS] * 2
