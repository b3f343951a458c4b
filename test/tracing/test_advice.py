"""Every piece of advice is taken, and keeps the format."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tracing import recorder

IMAGE, VOLUME = (2, 16, 6, 6), (2, 16, 6, 6, 6)
PLACES = channels_last(torch.randperm(12**3)[: 6**3].reshape(6, 6, 6).expand(VOLUME))
CALLS = {
    "avg_pool3d": (VOLUME, lambda of, x: of.avg_pool3d(x, 2)),
    "adaptive_avg_pool3d": (VOLUME, lambda of, x: of.adaptive_avg_pool3d(x, 3)),
    "adaptive_max_pool3d": (VOLUME, lambda of, x: of.adaptive_max_pool3d(x, 3)),
    "max_unpool3d": (VOLUME, lambda of, x: of.max_unpool3d(x, PLACES, 2)),
    "softmax": (IMAGE, lambda of, x: of.softmax(x, 1)),
    "softmax, 3D": (VOLUME, lambda of, x: of.softmax(x, -4)),
    "log_softmax": (IMAGE, lambda of, x: of.log_softmax(x, -3)),
    "pad": (IMAGE, lambda of, x: of.pad(x, (1, 1, 1, 1), "circular")),
    "pad, 3D": (VOLUME, lambda of, x: of.pad(x, (1,) * 6, "circular")),
    "instance_norm": (IMAGE, lambda of, x: of.instance_norm(x)),
    "cross_entropy": (IMAGE, lambda of, x: of.cross_entropy(x, x.detach().argmax(1))),
}


def losses(call, shape):
    x = channels_last(torch.randn(shape)).requires_grad_()
    with nhwc.trace(nn.Module()) as trace:
        out = call(x * 1)
        out.backward(channels_last(torch.rand_like(out)) if out.dim() else None)
    return trace.losses


@pytest.mark.parametrize("case", CALLS)
def test_our_functions_keep_what_those_of_pytorch_lose(case):
    shape, call = CALLS[case]
    advice = {loss.advice for loss in losses(lambda x: call(F, x), shape)}
    assert f"torch_nhwc.functional.{case.split(',')[0]}" in advice
    assert not losses(lambda x: call(nhwc.functional, x), shape)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.softmax(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda x: x.contiguous(),
        lambda x: x[:, torch.arange(3)],
    ],
)
def test_there_is_no_advice_where_nothing_is_known_to_help(call):
    assert {loss.advice for loss in losses(call, IMAGE)} == {None}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_upsampling_of_volumes_loses_backward_and_is_right(mode):
    def upsampled(x):
        return F.interpolate(x, scale_factor=(2, 1, 1.5), mode=mode)

    (loss,) = losses(upsampled, VOLUME)
    assert (loss.phase, loss.advice) == ("backward", None)
    assert loss.operator.endswith("3d_backward")
    x = torch.randn(VOLUME).requires_grad_()
    expected, output = upsampled(x), upsampled(channels_last(x))
    assert torch.equal(output, expected)
    gradient = torch.rand_like(expected)
    results = [
        torch.autograd.grad(y, x, given) for y, given in ((expected, gradient), (output, channels_last(gradient)))
    ]
    torch.testing.assert_close(*results)


def test_a_reshape_that_copies_is_unavoidable():
    (loss,) = losses(lambda x: x.flatten(1).relu()[..., None, None], IMAGE)[:1]
    assert loss.advice == recorder.RESHAPE


class WritesTo(nn.Module):
    """A convolution whose output is written to, as `write` does, and read afterwards."""

    def __init__(self, write):
        super().__init__()
        self.convolution, self.write = nn.Conv2d(3, 4, 3), write

    def forward(self, x):
        y = self.convolution(x)
        return self.write(y).sum() + y


WRITES = {
    "relu_": lambda y: nn.ReLU(inplace=True)(y.flatten(1)),
    "mul_": lambda y: y.reshape(len(y), -1)[:, :3].mul_(2),
    "clamp_": lambda y: y.contiguous().clamp_(-1, 1),
    "copy_": lambda y: y.ravel()[2:5].copy_(torch.ones(3)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("operator", WRITES)
def test_a_write_to_the_copy_of_a_reshape_is_named_where_the_activation_is_still_in_use(operator, mode):
    model, image = WritesTo(WRITES[operator]), torch.randn(2, 3, 8, 8)
    with mode(), nhwc.trace(model) as contiguous:
        expected = model(image)
    assert not contiguous.losses
    nhwc.convert_(model, input_format="channels_last")
    with mode(), nhwc.trace(model) as trace:
        for _ in range(2):
            assert not torch.allclose(model(image), expected, atol=1e-3)
    (loss,) = trace.losses
    assert loss.operator == "aten::clone"
    assert loss.advice == recorder.WRITTEN.format(operator)
    assert operator in str(trace)


@pytest.mark.parametrize(
    "model",
    [
        WritesTo(lambda y: y.flatten(2).relu_()),  # a view in either format
        WritesTo(lambda y: y.flatten(1).relu()),
        WritesTo(lambda y: y.flatten(1).clone().relu_()),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU(inplace=True)),  # nothing reads the activation
    ],
)
def test_writes_that_make_no_difference_are_not_named(model):
    nhwc.convert_(model, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert {loss.advice for loss in trace.losses} <= {recorder.RESHAPE}
