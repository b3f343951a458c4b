"""Networks whose inner activations are smaller than their kernels, and the errors of their gradients.

As a script, for a process of its own, which may die of PyTorch's own gradients:

    python right_models.py NAME,... {converted,compiled,contiguous} EDGE DTYPE ...

It prints a line for each network, with the error of the gradients of all parameters for each dtype: against the same
model in float64, relative in norm. The model is converted by `convert_`, also compiled, or PyTorch's own. An edge of 0
is that of `NETWORKS`.
"""

import copy
import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torch_nhwc


class Network(NamedTuple):
    """How to make a network, the edge of its input, and what its gradients may be off by in bfloat16.

    `reference` is the error of the contiguous network on `reference_edge`, measured on a CPU with AVX-512 in up to two
    minutes: the least edge with which no activation is smaller than a kernel. There are three exceptions. PyTorch gets
    the gradients of MedNeXt, whose kernels are depthwise, right on the small edge, too. With kernels of 7 the network
    would take 16 GiB; the error is that with kernels of 5. The one of DynUNet with instance norm is that with groups.
    """

    make: Callable[[], nn.Module]
    edge: int
    reference: float
    reference_edge: int


def monai(module: str, name: str, *arguments, **options) -> Callable[[], nn.Module]:
    """Return what makes one of MONAI's networks."""
    return lambda: getattr(importlib.import_module(f"monai.networks.nets.{module}"), name)(*arguments, **options)


def dynunet(levels: int, norm: object, **options) -> Callable[[], nn.Module]:
    """Return what makes a DynUNet that halves its input at each level but the first."""
    shape = 3, 1, 2, [3] * levels, [1] + [2] * (levels - 1), [2] * (levels - 1)
    filters = [4, 8, 8, 16, 16, 16][:levels]
    return monai("dynunet", "DynUNet", *shape, norm_name=norm, filters=filters, **options)


def unet(kernel: int) -> Callable[[], nn.Module]:
    size = {"kernel_size": kernel, "up_kernel_size": kernel, "num_res_units": 1, "act": smooth}
    return monai("unet", "UNet", 3, 1, 2, (4, 8, 16, 16, 16), (2, 2, 2, 2), **size)


groups = ("group", {"num_groups": 2})
# Norms of few voxels, as there are at the last levels, are so steep that a leaky ReLU after them differs in the sign of
# some activations in any two float32 runs, and with it in the derivative.
smooth = ("elu", {"inplace": True})
blocks = {"blocks_down": (1,) * 4, "blocks_up": (1,) * 4}
NETWORKS = {
    # Instance norm refuses the one voxel at the last level.
    "DynUNet": Network(dynunet(6, groups, act_name=smooth), 32, 0.011, 96),
    "DynUNet with instance norm": Network(dynunet(6, "instance", act_name=smooth), 64, 0.011, 96),
    "DynUNet of 4 levels": Network(dynunet(4, groups), 16, 0.15, 24),
    "BasicUNet": Network(monai("basic_unet", "BasicUNet", 3, 1, 2, features=(4, 4, 8, 8, 16, 4)), 32, 0.13, 48),
    "UNet with kernels of 5": Network(unet(5), 32, 0.1, 80),
    "UNet with kernels of 7": Network(unet(7), 32, 0.1, 80),
    "MedNeXt": Network(monai("mednext", "MedNeXt", 3, 4, 1, 2, **blocks), 32, 0.036, 32),
    "SegResNet": Network(monai("segresnet", "SegResNet", spatial_dims=3, init_filters=8, in_channels=1), 16, 0.1, 24),
    "convolution": Network(lambda: nn.Conv3d(16, 16, 5, padding=2), 4, 0.0017, 5),
}


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a model compiled by inductor, whose graphs must have no operator of ours but those by kernels."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph, inputs, **options):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert targets
        assert not any("nhwc" in target and "by_kernels" not in target for target in targets), targets
        return compile_fx_inner(graph, inputs, **options)

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=inner)

    return torch.compile(model, backend=backend, fullgraph=True)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
    """Return the gradients of all parameters after a call, flat and in float64."""
    call(x).backward(cotangent.to(x.dtype))
    given = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert given
    return torch.cat([each.double().flatten() for each in given])


def error(name: str, way: str, edge: int, dtype: torch.dtype) -> float:
    """Return the error of the gradients."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    # Both have the same rounded numbers, so that only the arithmetic differs.
    model = network.make().train().to(dtype)
    channels = next(each for each in model.modules() if isinstance(each, nn.Conv3d)).in_channels
    x = torch.randn(2, channels, *(edge or network.edge,) * 3).to(dtype)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        cotangent = torch.randn(copy.deepcopy(exact)(x.double()).shape).to(dtype)
    expected = gradients(exact, exact, x.double(), cotangent.double())
    if way != "contiguous":
        torch_nhwc.convert_(model, input_format="channels_last")
    found = gradients(model, compiled(model) if way == "compiled" else model, x, cotangent)
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    torch.set_num_threads(1)
    names, way, edge, *dtypes = sys.argv[1:]
    for name in names.split(","):
        print(*(error(name, way, int(edge), getattr(torch, dtype)) for dtype in dtypes), flush=True)
