"""Models that accelerate offloads."""

import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_nhwc as nhwc


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 4, 3)))


STRIDES = {False: [(27, 9, 3, 1), (54, 9, 3, 1)], True: [(27, 1, 9, 3), (54, 1, 18, 6)]}


@pytest.fixture
def accelerate():
    return importlib.import_module("accelerate")


@pytest.fixture
def weights_in_convolutions(monkeypatch):
    """Return the list to which calls of conv2d add the strides of their weight."""
    seen = []
    conv2d = functional.conv2d

    def look(x, weight, *arguments):
        seen.append(weight.stride())
        return conv2d(x, weight, *arguments)

    monkeypatch.setattr(functional, "conv2d", look)
    return seen


def cpu_offloaded(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offloaded(accelerate, model, path):
    return accelerate.disk_offload(model, path, execution_device="cpu")


def offloaded_by_the_block(accelerate, model, path):
    return accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Sequential"])


def dispatched(accelerate, model, path):
    devices = {"0": "cpu", "1": "cpu", "2": "disk"}
    return accelerate.dispatch_model(model, devices, offload_dir=path, main_device="cpu", force_hooks=True)


# The layers whose weights are elsewhere, and those of them that get them back contiguous.
OFFLOADS = {
    cpu_offloaded: ({"0", "2.0"}, set()),
    offloaded_by_the_block: ({"0", "2.0"}, set()),
    disk_offloaded: ({"0", "2.0"}, {"0", "2.0"}),
    dispatched: ({"2.0"}, {"2.0"}),
}


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_offloaded_weights_are_refused_with_a_reason_and_the_rest_converts(offload, accelerate, tmp_path):
    model, x = network().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    model = offload(accelerate, model, tmp_path)
    with pytest.warns(UserWarning, match="convert before offloading to the CPU"):
        report = nhwc.convert_(model)
    refused = {row.path for row in report.rows if row.reason is nhwc.Reason.OFFLOADED}
    assert refused == OFFLOADS[offload][0]
    torch.testing.assert_close(model(x), expected)
    assert nhwc.check(model, report.plan) == []


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda function: function.__name__)
def test_a_converted_model_is_offloaded_in_format_except_to_disk(
    offload, accelerate, weights_in_convolutions, tmp_path
):
    model, x = network().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    weights_in_convolutions.clear()
    report = nhwc.convert_(model)
    model = offload(accelerate, model, tmp_path)
    torch.testing.assert_close(model(x), expected)
    _, lost = OFFLOADS[offload]
    assert weights_in_convolutions == [STRIDES[path not in lost][index] for index, path in enumerate(("0", "2.0"))]
    with pytest.raises(RuntimeError, match=r"Report.revert: '[\w.]+': its values are kept elsewhere"):
        report.revert()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again = nhwc.convert_(model)
    assert {row.path for row in again.rows if row.reason is nhwc.Reason.OFFLOADED} == lost
    assert sum("from a disk they come back contiguous" in str(each.message) for each in warned) == bool(lost)
