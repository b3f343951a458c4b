"""Reorders inside of operators: by oneDNN's own words, and by the names of a GPU's kernels."""

import os
from types import SimpleNamespace

import pytest
import torch
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tracing.reorders import kernels_in

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@needs_onednn
def test_reorders_of_onednn_are_told_by_module_and_the_rest_is_printed(capfd):
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(32, 32, 3)))
    x = torch.randn(4, 16, 64, 64)
    with nhwc.trace(model, reorders=True) as trace:
        os.write(1, b"with")
        model(x).sum().backward()
        os.write(1, b"in\n")
        os.write(1, b"a line without end")
    os.write(1, b", and one behind\n")
    assert capfd.readouterr().out == "within\na line without end, and one behind\n"
    phases = {(row.path, row.phase) for row in trace.reorders}
    assert {("0", "forward"), ("2.0", "forward"), ("2.0", "backward")} <= phases
    assert all(row.milliseconds > 0 and row.count >= 1 and " -> " in row.what for row in trace.reorders)
    assert nhwc.Trace.from_json(trace.to_json()) == trace
    assert "reorders: " in str(trace)


@needs_onednn
def test_the_output_is_back_after_an_exception(capfd):
    with pytest.raises(KeyboardInterrupt), nhwc.trace(nn.ReLU(), reorders=True):
        raise KeyboardInterrupt
    os.write(1, b"here\n")
    torch.conv2d(torch.randn(4, 16, 64, 64), torch.randn(16, 16, 3, 3))
    assert capfd.readouterr().out == "here\n"


@needs_onednn
def test_channels_last_saves_reorders_of_activations():
    model, x = nn.Sequential(nn.Conv2d(16, 32, 3)), torch.randn(4, 16, 64, 64)
    with torch.no_grad(), nhwc.trace(model, reorders=True) as contiguous:
        model(x)
    with torch.no_grad(), nhwc.channels_last(model), nhwc.trace(model, reorders=True) as converted:
        model(channels_last(x))
    assert sum(row.count for row in converted.reorders) < sum(row.count for row in contiguous.reorders)


def test_kernels_that_change_formats_are_told_by_module():
    around = SimpleNamespace(name="torch_nhwc.trace|backward|layer.0", kernels=[], cpu_parent=None)
    inside = SimpleNamespace(
        name="aten::cudnn_convolution",
        kernels=[
            SimpleNamespace(name="void cudnn::ops::nchwToNhwcKernel<float>", duration=1500),
            SimpleNamespace(name="sm90_xmma_fprop", duration=3),
        ],
        cpu_parent=around,
    )
    outside = SimpleNamespace(
        name="x", kernels=[SimpleNamespace(name="convertTensor_kernel", duration=1)], cpu_parent=None
    )
    rows = [(row.path, row.phase, row.what, ms) for row, ms in kernels_in([around, inside, outside])]
    assert rows == [
        ("layer.0", "backward", "void cudnn::ops::nchwToNhwcKernel<float>", 1.5),
        ("", "forward", "convertTensor_kernel", 0.001),
    ]
