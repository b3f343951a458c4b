"""The ways that convolutions take, by shapes, formats, dtypes and the CPU; and half precision by way of float32."""

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients, of_both_orders
from convolution_cases import operands, way_of
from onednn import HAS_AVX512, TAKES
from torch.utils.flop_counter import FlopCounterMode

from torch_nhwc import functional

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ORDINARY = {
    "conv2d": ("conv2d", (2, 16, 9, 8), (24, 16, 3, 3), (1, 1)),
    "groups": ("conv2d", (2, 16, 9, 8), (24, 4, 3, 3), (1, 1, 1, 4)),
    "conv3d": ("conv3d", (2, 8, 6, 7, 5), (16, 8, 3, 3, 3), (1, 1)),
    "transposed": ("conv_transpose2d", (2, 16, 9, 8), (16, 8, 3, 3), (2, 1, 1)),
}


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (("conv2d", (2, 3, 9, 8), (6, 3, 3, 3), (1, 1)), "pytorch"),
        (("conv3d", (2, 4, 5, 6, 7), (6, 4, 3, 3, 3), (1, 1)), "pytorch"),
        (("conv2d", (2, 5, 9, 8), (6, 4, 3, 3), (1, 1)), "unfit"),
        (("conv2d", (4, 9, 8), (6, 4, 3, 3), (1, 1)), "batched"),
        (("conv2d", (2, 3, 2, 3), (6, 3, 5, 3), (1, (2, 1))), "padded" if HAS_AVX512 else "pytorch"),
        (("conv2d", (2, 3, 6, 5), (6, 1, 3, 5), (2, 0, 1, 3)), "kernels"),
        (("conv2d", (2, 4, 9, 8), (6, 4, 1, 1), (2,)), "sliced"),
        (("conv_transpose2d", (2, 4, 2, 3), (4, 3, 5, 3), (1, (2, 1))), "cut" if HAS_AVX512 else "pytorch"),
        (("conv_transpose2d", (2, 4, 6, 1), (4, 1, 3, 3), (2,)), "widened" if HAS_AVX512 else "pytorch"),
        (("conv_transpose2d", (2, 4, 6, 5), (4, 3, 1, 1), (2, 0, 1)), "extended"),
        (("conv3d", (1, 16, 6, 7, 5), (8, 16, 1, 1, 1), ()), "linear"),
        (("conv3d", (1, 16, 10, 11, 12), (3, 16, 1, 1, 1), ()), "kernels"),
        (("conv2d", (2, 2, 32, 16), (6, 2, 1, 1), ()), "kernels"),
        (("conv3d", (1, 16, 6, 7, 5), (8, 16, 3, 1, 1), (1, (1, 0, 0))), "along_depth"),
        (("conv3d", (1, 16, 6, 7, 5), (8, 16, 1, 1, 1), (2,)), "sliced"),
        (("conv2d", (2, 32, 20, 20), (32, 32, 3, 3), (1, 1)), "winograd"),
        (("conv3d", (1, 16, 9, 10, 8), (24, 16, 3, 3, 3), (1, 1)), "winograd"),
        (("conv3d", (1, 16, 9, 10, 8), (24, 16, 2, 3, 3), (1, 1)), "slabs"),
        (("conv_transpose3d", (1, 16, 9, 10, 8), (16, 24, 2, 2, 2), (2,)), "slabs"),
        (("conv3d", (1, 128, 3, 4, 3), (64, 128, 3, 3, 3), (1, 1)), "kernels"),
        (("conv3d", (1, 7, 3, 3, 3), (64, 7, 3, 3, 3), (1, 1)), "restored"),
    ],
)
def test_each_way(case, way):
    x, w, b, arguments = operands(case)
    assert way_of(case[0], x, w.requires_grad_(), b, arguments) == way
    with torch.no_grad():
        is_for_gradients = way in ("sliced", "extended") and "2d" in case[0]
        assert way_of(case[0], x, w, b, arguments) == ("pytorch" if is_for_gradients else way)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_contiguous_volume_takes_the_format_of_the_weight(batch, channels):
    x, w = torch.randn(batch, channels, 6, 7, 5), torch.randn(4, channels, 3, 3, 3)
    w = torch.empty_strided(w.shape, (27 * channels, 1, 9 * channels, 3 * channels, channels)).copy_(w)
    assert way_of("conv3d", x, w, None, (1, 1)) == "formatted"
    got, expected = (gradients(functions.conv3d, (x, w), arguments=(None, 1, 1)) for functions in (functional, F))
    assert_in_format(got[0])
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    contiguous = torch.empty(w.shape).copy_(w)
    assert way_of("conv3d", x, contiguous, None, (1, 1)) == "pytorch"
    assert functional.conv3d(x, contiguous, None, 1, 1).is_contiguous()


