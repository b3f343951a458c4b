"""Activations in channels-last, and comparisons of operators on them with PyTorch's own in float64."""

import torch

import torch_nhwc  # noqa: F401  registers the operators

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def channels_last(values):
    """Return the values in canonical channels-last strides, also where sizes are 1 and of 3 dimensions."""
    dense = values.movedim(1, -1).contiguous()
    return dense.flatten().view(dense.shape).movedim(-1, 1)


def sliced(values):
    """Return the same values as a part of a larger activation in channels-last."""
    wide = channels_last(torch.cat([values, values], dim=1))
    return wide[:, : values.shape[1]]


def assert_in_format(tensor):
    assert tensor.stride() == channels_last(tensor.detach()).stride()


def first(output):
    return output[0] if isinstance(output, tuple) else output


def assert_like(operator, reference, values, dtype=torch.float32, arrange=channels_last, same_rank=True):
    """Values, format, and the gradient of an operator, by the reference in float64."""
    values = values.to(dtype)
    inputs, expected_inputs = arrange(values).detach().requires_grad_(), values.double().requires_grad_()
    output, expected = operator(inputs), reference(expected_inputs)
    if isinstance(expected, tuple):
        assert torch.equal(output[1], expected[1])
        assert_in_format(output[1])
    output, expected = first(output), first(expected)
    tolerance = TOLERANCES[dtype]
    assert output.shape == expected.shape
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )
    gradient = torch.randn(expected.shape).to(dtype)
    # Contiguous, as a loss may hand it on: what comes out is channels-last all the same.
    output.backward(gradient)
    expected.backward(gradient.double())
    scale = tolerance * max(float(expected_inputs.grad.abs().max()), 1e-3)
    torch.testing.assert_close(inputs.grad.double(), expected_inputs.grad, rtol=tolerance, atol=scale)
    if same_rank:
        assert_in_format(output)
    if arrange is channels_last:
        assert_in_format(inputs.grad)


def canonical(shape):
    """Return the strides of channels-last, those that torch.empty gives where PyTorch has a name for the format."""
    strides = channels_last(torch.empty(shape, device="meta")).stride()
    assert len(shape) == 3 or strides == torch.empty(shape, device="meta", memory_format=FORMATS[len(shape)]).stride()
    return strides


def error(value, exact):
    """Return the largest difference, in units of the largest exact value."""
    return ((value.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()


def gradients(function, tensors, gradient=None, arguments=()):
    """Return the output of a function, and the gradients of all tensors that are given to it, by default of the sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, *arguments)
    gradient = torch.ones_like(out) if gradient is None else gradient.to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, gradient)]


def assert_as_accurate(function, reference, tensors, gradient, factor=2.0):
    """Values and gradients of `function` on a channels-last input are as near to those of float64 as `reference`'s do.

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


def of_both_orders(function, leaves, arguments=()):
    """Return a result, its gradients, and the gradients of these."""
    leaves = [each.detach().requires_grad_() for each in leaves]
    out = function(*leaves, *arguments)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)]
