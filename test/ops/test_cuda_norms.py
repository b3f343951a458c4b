"""Group norm and instance norm as on a GPU, with the kernels switched on; without one the same on a CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import torch_nhwc as nhwc

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Shape and groups: one channel in each and more, rows that fill vectors or do not, chunks, wide rows.
CASES = [((2, 32, 24, 24, 24), 32), ((2, 32, 24, 24, 24), 8), ((1, 33, 50, 50), 3), ((4, 640, 8, 8), 32)]
CASES += [((2, 5, 3, 3), 5), ((1, 16, 64, 64, 64), 4), ((64, 256, 7, 7), 256), ((1, 2056, 2, 3), 1)]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")


def results(input, parameters, grad, norm):
    """Return the output and the gradients."""
    tensors = [each.detach().requires_grad_() for each in (input, *parameters)]
    out = norm(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_as_accurate_as_on_contiguous(shape, groups, mean, dtype, device):
    """Expect at most twice PyTorch's error on contiguous, in the format, the same in each run."""
    torch.manual_seed(0)
    input, grad = ((torch.randn(shape) + each).to(device, dtype) for each in (mean, 0))
    parameters = [torch.randn(shape[1]).to(device, dtype) for _ in range(2)]
    memory_format = FORMATS[len(shape)]

    def norm(function):
        return lambda input, weight, bias: function(input, groups, weight, bias)

    exact = results(input.double(), [each.double() for each in parameters], grad.double(), norm(F.group_norm))
    theirs = results(input, parameters, grad, norm(F.group_norm))
    inputs = [each.to(memory_format=memory_format) for each in (input, grad)]
    ours, again = (results(inputs[0], parameters, inputs[1], norm(nhwc.functional.group_norm)) for _ in range(2))
    for index, (result, their, each) in enumerate(zip(ours, theirs, exact)):
        room = 1e-10 if dtype == torch.float64 else torch.finfo(dtype).eps
        assert error(result, each) <= 2 * error(their, each) + room, index
        assert torch.equal(result, again[index])
    for each in ours[:2]:
        assert each.is_contiguous(memory_format=memory_format)


def test_instance_norm_updates_its_statistics(device):
    layer = nn.InstanceNorm3d(32, affine=True, track_running_stats=True).to(device)
    plain = copy.deepcopy(layer)
    volume = (torch.randn(2, 32, 12, 12, 12) + 3).to(device)
    nhwc.convert_(model := nn.Sequential(nn.Conv3d(32, 32, 1).to(device), layer))
    out = layer(volume.to(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(out, plain(volume))
    for ours, theirs in zip(layer.buffers(), plain.buffers()):
        torch.testing.assert_close(ours, theirs)
    if device == "cpu" or nhwc.ops.runs_cuda_norms():
        assert "Preserving" in type(model[1]).__name__
        assert out.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("offset", [1, 8])
def test_memory_that_is_not_aligned(offset, device):
    memory = torch.randn(2 * 16 * 81 + 64).to(device)
    input = memory[offset : offset + 2 * 16 * 81].view(2, 9, 9, 16).movedim(-1, 1)
    torch.testing.assert_close(nhwc.functional.group_norm(input, 4), F.group_norm(input.contiguous(), 4))


def test_opcheck():
    for device in ("cpu", "cuda"):
        arguments = (torch.device(device),)
        torch.library.opcheck(torch.ops.nhwc.runs_cuda_norms.default, arguments, test_utils=("test_schema",))


@pytest.mark.parametrize("value", ["2", "yes", "-1"])
def test_another_value_of_the_switch_is_an_error_that_lists_those_it_has(value, monkeypatch, device):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", value)
    message = rf"^TORCH_NHWC_CUDA_NORMS: expected 1 \(.*\), 0 \(.*\), or nothing \(.*\), got '{value}'$"
    for asked in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=message):
            nhwc.ops.runs_cuda_norms(asked)
    monkeypatch.delenv("TORCH_NHWC_CUDA_NORMS")
    assert nhwc.ops.runs_cuda_norms(device) == (device == "cuda" and torch.cuda.get_device_capability() == (9, 0))


@pytest.mark.cuda
def test_norms_are_captured_in_a_graph():
    input = torch.randn(2, 32, 16, 16, 16, device="cuda").to(memory_format=torch.channels_last_3d)
    for _ in range(2):
        nhwc.functional.group_norm(input, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nhwc.functional.group_norm(input, 8)
    for _ in range(2):
        input.normal_()
        graph.replay()
        torch.testing.assert_close(out, F.group_norm(input.contiguous(), 8))


@pytest.mark.cuda
def test_switched_off_they_are_pytorchs(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    assert not nhwc.ops.runs_cuda_norms()
    input = torch.randn(2, 32, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    out = nhwc.functional.group_norm(input, 8)
    assert out.is_contiguous(memory_format=torch.channels_last)
    given = input if torch.__version__ >= "2.15" else input.contiguous()  # from then on PyTorch's keeps the format
    assert torch.equal(out, F.group_norm(given, 8))


@pytest.mark.cuda
@pytest.mark.parametrize("switch", ["1", "0"])
def test_bfloat16_autocast_of_a_model(switch, monkeypatch):
    """Converted on a CPU, so that its norms are replaced wherever it goes."""
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", switch)
    model = nn.Sequential(nn.Conv3d(8, 32, 3), nn.InstanceNorm3d(32, affine=True), nn.LeakyReLU(), nn.Conv3d(32, 8, 3))
    plain, volume = copy.deepcopy(model).cuda(), torch.randn(2, 8, 16, 16, 16, device="cuda")
    nhwc.convert_(model, input_format="channels_last")
    assert "Preserving" in type(model[1]).__name__
    model.cuda()
    for each in (model, plain):
        with torch.autocast("cuda", torch.bfloat16):
            each(volume).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-3)
