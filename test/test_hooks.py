"""Inputs in channels-last at a model's entry."""

import copy
import pickle

import pytest
import torch
from reference import FORMATS, canonical_strides
from torch import nn

import torch_nhwc as nhwc

CL = torch.channels_last


class Entry(nn.Module):
    """Gives back what it got."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, *arguments, **keywords):
        return arguments, keywords


def in_channels_last(tensor):
    return tensor.stride() == canonical_strides(tensor.shape, FORMATS[tensor.dim()])


@pytest.mark.parametrize(
    "passed_on",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["itself", "deepcopy", "pickle"],
)
def test_h23_inputs_of_four_and_five_dimensions_enter_in_channels_last(passed_on):
    model = Entry()
    report = nhwc.convert_(model, input_format="channels_last")
    image, volume, line = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3)
    arguments, keywords = passed_on(model)(image, [volume, line, "text", None], more={"image": image}, count=3)
    for given, got in ((image, arguments[0]), (volume, arguments[1][0]), (image, keywords["more"]["image"])):
        assert in_channels_last(got)
        assert torch.equal(got, given)
        assert given.is_contiguous()
    assert arguments[1][1] is line
    assert (arguments[1][2:], keywords["count"]) == (["text", None], 3)

    report.revert()
    assert model(image)[0][0] is image


def test_h15_a_second_call_adds_no_second_hook():
    model = Entry()
    for _ in range(2):
        nhwc.convert_(model, input_format="channels_last")
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 5), (1, 3, 1, 5), (1, 1, 1, 1), (0, 1, 4, 5), (2, 1, 4, 5, 6), (1, 3, 1, 1, 1)]
)
def test_h40_ambiguous_inputs_enter_in_canonical_strides_without_a_copy(shape):
    model = nn.Identity()
    nhwc.convert_(model, input_format="channels_last")
    x = torch.randn(shape, requires_grad=True)
    output = model(x)
    assert in_channels_last(output)
    assert torch.equal(output, x)
    if shape[1] == 1:
        assert output.data_ptr() == x.data_ptr()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), x)
    output.sum().backward()
    assert x.grad.shape == x.shape


def test_an_input_in_channels_last_is_passed_on_as_it_is():
    model = Entry()
    nhwc.convert_(model, input_format="channels_last")
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert model(image)[0][0] is image


def test_gradients_pass_through_to_the_input():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    nhwc.convert_(model, input_format="channels_last")
    image = torch.randn(2, 3, 6, 6, requires_grad=True)
    output = model(image)
    assert in_channels_last(output)
    output.sum().backward()
    assert image.grad.shape == image.shape


def test_containers_stay_the_ones_that_they_are_unless_they_hold_an_image():
    class Collects(nn.Module):
        def forward(self, x, collected, options):
            collected.append(x)
            options["seen"] = True
            return x

    model = Collects()
    nhwc.convert_(model, input_format="channels_last")
    collected, options = [], {"scale": torch.ones(1)}
    x = model(torch.randn(2, 3, 4, 4), collected, options)
    assert collected[0] is x
    assert options["seen"]


@pytest.mark.parametrize("kind", ["integers", "expanded", "sparse"])
def test_what_is_no_image_passes_through(kind):
    tensor = {
        "integers": torch.randint(0, 2, (2, 3, 4, 4)),
        "expanded": torch.zeros(1, 1, 1, 1).expand(2, 3, 4, 4),
        "sparse": torch.randn(2, 3, 4, 4).to_sparse(),
    }[kind]
    model = nn.Identity()
    nhwc.convert_(model, input_format="channels_last")
    assert model(tensor) is tensor


def test_converting_back_takes_the_hook_away():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    nhwc.convert_(model, input_format="channels_last")
    report = nhwc.convert_(model, torch.contiguous_format)
    assert not model._forward_pre_hooks
    report.revert()
    assert len(model._forward_pre_hooks) == 1


class Recorder(nn.Module):
    """Keeps the strides of what comes in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)

    def forward(self, x, *, volume=None, rest=()):
        self.seen = [tuple(t.stride()) for t in (x, volume, *rest) if t is not None]
        return self.layer(x)


class TestInputFormat:
    """A forward pre-hook brings activations into channels-last at the model's entry."""

    def test_reaches_positional_keyword_and_nested_inputs(self):
        model = Recorder()
        nhwc.convert_(model, input_format="channels_last")
        x, volume = torch.randn(1, 3, 8, 8), torch.randn(1, 2, 4, 4, 4)
        expected = model.layer(x)
        actual = model(x, volume=volume, rest=[x, torch.randn(3, 3)])
        assert model.seen == [(192, 1, 24, 3), (128, 1, 32, 8, 2), (192, 1, 24, 3), (3, 1)]
        assert actual.is_contiguous(memory_format=CL)
        torch.testing.assert_close(actual, expected)

    def test_survives_deepcopy_and_pickle_and_is_added_once(self):
        model = Recorder()
        report = nhwc.convert_(model, input_format="channels_last")
        nhwc.convert_(model, input_format="channels_last")
        for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert len(copied._forward_pre_hooks) == 1
            nhwc.convert_(copied, input_format="channels_last")
            assert len(copied._forward_pre_hooks) == 1
            copied(torch.randn(1, 3, 8, 8))
            assert copied.seen == [(192, 1, 24, 3)]
        report.revert()
        assert not model._forward_pre_hooks
        assert not model._forward_pre_hooks_with_kwargs
        model(torch.randn(1, 3, 8, 8))
        assert model.seen == [(192, 64, 8, 1)]
