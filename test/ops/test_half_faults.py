"""Half precision that oneDNN computes wrong with AVX-512 or AMX: whatever the CPU has, ours is right."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last, gradients
from convolution_cases import operands

from torch_nhwc import functional

# By the row of docs/hazards.md. On a CPU with AMX, PyTorch computes all but the last one wrong.
FAULTS = {
    "h71": ("conv2d", (2, 16, 5, 5), (9, 16, 5, 5), ((1, 4), (2, 0))),
    "h71 transposed": ("conv_transpose3d", (1, 3, 3, 10, 1), (3, 9, 5, 6, 2), ((1, 2, 2), (1, 0, 0), (0, 0, 1))),
    "h72 patches": ("conv2d", (2, 16, 16, 16), (32, 16, 4, 4), (4,)),
    "h72 wide": ("conv2d", (4, 8, 12, 12), (17, 8, 2, 8), (2, (0, 3))),
    "h72 transposed": ("conv_transpose2d", (3, 24, 6, 5), (24, 24, 4, 4), ((3, 4), (1, 0))),
    "h73": ("conv3d", (1, 48, 5, 6, 12), (7, 48, 1, 4, 2), ((4, 1, 1), (0, 1, 1), (1, 1, 2))),
    "h73 transposed": ("conv_transpose3d", (2, 1, 6, 4, 6), (1, 2, 2, 4, 3), ((2, 4, 3), (0, 1, 0), (1, 0, 0))),
    "h74": ("conv3d", (1, 12, 9, 5, 3), (12, 12, 4, 3, 2), ((4, 2, 2), (1, 1, 0))),
    "h75": ("conv3d", (2, 8, 4, 4, 2), (17, 8, 5, 2, 7), ((1, 1, 2), (2, 1, 3))),
}


@pytest.mark.parametrize("arrange", [channels_last, torch.Tensor.contiguous], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("name", FAULTS)
def test_half_precision_is_right_where_onednn_is_not(name, arrange):
    function, *_ = FAULTS[name]
    *leaves, arguments = operands(FAULTS[name], torch.bfloat16)
    leaves = [*map(arrange, leaves[:2]), leaves[2]]
    got = gradients(getattr(functional, function), leaves, arguments=arguments)
    exact = gradients(getattr(F, function), [each.double() for each in leaves], arguments=arguments)
    for ours, right in zip(got, exact, strict=True):
        assert (ours.double() - right).abs().max() <= 2e-2 * right.abs().max()
