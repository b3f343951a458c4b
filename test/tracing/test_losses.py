"""Losses, mixed convolutions and gains that a trace has to find, and models in which there is none."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from torch import nn
from torch.utils.checkpoint import checkpoint
from user_code import Function

import torch_nhwc as nhwc


def converted(*layers):
    """Layers between two convolutions, in channels-last."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 8, 3, padding=1))
    return model.to(memory_format=torch.channels_last)


def image(*shape):
    return channels_last(torch.randn(shape or (2, 3, 8, 8)))


def found(rows):
    return [(row.path, row.operator.removeprefix("aten::"), row.phase) for row in rows]


def step(model, x):
    out = model(x)
    out.backward(channels_last(torch.ones_like(out)))


class Bicubic(nn.Module):
    def forward(self, x):
        return F.interpolate(x, scale_factor=2, mode="bicubic")


def test_a_loss_in_the_forward_is_found_with_all_details():
    model, x = converted(nn.Softmax2d()), image()
    with nhwc.trace(model) as trace, torch.no_grad():
        for _ in range(3):
            model(x)
    (loss,) = trace.losses
    assert found([loss]) == [("1", "_softmax", "forward")]
    assert loss.inputs == (("channels_last", (2, 8, 8, 8)),)
    assert loss.outputs == (("contiguous", (2, 8, 8, 8)),)
    assert (loss.bytes, loss.count) == (3 * 2 * 8 * 8 * 8 * 4, 3)
    assert loss.source.startswith(__file__)
    assert loss.advice == "replaced by preserve=True"
    assert trace.operators == {"forward": 3 * 3, "backward": 0}


def test_a_loss_in_backward_alone_has_the_path_and_the_line_of_the_forward():
    model = converted(Bicubic())
    with nhwc.trace(model) as trace:
        step(model, image())
    (loss,) = trace.losses
    assert found([loss]) == [("1", "upsample_bicubic2d_backward", "backward")]
    line = Bicubic.forward.__code__.co_firstlineno + 1
    assert loss.source == f"{__file__}:{line}"


def assigned(out, x):
    for index, each in enumerate(x):
        out[index] = each
    return out


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.contiguous(), "clone"),
        (lambda x: x[:, torch.arange(8)], "index"),
        (lambda x: x.flatten(1).view(x.shape), "clone"),
        (lambda x: torch.empty(x.shape).copy_(x), "copy_"),
        (lambda x: torch.mul(x, 2, out=torch.empty(x.shape)), "mul"),
        (lambda x: torch.zeros(x.shape).add_(x), "add_"),
        (lambda x: torch.stack([each for each in x]), "stack"),
        (lambda x: assigned(torch.empty(x.shape), x), "copy_"),
    ],
)
def test_a_loss_in_the_users_code_has_its_line(function, operator):
    """Also one that writes in place, or image by image."""
    model = converted(nn.Sequential(Function(function)))
    with nhwc.trace(model) as trace, torch.no_grad():
        model(image())
    (loss,) = trace.losses
    assert found([loss]) == [("1.0", operator, "forward")]
    assert loss.bytes == 2 * 8 * 8 * 8 * 4
    first = (assigned if operator == "copy_" and loss.count == 2 else function).__code__.co_firstlineno
    assert loss.source == f"{__file__}:{first + 2 * (loss.count == 2)}"


def test_a_volume_has_the_format_of_its_batch():
    x = image(2, 4, 4, 5, 6)
    with nhwc.trace(nn.Module()) as trace:
        x[0] * 2
    assert not trace.losses


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_a_parameter_or_a_buffer_that_the_model_is_given_is_an_activation(kind):
    model = converted(Function(lambda x: x.contiguous()))
    model.constant = kind(image())
    with nhwc.trace(model) as trace:
        step(model, model.constant)
    assert found(row for row in trace.losses if row.phase == "forward") == [("1", "clone", "forward")]


def test_a_constant_of_the_model_is_an_activation_from_its_first_convolution_on():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant = nn.Parameter(image(1, 3, 8, 8))
            self.body = converted(nn.Softmax2d())

        def forward(self):
            return self.body(self.constant.expand(2, -1, -1, -1) + 0)

    model = Generator()
    with nhwc.trace(model) as trace, torch.no_grad():
        model()
    assert found(trace.losses) == [("body.1", "_softmax", "forward")]


