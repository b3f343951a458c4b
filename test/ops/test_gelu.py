"""gelu, by PyTorch's own."""

import pytest
import torch
from activations import assert_as_stock, assert_like, channels_last, sliced
from torch.nn import functional

ours = torch.ops.nhwc.gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("arrange", [channels_last, sliced])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 3, 2, 3, 4), (3, 7, 9), (1, 1, 4, 4), (2, 5, 1, 1, 1)], ids=str)
def test_values_and_gradients(shape, arrange, approximate):
    stock = lambda x: functional.gelu(x, approximate=approximate)  # noqa: E731
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert_like(lambda x: ours(x, approximate=approximate), stock, 3 * torch.randn(shape), dtype, arrange)


def test_anything_else_is_pytorchs_own():
    for values in (torch.randn(2, 3, 4, 5), torch.randn(3), torch.randn(2, 3), channels_last(torch.randn(2, 0, 4, 5))):
        assert_as_stock(ours, functional.gelu, values)
    for function in (ours, functional.gelu):
        with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
            function(channels_last(torch.randn(2, 3, 4, 5)), approximate="other")
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            function(channels_last(torch.ones(2, 3, 4, 5, dtype=torch.long)))
