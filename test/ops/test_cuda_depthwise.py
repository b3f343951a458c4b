"""Depthwise 3D convolutions on a GPU, where cuDNN is slow in channels-last; without a GPU the same on a CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last
from torch import nn
from torch._subclasses import FakeTensorMode

import torch_nhwc as nhwc

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Shape of the input, filters of each channel, kernel, stride, padding and dilation.
CASES = [
    ((2, 32, 9, 10, 11), 1, 3, 1, 1, 1),
    ((1, 40, 8, 9, 21), 1, 5, 1, 2, 1),
    ((2, 16, 7, 8, 9), 1, 7, 1, 3, 1),
    ((2, 24, 9, 8, 7), 1, 3, 2, 1, 1),
    ((2, 64, 10, 12, 14), 1, 5, 2, 2, 1),
    ((1, 33, 6, 5, 7), 1, 3, 1, 1, 1),
    ((1, 6, 6, 7, 9), 1, (3, 1, 5), 1, (1, 0, 2), 1),
    ((2, 8, 6, 7, 9), 2, 3, 1, 0, 1),
    ((1, 16, 9, 9, 9), 1, 3, 1, 2, 2),
    ((3, 300, 3, 2, 4), 1, 3, 1, 1, 1),
]


@pytest.fixture(params=["1", "0"], autouse=True)
def switch(request, monkeypatch):
    """Run with our kernels and without."""
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", request.param)


def results(input, weight, bias, grad, arguments, convolve):
    """Return the output and the gradients."""
    tensors = [each.detach().requires_grad_() for each in (input, weight, bias)]
    out = convolve(*tensors, *arguments)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_accurate_as_on_contiguous(case, dtype, device):
    """Expect at most twice PyTorch's error on contiguous, in the format, the same in each run."""
    shape, multiple, kernel, stride, padding, dilation = case
    kernel = (kernel,) * 3 if isinstance(kernel, int) else kernel
    arguments = (stride, padding, dilation, shape[1])
    input, bias = torch.randn(shape).to(device, dtype), torch.randn(shape[1] * multiple).to(device, dtype)
    weight = torch.randn(shape[1] * multiple, 1, *kernel).to(device, dtype)
    grad = torch.randn_like(F.conv3d(input, weight, bias, *arguments))
    exact = results(*(each.double() for each in (input, weight, bias, grad)), arguments, F.conv3d)
    theirs = results(input, weight, bias, grad, arguments, F.conv3d)
    given = (channels_last(input), channels_last(weight), bias, channels_last(grad), arguments)
    ours, again = (results(*given, nhwc.functional.conv3d) for _ in range(2))
    room = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    for index, (result, their, each) in enumerate(zip(ours, theirs, exact)):
        assert error(result, each) <= 2 * error(their, each) + room, index
        assert torch.equal(result, again[index]), index
    for each in ours[:3] if device == "cuda" else ours[:1]:
        assert_in_format(each)
    # Either alone makes cuDNN take channels-last.
    for arrangement in ((channels_last(input), weight), (input, channels_last(weight))):
        out = nhwc.functional.conv3d(*arrangement, bias, *arguments)
        torch.testing.assert_close(out, ours[0])
        assert_in_format(out)


def test_one_sample_and_a_slice(device):
    volume, weight = torch.randn(16, 5, 6, 7).to(device), channels_last(torch.randn(16, 1, 3, 3, 3).to(device))
    expected = F.conv3d(volume, weight.contiguous(), None, 1, 1, 1, 16)
    torch.testing.assert_close(nhwc.functional.conv3d(volume, weight, None, 1, 1, 1, 16), expected)
    wide = channels_last(torch.randn(2, 32, 5, 6, 7).to(device))
    expected = F.conv3d(wide[:, 3:19].contiguous(), weight.contiguous(), None, 1, 1, 1, 16)
    torch.testing.assert_close(nhwc.functional.conv3d(wide[:, 3:19], weight, None, 1, 1, 1, 16), expected)


