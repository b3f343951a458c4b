"""Convolutions: right where PyTorch's are not on a CPU, and PyTorch's own elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import convolution_cases
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last, gradients
from compiled_graphs import HAS_NUMBERS, compiled
from convolution_cases import HALVES, NAMED, ONE_COLUMN, SMALL_INPUTS, STRIDE_BEYOND_KERNEL, STRIDED_TAPS, way_of
from onednn import CPU_HAS_AVX512, HAS_AVX512, IS_X86, TAKES
from selection import exhaustive
from torch.utils.checkpoint import checkpoint

from torch_nhwc import functional

nhwc = torch.ops.nhwc
# Small inputs of every function: each is mended where the CPU has AVX-512.
SMALL = {
    "conv2d": ((2, 4, 2, 3), (6, 4, 5, 3), (1, (2, 1))),
    "conv3d": ((2, 4, 2, 3, 2), (6, 4, 3, 3, 5), (2, (1, 1, 2))),
    "conv_transpose2d": ((2, 4, 2, 3), (4, 3, 5, 3), (1, (2, 1), 0, 2)),
    "conv_transpose3d": ((2, 4, 1, 3, 2), (4, 3, 3, 3, 3), (2, 1, (1, 0, 1), 2)),
}
every_function = pytest.mark.parametrize("name", SMALL)
AVX2 = pytest.param("AVX2", marks=pytest.mark.levels)
TAPS = [NAMED.index(case) for case in STRIDED_TAPS]


def in_lists(arguments, axes):
    """Return arguments as `torch.ops` takes them: lists, except for the groups, which are the fourth."""
    is_number = [isinstance(each, int) and index != 3 for index, each in enumerate(arguments)]
    return [[each] * axes if single else each for each, single in zip(arguments, is_number)]


def wrong_cases(*arguments, **environment):
    """Run cases in a process whose fresh memory holds garbage; return what it prints of wrong ones."""
    script = Path(convolution_cases.__file__)
    path = os.pathsep.join([str(script.parent), *sys.path])
    inherited = {
        name: value for name, value in os.environ.items() if not (environment and name.endswith("_MAX_CPU_ISA"))
    }
    variables = {**inherited, "MALLOC_PERTURB_": "165", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def small(name, dtype=torch.float32):
    """Return an input in channels-last, a weight, a bias and the other arguments."""
    shape, kernel, arguments = SMALL[name]
    outputs = kernel[1] * arguments[3] if "transpose" in name else kernel[0]
    x = channels_last(torch.randn(shape, dtype=dtype))
    return x, torch.randn(kernel, dtype=dtype), torch.randn(outputs, dtype=dtype), arguments


@pytest.mark.parametrize("isa", ["default", AVX2])
def test_what_pytorch_computes_wrong_is_right(isa):
    environment = {} if isa == "default" else {"ONEDNN_MAX_CPU_ISA": isa}
    assert wrong_cases("named", "ours", **environment) == []


@pytest.mark.levels
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_bounds_are_read_in_all_their_names(variable):
    """By strided taps, which are wrong by default where a CPU seems to have AVX-512 and oneDNN does not use it."""
    assert wrong_cases("named", "ours", *map(str, TAPS), **{variable: "avx2_vnni"}) == []


@pytest.mark.levels
@pytest.mark.skipif(not CPU_HAS_AVX512, reason="a CPU with AVX-512")
def test_pytorch_computes_small_inputs_and_single_columns_wrong_with_avx512():
    """If this fails, PyTorch has mended it: `mended_in` of faults.cpp wants its version."""
    wrong = wrong_cases("named", "pytorch", ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")  # with AMX fewer are
    expected = len(SMALL_INPUTS) + len(ONE_COLUMN)
    assert {int(line.split()[1]) for line in wrong} >= set(range(expected))


@pytest.mark.levels
@pytest.mark.skipif(not IS_X86, reason="a CPU with AVX2")
@pytest.mark.parametrize(("variable", "numbers"), [("ONEDNN_MAX_CPU_ISA", ()), ("DNNL_MAX_CPU_ISA", TAPS)])
def test_pytorch_computes_strided_taps_wrong_without_avx512(variable, numbers):
    found = wrong_cases("named", "pytorch", *map(str, numbers), **{variable: "AVX2"})
    assert {int(line.split()[1]) for line in found} <= {*TAPS}
    assert found


@pytest.mark.levels
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU with AMX")
def test_pytorch_computes_halves_wrong_with_amx():
    wrong = {int(line.split()[1]) for line in wrong_cases("named", "pytorch", ONEDNN_MAX_CPU_ISA="ALL")}
    right = {NAMED.index(STRIDE_BEYOND_KERNEL)} if torch.__version__ >= "2.15" else set()
    assert {index for index, case in enumerate(NAMED) if case in HALVES} - wrong == right


@pytest.mark.parametrize("isa", ["default", AVX2])
@pytest.mark.parametrize("seed", [0, *(exhaustive(seed) for seed in (1, 2))])
def test_random_convolutions_are_right(seed, isa):
    environment = {} if isa == "default" else {"ONEDNN_MAX_CPU_ISA": isa}
    assert wrong_cases("random", "ours", str(seed), "400", **environment) == []


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "groups"),
    [
        ((3, 16, 1, 3), (8, 2, 1, 1), (2, 1), 8),
        ((3, 32, 6, 1), (64, 8, 1, 1), (1, 2), 4),
        ((1, 4, 2, 2), (8, 4, 1, 1), 2, 1),
    ],
)
@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
def test_strided_taps_on_sizes_of_1(shape, kernel, stride, groups, arrange):
    """A slice of a size of 1 has another stride there, by which oneDNN computes wrong weight gradients."""
    x, w = arrange(torch.randn(shape)), channels_last(torch.randn(kernel))
    arguments = (None, stride, 0, 1, groups)
    expected = gradients(F.conv2d, (x.double(), w.double()), arguments=arguments)
    got = gradients(functional.conv2d, (x, w), channels_last(torch.ones_like(expected[0])), arguments)
    for ours, real in zip(got, expected):
        torch.testing.assert_close(ours.double(), real, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize(
    ("name", "shape", "kernel", "arguments"),
    [
        ("conv2d", (2, 10, 7, 6), (6, 5, 3, 3), (2, 1, 1, 2)),
        ("conv2d", (3, 7, 6), (6, 3, 3, 2), (1, "same", (1, 2))),
        ("conv2d", (2, 16, 7, 6), (6, 16, 1, 1), ([2], "valid")),
        ("conv3d", (4, 5, 6, 4), (6, 4, 3, 3, 3), (2, 1)),
        ("conv_transpose2d", (2, 4, 7, 6), (4, 3, 3, 3), (2, 1, 1, 2)),
        ("conv_transpose2d", (4, 7, 6), (4, 3, 3, 3), (2, 1, 0, 1, 2)),
        ("conv_transpose3d", (4, 3, 7, 6), (4, 3, 3, 3, 3), (2, 1, 1, 2)),
    ],
)
def test_other_shapes_are_pytorch_s_bit_for_bit(name, shape, kernel, arguments, arrange, dtype):
    x = torch.randn(shape, dtype=dtype)
    x = arrange(x) if len(shape) == len(kernel) else x
    w = torch.randn(kernel, dtype=dtype)
    results = []
    for functions in (F, functional, nhwc):
        given = in_lists(arguments, len(kernel) - 2) if functions is nhwc else arguments
        results.append(gradients(getattr(functions, name), (x, w), arguments=(None, *given)))
    for got in results[1:]:
        for ours, theirs in zip(got, results[0], strict=True):
            if TAKES.get(dtype, True):
                assert torch.equal(ours, theirs)
                assert dtype.is_complex or ours.stride() == theirs.stride()  # PyTorch loses the format of complex ones
            else:  # by way of float32
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.detach().abs().max()))


def operators_of(function):
    with torch.profiler.profile() as profile:
        function()
    return [event.key for event in profile.key_averages()]


def test_a_strided_tap_is_sliced_only_if_a_gradient_of_the_weight_is_to_come():
    x, w = channels_last(torch.randn(2, 4, 7, 6)), torch.randn(6, 4, 1, 1)

    def is_sliced(call, weight=w):
        return "aten::slice" in operators_of(lambda: call(weight))

    def plain(weight):
        return functional.conv2d(x, weight, None, 2)

    def total(weight, x=x):
        return functional.conv2d(x, weight, None, 2).sum()

    required = w.clone().requires_grad_()
    assert not is_sliced(plain)
    assert is_sliced(plain, required)
    with torch.no_grad():
        assert not is_sliced(plain, required)
    assert is_sliced(torch.func.grad(total))
    assert is_sliced(lambda w: torch.func.vmap(torch.func.grad(total), (None, 0))(w, x[None]))
    for use_reentrant in (False, True):
        given = x.clone().requires_grad_()
        assert is_sliced(
            lambda w, given=given, use_reentrant=use_reentrant: checkpoint(
                lambda x: total(w, x), given, use_reentrant=use_reentrant
            ).backward(),
            required,
        )


@pytest.mark.skipif(not HAS_AVX512, reason="a CPU with AVX-512")
@every_function
def test_a_small_input_is_padded_or_cut_with_and_without_gradients(name):
    x, w, b, arguments = small(name)
    for given in (w, w.clone().requires_grad_()):
        assert way_of(name, x, given, b, arguments) == ("cut" if "transpose" in name else "padded")


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("conv2d", False), ("conv2d", True), ("conv_transpose3d", False)]
    # Symbols of a transposed volume take inductor two minutes.
    + [exhaustive(name, True) for name in ("conv3d", "conv_transpose2d")],
)
def test_compiled_graphs_hold_pytorch_s_operators_and_our_kernels(name, dynamic):
    x, w, b, arguments = small(name)
    w.requires_grad_()
    call, operators = compiled(lambda x, w: getattr(functional, name)(x, w, b, *arguments), dynamic)
    large = channels_last(torch.randn(*x.shape[:2], *(size + 9 for size in x.shape[2:])))
    for given in (x, large):
        out, expected = call(given, w), getattr(F, name)(given.double(), w.double(), b.double(), *arguments)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        gradients = [torch.autograd.grad(each.square().sum(), w)[0] for each in (out, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    ways = {way_of(name, given, w, b, arguments) for given in (x, large)}
    assert "aten.convolution.default" in operators
    is_ours = HAS_NUMBERS and not dynamic and not ways.isdisjoint({"kernels", "kernels_in_part", "winograd"})
    assert any("nhwc" in operator for operator in operators) == is_ours