def test_an_ambiguous_volume_is_in_both_formats():
    x, w = torch.randn(4, 1, 1, 1, 1), torch.empty(4, 17, 2, 2, 2, memory_format=torch.channels_last_3d).normal_()
    ours, theirs = functional.conv_transpose3d(x[:, :, 0:1], w[:1], None, 2), F.conv_transpose3d(x, w[:1], None, 2)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 40, 7, 6, 9), (1, 16, 8, 8, 8), (1, 5, 4, 5, 3)])
@pytest.mark.parametrize("stride", [2, (1, 3, 2)])
def test_strided_voxels_of_one_tap_are_taken_first(shape, stride):
    x, w, b = channels_last(torch.randn(shape)), channels_last(torch.randn(24, shape[1], 1, 1, 1)), torch.randn(24)
    each = [stride] * 3 if isinstance(stride, int) else list(stride)
    assert way_of("conv3d", x, w.requires_grad_(), b, (each,)) == "sliced"
    got = of_both_orders(functional.conv3d, (x, w, b), (stride,))
    for ours, real in zip(got, of_both_orders(F.conv3d, (x.double(), w.double(), b.double()), (stride,))):
        assert (ours.double() - real).norm() <= 3e-6 * real.norm()
    assert_in_format(got[0])
    assert_in_format(got[1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(6, 7, 4).permute(2, 0, 1)[None],
        lambda: channels_last(torch.randn(3, 4, 6, 7))[1][None],
        lambda: torch.randn(1, 8, 4).transpose(1, 2).unsqueeze(3),
        lambda: channels_last(torch.randn(1, 4, 3, 6))[:, :, ::3],
    ],
)
def test_views_with_odd_strides_in_sizes_of_1(view, dtype, kernel, threads):
    """PyTorch's product for grouped convolutions goes by such a stride, and gives wrong gradients of the weight."""
    x = view().to(dtype)
    case = ("conv2d", x.shape, (4, 2, kernel, kernel), (1, kernel // 2, 1, 2))
    w = torch.empty_strided(case[2], (2 * kernel**2, 1, 2 * kernel, 2)).copy_(torch.randn(case[2])).to(dtype)
    assert way_of(case[0], x, w, None, case[3]) in ("restrided", "padded")
    torch.set_num_threads(threads)
    got = gradients(functional.conv2d, (x, w), arguments=(None, *case[3]))
    exact = x.double().contiguous().clone(), w.double().contiguous().clone()
    real = gradients(F.conv2d, exact, arguments=(None, *case[3]))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, theirs in zip(got, real):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


IMAGES = channels_last(torch.randn(3, 96, 16, 18))
FEW_PIXELS = channels_last(torch.randn(3, 512, 7, 7))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("keeps_format", [False, True])
@pytest.mark.parametrize(("x", "outputs"), [(IMAGES, 80), (FEW_PIXELS, 256)], ids=["images", "few pixels"])
def test_images_under_one_tap_are_one_product_on_one_thread(x, outputs, keeps_format, has_bias, on_one_thread):
    """PyTorch computes one for each sample, after it has written zeros."""
    w, b = torch.randn(outputs, x.shape[1], 1, 1), torch.randn(outputs) if has_bias else None
    w = channels_last(w) if keeps_format else w
    assert way_of("conv2d", x, w.clone().requires_grad_(), b, ()) == "linear"
    with torch.no_grad():
        assert way_of("conv2d", x, w, b, ()) == ("linear" if x is FEW_PIXELS else "pytorch")
        torch.testing.assert_close(functional.conv2d(x, w, b), F.conv2d(x, w, b), rtol=1e-4, atol=1e-4)
    torch.set_num_threads(2)
    assert way_of("conv2d", x, w.clone().requires_grad_(), b, ()) != "linear", "which oneDNN computes"
    torch.set_num_threads(1)
    operands = [x, w] if b is None else [x, w, b]
    ours, stock = (of_both_orders(each, operands) for each in (functional.conv2d, F.conv2d))
    exact = of_both_orders(F.conv2d, [each.double() for each in operands])
    for each, other, real in zip(ours, stock, exact):
        assert (each.double() - real).norm() <= 2 * (other.double() - real).norm() + 1e-7 * real.norm()
        assert each.stride() == other.stride()
    frozen = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.conv2d(x, frozen, b).sum(), frozen)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(F.conv2d(x, frozen, b).sum(), frozen)[0], rtol=1e-4, atol=1e-2
    )