def test_of_higher_derivatives_and_transforms(device):
    input = channels_last(torch.randn(2, 4, 3, 4, 5, dtype=torch.double).to(device)).requires_grad_()
    weight = channels_last(torch.randn(4, 1, 3, 3, 3, dtype=torch.double).to(device)).requires_grad_()

    def convolve(input, weight):
        return nhwc.functional.conv3d(input, weight, None, 1, 1, 1, 4)

    assert torch.autograd.gradcheck(convolve, (input, weight))
    assert torch.autograd.gradgradcheck(convolve, (input, weight))
    many = torch.stack([input, 2 * input]).detach()
    mapped = torch.func.vmap(convolve, (0, None))(many, weight)
    torch.testing.assert_close(mapped[1], 2 * convolve(input, weight))


def block(channels=16, kernel=3):
    """Return the layers of a block of MedNeXt without its residual."""
    return nn.Sequential(
        nn.Conv3d(channels, channels, kernel, padding=kernel // 2, groups=channels),
        nn.GroupNorm(channels, channels),
        nn.Conv3d(channels, 2 * channels, 1),
        nn.GELU(),
        nn.Conv3d(2 * channels, channels, 1),
    )


def step(model, volume):
    """Return the output, and the gradients of the input and of all parameters."""
    given = volume.detach().clone().requires_grad_()
    out = model(given)
    out.float().square().mean().backward()
    return [out.detach(), given.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_converted_model_gives_what_it_gave(kernel, device):
    model, volume = block(kernel=kernel).to(device), torch.randn(2, 16, 8, 9, 10).to(device)
    plain = copy.deepcopy(model)
    report = nhwc.convert_(model, input_format="channels_last")
    assert "Preserving" in type(model[0]).__name__
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value not in report.remarks
    for ours, theirs in zip(step(model, volume), step(plain, volume)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert model(volume).is_contiguous(memory_format=torch.channels_last_3d)
    report.revert()
    assert type(model[0]) is nn.Conv3d


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_memory_that_is_not_aligned(offset, device):
    memory = torch.randn(2 * 16 * 6 * 7 * 8 + 64).to(device)
    input = memory[offset : offset + 2 * 16 * 6 * 7 * 8].view(2, 6, 7, 8, 16).movedim(-1, 1)
    weight = torch.randn(16, 1, 3, 3, 3).to(device)
    out = nhwc.functional.conv3d(input, channels_last(weight), None, 1, 1, 1, 16)
    torch.testing.assert_close(out, F.conv3d(input.contiguous(), weight, None, 1, 1, 1, 16))


@pytest.mark.parametrize("required", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_needed(required, device):
    tensors = [torch.randn(2, 16, 6, 7, 8).to(device), torch.randn(16, 1, 3, 3, 3).to(device)]
    ours, theirs = ([each.clone().requires_grad_(need) for each, need in zip(tensors, required)] for _ in range(2))
    got = nhwc.functional.conv3d(*map(channels_last, ours), None, 1, 1, 1, 16)
    expected = F.conv3d(*theirs, None, 1, 1, 1, 16)
    torch.testing.assert_close(got, expected)
    if any(required):
        got.square().sum().backward(), expected.square().sum().backward()
    for our, their in zip(ours, theirs):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (3, 2)])
def test_large_volumes(kernel, stride):
    input, weight = torch.randn(2, 64, 40, 41, 42, device="cuda"), torch.randn(64, 1, *[kernel] * 3, device="cuda")
    arguments = (stride, kernel // 2, 1, 64)
    grad = torch.randn_like(F.conv3d(input, weight, None, *arguments))
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [each.to(dtype) for each in (input, weight, grad)]
        bias = torch.randn(64, device="cuda", dtype=dtype)
        exact = results(*(each.double() for each in (*tensors[:2], bias, tensors[2])), arguments, F.conv3d)
        ours = results(
            *map(channels_last, tensors[:2]), bias, channels_last(tensors[2]), arguments, nhwc.functional.conv3d
        )
        for result, each in zip(ours, exact):
            assert error(result, each) <= (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.cuda
def test_captured_in_a_graph():
    input = channels_last(torch.randn(2, 32, 8, 9, 10, device="cuda"))
    weight = channels_last(torch.randn(32, 1, 3, 3, 3, device="cuda"))
    for _ in range(2):
        nhwc.functional.conv3d(input, weight, None, 1, 1, 1, 32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nhwc.functional.conv3d(input, weight, None, 1, 1, 1, 32)
    for _ in range(2):
        input.normal_()
        graph.replay()
        torch.testing.assert_close(out, F.conv3d(input.contiguous(), weight.contiguous(), None, 1, 1, 1, 32))


@pytest.mark.cuda
def test_autocast_computes_and_saves_in_bfloat16():
    model, volume = block(32).cuda(), torch.randn(2, 32, 12, 12, 12, device="cuda")
    plain = copy.deepcopy(model)
    nhwc.convert_(model, input_format="channels_last")
    saved = []
    with torch.autocast("cuda", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
            assert model[0](channels_last(volume)).dtype == torch.bfloat16
        assert all(each.dtype == torch.bfloat16 for each in saved)
        ours, theirs = step(model, volume), step(plain, volume)
    for our, their in zip(ours, theirs):
        torch.testing.assert_close(our, their, rtol=0.05, atol=2e-3)


@pytest.mark.cuda
def test_the_report_of_a_model_on_a_gpu():
    model = nn.Sequential(nn.Conv3d(3, 8, 3), nn.Conv3d(8, 8, 3, groups=8), nn.Conv3d(8, 8, 3, groups=2)).cuda()
    plan = nhwc.plan(model)
    assert [row.reason for row in plan.layers] == [nhwc.Reason.OTHER_DEVICE, None, nhwc.Reason.OTHER_DEVICE]
    assert "1 Conv3d to replace" in str(plan)
    report = nhwc.convert_(model, preserve=False)
    assert type(model[1]) is nn.Conv3d
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value in report.remarks
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value in " ".join(str(report).split())
    report.revert()
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value not in nhwc.convert_(model[::2], preserve=False).remarks


@pytest.mark.cuda
def test_a_network_of_monai():
    pytest.importorskip("monai")
    from monai.networks.nets.mednext import MedNeXt

    model = MedNeXt(3, 8, 1, 2, blocks_down=(1,) * 4, blocks_up=(1,) * 4).cuda().eval()
    plain, volume = copy.deepcopy(model), torch.randn(1, 1, 32, 32, 32, device="cuda")
    nhwc.convert_(model, input_format="channels_last")
    with torch.no_grad():
        torch.testing.assert_close(model(volume), plain(volume), rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_compiled_graphs_do_the_same():
    model, volume = block(), torch.randn(2, 16, 8, 9, 10, device="cuda")
    model.cuda()
    nhwc.convert_(model, input_format="channels_last")
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    for ours, theirs in zip(step(compiled, volume), step(model, volume)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def way(device, shape, weight, groups, formats=(True, True)):
    """Return the way of tensors that do not exist, so that there may be no such device."""
    tensors = [torch.empty(each) for each in (shape, weight)]
    made = [channels_last(each) if is_last else each for each, is_last in zip(tensors, formats)]
    with FakeTensorMode():
        input, filters = (torch.empty_strided(each.shape, each.stride(), device=device) for each in made)
        return torch.ops.nhwc.convolution_way(input, filters, None, [1] * 3, [1] * 3, [1] * 3, groups)


def test_only_depthwise_volumes_on_cuda_take_the_way():
    depthwise = ((2, 8, 5, 6, 7), (8, 1, 3, 3, 3), 8)
    expected = ("kernels", "ours", True) if nhwc.ops.runs_cuda_norms() else ("contiguous", "faster", True)
    for formats in ((True, True), (True, False), (False, True)):
        assert way("cuda", *depthwise, formats) == expected
    for taps in (1, 2, 9):  # along the width, for which there are no kernels
        assert way("cuda", (2, 8, 5, 6, 12), (8, 1, 3, 3, taps), 8)[0] == "contiguous"
    assert way("cuda", (8, 5, 6, 7), *depthwise[1:], (False, True))[0] == "contiguous"
    others = [
        (*depthwise, (False, False)),
        ((2, 8, 5, 6, 7), (8, 2, 3, 3, 3), 4),
        ((2, 8, 5, 6, 7), (8, 8, 3, 3, 3), 1),
    ]
    for other in (*others, ((2, 8, 5, 6, 7), (9, 1, 3, 3, 3), 8)):
        assert way("cuda", *other)[0] == "unfit"
    for device in ("cpu", "xpu"):
        assert way(device, *depthwise)[0] != "contiguous"
