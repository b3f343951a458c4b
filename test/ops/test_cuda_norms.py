"""Group norm and instance norm as on a GPU, with the kernels switched on; without one the same on a CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.nn import pending

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


# --- With what follows, and batch norm ---

LAYERS = {
    "group": lambda: nn.GroupNorm(8, 32),
    "instance": lambda: nn.InstanceNorm3d(32, affine=True),
    "batch": lambda: nn.BatchNorm3d(32, momentum=0.3),
    "batch in evaluation": lambda: nn.BatchNorm3d(32).eval(),
}
ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2, inplace=True),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU("tanh"),
}


@pytest.fixture
def small_ones_wait(monkeypatch):
    for name in ("_FEWEST", "_FEWEST_IN_GROUPS", "_FEWEST_ON_CUDA", "_FEWEST_CAST"):
        monkeypatch.setattr(pending, name, 0)


def with_gradients(model, volume, grad):
    volume = volume.detach().requires_grad_()
    out = model(volume)
    return [out.detach(), *torch.autograd.grad(out, [volume, *model.parameters()], grad)]


@pytest.mark.usefixtures("small_ones_wait")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_norm_and_its_activation_are_one_pass(kind, activation, dtype, device):
    """Expect at most twice PyTorch's error on contiguous, and that the norm waits."""
    torch.manual_seed(0)
    plain = nn.Sequential(LAYERS[kind](), ACTIVATIONS[activation]).to(device, dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    volume, grad = ((torch.randn(2, 32, 20, 20, 20) + each).to(device, dtype) for each in (1, 0))
    exact_model, model = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    nhwc.convert_(model)
    exact, theirs = (
        with_gradients(each, *(tensor.to(next(each.parameters()).dtype) for tensor in (volume, grad)))
        for each in (exact_model, plain)
    )
    given = [each.to(memory_format=torch.channels_last_3d) for each in (volume, grad)]
    if device == "cuda":
        assert type(copy.deepcopy(model)[0](given[0])) is pending.Pending
    for index, (ours, their, each) in enumerate(zip(with_gradients(model, *given), theirs, exact)):
        room = 4 * torch.finfo(dtype).eps
        assert error(ours, each) <= 2 * error(their, each) + room, index
        if index < 2:
            assert ours.is_contiguous(memory_format=torch.channels_last_3d)
    for ours, theirs_ in zip(model.buffers(), exact_model.buffers()):
        torch.testing.assert_close(ours.double(), theirs_.double(), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("small_ones_wait")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [*LAYERS, "none"])
def test_the_bias_of_a_convolution_is_in_the_pass_of_what_follows(kind, grad, dtype, device):
    """A norm and an activation, or in inference an activation alone. Expect at most twice PyTorch's error."""
    torch.manual_seed(0)
    norm = LAYERS[kind]() if kind != "none" else nn.Identity()
    plain = nn.Sequential(nn.Conv3d(8, 32, 3, padding=1), norm, nn.SiLU()).to(device, dtype)
    for parameter in (*plain[1].parameters(), plain[0].bias):
        nn.init.normal_(parameter)
    volume, grad_out = torch.randn(2, 8, 14, 15, 16).to(device, dtype), torch.randn(2, 32, 14, 15, 16).to(device, dtype)
    exact_model, model = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    nhwc.convert_(model)

    def computed(model, *given):
        if grad:
            return with_gradients(model, *given)
        with torch.no_grad():
            return [model(given[0])]

    exact, theirs = (
        computed(each, *(tensor.to(next(each.parameters()).dtype) for tensor in (volume, grad_out)))
        for each in (exact_model, plain)
    )
    given = [each.to(memory_format=torch.channels_last_3d) for each in (volume, grad_out)]
    if device == "cuda":
        with torch.set_grad_enabled(grad):
            assert type(copy.deepcopy(model)[0](given[0])) is pending.Pending
    for index, (ours, their, each) in enumerate(zip(computed(model, *given), theirs, exact)):
        room = 16 * torch.finfo(dtype).eps * each.norm() + 1e-5
        assert (ours.double() - each).norm() <= 2 * (their.double() - each).norm() + room, index
    for ours, theirs_ in zip(model.buffers(), exact_model.buffers()):
        torch.testing.assert_close(ours.double(), theirs_.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(8, 48, 40, 40), (2, 33, 9, 10, 11)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_bfloat16(training, shape, device):
    torch.manual_seed(0)
    input, grad = ((torch.randn(shape) + each).to(device, torch.bfloat16) for each in (2, 0))
    parameters = [torch.randn(shape[1]).to(device) for _ in range(2)]
    memory_format = FORMATS[len(shape)]
    running = [torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)]

    def norm(function, *statistics):
        return lambda input, weight, bias: function(input, *statistics, weight, bias, training, 0.2)

    theirs, ours = ([each.clone() for each in running] for _ in range(2))
    expected = results(
        input.double(),
        [each.double() for each in parameters],
        grad.double(),
        norm(F.batch_norm, *(each.double() for each in running)),
    )
    by_pytorch = results(input, parameters, grad, norm(F.batch_norm, *theirs))
    given = [each.to(memory_format=memory_format) for each in (input, grad)]
    found = results(given[0], parameters, given[1], norm(nhwc.functional.batch_norm, *ours))
    for index, (result, their, each) in enumerate(zip(found, by_pytorch, expected)):
        assert error(result, each) <= 2 * error(their, each) + torch.finfo(torch.bfloat16).eps, index
    for our, their in zip(ours, theirs):
        torch.testing.assert_close(our, their, rtol=1e-3, atol=1e-3)
    assert found[0].is_contiguous(memory_format=memory_format)


@pytest.mark.usefixtures("small_ones_wait")
def test_under_autocast_group_norm_is_in_float(device):
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 8, 3)).to(device)
    image = torch.randn(2, 8, 24, 24, device=device)
    converted = copy.deepcopy(model)
    nhwc.convert_(converted)
    with torch.autocast(device, torch.bfloat16):
        hidden = converted[:3](image.to(memory_format=torch.channels_last))
        expected = model[:3](image)
        assert hidden.dtype == expected.dtype
        torch.testing.assert_close(hidden.float(), expected.float(), rtol=0.02, atol=0.02)
        loss, plain = (each(image).float().square().mean() for each in (converted, model))
    for each in (loss, plain):
        each.backward()
    for ours, theirs in zip(converted.parameters(), model.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.usefixtures("small_ones_wait")
def test_norms_with_activations_are_recorded_in_a_graph():
    model = nn.Sequential(nn.BatchNorm3d(16).eval(), nn.ReLU(), nn.GroupNorm(4, 16), nn.SiLU()).cuda()
    volume = torch.randn(2, 16, 12, 12, 12, device="cuda").to(memory_format=torch.channels_last_3d)
    nhwc.convert_(model)
    with torch.no_grad():
        expected = model(volume).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(volume)
        graph.replay()
    torch.testing.assert_close(out, expected)


@pytest.mark.cuda
@pytest.mark.usefixtures("small_ones_wait")
def test_a_result_may_be_read_on_another_stream():
    model = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()).cuda()
    nhwc.convert_(model)
    volume = torch.randn(2, 16, 32, 32, 32, device="cuda").to(memory_format=torch.channels_last_3d)
    expected = model(volume)
    stream = torch.cuda.Stream()
    waiting = model[0](volume.clone(memory_format=torch.preserve_format))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = model[1](waiting) + 0
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, expected)
