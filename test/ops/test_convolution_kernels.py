"""Passes of convolutions by our own kernels: which are, and their numbers, at every instruction set of this CPU.

oneDNN and the library choose theirs once in a process, so that each is checked in a process of its own: this file is
also that program.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients
from convolution_cases import operands, way_of
from onednn import CPU_HAS_AVX512, IS_X86, TAKES

from torch_nhwc import functional

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "TORCH_NHWC_CPU_CAPABILITY": "avx2"}
AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "TORCH_NHWC_CPU_CAPABILITY": "avx512"}
BASELINE = {"TORCH_NHWC_CPU_CAPABILITY": "baseline"}
# For each case the passes that are ours, with AVX2 and with AVX-512: forward, input's and weight's gradient.
CASES = {
    "dense": (("conv2d", (2, 20, 9, 11), (21, 20, 3, 3), (1, 1)), F32, "w", "w"),
    "dense, many positions": (("conv2d", (1, 32, 33, 35), (16, 32, 3, 3), (1, 1)), F32, "w", ""),
    "dense, strided": (("conv2d", (1, 32, 53, 55), (33, 32, 3, 3), (2, 1)), F32, "w", "w"),
    "dense, dilated": (("conv2d", (2, 37, 20, 13), (9, 37, 3, 5), (1, 2, 2)), F32, "w", "w"),
    "dense, one small sample, PyTorch's product": (("conv2d", (1, 16, 8, 8), (16, 16, 3, 3), (1, 1)), F32, "", ""),
    "3D, one small sample": (("conv3d", (1, 8, 4, 4, 4), (8, 8, 3, 3, 3), (1, 1)), F32, "", ""),
    "few outputs": (("conv2d", (1, 16, 40, 41), (3, 16, 7, 7), (1, 3)), F32, "w", "w"),
    "few inputs": (("conv2d", (2, 3, 20, 21), (16, 3, 7, 7), (2, 3)), F32, "", ""),
    "one tap": (("conv2d", (2, 32, 9, 11), (24, 32, 1, 1), ()), F32, "", ""),
    "3D": (("conv3d", (2, 9, 9, 8, 7), (17, 9, 3, 3, 3), (1, 1)), F32, "w", ""),
    "3D, few voxels": (("conv3d", (2, 128, 4, 3, 4), (97, 128, 3, 3, 3), (1, 1)), F32, "w", "w"),
    "transposed": (("conv_transpose2d", (2, 17, 9, 8), (17, 20, 3, 3), (2, 1, 1)), F32, "w", "w"),
    "transposed 3D": (("conv_transpose3d", (2, 16, 5, 6, 7), (16, 9, 2, 2, 2), (2,)), F32, "w", ""),
    "groups of 4": (("conv2d", (2, 32, 15, 14), (32, 4, 3, 3), (1, 1, 1, 8)), F32, "w", "w"),
    "groups of 4 in part of a register": (("conv2d", (2, 20, 15, 14), (20, 4, 3, 3), (1, 1, 1, 5)), F32, "w", "w"),
    "groups of 4, strided": (("conv2d", (2, 32, 15, 14), (32, 4, 3, 3), (2, 1, 1, 8)), F32, "", ""),
    "groups of 4, wide": (("conv2d", (1, 80, 5, 211), (80, 4, 3, 3), (1, 1, 1, 20)), F32, "w", "w"),
    "groups of 8": (("conv2d", (2, 24, 15, 14), (24, 8, 3, 3), (1, 1, 1, 3)), F32, "w", "w"),
    "groups of 16, strided": (("conv2d", (2, 48, 15, 14), (48, 16, 3, 3), (2, 1, 1, 3)), F32, "", ""),
    "groups of 40": (("conv2d", (2, 80, 15, 14), (80, 40, 3, 3), (1, 1, 1, 2)), F32, "w", ""),
    "depthwise 3x3": (("conv2d", (2, 20, 72, 70), (20, 1, 3, 3), (1, 1, 1, 20)), F32, "", ""),
    "depthwise 7x7": (("conv2d", (2, 20, 72, 70), (40, 1, 7, 7), (1, 3, 1, 20)), F32, "fiw", "iw"),
    "depthwise, strided": (("conv2d", (2, 20, 72, 70), (20, 1, 5, 5), (2, 2, 1, 20)), F32, "w", "w"),
    "depthwise, small": (("conv2d", (2, 20, 15, 14), (20, 1, 3, 3), (1, 1, 1, 20)), F32, "fiw", "fiw"),
    "depthwise, small, strided": (("conv2d", (2, 20, 15, 14), (20, 1, 5, 5), (2, 2, 1, 20)), F32, "fiw", "fiw"),
    "depthwise, many small planes": (("conv2d", (9, 120, 3, 4), (120, 1, 3, 3), (1, 1, 1, 120)), F32, "", ""),
    "depthwise, small, many phases": (("conv2d", (1, 300, 4, 5), (300, 1, 3, 3), (2, 1, 1, 300)), F32, "fw", "fw"),
    "depthwise 3D": (("conv3d", (2, 20, 12, 12, 13), (20, 1, 3, 3, 3), (1, 1, 1, 20)), F32, "iw", "iw"),
    "depthwise 3D, small": (("conv3d", (2, 20, 9, 8, 7), (20, 1, 3, 3, 3), (1, 1, 1, 20)), F32, "fiw", "fiw"),
    "depthwise 3D, far taps": (("conv3d", (2, 20, 8, 8, 8), (20, 1, 3, 3, 3), (1, 36, 36, 20)), F32, "fiw", "fiw"),
    "depthwise, transposed": (("conv_transpose2d", (2, 20, 36, 35), (20, 1, 5, 5), (2, 2, 1, 20)), F32, "w", "w"),
    "depthwise, transposed, small": (
        ("conv_transpose2d", (2, 20, 9, 8), (20, 1, 5, 5), (2, 2, 1, 20)),
        F32,
        "fiw",
        "fiw",
    ),
    "depthwise, transposed 3D": (
        ("conv_transpose3d", (2, 20, 7, 7, 7), (20, 1, 3, 3, 3), (2, 1, 0, 20)),
        F32,
        "fw",
        "fw",
    ),
    # In half precision, AVX2 computes in float32, and so does AVX-512 in float16.
    "bfloat16, dense": (("conv2d", (2, 20, 9, 11), (21, 20, 3, 3), (1, 1)), BF16, "w", ""),
    "bfloat16, few outputs": (("conv2d", (1, 16, 40, 41), (3, 16, 3, 3), (1, 1)), BF16, "w", "w"),
    "bfloat16, groups of 4": (("conv2d", (2, 32, 15, 14), (32, 4, 3, 3), (2, 1, 1, 8)), BF16, "", "w"),
    "bfloat16, depthwise": (("conv2d", (2, 20, 72, 70), (20, 1, 3, 3), (1, 1, 1, 20)), BF16, "fiw", ""),
    "bfloat16, depthwise, strided": (("conv2d", (2, 20, 72, 70), (20, 1, 5, 5), (2, 2, 1, 20)), BF16, "fiw", "iw"),
    "bfloat16, depthwise, small": (("conv2d", (2, 20, 15, 14), (20, 1, 3, 3), (1, 1, 1, 20)), BF16, "fiw", "fiw"),
    "float16, dense": (("conv2d", (2, 20, 9, 11), (21, 20, 3, 3), (1, 1)), F16, "w", "w"),
    "float16, depthwise": (("conv2d", (2, 20, 15, 14), (20, 1, 3, 3), (1, 1, 1, 20)), F16, "fiw", "fiw"),
}
# Of a small input, all passes, which saves the ways around oneDNN's faults.
SMALL = ("conv2d", (2, 8, 2, 3), (8, 1, 5, 3), (1, (2, 1), 1, 8))
TOLERANCES = {F32: 2e-5, BF16: 2e-2, F16: 3e-3}


def passes_of(case, dtype):
    """Return the letters of the passes that are ours, by the ways of calls that need some of them."""
    x, w, b, arguments = operands(case, dtype)
    ways = [
        way_of(case[0], x.requires_grad_(of_x), w.requires_grad_(of_w), b, arguments)
        for of_x, of_w in (
            (False, False),
            (True, False),
            (False, True),
        )
    ]
    is_forward = ways[0] == "kernels"
    ours = "kernels" if is_forward else "kernels_in_part"
    return is_forward * "f" + (ways[1] == ours) * "i" + (ways[2] == ours) * "w"


def check_numbers(case, dtype):
    """Compare output and gradients with float64, on one thread and on two, and for a gradient that is no memory."""
    x, w, b, arguments = operands(case, dtype)
    call, stock = getattr(functional, case[0]), getattr(F, case[0])
    expected = stock(x.double(), w.double(), b.double(), *arguments)
    for gradient in (torch.randn(expected.shape).to(dtype), torch.ones((), dtype=dtype).expand(expected.shape)):
        real = gradients(stock, [each.double() for each in (x, w, b)], gradient.double(), arguments)
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gradients(call, (x, w, b), gradient, arguments))
        for ours, theirs in zip(results[0], real, strict=True):
            assert ours.dtype == dtype
            largest = float(theirs.detach().abs().max())
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCES[dtype] * largest)
        assert_in_format(results[0][0])
        assert_in_format(results[0][1])
        for one, two in zip(*results, strict=True):
            assert one.stride() == two.stride()
    if "w" in passes_of(case, dtype):  # PyTorch's gradients may have another format than the weight
        assert results[0][2].stride() == w.stride()
        contiguous = gradients(call, (x, w.contiguous(), b), arguments=arguments)[2]
        assert contiguous.stride() == w.contiguous().stride()


def check_this_level(column):
    """Run every case; `column` is where its passes are: 2 with AVX2, 3 with AVX-512, 0 where no rule was measured."""
    torch.manual_seed(0)
    for name, row in CASES.items():
        case, dtype = row[:2]
        if column:
            found = passes_of(case, dtype)
            if dtype == F16 and column == 3 and TAKES[F16]:  # a CPU with AVX-512's float16
                continue
            assert found == row[column], (name, found)
        check_numbers(case, dtype)
    check_numbers(SMALL, F32)


def run(column, environment):
    names = {*AVX2, *AVX512, "DNNL_MAX_CPU_ISA"}
    clean = {name: value for name, value in os.environ.items() if name not in names}
    clean["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, __file__, str(column)]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.levels
@pytest.mark.skipif(not IS_X86, reason="a CPU with AVX2")
@pytest.mark.parametrize(
    ("column", "environment"),
    [
        pytest.param(2, AVX2, id="avx2"),
        pytest.param(3, AVX512, id="avx512", marks=pytest.mark.skipif(not CPU_HAS_AVX512, reason="a CPU with AVX-512")),
        pytest.param(0, BASELINE, id="baseline", marks=pytest.mark.exhaustive),
        pytest.param(0, {}, id="default"),
    ],
)
def test_each_level(column, environment):
    run(column, environment)


@pytest.mark.parametrize("size", [8, 40])
def test_what_far_taps_need_follows_from_what_they_see(size):
    """Scratch memory for a position of each tap and output, not for the padding between them."""
    torch.set_num_threads(1)
    x, w = channels_last(torch.randn(1, 16, size, size, size)), torch.randn(16, 1, 3, 3, 3)
    sizes = [1] * 3, [36] * 3, [36] * 3, False, [0] * 3, 16
    grad = channels_last(torch.randn(x.shape))
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.ops.nhwc.convolution_by_kernels_backward(grad, x, channels_last(w), *sizes, [True] * 3)
    events = profile.profiler.kineto_results.events()
    largest = max(each.nbytes() for each in events if each.name() == "[memory]")
    assert x.nbytes <= largest <= max(4 * 27 * 512 * 16 * 4, x.nbytes)


if __name__ == "__main__":
    check_this_level(int(sys.argv[1]))
