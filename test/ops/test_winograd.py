"""Dense convolutions with fewer multiplications: values, errors next to PyTorch's, and where they are used."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients
from convolution_cases import operands, way_of
from selection import some_of

from torch_nhwc import functional

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# All passes of them, at every instruction set; in half precision, where oneDNN does not take it.
CASES = {
    "image": ("conv2d", (2, 48, 19, 21), (40, 48, 3, 3), (1, 1)),
    "no padding": ("conv2d", (1, 33, 30, 29), (65, 33, 3, 3), (1, 0)),
    "padding of 2": ("conv2d", (3, 32, 20, 21), (32, 32, 3, 3), (1, (2, 0))),
    "same": ("conv2d", (2, 32, 23, 24), (32, 32, 3, 3), (1, "same")),
    "transposed": ("conv_transpose2d", (2, 40, 23, 24), (40, 33, 3, 3), (1, 1)),
    "volume": ("conv3d", (2, 17, 16, 17, 18), (20, 17, 3, 3, 3), (1, 1)),
    "volume, one sample": ("conv3d", (1, 24, 16, 18, 20), (16, 24, 3, 3, 3), (1, (0, 1, 2))),
    "plane": ("conv3d", (2, 32, 8, 20, 18), (48, 32, 1, 3, 3), (1, (0, 1, 1))),
    "depth and height": ("conv3d", (2, 33, 20, 12, 16), (32, 33, 3, 3, 1), (1, (1, 1, 0))),
    "depth and width": ("conv3d", (2, 32, 20, 12, 16), (33, 32, 3, 1, 3), (1, (1, 0, 1))),
    "groups": ("conv2d", (2, 128, 19, 21), (192, 64, 3, 3), (1, 1, 1, 2)),
    "groups of a volume": ("conv3d", (1, 78, 14, 16, 17), (75, 26, 3, 3, 3), (1, (1, 0, 2), 1, 3)),
    "transposed groups of a volume": ("conv_transpose3d", (1, 48, 14, 16, 15), (48, 25, 3, 3, 3), (1, 1, 0, 2)),
    "transposed volume": ("conv_transpose3d", (1, 18, 16, 17, 16), (18, 16, 3, 3, 3), (1, 1)),
}
every_case = pytest.mark.parametrize("name", CASES)


def exact_gradients(case, tensors, gradient):
    return gradients(getattr(F, case[0]), [each.double() for each in tensors], gradient.double(), case[3])


@every_case
@pytest.mark.parametrize("dtype", some_of([F32, BF16, F16], F32, BF16), ids=str)
def test_outputs_and_gradients_are_right(name, dtype):
    case = CASES[name]
    x, w, b, arguments = operands(case, dtype)
    sizes = [1 if each == "same" else each for each in arguments]
    takes_part = way_of(case[0], x, w.requires_grad_(), b, sizes) == "winograd"
    assert takes_part or dtype != F32
    w.requires_grad_(False)
    shape = getattr(F, case[0])(x.double(), w.double(), None, *arguments).shape
    gradient = channels_last(torch.randn(shape).to(dtype))
    exact = exact_gradients(case, (x, w, b), gradient)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(gradients(getattr(functional, case[0]), (x, w, b), gradient, arguments))
    for ours, again, real in zip(*results, exact, strict=True):
        assert torch.equal(ours, again) or not takes_part
        assert ours.dtype == dtype
        assert (ours.double() - real).norm() <= {F32: 2e-6, BF16: 4e-3, F16: 6e-4}[dtype] * real.norm()
    assert_in_format(results[0][0])
    assert_in_format(results[0][1])
    assert results[0][2].stride() == w.stride()


@pytest.mark.parametrize("kind", ["normal", "rectified", "shifted"])
@pytest.mark.parametrize(
    "shape", [(2, 64, 32, 32), (1, 256, 24, 24), (2, 16, 16, 16, 16), (2, 64, 16, 16, 16)], ids=str
)
def test_the_error_is_at_most_twice_that_of_pytorch_on_contiguous(shape, kind):
    axes, channels = len(shape) - 2, shape[1]
    x, gradient = torch.randn(shape), torch.randn(shape)
    x = {"normal": x, "rectified": x.relu(), "shifted": x + 10}[kind]
    w = torch.randn(channels, channels, *(3,) * axes) / (channels * 3**axes) ** 0.5
    name = f"conv{axes}d"
    assert way_of(name, channels_last(x), channels_last(w), None, (1, 1)) == "winograd"
    exact = gradients(getattr(F, name), (x.double(), w.double()), gradient.double(), (None, 1, 1))
    stock = gradients(getattr(F, name), (x, w), gradient, (None, 1, 1))
    ours = gradients(getattr(functional, name), [channels_last(each) for each in (x, w)], gradient, (None, 1, 1))
    for own, theirs, real in zip(ours, stock, exact, strict=True):
        assert (own.double() - real).norm() <= 2 * (theirs.double() - real).norm()


# PyTorch computes their weight gradients by exact matrix products, even with AVX-512.
EXACT = {
    "padded height": ("conv3d", (2, 16, 22, 14, 14), (48, 16, 3, 3, 3), (1, (2, 2, 0))),
    "transposed, padded height": ("conv_transpose3d", (4, 64, 13, 13, 7), (64, 32, 3, 3, 3), (1, 2)),
    "odd groups of a volume": ("conv3d", (2, 80, 18, 16, 15), (144, 40, 3, 3, 3), (1, 1, 1, 2)),
}


@pytest.mark.usefixtures("on_one_thread")  # on more, PyTorch's sums are shorter, and more exact
@pytest.mark.parametrize("name", [*EXACT, *(name for name in CASES if "groups" in name or "transposed" in name)])
def test_groups_transposed_ones_and_wide_padding_are_as_accurate(name):
    case = (CASES | EXACT)[name]
    x, w, _, arguments = operands(case)
    function = getattr(F, case[0])
    drawn = channels_last(torch.randn(function(x, w, None, *arguments).shape))
    for given, gradient in ((x, drawn), (x.relu(), drawn * (torch.rand_like(drawn) > 0.5))):
        exact = gradients(function, (given.double(), w.double()), gradient, (None, *arguments))
        stock = gradients(function, (given.contiguous(), w.contiguous()), gradient.contiguous(), (None, *arguments))
        ours = gradients(getattr(functional, case[0]), (given, w), gradient, (None, *arguments))
        for own, theirs, real in zip(ours, stock, exact, strict=True):
            assert (own.double() - real).norm() <= 2 * (theirs.double() - real).norm()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (("conv2d", (2, 32, 20, 20), (16, 32, 3, 3), (1, 1)), "few channels"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 1, 3), (1, (0, 1))), "one axis"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 5, 3), (1, 1)), "five taps"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 3, 3), (2, 1)), "strides"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 3, 3), (1, 2, 2)), "dilation"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 3, 3), (1, 3)), "padding beyond the taps"),
        (("conv2d", (1, 32, 5, 5), (32, 32, 3, 3), (1, 1)), "few positions"),
        (("conv2d", (2, 64, 20, 20), (64, 32, 3, 3), (1, 1, 1, 2)), "few channels of a group"),
    ],
)
def test_other_convolutions_do_without(case, why):
    x, w, b, arguments = operands(case)
    assert way_of(case[0], x, w.requires_grad_(), b, arguments) != "winograd", why


@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize(("channels", "fits"), [(4000, True), (7000, True), (11000, False)])
def test_a_block_of_tiles_fits_into_8_mb(channels, fits):
    x, w = channels_last(torch.zeros(2, channels, 16, 16)), channels_last(torch.zeros(32, channels, 3, 3))
    assert (way_of("conv2d", x, w, None, (1, 1)) == "winograd") == fits
    if fits:
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            functional.conv2d(x, w, padding=1)
        blocks = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        *scratch, transformed = sorted(blocks)
        assert transformed >= 16 * 32 * channels * 4
        assert scratch[-1] <= 8 << 20


def test_what_is_not_finite_reaches_all_outputs_under_it_and_at_most_their_tiles():
    x, w, b, arguments = operands(CASES["image"])
    clean = functional.conv2d(x, w, b, *arguments)
    x[0, 3, 10, 11] = torch.inf
    out = functional.conv2d(x, w, b, *arguments)
    assert not out[0, :, 9:12, 10:13].isfinite().any()
    others = torch.ones(out.shape, dtype=torch.bool)
    others[0, :, 6:16, 4:20] = False
    assert torch.equal(out[others], clean[others])


def test_an_environment_variable_switches_it_off():
    code = """
        import torch, torch_nhwc
        x, w = (torch.randn(s).to(memory_format=torch.channels_last) for s in ((2, 64, 24, 24), (64, 64, 3, 3)))
        print(torch.ops.nhwc.convolution_way(x, w, None, [1, 1], [1, 1], [1, 1], 1)[0])
        print(torch.equal(torch_nhwc.functional.conv2d(x, w, None, 1, 1), torch.nn.functional.conv2d(x, w, None, 1, 1)))
    """
    command = [sys.executable, "-c", "\n".join(map(str.strip, code.strip().splitlines()))]
    for switch, expected in (("0", "pytorch\nTrue\n"), ("1", "winograd\nFalse\n")):
        environment = os.environ | {"TORCH_NHWC_WINOGRAD": switch}
        assert subprocess.run(command, capture_output=True, text=True, env=environment).stdout == expected


def test_the_opaque_operator_takes_any_sizes_that_fit():
    for shape in ((0, 5, 4, 4), (2, 5, 1, 1), (1, 3, 2, 7), (2, 70, 5, 4)):
        x = channels_last(torch.randn(shape))
        w = channels_last(torch.randn(6, shape[1], 3, 3))
        for padding in (1, 2):
            if shape[-1] + 2 * padding < 3:
                continue
            got = torch.ops.nhwc.convolution_by_kernels(
                x, w, None, [1, 1], [padding, padding], [1, 1], False, [0, 0], 1
            )
            torch.testing.assert_close(got, F.conv2d(x, w, None, 1, padding), rtol=1e-4, atol=1e-4)
