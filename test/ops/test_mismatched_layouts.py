"""mismatched_layouts: gradients and state whose layout is not their weight's."""

import pytest
import torch

from torch_nhwc.ops import mismatched_layouts

WEIGHT = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
COMPANIONS = {
    "in its layout": (torch.empty_like(WEIGHT), False),
    "contiguous": (torch.empty(4, 3, 2, 2), True),
    "of gaps": (torch.empty_strided((4, 3, 2, 2), (24, 1, 6, 3)), True),
    "of another dtype": (torch.empty(4, 3, 2, 2, dtype=torch.bfloat16), True),
    "of another shape": (torch.empty(3, 4, 2, 2), False),
    "a count": (torch.tensor(1.0), False),
    "sparse": (torch.zeros(4, 3, 2, 2).to_sparse(), False),
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_companions_of_the_weights_shape_in_another_layout_are_named(name):
    companion, differs = COMPANIONS[name]
    assert mismatched_layouts([WEIGHT], [companion]) == ([0] if differs else [])


def test_strides_of_dimensions_of_one_element_do_not_count():
    for shape in ((4, 3, 1, 1), (4, 1, 3, 3), (1, 3, 1, 1), (0, 3, 2, 2)):
        contiguous = torch.empty(shape)
        assert mismatched_layouts([contiguous], [contiguous.to(memory_format=torch.channels_last)]) == []


def test_indices_come_in_order_and_nothing_is_changed():
    contiguous = torch.empty(4, 3, 2, 2)
    tensors = [contiguous, WEIGHT, contiguous, contiguous]
    before = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    assert mismatched_layouts([WEIGHT] * 4, tensors) == [0, 2, 3]
    assert mismatched_layouts([], []) == []
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before


def test_there_is_a_weight_for_each_companion():
    with pytest.raises(RuntimeError, match="expected a weight for each of 1 companions, got 2"):
        mismatched_layouts([WEIGHT, WEIGHT], [WEIGHT])
