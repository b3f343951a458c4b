"""Dense convolutions of few positions: values, errors next to PyTorch's, and where they are used."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients, of_both_orders
from convolution_cases import operands, way_of
from onednn import HAS_AVX512, TAKES

from torch_nhwc import functional

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Those that take inner products at every instruction set that was measured.
CASES = {
    "pixels": ("conv2d", (1, 515, 3, 3), (1201, 515, 1, 1), ()),
    "pixels, a page apart": ("conv2d", (1, 1024, 3, 4), (601, 1024, 1, 1), ()),
    "strided pixels": ("conv2d", (1, 300, 9, 13), (1040, 300, 1, 1), (2,)),
    "padded pixels": ("conv2d", (1, 300, 5, 7), (1040, 300, 1, 1), (3, 1)),
    "3x3": ("conv2d", (1, 128, 5, 6), (270, 128, 3, 3), (1, 1)),
    "3x3, odd channels": ("conv2d", (1, 131, 5, 6), (263, 131, 3, 3), (1, 1)),
    "3x3, two images": ("conv2d", (2, 160, 4, 5), (211, 160, 3, 3), (1, 1)),
    "3x3, few inputs": ("conv2d", (1, 37, 6, 7), (910, 37, 3, 3), (1, (2, 1))),
    "3x3, many inputs": ("conv2d", (1, 1100, 2, 3), (33, 1100, 3, 3), (1, 1)),
    "strided": ("conv2d", (1, 120, 11, 13), (280, 120, 3, 3), (2, 1)),
    "dilated": ("conv2d", (1, 120, 8, 7), (280, 120, 3, 3), (1, 2, 2)),
    "patches": ("conv2d", (1, 96, 14, 14), (784, 96, 2, 2), (2,)),
    "without padding": ("conv2d", (1, 96, 7, 9), (128, 96, 5, 5), (1, 0)),
    "one image": ("conv2d", (64, 5, 5), (530, 64, 3, 3), (1, 1)),
    "voxels": ("conv3d", (1, 520, 2, 2, 2), (1160, 520, 1, 1, 1), ()),
    "3x3x3": ("conv3d", (1, 65, 4, 5, 3), (40, 65, 3, 3, 3), (1, 1)),
    "3x3x3, few channels": ("conv3d", (1, 16, 5, 5, 5), (3, 16, 3, 3, 3), (1, 1)),
    "3x3x3, strided": ("conv3d", (1, 33, 13, 11, 12), (40, 33, 3, 3, 3), (2, 1)),
    "3x3x3, dilated": ("conv3d", (1, 24, 9, 8, 10), (17, 24, 3, 3, 3), (1, 2, 2)),
    "mixed taps": ("conv3d", (1, 128, 5, 7, 9), (70, 128, 2, 3, 4), ((2, 1, 2), (1, 0, 1), (1, 2, 1))),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_outputs_and_gradients_are_right(name, dtype):
    case = CASES[name]
    x, w, b, arguments = operands(case, dtype)
    if dtype == F32:
        assert way_of(case[0], x, w, b, arguments) == ("batched" if x.dim() == 3 else "kernels")
    exact = gradients(getattr(F, case[0]), [each.double() for each in (x, w, b)], arguments=arguments)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            results.append(getattr(functional, case[0])(x, w, b, *arguments))
    assert torch.equal(*results) or dtype != F32
    trained = gradients(getattr(functional, case[0]), (x, w, b), arguments=arguments)
    for ours, real in ((results[0], exact[0]), *zip(trained, exact, strict=True)):
        assert ours.dtype == dtype
        assert (ours.double() - real).norm() <= {F32: 2e-6, BF16: 6e-3, F16: 1e-3}[dtype] * real.norm()
    if x.dim() > 3:
        assert_in_format(results[0])
        assert_in_format(trained[1])


@every_case
def test_the_error_is_at_most_that_of_pytorch_on_contiguous(name):
    case = CASES[name]
    x, w, b, arguments = operands(case)
    exact = getattr(F, case[0])(x.double(), w.double(), b.double(), *arguments)
    stock = getattr(F, case[0])(x.contiguous(), w.contiguous(), b, *arguments)
    ours = getattr(functional, case[0])(x, w, b, *arguments)
    assert (ours.double() - exact).norm() <= 1.1 * (stock.double() - exact).norm()


@every_case
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_the_opaque_operator_takes_every_dtype(name, has_bias, dtype):
    case = CASES[name]
    x, w, b, arguments = operands(case, dtype)
    axes = w.dim() - 2
    stride, padding, dilation = (
        [each] * axes if isinstance(each, int) else list(each) for each in (*arguments, *(1, 0, 1)[len(arguments) :])
    )
    x = x if x.dim() > 3 else channels_last(x[None])
    bias = b if has_bias else None
    got = torch.ops.nhwc.convolution_by_kernels(x, w, bias, stride, padding, dilation, False, [0] * axes, 1)
    real = getattr(F, case[0])(x.double(), w.double(), bias.double() if has_bias else None, stride, padding, dilation)
    assert (got.double() - real).norm() <= {F32: 2e-6, BF16: 4e-3, F16: 6e-4}[dtype] * real.norm()
    assert_in_format(got)
    assert (
        torch.ops.nhwc.convolution_by_kernels(
            *(x.to("meta"), w.to("meta"), bias if bias is None else bias.to("meta")),
            *(stride, padding, dilation, False, [0] * axes, 1),
        ).stride()
        == got.stride()
    )


def test_gradients_of_both_orders():
    x, w, b, arguments = operands(CASES["3x3x3"])
    got = of_both_orders(functional.conv3d, (x, w, b), arguments)
    for ours, real in zip(got, of_both_orders(F.conv3d, (x.double(), w.double(), b.double()), arguments)):
        assert (ours.double() - real).norm() <= 3e-6 * real.norm()
    assert_in_format(got[1])


def test_the_gradient_of_a_transposed_convolution():
    x, w, gradient = (channels_last(torch.randn(shape)) for shape in ((1, 40, 4, 4), (40, 21, 3, 3), (1, 21, 7, 7)))
    sizes = [2, 2], [1, 1], [1, 1], True, [0, 0], 1, [False, True, True]
    torch.ops.nhwc.convolution_by_kernels_backward(gradient, x, w, *sizes)
    with pytest.raises(RuntimeError, match="a transposed convolution"):
        torch.ops.nhwc.convolution_by_kernels(x, w, None, *sizes[:-1])


def test_what_is_not_finite_stays_under_its_taps():
    x, w, b, arguments = operands(CASES["3x3"])
    clean = functional.conv2d(x, w, b, *arguments)
    x[0, 3, 2, 2] = torch.inf
    out = functional.conv2d(x, w, b, *arguments)
    assert not out[0, :, 1:4, 1:4].isfinite().any()
    assert torch.equal(out[0, :, :, 4:], clean[0, :, :, 4:])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (("conv2d", (1, 128, 20, 20), (128, 128, 3, 3), (2, 1)), "many positions"),
        (("conv2d", (1, 64, 4, 4), (64, 64, 3, 3), (1, 1)), "few weights"),
        (("conv2d", (1, 512, 1, 1), (512, 512, 1, 1), ()), "one position"),
        (("conv2d", (1, 256, 9, 9), (1024, 256, 1, 1), ()), "pixels of a large matrix"),
        (("conv2d", (1, 256, 4, 4), (256, 128, 3, 3), (1, 1, 1, 2)), "groups"),
        (("conv_transpose2d", (1, 256, 4, 4), (256, 256, 3, 3), (2, 1)), "transposed"),
    ],
)
def test_other_convolutions_do_without(case, why):
    x, w, b, arguments = operands(case)
    assert way_of(case[0], x, w, b, arguments) != "kernels", why
    contiguous = CASES["3x3"]
    x, w, b, arguments = operands(contiguous)
    assert way_of("conv2d", x, w.contiguous(), b, arguments) != "kernels"


def test_half_precision_takes_them_where_onednn_does_not_take_it():
    x, w, b, arguments = operands(CASES["3x3"], BF16)
    assert way_of("conv2d", x, w, b, arguments) == ("kernels" if not TAKES[BF16] else "pytorch")


def test_winograd_takes_fewer_positions_with_avx512():
    x, w, b, arguments = operands(("conv2d", (1, 256, 14, 14), (256, 256, 3, 3), (1, 1)))
    assert way_of("conv2d", x, w, b, arguments) == ("winograd" if HAS_AVX512 else "pytorch")
