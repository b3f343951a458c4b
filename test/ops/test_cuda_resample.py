"""Padding and interpolation as on a GPU, with the kernels switched on; without one the same on a CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from losing_layers import LAYERS, ON_GPU
from reference import FORMATS
from torch import nn

import torch_nhwc as nhwc

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
IMAGE, VOLUME = (2, 64, 12, 17), (2, 8, 6, 9, 7)
CALLS = {
    f"{mode} {len(shape) - 2}D": ("pad", shape, (by, mode), {})
    for mode in ("reflect", "replicate", "circular")
    for shape, by in ((IMAGE, (1, 2, 3, 0)), (VOLUME, (1, 2, 3, 0, 1, 4)))
}
CALLS |= {
    f"{mode} {len(shape) - 2}D by {factor}": ("interpolate", shape, (None, factor, mode), {})
    for shape, modes in (
        (IMAGE, ("nearest", "nearest-exact", "bilinear")),
        (VOLUME, ("nearest", "nearest-exact", "trilinear")),
    )
    for mode in modes
    for factor in (2, 1.7, (1.25,) * (len(shape) - 3) + (0.4,))
}
CALLS |= {
    "bilinear, corners": ("interpolate", IMAGE, ((24, 5), None, "bilinear", True), {}),
    "trilinear, corners": ("interpolate", VOLUME, ((1, 19, 14), None, "trilinear", True), {}),
    "trilinear, recomputed": ("interpolate", VOLUME, (None, 1.3, "trilinear", None, True), {}),
    "nearest to a size": ("interpolate", VOLUME, (9,), {}),
    "reflect, odd channels": ("pad", (2, 33, 7, 9), ((2, 1, 1, 2), "reflect"), {}),
    "bilinear, odd channels": ("interpolate", (3, 3, 7, 9), (None, 3, "bilinear"), {}),
    "replicate by more": ("pad", (1, 16, 2, 3), ((7, 9, 30, 1), "replicate"), {}),
    "many blocks": ("interpolate", (1, 32, 20, 70, 70), (None, 2, "trilinear"), {}),
    "wide rows": ("pad", (1, 4100, 3, 3), ((1, 1, 1, 1), "circular"), {}),
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")


@pytest.fixture
def is_ours(device):
    """Return whether a GPU's kernel runs, and not PyTorch's."""
    return device == "cuda" and nhwc.ops.runs_cuda_norms()


def as_channels_last(tensor):
    return tensor.contiguous(memory_format=FORMATS[tensor.dim()])


def outcome(call):
    """Return the result, or the type and the first line of the error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error).splitlines()[0]


def results(call, input, grad=None):
    """Return the output and the gradient."""
    input = input.detach().requires_grad_()
    out = call(input)
    return out.detach(), torch.autograd.grad(out, input, torch.ones_like(out) if grad is None else grad)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_as_pytorchs_in_format_and_the_same_in_each_run(name, dtype, device, is_ours):
    function, shape, arguments, options = CALLS[name]
    torch.manual_seed(0)
    input = torch.randn(shape).to(device, dtype)

    def ours(x):
        return getattr(nhwc.functional, function)(x, *arguments, **options)

    def theirs(x):
        return getattr(F, function)(x, *arguments, **options)

    grad = torch.randn(theirs(input).shape).to(device, dtype)
    # On a CPU, whose gradients are the adjoint of the forward for every factor.
    exact = [each.to(device) for each in results(theirs, input.double().cpu(), grad.double().cpu())]
    given = as_channels_last(input), as_channels_last(grad)
    found, again = (results(ours, *given) for _ in range(2))
    room = {torch.float64: 1e-11, torch.float32: 5e-5}.get(dtype, torch.finfo(dtype).eps)
    for result, right, repeated in zip(found, exact, again):
        if is_ours:
            torch.testing.assert_close(result.double(), right, rtol=room, atol=room)
            assert result.is_contiguous(memory_format=FORMATS[result.dim()])
            assert torch.equal(result, repeated)
    if not is_ours and "circular" not in name:
        for result, right in zip(found, results(theirs, *given)):
            assert torch.equal(result, right)
    if "linear" not in str(arguments):
        assert torch.equal(found[0], theirs(input.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.complex64], ids=str)
def test_circular_pads_of_any_dtype(dtype, device):
    x = torch.randint(0, 100, IMAGE, device=device).to(dtype)
    for offset in (0, 1):
        part = as_channels_last(x)[..., offset:]
        out = nhwc.functional.pad(part, (3, 1, 2, 4), "circular")
        assert torch.equal(out, F.pad(part.contiguous(), (3, 1, 2, 4), "circular"))


