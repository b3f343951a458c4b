"""Convolutions of what PyTorch answers or refuses by itself: no elements, other devices and layouts, other settings."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last, gradients
from convolution_cases import way_of
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import functional


def converted(layer):
    model = nn.Sequential(layer)
    nhwc.convert_(model)
    return model


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_no_channels_and_no_samples_are_pytorch_s(batch):
    for name, kernel in (("conv2d", (3, 0, 1, 1)), ("conv3d", (3, 0, 1, 1, 1)), ("conv3d", (3, 0, 3, 3, 3))):
        x, w = torch.zeros(batch, 0, *[4] * (len(kernel) - 2)), torch.zeros(kernel)
        ours, theirs = (getattr(functions, name)(x, w) for functions in (functional, F))
        assert ours.shape == theirs.shape
    model = converted(nn.Conv2d(0, 3, 1))
    assert model(torch.zeros(batch, 0, 4, 4)).shape == F.conv2d(torch.zeros(batch, 0, 4, 4), model[0].weight).shape
    x, w = channels_last(torch.randn(2, 8, 5, 5))[:0], torch.randn(8, 1, 5, 5)
    assert functional.conv2d(x, w, None, 1, 2, 1, 8).shape == (0, 8, 5, 5)


@pytest.mark.parametrize("moves", [("weight",), ("bias",), ("weight", "bias")])
def test_a_parameter_on_another_device_is_pytorch_s(moves):
    model, stock = converted(nn.Conv2d(8, 8, 5, padding=2, groups=8)), nn.Conv2d(8, 8, 5, padding=2, groups=8)
    x = channels_last(torch.randn(2, 8, 16, 16))
    model(x)  # whose way is remembered
    for layer in (model[0], stock):
        for name in moves:
            setattr(layer, name, nn.Parameter(getattr(layer, name).to("meta")))
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert model(x).shape == stock(x).shape
            assert model(x).device == stock(x).device


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error), str(error).split("(")[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: torch.nested.nested_tensor([torch.randn(8, 5, 5), torch.randn(8, 5, 6)]),
        lambda: torch.randn(2, 8, 4, 4).to_mkldnn(),
    ],
    ids=["None", "nested", "mkldnn"],
)
def test_what_no_kernel_takes_is_pytorch_s(make, stride):
    stock = nn.Conv2d(8, 8, 1, stride=stride)
    model = converted(nn.Conv2d(8, 8, 1, stride=stride))
    model.load_state_dict({f"0.{name}": value for name, value in stock.state_dict().items()})
    x = make()
    ours, theirs = (outcome(lambda layer=layer: layer(x)) for layer in (model[0], stock))
    if isinstance(theirs, torch.Tensor):
        assert ours.layout == theirs.layout
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
    else:
        assert ours == theirs


def test_a_missing_weight_is_refused_as_by_pytorch():
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        functional.conv2d(torch.randn(1, 8, 3, 3), None)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_setting_changes_what_was_remembered(threads):
    x, w = channels_last(torch.randn(2, 16, 6, 6, 6)), torch.randn(16, 16, 3, 3, 3)
    before = torch.get_num_threads()
    try:
        for enabled in (True, False, True):
            torch._C._set_mkldnn_enabled(enabled)
            for count in (threads, 1):
                torch.set_num_threads(count)
                out = functional.conv3d(x, w, padding=1)
                assert out.stride() == x.stride()
                torch.testing.assert_close(
                    out, F.conv3d(x.double(), w.double(), padding=1).float(), rtol=1e-4, atol=1e-4
                )
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "kernel", "arguments", "way"),
    [
        ((1, 64, 4, 4, 4), (64, 64, 1, 1, 1), (), "linear"),
        ((2, 64, 4, 4, 4), (64, 64, 1, 1, 1), (), "linear"),
        ((1, 128, 3, 4, 3), (64, 128, 3, 3, 3), (1, 1), "gathered"),
        ((1, 16, 6, 7, 5), (8, 16, 3, 1, 1), (1, (1, 0, 0)), "along_depth"),
        ((1, 16, 9, 10, 8), (24, 16, 3, 3, 3), (1, 1), "slabs"),
    ],
)
def test_a_backward_inside_of_autocast_keeps_the_precision_of_the_forward(shape, kernel, arguments, way):
    x, w = (channels_last(torch.randn(sizes)) for sizes in (shape, kernel))
    assert way_of("conv3d", x, w, None, arguments) == way
    x, w = x.requires_grad_(), w.requires_grad_()
    out = functional.conv3d(x, w, None, *arguments)
    grad = torch.randn_like(out)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, (x, w), grad, create_graph=True)
        second = torch.autograd.grad(got[0].square().sum(), (w,))
    exact = [each.detach().double() for each in (x, w)]
    real = gradients(F.conv3d, exact, grad.double(), (None, *arguments))[1:]
    for ours, theirs in zip(got, real):
        assert ours.dtype == torch.float32
        assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()
    assert second[0].dtype == torch.float32
