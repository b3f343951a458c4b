"""DDP, raw process groups and DTensor: what converts, and what is refused before it goes wrong."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_nhwc as nhwc

pytestmark = pytest.mark.usefixtures("process_group")


def test_h31_a_weight_that_ddp_has_wrapped_is_refused():
    """The wrapper is recognised by itself, and what is inside of it by its hooks; test_ranks.py has what goes wrong."""
    layer = nn.Conv2d(3, 4, 3)
    wrapped = nn.parallel.DistributedDataParallel(layer)
    by_hooks = r"post hooks on its gradient accumulator|its gradient accumulator has post hooks"
    for call, reason in (
        (lambda: nhwc.convert_weight_(layer.weight), by_hooks),
        (lambda: nhwc.convert_weight_(layer.weight, storage="fresh"), by_hooks),
        (lambda: nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last), by_hooks),
        (lambda: nhwc.convert_conv2d_weight_memory_format(wrapped, torch.channels_last), "DistributedDataParallel has"),
    ):
        with pytest.raises(RuntimeError, match=rf"({reason}).*convert first.*then wrap"):
            call()
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
