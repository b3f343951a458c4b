"""Which tensors share memory."""

import pytest
import torch
from torch import nn

from torch_nhwc.layout import tied_by_view


class TestTiedByView:
    """Weights that would be separated from tensors that overlap with them."""

    def test_views_and_aliases_outside_of_the_weights_are_tied(self):
        flat = torch.randn(40)
        weight, overlapping, apart = (nn.Parameter(flat[start : start + 9].view(1, 1, 3, 3)) for start in (0, 8, 20))
        assert tied_by_view([], [weight, overlapping, apart, None]) == {id(weight), id(overlapping)}
        buffer = weight.detach()
        assert tied_by_view([buffer], [weight, apart]) == {id(weight), id(buffer)}
        assert tied_by_view([weight.to("meta"), None], [weight]) == set()

    @pytest.mark.parametrize("kind", [list, iter])
    def test_weights_that_are_exact_aliases_stay_together(self, kind):
        weight = nn.Parameter(torch.randn(4, 1, 3, 3))
        alias = nn.Parameter(weight.detach().as_strided((4, 1, 3, 3), (9, 1, 3, 1)))
        assert tied_by_view([], kind([weight, alias])) == set()
