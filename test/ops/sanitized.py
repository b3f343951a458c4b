"""The program of `make sanitize-cuda` under compute-sanitizer: elements by every way, and norms, in little time.

python test/ops/sanitized.py [device]
"""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from exactness import CASTS, check
from reference import DTYPES, assert_same, random_weight

import torch_nhwc as nhwc

# Bundles of rows and of columns, whole filters, rectangles, an order that stays, several blocks.
SHAPES = [(3, 64, 3, 3), (2, 9, 8, 8), (37, 5, 3, 3), (3, 67, 5, 5), (2, 33, 31, 1), (300, 3, 2, 2), (2, 40, 3, 3, 3)]
SHAPES += [(70, 30, 1, 1), (70, 1, 3, 3), (2, 1, 40, 41), (1, 256, 5, 5), (0, 3, 3, 3)]
# Longer than shared memory: in place they go by way of global memory. Odd lengths, and more filters than blocks.
LONG = [((2, 4096, 5, 5), torch.float32), ((2, 5001, 5, 5), torch.float32), ((2, 1031, 5, 5), torch.complex128)]
LONG += [((2, 70001, 2, 2), torch.uint8), ((150, 1024, 8, 8), torch.float32)]
# Samples, channels, height, width, groups: vectors that fill rows or do not, wide rows, several chunks.
NORMS = [(2, 24, 60, 60, 4), (2, 33, 7, 11, 3), (1, 1280, 5, 5, 32), (1, 513, 5, 5, 27), (3, 16, 64, 64, 16)]


def main(device="cuda"):
    torch.manual_seed(0)
    for shape in SHAPES:
        for dtypes in DTYPES.values():
            check(shape, dtypes[0], device=device)
        for of, to in CASTS:
            check(shape, of, to, device=device)
    for shape, dtype in LONG:
        check(shape, dtype, device=device)
    weights = [random_weight(shape, dtypes[0], device).clone() for shape in SHAPES * 10 for dtypes in DTYPES.values()]
    expected = nhwc.convert_weights(weights)
    nhwc.convert_weights_(weights, storage="reuse")
    for weight, fresh in zip(weights, expected):
        assert_same(weight, fresh)
    os.environ["TORCH_NHWC_CUDA_NORMS"] = "1"
    for (*shape, groups), dtype in itertools.product(NORMS, (torch.float32, torch.bfloat16, torch.float64)):
        input = torch.randn(shape, device=device).to(dtype)
        parameters = [torch.randn(shape[1], device=device).to(dtype).requires_grad_() for _ in range(2)]
        dense = input.contiguous(memory_format=torch.channels_last).requires_grad_()
        out = nhwc.functional.group_norm(dense, groups, *parameters)
        out.backward(torch.randn_like(out))
        expected = torch.nn.functional.group_norm(input, groups, *parameters)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    for activation, dtype in itertools.product(("relu", "silu"), (torch.float32, torch.bfloat16)):
        input, parameters = (
            volume(2, 24, 9, 16, 16, device=device, dtype=dtype),
            [ones(24, device, dtype) for _ in "wb"],
        )
        run(lambda x, *p: nhwc.functional.group_norm(x, 4, *p, activation=activation), input, *parameters)
        run(
            lambda x, *p: nhwc.functional.batch_norm(x, None, None, *p, True, activation=activation), input, *parameters
        )
    for channels, dtype in itertools.product((33, 64), (torch.float32, torch.bfloat16)):
        input = volume(2, channels, 5, 6, 7, device=device, dtype=dtype)
        for activation in (None, "silu"):
            run(
                lambda x, *p, activation=activation: nhwc.functional.normalize(
                    x, weight=p[0], bias=p[1], activation=activation
                ),
                *(input, *[ones(channels, device, dtype) for _ in "wb"]),
            )
        for mode in ("reflect", "replicate", "circular"):
            run(lambda x, mode=mode: nhwc.functional.pad(x, (1, 2, 2, 1, 1, 1), mode), input)
        for mode in ("nearest", "trilinear"):
            run(lambda x, mode=mode: nhwc.functional.interpolate(x, scale_factor=1.7, mode=mode), input)
        for kernel in (3, 5, 7):
            weight = torch.randn(channels, 1, *[kernel] * 3, device=device, dtype=dtype)
            run(lambda x, w: nhwc.functional.conv3d(x, w, None, 1, len(w[0, 0]) // 2, 1, len(w)), input, weight)
    if device != "cpu":
        torch.cuda.synchronize()
    print("every conversion and norm was right")


def volume(*shape, device, dtype):
    return torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last_3d)


def ones(size, device, dtype):
    return torch.ones(size, device=device, dtype=dtype)


def run(call, *tensors):
    """Compute a result and its gradients."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    out = call(*leaves)
    torch.autograd.grad(out, leaves, torch.randn_like(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