def test_arguments_may_nest_and_volumes_have_five_dimensions():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 4, 3)
            self.pool = nn.AvgPool3d(2)

        def forward(self, batch, *, options):
            return {"out": [self.pool(self.conv(batch["images"][0]) + options[0])]}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Inner()])

        def forward(self, batch):
            return self.blocks[0](batch, options=(1.0,))

    model = Outer().to(memory_format=torch.channels_last_3d)
    with nhwc.trace(model) as trace:
        model({"images": (image(2, 2, 6, 6, 6),)})["out"][0].sum().backward()
    assert found(trace.losses) == [("blocks.0.pool", "avg_pool3d", "forward")]
    assert trace.losses[0].outputs[0] == ("contiguous", (2, 4, 2, 2, 2))
    modules = {module.path: module for module in trace.modules}
    assert list(modules) == ["", "blocks.0", "blocks.0.conv", "blocks.0.pool"]
    assert modules["blocks.0"].inputs[0].format == "channels_last_3d"
    assert modules["blocks.0"].outputs[0].format == "contiguous"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inference_shows_the_same_operators_as_training(mode):
    model = converted(nn.Upsample(scale_factor=2, mode="bilinear"), nn.InstanceNorm2d(8))
    with nhwc.trace(model) as trace, mode():
        model(image()).flatten(1)
    assert found(trace.losses) == [("2", "clone", "forward"), ("", "clone", "forward")]
    advice = ["replaced by preserve=True", "a reshape that is unavoidable"]
    assert [row.advice for row in trace.losses] == advice


def test_autocast_casts_weights_without_a_loss():
    model = converted(nn.Softmax2d())
    with nhwc.trace(model) as trace, torch.autocast("cpu", torch.bfloat16):
        step(model, image())
    assert {path for path, _, _ in found(trace.losses)} == {"1"}


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_modules_that_a_checkpoint_computes_again_run_forward(is_reentrant):
    model = converted(nn.Softmax2d(), Bicubic())
    with nhwc.trace(model) as trace:
        step(lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=is_reentrant), image())
    forward = [row for row in trace.losses if row.phase == "forward"]
    assert set(found(forward)) == {("1", "_softmax", "forward")}
    assert sum(row.count for row in forward) == 2
    assert [row.source is None for row in forward] == [False, True]  # PyTorch calls it the second time
    backward = found(row for row in trace.losses if row.phase == "backward")
    assert backward == [("2", "upsample_bicubic2d_backward", "backward")]


def test_two_forwards_before_a_backward_keep_their_paths():
    model = converted(nn.Sequential(Bicubic()))
    with nhwc.trace(model) as trace:
        outs = [model(image()) for _ in range(5)]
        step(lambda _: sum(outs), None)
    assert found(trace.losses) == [("1.0", "upsample_bicubic2d_backward", "backward")]
    assert trace.losses[0].count == 5


def test_functions_of_autograd_keep_the_path():
    class Losing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.contiguous() * 2

    model = converted(Function(Losing.apply), nn.ReLU())
    with nhwc.trace(model) as trace:
        step(model, image())
    assert found(trace.losses) == [("1", "clone", "backward")]


def test_a_weight_is_no_activation():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight.contiguous(), self.bias)

    model = converted(Standardised(8, 8, 3))
    with nhwc.trace(model) as trace:
        model(image())
    assert not trace.losses
    assert [row.path for row in trace.mixed] == ["1"]


def test_mixed_convolutions_are_found_forward_and_backward():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))  # of one tap: both formats fit the weight
    with nhwc.trace(model) as trace:
        step(model, image())
    assert found(trace.mixed) == [("0", "convolution", "forward"), ("0", "convolution_backward", "backward")]
    forward, backward = trace.mixed
    assert [layout.format for layout in forward.inputs] == ["channels_last", "contiguous"]
    assert [layout.format for layout in backward.inputs] == ["channels_last", "channels_last", "contiguous"]
    assert forward.bytes == backward.bytes == 8 * 3 * 3 * 3 * 4
    with nhwc.channels_last(model), nhwc.trace(model) as trace:
        step(model, image())
    assert not trace.mixed


def test_a_format_that_is_gained_is_found_where_it_begins():
    def norm(x):
        return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Function(norm), nn.Conv2d(8, 8, 3), Function(norm))
    with nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 8, 8))
    assert found(trace.gained) == [("1", "permute", "forward")]
    x = image()
    with nhwc.channels_last(model), nhwc.trace(model) as trace:
        model(x)
    assert not trace.gained


