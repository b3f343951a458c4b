"""The RMS norms that video autoencoders define for themselves, and the zeros that their convolutions pad with."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.nn import pending
from torch_nhwc.nn.replacements import is_preserving, replacement_for

LARGE = (1, 16, 4, 64, 72)  # of so many elements that a result waits


class VideoRMS_norm(nn.Module):  # noqa: N801  the name is what is known
    """As diffusers has it for each of its video autoencoders."""

    def __init__(self, dim, channel_first=True, images=False, bias=False):
        super().__init__()
        shape = (dim, 1, 1, *[1] * (not images)) if channel_first else (dim,)
        self.channel_first = channel_first
        self.scale = dim**0.5
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(shape))
        self.bias = nn.Parameter(0.1 * torch.randn(shape)) if bias else 0.0

    def forward(self, x):
        is_half = x.dtype in (torch.float16, torch.bfloat16)
        normalized = F.normalize(x.float() if is_half else x, dim=(1 if self.channel_first else -1)).to(x.dtype)
        return normalized * self.scale * self.gamma + self.bias


class CausalConv3d(nn.Conv3d):
    """Pads the past alone, and both sides of the plane."""

    def forward(self, x, past=2):
        return super().forward(F.pad(x, (1, 1, 1, 1, past, 0)))


class Block(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.norm, self.nonlinearity, self.conv = VideoRMS_norm(16, bias=bias), nn.SiLU(), CausalConv3d(16, 16, 3)

    def forward(self, x, past=2):
        return x[:, :, -1:] + self.conv(self.nonlinearity(self.norm(x)), past)[:, :, -1:]


def gradients_of(model, x, *arguments):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(x, *arguments)
    out.square().mean().backward()
    return [out, x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_of_a_block(bias, past):
    block = Block(bias)
    converted, exact = copy.deepcopy(block), copy.deepcopy(block).double()
    report = nhwc.convert_(converted)
    assert "1 VideoRMS_norm replaced: one pass over memory, with the activation after it" in str(report)
    x = torch.randn(LARGE)
    real = gradients_of(exact, x.double(), past)
    ours, theirs = gradients_of(converted, channels_last(x), past), gradients_of(block, x, past)
    for own, other, right in zip(ours, theirs, real, strict=True):
        error, least = ((each.double() - right).norm() / right.norm() for each in (own, other))
        assert error <= 2 * least + 1e-7
    report.revert()
    assert type(converted.norm) is VideoRMS_norm


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_activation_are_one_pass(dtype):
    block = nn.Sequential(nn.Conv3d(16, 16, 1), VideoRMS_norm(16), nn.SiLU()).to(dtype)
    x = channels_last(torch.randn(LARGE).to(dtype))
    expected = block(x)
    nhwc.convert_(block)
    with torch.profiler.profile() as profile:
        out = block(x)
    names = {each.name for each in profile.events()}
    assert "nhwc::normalize" in names
    assert "aten::silu" not in names
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_result_that_something_else_reads_is_plain():
    norm = VideoRMS_norm(16)
    x = channels_last(torch.randn(LARGE))
    expected = norm(x)
    nhwc.convert_(nn.Sequential(nn.Conv3d(16, 16, 1), norm))
    for _ in range(3):  # after two such reads it waits no more
        torch.testing.assert_close(norm(x) + 0, expected)
        torch.testing.assert_close(F.gelu(norm(x)), F.gelu(expected))
    assert type(norm(x)) is torch.Tensor


@torch.no_grad()
def test_zeros_around_what_a_convolution_of_its_own_pads_are_its_padding():
    conv = CausalConv3d(16, 16, 3)
    x = channels_last(torch.randn(1, 16, 5, 24, 26))
    expected = [conv(x, past) for past in (0, 2)]
    nhwc.convert_(model := nn.Sequential(conv))
    for past, right in zip((0, 2), expected):
        with torch.profiler.profile() as profile:
            out = conv(x, past)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
        assert ("aten::constant_pad_nd" in {each.name for each in profile.events()}) == (past > 0)
    with torch.inference_mode():
        torch.testing.assert_close(conv(x, 0), expected[0], rtol=1e-4, atol=1e-4)
    assert is_preserving(type(model[0]))


def test_graphs_and_compilers_see_the_padding():
    conv = CausalConv3d(4, 4, 3)
    x = channels_last(torch.randn(1, 4, 5, 8, 9))
    expected = conv(x, 0)
    nhwc.convert_(nn.Sequential(conv))
    torch.testing.assert_close(torch.fx.symbolic_trace(conv)(x, 0), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(conv, backend="eager")(x, 0), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.jit.trace(conv, x)(x), conv(x), rtol=1e-4, atol=1e-4)


def test_zeros_that_wait_are_switched_off_with_everything_that_waits(monkeypatch):
    monkeypatch.setattr(pending, "_is_on", False)
    conv = CausalConv3d(16, 16, 3)
    x = channels_last(torch.randn(1, 16, 5, 8, 9))
    expected = conv(x, 0)
    nhwc.convert_(nn.Sequential(conv))
    torch.testing.assert_close(conv(x, 0), expected, rtol=1e-4, atol=1e-4)


def test_others_compute_as_before():
    norm = VideoRMS_norm(16, channel_first=False)
    x = channels_last(torch.randn(2, 16, 5, 16, 16))
    expected = norm(x)
    nhwc.convert_(nn.Sequential(nn.Conv3d(16, 16, 1), norm))
    assert torch.equal(norm(x), expected)
    contiguous = VideoRMS_norm(16)
    expected = contiguous(x.contiguous())
    nhwc.convert_(nn.Sequential(nn.Conv3d(16, 16, 1), contiguous))
    assert torch.equal(contiguous(x.contiguous()), expected)


def test_a_class_that_computes_something_else_is_none_of_them():
    class OtherRMS_norm(VideoRMS_norm):  # noqa: N801
        def forward(self, x):
            return F.normalize(x, dim=1 if self.channel_first else 2) * self.scale * self.gamma + self.bias.sigmoid()

    assert replacement_for(VideoRMS_norm) is not None
    nhwc.convert_(model := nn.Sequential(nn.Conv3d(4, 4, 1), OtherRMS_norm(4, bias=True)))
    assert type(model[1]) is OtherRMS_norm


class FloatUpsample(nn.Upsample):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


def test_an_upsampling_that_casts_is_one_of_its_own_dtype_on_a_gpu():
    layer = FloatUpsample(scale_factor=2.0, mode="nearest-exact")
    found = nhwc.plan(nn.Sequential(nn.Conv2d(4, 4, 3), layer).to("meta")).layers
    assert [each.layer for each in found] == ["Conv2d"]  # on another device it stays
    nhwc.nn.class_swap.swap_class(layer, nhwc.nn.replacements.Preserving)
    x = channels_last(torch.randn(1, 4, 5, 6)).bfloat16()
    assert torch.equal(layer(x), F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