class Saved(contextlib.AbstractContextManager):
    """Counts the bytes that a forward saves, by dtype; each tensor once."""

    def __init__(self):
        self.bytes = {}
        seen = set()

        def pack(tensor):
            if (key := (tensor.data_ptr(), tensor.dtype)) not in seen:
                seen.add(key)
                self.bytes[tensor.dtype] = self.bytes.get(tensor.dtype, 0) + tensor.nbytes
            return tensor

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        return self.hooks.__exit__(*error)


@HALVES
@pytest.mark.parametrize("name", ["conv2d", "groups", "conv3d", "transposed"])
def test_what_is_saved_is_what_pytorch_saves(name, dtype):
    function, *_ = case = ORDINARY[name]
    x, w, b, arguments = operands(case, dtype)
    each = [tensor.requires_grad_() for tensor in (x, w, b)]
    with Saved() as theirs:
        kept = getattr(F, function)(*each, *arguments)
    with Saved() as ours:
        out = getattr(functional, function)(*each, *arguments)
    assert ours.bytes == theirs.bytes == {dtype: x.nbytes + w.nbytes}
    assert out.grad_fn is not None
    assert kept.grad_fn is not None


@HALVES
def test_which_half_precision_goes_by_way_of_float32(dtype):
    x, w, b, arguments = operands(ORDINARY["conv2d"], dtype)
    way = "pytorch" if TAKES[dtype] else "float32"
    assert way_of("conv2d", x, w, b, arguments) == way
    assert way_of("conv2d", x.contiguous(), w.contiguous(), None, arguments) == way
    with torch.autocast("cpu", dtype=dtype):
        assert way_of("conv2d", x.float(), w.float(), b.float(), arguments) == way


@pytest.mark.parametrize(
    "case", [ORDINARY["conv2d"], ("conv2d", (2, 6, 9, 8), (6, 1, 5, 5), (1, 2, 1, 6))], ids=["dense", "depthwise"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dispatch_mode_sees_a_convolution(case, dtype):
    x, w, b, arguments = operands(case, dtype)
    counts = []
    for functions in (F, functional):
        with FlopCounterMode(display=False) as counter:
            functions.conv2d(x.requires_grad_(), w.requires_grad_(), b, *arguments).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_contiguous_volume_of_which_one_voxel_is_left():
    """One voxel alone does not show that the volume was brought into the format already."""
    x, weight = torch.randn(1, 16, 2, 2, 2), torch.randn(8, 16, 1, 1, 1)
    weight = weight.as_strided(weight.shape, (16, 1, 16, 16, 16))
    out = functional.conv3d(x, weight, stride=2)
    torch.testing.assert_close(out, F.conv3d(x, weight, stride=2))
    assert out.stride() == (8, 1, 8, 8, 8)