def test_complex_gradients(device):
    x = torch.randn(1, 3, 5, 4, dtype=torch.complex64, device=device)
    out, grad = results(lambda x: nhwc.functional.pad(x, (1, 2, 3, 1), "reflect"), as_channels_last(x))
    expected = results(lambda x: F.pad(x, (1, 2, 3, 1), "reflect"), x)
    assert torch.equal(out, expected[0])
    torch.testing.assert_close(grad, expected[1])
    assert torch.equal(
        nhwc.functional.pad(as_channels_last(x).conj(), (1, 0, 0, 1), "circular"),
        F.pad(x.conj().resolve_conj(), (1, 0, 0, 1), "circular"),
    )


@pytest.mark.parametrize("offset", [1, 4])
def test_memory_that_is_not_aligned(offset, device):
    memory = torch.randn(2 * 16 * 81 + 64, device=device)
    x = memory[offset : offset + 2 * 16 * 81].view(2, 9, 9, 16).movedim(-1, 1)
    for ours, theirs in ((nhwc.functional.pad, F.pad),):
        assert torch.equal(ours(x, (1, 1, 1, 1), "reflect"), theirs(x.contiguous(), (1, 1, 1, 1), "reflect"))
    found = results(lambda x: nhwc.functional.interpolate(x, (20, 15), None, "bilinear"), x)
    expected = results(lambda x: F.interpolate(x, (20, 15), None, "bilinear"), x.contiguous())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "nearest", "nearest-exact", "linear"])
def test_operators(mode, device):
    """opcheck, derivatives of the second order, tangents and batches."""
    is_pad = mode in ("reflect", "replicate", "circular")
    arguments = (mode, [6, 9], [1.0, 3.0]) if is_pad else (mode, [7, 6], [0.0, 1.3])
    x = as_channels_last(torch.randn(2, 6, 4, 5, device=device)).requires_grad_()
    grad = as_channels_last(torch.randn(2, 6, *arguments[1], device=device)).requires_grad_()
    backward = (mode, [4, 5], arguments[2])
    forward_op, backward_op = torch.ops.nhwc.native_resample, torch.ops.nhwc.native_resample_backward
    torch.library.opcheck(forward_op.default, (x, *arguments))
    torch.library.opcheck(backward_op.default, (grad, *backward))
    for op, given, others in ((forward_op, x, arguments), (backward_op, grad, backward)):
        double = as_channels_last(given.detach()[:1, :2].double()).requires_grad_()
        torch.autograd.gradcheck(lambda x: op(x, *others), double, check_forward_ad=True, nondet_tol=0.0)
        torch.autograd.gradgradcheck(lambda x: op(x, *others), double)
        batch = torch.randn(3, *given.shape, device=device)
        expected = torch.stack([op(each, *others) for each in batch])
        torch.testing.assert_close(torch.vmap(lambda x: op(x, *others))(batch), expected)


