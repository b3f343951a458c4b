"""Convolutions: right where PyTorch's are not on a CPU, and PyTorch's own elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import convolution_cases
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_differentiable, assert_in_format, channels_last, gradients
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


@pytest.mark.parametrize("isa", ["default", "AVX2", "avx2_vnni"])
def test_what_pytorch_computes_wrong_is_right(isa):
    environment = {} if isa == "default" else {"ONEDNN_MAX_CPU_ISA": isa}
    assert wrong_cases("named", "ours", **environment) == []


@pytest.mark.skipif(not CPU_HAS_AVX512, reason="a CPU with AVX-512")
def test_pytorch_computes_small_inputs_and_single_columns_wrong_with_avx512():
    """If this fails, PyTorch has mended it: `mended_in` of faults.cpp wants its version."""
    wrong = wrong_cases("named", "pytorch", ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")  # with AMX fewer are
    expected = len(SMALL_INPUTS) + len(ONE_COLUMN)
    assert {int(line.split()[1]) for line in wrong} >= set(range(expected))


@pytest.mark.skipif(not IS_X86, reason="a CPU with AVX2")
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_pytorch_computes_strided_taps_wrong_without_avx512(variable):
    wrong = {int(line.split()[1]) for line in wrong_cases("named", "pytorch", **{variable: "AVX2"})}
    taps = {index for index, case in enumerate(NAMED) if case in STRIDED_TAPS}
    assert wrong & taps
    assert not wrong - taps


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU with AMX")
def test_pytorch_computes_halves_wrong_with_amx():
    wrong = {int(line.split()[1]) for line in wrong_cases("named", "pytorch", ONEDNN_MAX_CPU_ISA="ALL")}
    right = {NAMED.index(STRIDE_BEYOND_KERNEL)} if torch.__version__ >= "2.15" else set()
    assert {index for index, case in enumerate(NAMED) if case in HALVES} - wrong == right


@pytest.mark.parametrize("isa", ["default", "AVX2"])
@pytest.mark.parametrize("seed", [0, *(exhaustive(seed) for seed in range(1, 12))])
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


@every_function
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16], ids=str)
def test_small_inputs_of_every_dtype(name, dtype, is_batched):
    x, w, b, arguments = small(name, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}.get(dtype, 1e-11)
    if not is_batched:
        x = x[0]
    for arrange in (lambda each: each, torch.Tensor.contiguous):
        exact = [each.to(wide) for each in (x, w, b)]
        gradient = torch.randn_like(getattr(F, name)(*exact, *arguments))
        got = gradients(getattr(functional, name), [arrange(each) for each in (x, w, b)], gradient, arguments)
        for ours, real in zip(got, gradients(getattr(F, name), exact, gradient, arguments)):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.to(wide), real, rtol=tolerance, atol=tolerance * float(real.abs().max()))
        if is_batched and arrange is not torch.Tensor.contiguous:
            assert_in_format(got[0])
            assert_in_format(got[1])
        elif is_batched:
            assert got[0].stride() == torch.empty(got[0].shape).stride()


@every_function
def test_every_derivative_of_small_inputs(name):
    x, w, b, arguments = small(name, torch.float64)
    call = getattr(functional, name)
    w.requires_grad_()
    assert_differentiable(lambda x: call(x, w, b, *arguments), x)
    torch.autograd.gradgradcheck(lambda w, b: call(x, w, b, *arguments), (w, b.requires_grad_()), fast_mode=True)
    # An ensemble, and the gradient of a weight inside of transforms, of each sample.
    weights = torch.stack([w, 2 * w]).detach()
    each = torch.stack([getattr(F, name)(x, w, b, *arguments) for w in weights])
    torch.testing.assert_close(torch.func.vmap(lambda w: call(x, w, b, *arguments))(weights), each)

    def total(w, x, function):
        return function(x, w, b, *arguments).square().sum()

    gradient = torch.func.vmap(torch.func.grad(total), (None, 0, None))
    batch = torch.stack([x, 3 * x])
    expected = gradient(w.detach(), batch, getattr(F, name))
    torch.testing.assert_close(gradient(w.detach(), batch, call), expected)


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
def test_a_small_input_is_padded_with_and_without_gradients(name):
    x, w, b, arguments = small(name)
    for given in (w, w.clone().requires_grad_()):
        assert way_of(name, x, given, b, arguments) == ("cut" if "transpose" in name else "padded")


@every_function
def test_opcheck(name):
    x, w, b, arguments = small(name)
    sizes = in_lists(arguments, w.dim() - 2)
    torch.library.opcheck(getattr(nhwc, name).default, (x.requires_grad_(), w.requires_grad_(), b, *sizes))
    if "transpose" not in name:
        one = [1] * (w.dim() - 2)
        torch.library.opcheck(nhwc.__getattr__(name).padding, (x, w, b, one, "same"))


@every_function
def test_autocast(name):
    x, w, b, arguments = small(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = getattr(functional, name)(x, w.requires_grad_(), b, *arguments)
    assert out.dtype == torch.bfloat16
    expected = getattr(F, name)(x, w, b, *arguments)
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2 * float(expected.detach().abs().max()))
    (gradient,) = torch.autograd.grad(out.float().sum(), w)
    (right,) = torch.autograd.grad(getattr(F, name)(x.double(), w.double(), b.double(), *arguments).sum(), w)
    torch.testing.assert_close(gradient, right, rtol=5e-2, atol=5e-2 * float(right.abs().max()))


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("conv2d", False), ("conv2d", True), ("conv_transpose3d", False)]
    + [exhaustive(name, True) for name in SMALL if name != "conv2d"],
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
    is_ours = HAS_NUMBERS and not dynamic and not ways.isdisjoint({"kernels", "kernels_in_part"})
    assert any("nhwc" in operator for operator in operators) == is_ours


@every_function
def test_scripted_functions(name):
    x, w, b, arguments = small(name)
    names = ["stride", "padding", "output_padding", "groups"] if "transpose" in name else ["stride", "padding"]
    text = ", ".join(f"{key}={value}" for key, value in zip(names, arguments))
    unit = torch.jit.CompilationUnit(f"def call(x, w, b):\n    return torch.ops.nhwc.{name}(x, w, b, {text})\n")
    torch.testing.assert_close(unit.call(x, w.requires_grad_(), b), getattr(F, name)(x, w, b, *arguments))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2), (2, 5)])
@pytest.mark.parametrize("size", [(1, 2), (3, 4), (8, 9)])
def test_padding_by_name(kernel, size):
    x, w = channels_last(torch.randn(2, 4, *size)), torch.randn(6, 4, *kernel)
    for padding in ("same", "valid"):
        if padding == "valid" and any(k > n for k, n in zip(kernel, size)):
            continue
        results = []
        for function, dtype in ((functional.conv2d, torch.float32), (F.conv2d, torch.float64)):
            leaves = [each.detach().to(dtype).requires_grad_() for each in (x, w)]
            out = function(*leaves, padding=padding)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        assert_in_format(results[0][0])
        for got, real in zip(*results):
            torch.testing.assert_close(got.double(), real, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kernel", "arguments", "message"),
    [
        ("conv2d", (6, 3, 5, 3), (None, [1, 1], [2, 1]), r"expected input\[2, 4, 2, 3\] to have 3 channels, but got 4"),
        ("conv2d", (6, 4, 5, 3), (torch.randn(3), [1, 1], [2, 1]), "to be 1-dimensional with 6 elements"),
        ("conv2d", (6, 4, 9, 3), (None, [1, 1], [2, 1]), "Kernel size can't be greater than actual input size"),
        ("conv2d", (6, 4, 5, 3), (None, [0, 1], [2, 1]), "non-positive stride is not supported"),
        ("conv2d", (6, 4, 5, 3), (None, [1, 1], [-1, 1]), "negative padding is not supported"),
        ("conv2d", (6, 4, 5, 3), (None, [2, 1], "same"), "padding='same' is not supported for strided"),
        ("conv2d", (6, 4, 5, 3), (None, [1, 1], "other"), "Invalid padding string: 'other'"),
        ("conv2d", (6, 4, 5), (None, [1, 1], [2, 1]), "expected|Expected"),
        ("conv_transpose2d", (3, 6, 5, 3), (None, [1, 1], [2, 1]), "to have 3 channels, but got 4"),
        ("conv_transpose2d", (4, 6, 5, 3), (None, [1, 1], [2, 1], [2, 0]), "output padding must be smaller than"),
    ],
)
def test_refusals_are_pytorch_s(name, kernel, arguments, message):
    bias, *others = arguments
    x, w = channels_last(torch.randn(2, 4, 2, 3)), torch.randn(kernel, requires_grad=True)
    with pytest.raises(RuntimeError, match=message) as theirs:
        getattr(F, name)(x, w, bias, *others)
    for functions in (functional, nhwc):
        with pytest.raises(RuntimeError, match=message) as ours:
            getattr(functions, name)(x, w, bias, *others)
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
