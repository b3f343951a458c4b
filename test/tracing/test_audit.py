"""What a saved profile shows of losses."""

import gzip
import json

import pytest
import torch
from activations import channels_last
from torch import nn

from torch_nhwc.tracing import Reorder, Trace, assert_layout, audit


def profiled(model, path, x, **options):
    with torch.profiler.profile(record_shapes=True, **options) as profile:
        model(x).sum().backward()
    profile.export_chrome_trace(str(path))
    return path


@pytest.fixture
def x():
    return channels_last(torch.randn(2, 3, 8, 8))


def layered(*layers):
    return nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_profile_shows_losses_and_mixed_convolutions(name, tmp_path, x):
    model = layered(nn.Softmax2d())
    path = profiled(model, tmp_path / name, x)
    trace = audit(path)
    forward = [row for row in trace.losses if row.phase == "forward"]
    assert [(row.operator, row.bytes, row.count) for row in forward] == [("aten::softmax", 2 * 8 * 6 * 6 * 4, 1)]
    assert [(row.operator, row.phase) for row in trace.mixed][:1] == [("aten::conv2d", "forward")]
    assert trace.operators["forward"] > 0 < trace.operators["backward"]
    assert Trace.from_json(trace.to_json()) == trace
    assert trace.unseen
    with pytest.raises(AssertionError, match="softmax"):
        assert_layout(trace)


def test_a_copy_has_the_name_of_the_operator_around_it(tmp_path, x):
    trace = audit(profiled(layered(nn.InstanceNorm2d(8)), tmp_path / "trace.json", x))
    assert "aten::instance_norm" in {row.operator for row in trace.losses if row.phase == "forward"}


def test_a_clean_model_shows_none(tmp_path, x):
    model = layered(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval()
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        model(channels_last(torch.randn(2, 3, 16, 16)))
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = audit(tmp_path / "trace.json")
    assert not trace.losses
    assert not trace.mixed


def test_modules_are_named_where_the_profile_has_them(tmp_path, x):
    path = profiled(layered(nn.Softmax2d()), tmp_path / "trace.json", x, with_stack=True)
    paths = {row.path for row in audit(path).losses if row.phase == "forward"}
    assert any("Softmax2d" in path for path in paths)


def test_kernels_that_change_formats_are_counted(tmp_path):
    strided = {"ph": "X", "cat": "cpu_op", "name": "aten::relu", "ts": 0, "dur": 1, "tid": 1}
    strided["args"] = {"Input Dims": [[2, 3]], "Input Strides": [[3, 1]]}
    kernel = {"ph": "X", "cat": "kernel", "name": "cudnn::nchwToNhwcKernel", "ts": 0, "dur": 1500, "tid": 7}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [strided, kernel, kernel]}))
    assert audit(tmp_path / "trace.json").reorders == (Reorder("cudnn::nchwToNhwcKernel", 3.0, 2),)


@pytest.mark.parametrize("text", ["", "{}", "5", '{"traceEvents": 1}', '{"traceEvents": [1]}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match="audit: expected"):
        audit(tmp_path / "trace.json")
    (tmp_path / "trace.gz").write_bytes(gzip.compress(text.encode())[:-4])
    with pytest.raises(ValueError, match="audit: expected"):
        audit(tmp_path / "trace.gz")


def test_a_profile_without_strides_is_refused(tmp_path):
    with torch.profiler.profile() as profile:
        torch.ones(2) + 1
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(ValueError, match="record_shapes=True"):
        audit(tmp_path / "trace.json")