def test_views_ambiguous_tensors_and_slices_are_no_losses():
    model = converted(
        Function(lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)),
        Function(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        Function(lambda x: x * x.mean((2, 3), keepdim=True) * x.sum(1, keepdim=True)),
    )
    with nhwc.trace(model) as trace:
        step(model, image())
    assert not trace.losses
    assert not trace.mixed


def test_a_converted_model_has_no_loss():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    model, x = nn.Sequential(*layers, nn.Conv2d(8, 4, 1), *head), torch.randn(2, 3, 64, 64)
    nhwc.convert_(model, preserve=True, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(x).square().mean().backward()
    nhwc.tracing.assert_layout(trace)
    with nhwc.trace(model.eval()) as trace, torch.inference_mode():
        model(x)
    assert not trace.losses
    assert not trace.mixed
    convolved = [row for row in trace.modules if row.layer.endswith("Conv2d")]
    assert all(row.outputs[0].format in ("channels_last", "ambiguous") for row in convolved)


class Through(nn.Module):
    """A convolution, code that computes with its output in another rank, and a convolution."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(3, 8, 3), function, nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def shuffled(y):
    return y.view(len(y), 2, 4, *y.shape[2:]).transpose(1, 2).reshape(y.shape)


def split(y):
    parts = y.view(len(y), 2, 4, *y.shape[2:])
    return (parts * parts.mean((3, 4), keepdim=True).softmax(1)).sum(1).repeat(1, 2, 1, 1)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda y: torch.stack([y, y.relu()], 1).sum(1), "sum"),
        (lambda y: torch.stack([y, y.relu()]).contiguous()[0], "clone"),
        (shuffled, "clone"),
        (split, "sum"),
        (lambda y: (y.flatten(2) * 2).contiguous().view(y.shape), "clone"),
    ],
)
def test_a_loss_through_another_rank_is_the_operator_that_wrote_contiguous_memory(function, operator, mode):
    model = Through(function)
    nhwc.convert_(model, input_format="channels_last", preserve=False)
    with mode(), nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 16, 16))
    losses = [row for row in trace.losses if row.phase == "forward"]
    assert found(losses)[0] == ("", operator, "forward")
    assert losses[0].outputs[0].format == "contiguous"
    assert losses[0].source.startswith(__file__)
    assert [row.path for row in trace.mixed if row.phase == "forward"] == ["last"]


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y + torch.stack([y, y], 1).mean((1, 3, 4))[..., None, None],
        lambda y: torch.stack([y, y]).mul(2)[0],
        lambda y: F.layer_norm(y.permute(0, 2, 3, 1), y.shape[1:2]).mul(2).permute(0, 3, 1, 2),
        lambda y: F.linear(y.flatten(2).transpose(1, 2), torch.ones(8, 8)).transpose(1, 2).view(y.shape),
        lambda y: y * y.mean((2, 3)).relu()[..., None, None],
    ],
)
def test_other_ranks_that_keep_the_format_are_no_losses(function):
    model = Through(function)
    nhwc.convert_(model, input_format="channels_last", preserve=False)
    with nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 16, 16))
    assert not trace.losses
    assert not trace.mixed


def test_what_replaced_layers_restore_is_a_kind_of_its_own():
    layers = nn.Conv3d(3, 32, 3, padding=1), nn.ConvTranspose3d(32, 16, 2, stride=2), nn.Conv3d(16, 8, 1)
    model = nn.Sequential(*layers)
    nhwc.convert_(model, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(torch.randn(1, 3, 4, 4, 4)).square().mean().backward()
    nhwc.tracing.assert_layout(trace, max_bytes=0)
    assert {(row.path, row.phase) for row in trace.restored} >= {("1", "forward"), ("1", "backward")}
    assert "by design: the layers restore the format" in " ".join(str(trace).split())
    assert nhwc.tracing.Trace.from_json(trace.to_json()) == trace


def test_what_a_function_of_ours_does_not_restore_is_a_loss():
    model = Through(lambda y: nhwc.functional.softmax(y, 2))
    nhwc.convert_(model, input_format="channels_last", preserve=False)
    with nhwc.trace(model) as trace:
        returned = nhwc.functional.softmax(model(torch.randn(2, 3, 16, 16)), 2)
    assert [row.count for row in trace.losses] == ([] if returned.stride(1) == 1 else [1, 1])
    assert not trace.restored


def test_the_input_hook_is_a_source():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    nhwc.convert_(model, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 8, 8))
    assert [(gain.path, gain.source) for gain in trace.gained] == [("", "the input hook")]
    assert "channels-last from the input hook on, by clone" in str(trace)
