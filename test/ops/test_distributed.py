"""DDP, raw process groups and DTensor: what converts, and what is refused before it goes wrong."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_nhwc as nhwc

pytestmark = pytest.mark.usefixtures("process_group")


def train(model, module, steps, between=None):
    """Return the weight after every step of plain SGD; `between` runs after the second."""
    torch.manual_seed(1)
    weights = []
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
        weights.append(module.weight.detach().clone())
        if step == 1 and between is not None:
            between()
    return weights


def test_h31_a_weight_that_ddp_has_wrapped_is_refused():
    def pair():
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 4, 3)
        return nn.parallel.DistributedDataParallel(layer), layer

    wrapped, layer = pair()
    expected = train(wrapped, layer, 4)

    # What plain PyTorch does: nothing looks wrong, and the gradients of the next step are permuted.
    wrapped, layer = pair()
    stock = train(wrapped, layer, 4, lambda: nn.utils.convert_conv2d_weight_memory_format(layer, torch.channels_last))
    torch.testing.assert_close(stock[1], expected[1])
    assert not torch.allclose(stock[2], expected[2])

    wrapped, layer = pair()

    def refused():
        for call in (
            lambda: nhwc.convert_weight_(layer.weight),
            lambda: nhwc.convert_weight_(layer.weight, storage="fresh"),
        ):
            with pytest.raises(RuntimeError, match=r"post hooks on its gradient accumulator.*convert first.*then wrap"):
                call()
        # The wrapper is recognised by itself, and what is inside of it by its hooks.
        for module, message in (
            (wrapped, r"DistributedDataParallel has wrapped it.*convert first.*then wrap"),
            (layer, r"its gradient accumulator has post hooks.*convert first.*then wrap"),
        ):
            with pytest.raises(RuntimeError, match=message):
                nhwc.convert_conv2d_weight_memory_format(module, torch.channels_last)

    ours = train(wrapped, layer, 4, refused)
    torch.testing.assert_close(ours, expected)
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize("dimension", [None, 0, 1, 2])
def test_a_dtensor_converts_shard_by_shard(dimension):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Replicate() if dimension is None else Shard(dimension)
    weight = distribute_tensor(
        torch.randn(4, 3, 3, 3), dist.init_device_mesh("cpu", (1,)), [placement]
    ).requires_grad_()
    out = nhwc.convert_weight(weight, dtype=torch.float64)
    assert out.placements == (placement,)
    assert out.stride() == out.to_local().stride() == (27, 1, 9, 3)
    assert torch.equal(out.full_tensor(), weight.full_tensor().double())
    out.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 3, 3, 3))
    with pytest.raises(RuntimeError, match="is traced, fake, functional or of a tensor subclass"):
        nhwc.convert_weight_(nn.Parameter(weight.detach()))


@pytest.mark.parametrize("first", ["torch_nhwc", "torch.distributed.tensor"])
def test_the_sharding_rule_is_there_whichever_is_imported_first(first, tmp_path):
    second = {"torch_nhwc": "torch.distributed.tensor", "torch.distributed.tensor": "torch_nhwc"}[first]
    script = f"""
import sys, torch, {first}
assert ("torch.distributed.tensor" in sys.modules) == ({first!r} != "torch_nhwc")
import importlib.util
importlib.util.find_spec("torch.distributed.tensor")  # a mere question must not lose the rule
import {second}
from torch.distributed.tensor import DTensor
rules = DTensor._op_dispatcher.sharding_propagator
known = [table for table in vars(rules).values() if isinstance(table, dict)]
assert any(torch.ops.nhwc.convert_weight.default in table for table in known)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