@pytest.mark.parametrize("name", [*ON_GPU, "circular_pad", "circular_pad_3d", "circular_conv", "reflect_conv"])
def test_layers_of_a_model(name, device, is_ours):
    reflect = (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), (2, 6, 5, 7))
    make, shape = (LAYERS | ON_GPU | {"reflect_conv": reflect})[name]
    layer = make().to(device)
    conv = (nn.Conv3d if len(shape) == 5 else nn.Conv2d)(shape[1], 4, 1).to(device)
    model = nn.Sequential(layer, *([] if "conv" in name else [nn.Identity()]))
    stock, whole = copy.deepcopy(model), nn.ModuleList([model, conv])
    nhwc.convert_(whole, preserve=True)
    assert type(model[0]).__name__.startswith("Preserving") == (is_ours or "circ" in name or "conv" in name)
    x = torch.randn(shape, device=device)
    found, expected = results(model, as_channels_last(x)), results(stock, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if is_ours:
        assert all(each.is_contiguous(memory_format=FORMATS[each.dim()]) for each in found)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((None, 2, "bicubic"), {}),
        (((20, 30), None, "bilinear"), {"antialias": True}),
        (((20, 30), 2), {}),
        ((), {}),
        (((20,),), {}),
        ((None, (2, 2, 2)), {}),
        ((None, 2, "nearest", False), {}),
        ((None, 2, "trilinear"), {}),
        ((20, None, "bilinear", None, True), {}),
        ((None, 2, "area"), {}),
        ((None, -1), {}),
        ((0,), {}),
    ],
    ids=str,
)
def test_other_interpolations_and_errors_are_pytorchs(arguments, options, device):
    x = as_channels_last(torch.randn(IMAGE, device=device))
    ours, theirs = (outcome(lambda of=each: of.interpolate(x, *arguments, **options)) for each in (nhwc.functional, F))
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("pad", [(9, 9, 9, 9), (30, 0, 0, 0), (-1, 2, 0, 0), (1, 1), (0, 0, 0, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_pads_and_errors_are_pytorchs(mode, pad, device):
    x = as_channels_last(torch.randn(IMAGE, device=device))
    ours, theirs = (outcome(lambda of=each: of.pad(x, pad, mode)) for each in (nhwc.functional, F))
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_arguments_that_no_operator_has():
    x = torch.randn(1, 2, 3, 4)
    for arguments, message in (
        (("bicubic", [3, 4], [0.0, 0.0]), "no mode 'bicubic'"),
        (("nearest", [3], [0.0]), "a size and a parameter for each dimension"),
        (("nearest", [3, 0], [0.0, 0.0]), "no size may be 0"),
        (("reflect", [9, 4], [3.0, 0.0]), r"cannot pad \[3, 4\] to \[9, 4\]"),
        (("circular", [3, 9], [0.0, -1.0]), "cannot pad"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nhwc.native_resample(x, *arguments)


@pytest.mark.cuda
def test_they_are_captured_in_a_graph_at_the_first_call_of_a_size():
    x = torch.randn(1, 40, 5, 6, 7, device="cuda").to(memory_format=torch.channels_last_3d)
    grad = torch.randn(1, 40, 10, 12, 14, device="cuda").to(memory_format=torch.channels_last_3d)
    arguments = ("linear", [10, 12, 14], [0.0] * 3)
    small = x[..., 1:]  # loads the kernels
    nhwc.functional.pad(small, (1, 1, 1, 1, 1, 1), "reflect")
    torch.ops.nhwc.native_resample(small, "linear", [9, 9, 9], [0.0] * 3)
    torch.ops.nhwc.native_resample_backward(small, "linear", [2, 2, 2], [0.0] * 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded = nhwc.functional.pad(x, (1, 2, 1, 2, 1, 2), "reflect")
        out = torch.ops.nhwc.native_resample(x, *arguments)
        back = torch.ops.nhwc.native_resample_backward(grad, "linear", [5, 6, 7], [0.0] * 3)
    for _ in range(2):
        x.normal_(), grad.normal_()
        graph.replay()
        plain = x.contiguous().requires_grad_()
        expected = F.interpolate(plain, scale_factor=2, mode="trilinear")
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(back, torch.autograd.grad(expected, plain, grad)[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(padded, F.pad(plain, (1, 2, 1, 2, 1, 2), "reflect"))


@pytest.mark.cuda
def test_streams_need_nothing_of_each_other():
    inputs = [torch.randn(1, 32, 40 + each, 50, device="cuda").to(memory_format=torch.channels_last) for each in (0, 1)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs = []
    for _ in range(5):
        for x, stream in zip(inputs, streams):
            with torch.cuda.stream(stream):
                outs.append((x, nhwc.functional.interpolate(x, scale_factor=2, mode="bilinear")))
    torch.cuda.synchronize()
    for x, out in outs:
        torch.testing.assert_close(out, F.interpolate(x.contiguous(), scale_factor=2, mode="bilinear"))


@pytest.mark.cuda
def test_compiled_they_are_pytorchs():
    x = as_channels_last(torch.randn(IMAGE, device="cuda"))
    for call in (
        lambda x: nhwc.functional.pad(x, (1, 1, 1, 1), "reflect"),
        lambda x: nhwc.functional.interpolate(x, (20, 30)),
    ):
        program = torch.export.export(_Calling(call), (x,))
        assert not any("nhwc" in str(node.target) for node in program.graph.nodes)


class _Calling(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.cuda
def test_switched_off_they_are_pytorchs(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    x = as_channels_last(torch.randn(IMAGE, device="cuda"))
    for ours, theirs in (
        (nhwc.functional.pad(x, (1, 1, 1, 1), "reflect"), F.pad(x, (1, 1, 1, 1), "reflect")),
        (nhwc.functional.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2)),
    ):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.cuda
def test_more_vectors_than_one_launch_has():
    """Bytes in rows of one: samples are cut into several launches."""
    x = torch.randint(0, 256, (5, 3, 16000, 16000), dtype=torch.uint8, device="cuda")
    x = x.to(memory_format=torch.channels_last)
    out = nhwc.functional.pad(x, (1, 1, 1, 1), "circular")
    assert torch.equal(out[:, :, 1:-1, 1:-1], x)
    assert torch.equal(out[:, :, 0, 1:-1], x[:, :, -1])
    assert torch.equal(out[:, :, 1:-1, -1], x[..., 0])
