"""cross_entropy over channels, with every argument, by PyTorch's own."""

import pytest
import torch
from activations import assert_differentiable, assert_like, channels_last, sliced
from torch.nn import functional

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def ours(x, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    return torch.ops.nhwc.cross_entropy(x, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing)


def targets(shape):
    """Class indices, and probabilities."""
    return torch.randint(0, shape[1], (shape[0], *shape[2:])), torch.rand(shape)


def in_float64(tensor):
    return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor


@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 2, 2, 3, 4), (3, 70, 4), (2, 4, 1, 1), (2, 1, 3, 3)], ids=str)
def test_values_and_gradients(shape, reduction, arrange):
    for dtype in (torch.float32, torch.bfloat16):
        for target in (target.to(dtype) if target.is_floating_point() else target for target in targets(shape)):
            for weight in (None, torch.rand(shape[1]).to(dtype) + 0.5):
                for smoothing in (0.0, 0.1, 1.0):
                    others = {"reduction": reduction, "label_smoothing": smoothing}
                    assert_like(
                        lambda x: ours(x, target, weight, **others),
                        lambda x: functional.cross_entropy(x, in_float64(target), in_float64(weight), **others),
                        torch.randn(shape),
                        dtype,
                        arrange,
                        same_rank=False,
                    )


@pytest.mark.parametrize("ignored", [1, -100, -1, 255])
def test_ignore_index(ignored):
    target = torch.randint(0, 4, (2, 3, 5))
    target[0, 1] = target[1, :, 2] = ignored
    for reduction in REDUCTIONS:
        for weight in (None, torch.rand(4)):
            for smoothing in (0.0, 0.2):
                others = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
                assert_like(
                    lambda x: ours(x, target, weight, **others),
                    lambda x: functional.cross_entropy(x, target, in_float64(weight), **others),
                    torch.randn(2, 4, 3, 5),
                    same_rank=False,
                )
    nothing = torch.full((2, 3, 5), ignored)
    values = torch.randn(2, 4, 3, 5)
    for smoothing in (0.0, 0.1):
        result = ours(channels_last(values), nothing, ignore_index=ignored, label_smoothing=smoothing)
        expected = functional.cross_entropy(values, nothing, ignore_index=ignored, label_smoothing=smoothing)
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_anything_else_is_pytorchs_own():
    values, target = torch.randn(2, 4, 3, 5), torch.randint(0, 4, (2, 3, 5))
    assert torch.equal(ours(values, target), functional.cross_entropy(values, target))
    assert torch.equal(
        ours(values[:, :, 0, 0], target[:, 0, 0]), functional.cross_entropy(values[:, :, 0, 0], target[:, 0, 0])
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.zeros(2, 3, 4, dtype=torch.long)}, RuntimeError, "size"),
        ({"target": torch.zeros(2, 3, 5)}, RuntimeError, "expected target dtype to be Long or Byte"),
        ({"target": torch.full((2, 3, 5), 4)}, IndexError, "Target 4 is out of bounds"),
        ({"weight": torch.rand(3)}, RuntimeError, "weight tensor should be defined either for all"),
        ({"label_smoothing": 2.0}, RuntimeError, "label_smoothing must be between 0.0 and 1.0"),
        ({"target": torch.zeros(2, 4, 3, 5, dtype=torch.long)}, RuntimeError, "Expected floating point type"),
        ({"target": torch.rand(2, 4, 3, 5), "ignore_index": 1}, RuntimeError, "ignore_index is not supported"),
    ],
)
def test_errors_are_pytorchs(change, error, message):
    arguments = {"target": torch.zeros(2, 3, 5, dtype=torch.long), **change}
    for function in (ours, functional.cross_entropy):
        with pytest.raises(error, match=message):
            function(channels_last(torch.randn(2, 4, 3, 5)), **arguments)


def test_derivatives_contract_and_script():
    shape = (2, 3, 2, 2)
    for target in targets(shape):
        weight = torch.rand(3, dtype=torch.float64)
        target = in_float64(target)
        for smoothing in (0.0, 0.1):
            assert_differentiable(
                lambda x: ours(x, target, weight, "sum", label_smoothing=smoothing), torch.randn(shape)
            )
            values = channels_last(torch.randn(shape).double()).requires_grad_()
            torch.library.opcheck(torch.ops.nhwc.cross_entropy.default, (values, target, weight, 1, -100, smoothing))

    @torch.jit.script
    def scripted(x, target):
        return torch.ops.nhwc.cross_entropy(x, target)

    values, (target, _) = torch.randn(shape), targets(shape)
    torch.testing.assert_close(scripted(channels_last(values), target), functional.cross_entropy(values, target))


def test_autocast():
    values, (indices, probabilities) = channels_last(torch.randn(2, 3, 4, 5)), targets((2, 3, 4, 5))
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            for target in (indices, probabilities.to(dtype)):
                result, expected = ours(values.to(dtype), target), functional.cross_entropy(values.to(dtype), target)
                assert result.dtype == expected.dtype
                torch.testing.assert_close(result, expected)
