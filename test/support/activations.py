"""Activations in channels-last, and what layers make of them beside plain torch."""

import torch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor):
    """The tensor in canonical channels-last strides, also where sizes are 1 and of 3 dimensions."""
    dense = tensor.movedim(1, -1).contiguous()
    return dense.flatten().view(dense.shape).movedim(-1, 1)


def canonical(shape):
    """The strides of channels-last, those that torch.empty gives where PyTorch has a name for the format."""
    strides = channels_last(torch.empty(shape, device="meta")).stride()
    assert len(shape) == 3 or strides == torch.empty(shape, device="meta", memory_format=FORMATS[len(shape)]).stride()
    return strides


def error(value, exact):
    """The largest difference, in units of the largest exact value."""
    return ((value.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()


def gradients(function, tensors, gradient):
    """The output of a function, and the gradients of all that is given to it."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def assert_as_accurate(function, reference, tensors, gradient, factor=2.0):
    """Values and gradients of `function` on a channels-last input lie as near to those of float64 as `reference`'s do.

    And they come in canonical channels-last strides.
    """
    first, *others = tensors
    ours = gradients(function, [channels_last(first), *others], channels_last(gradient))
    theirs = gradients(reference, tensors, gradient)
    exact = gradients(reference, [tensor.double() for tensor in tensors], gradient.double())
    assert ours[0].stride() == canonical(exact[0].shape)
    assert ours[1].stride() == canonical(first.shape)
    # The reference for doubles is PyTorch's own kernel.
    least = 1e-13 if first.dtype == torch.float64 else torch.finfo(first.dtype).eps / 2
    for name, own, other, real in zip(("out", "dx", "dw", "db"), ours, theirs, exact, strict=False):
        assert own.dtype == other.dtype, name
        assert error(own, real) <= factor * error(other, real) + least, name
