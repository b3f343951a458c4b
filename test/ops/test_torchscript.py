"""The operators in TorchScript, and saved modules in processes that never import our Python."""

import subprocess
import sys

import pytest
import torch

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
CHANNELS_LAST = 2  # what torch.channels_last is in TorchScript, which does not know the name


class Layer(torch.nn.Module):
    """Calls every operator, by position and by keyword."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: torch.Tensor, memory_format: int):
        weight = torch.ops.nhwc.convert_weight(self.weight, memory_format)
        half = torch.ops.nhwc.convert_weight(weight=self.weight, memory_format=None, dtype=torch.bfloat16)
        listed = torch.ops.nhwc.convert_weights([self.weight, weight], 0)
        return torch.nn.functional.conv2d(x, weight), half, listed[1]

    @torch.jit.export
    def convert(self, storage: str):
        planned = torch.ops.nhwc.plan_weights([self.weight], None, storage=storage)
        done = torch.ops.nhwc.convert_weights_([self.weight], memory_format=None, storage=storage)
        again = torch.ops.nhwc.convert_weight_(self.weight)
        return planned, done, again


class Converts(torch.nn.Conv2d):
    def forward(self, x):
        return torch.nn.functional.conv2d(x, torch.ops.nhwc.convert_weight(self.weight))


class ConvertsInPlace(torch.nn.Conv2d):
    def forward(self, x):
        torch.ops.nhwc.convert_weights_([self.weight])
        return torch.nn.functional.conv2d(x, self.weight)


def test_traced_and_frozen_modules_keep_the_operator_or_fold_it_right():
    layer, x = Converts(3, 4, 3).eval(), torch.randn(2, 3, 8, 8)
    traced = torch.jit.trace(layer, x)
    assert "nhwc::convert_weight" in str(traced.inlined_graph)
    frozen = torch.jit.freeze(torch.jit.script(layer))
    assert "nhwc::convert_weight" not in str(frozen.graph)
    for module in (traced, frozen):
        torch.testing.assert_close(module(x), layer(x))


def test_tracing_refuses_an_in_place_conversion_and_changes_nothing():
    module = ConvertsInPlace(3, 4, 3)
    with pytest.raises(RuntimeError, match="nhwc::convert_weights_: the weight is traced"):
        torch.jit.trace(module, torch.randn(1, 3, 8, 8))
    assert module.weight.is_contiguous()


def test_a_saved_module_trains_where_only_the_library_is_loaded(tmp_path):
    layer, x = Layer(), torch.randn(2, 3, 8, 8)
    torch.jit.script(layer).save(tmp_path / "layer.pt")
    out = layer(x, torch.channels_last)[0]
    out.sum().backward()
    torch.save((x, out.detach(), layer.weight.grad), tmp_path / "expected.pt")
    script = f"""
import torch
torch.ops.load_library({str(nhwc.cpp_extension.library_path())!r})
x, expected, gradient = torch.load({str(tmp_path / "expected.pt")!r})
layer = torch.jit.load({str(tmp_path / "layer.pt")!r})
for _ in range(3):  # the profiling executor specialises from the second run on
    layer.weight.grad = None
    out, half, listed = layer(x, {CHANNELS_LAST})
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(layer.weight.grad, gradient) and layer.weight.grad.stride() == gradient.stride()
assert half.stride() == (27, 1, 9, 3) and half.dtype == torch.bfloat16
assert torch.equal(half, layer.weight.bfloat16())
assert torch.equal(listed, layer.weight) and listed.is_contiguous()
planned, done, again = layer.convert("auto")
assert planned == done == [{int(nhwc.Outcome.IN_PLACE)}] and again == {int(nhwc.Outcome.UNCHANGED)}
assert layer.weight.stride() == layer.weight.grad.stride() == (27, 1, 9, 3)
assert torch.equal(layer(x, {CHANNELS_LAST})[0], expected)
import sys
assert "torch_nhwc" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env={"PATH": ""})
