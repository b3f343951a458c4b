"""set_strides_: any rank, any strides that do not overlap, and back."""

import pytest
import reference
import torch
from reference import SHAPES, SOURCES, arrange, random_weight

import torch_nhwc as nhwc
from torch_nhwc import Outcome


def own(tensor):
    """Return the same values and strides in their own storage, which is as long as they need."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "expanded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_conversion_of_every_arrangement_is_undone_exactly(shape, source, device):
    weight = own(arrange(random_weight(shape, device=device), source))
    expected = weight.clone(), weight.stride()
    (planned,) = nhwc.ops.plan_weights([weight], storage="detach")
    assert nhwc.convert_weight_(weight, storage="detach") == planned
    reference.assert_same(weight, reference.convert_weight(expected[0]))
    pointer = weight.data_ptr()
    (outcome,) = nhwc.ops.set_strides_([weight], [expected[1]])
    assert weight.stride() == expected[1]
    assert torch.equal(reference.bits(weight), reference.bits(expected[0]))
    if outcome == Outcome.IN_PLACE:
        assert weight.data_ptr() == pointer
    assert nhwc.ops.set_strides_([weight], [expected[1]]) == [Outcome.UNCHANGED]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5, 6, 7)], ids=str)
def test_tensors_of_any_rank_take_the_order_of_another(shape, device):
    other = random_weight(tuple(reversed(shape)), device=device).permute(tuple(reversed(range(len(shape)))))
    tensor = random_weight(shape, device=device)
    values = tensor.clone()
    nhwc.ops.set_strides_([tensor], [other.stride()])
    assert tensor.stride() == other.stride()
    assert torch.equal(tensor, values) or reference.bits(tensor).equal(reference.bits(values))


def test_a_gradient_follows_unless_it_is_in_the_list(device):
    first, second = (torch.nn.Parameter(torch.randn(4, 3, 3, 3, device=device)) for _ in range(2))
    for weight in (first, second):
        weight.grad = torch.randn(4, 3, 3, 3, device=device)
    values = second.grad.clone()
    strides = (27, 1, 9, 3)
    nhwc.ops.set_strides_([first, second, second.grad], [strides, strides, (1, 4, 12, 36)])
    assert first.grad.stride() == strides
    assert second.grad.stride() == (1, 4, 12, 36)
    assert torch.equal(second.grad, values)


def test_exact_aliases_stay_aliases(device):
    first = torch.randn(4, 3, 3, 3, device=device)
    second = first.detach()
    nhwc.ops.set_strides_([first, second], [(1, 4, 12, 36)] * 2)
    assert first.data_ptr() == second.data_ptr()
    assert first.stride() == second.stride() == (1, 4, 12, 36)


@pytest.mark.parametrize(
    ("strides", "message"),
    [
        ([(27, 9, 3, 1), (27, 9, 3)], r"weight 1 of 2: there are fewer strides than dimensions"),
        ([(27, 9, 3, 1), (27, 9, 3, 1, 1)], r"there are 1 strides more than dimensions"),
        ([(27, 9, 3, 1), (0, 9, 3, 1)], r"weight 1 of 2: expected strides by which no elements overlap, got \[0, 9"),
        ([(27, 1, 9, 3), (27, 2, 9, 3)], r"weight 1 of 2: expected strides by which no elements overlap"),
        ([(27, 1, 9, 3), (-27, 1, 9, 3)], r"weight 1 of 2: expected no negative strides, got \[-27, 1"),
    ],
)
def test_bad_strides_raise_and_nothing_changes(strides, message, device):
    weights = [torch.randn(4, 3, 3, 3, device=device) for _ in range(2)]
    before = [(weight.data_ptr(), weight.stride()) for weight in weights]
    with pytest.raises(RuntimeError, match=message):
        nhwc.ops.set_strides_(weights, strides)
    assert [(weight.data_ptr(), weight.stride()) for weight in weights] == before


@pytest.mark.parametrize("shape", [(0, 3), (1, 3)])
def test_negative_strides_raise_where_no_elements_use_them(shape):
    with pytest.raises(RuntimeError, match="expected no negative strides"):
        nhwc.ops.set_strides_([torch.randn(shape)], [(-3, 1)])


def test_the_rules_of_the_in_place_operators_hold(device):
    weight = torch.randn(8, 3, 3, 3, device=device)[4:]
    with pytest.raises(RuntimeError, match="is part of a larger storage"):
        nhwc.ops.set_strides_([weight], [(27, 1, 9, 3)])
    with pytest.raises(RuntimeError, match="is not a leaf"):
        nhwc.ops.set_strides_([torch.randn(4, 3, 3, 3, requires_grad=True) * 2], [(27, 1, 9, 3)])
    with pytest.raises(TypeError, match="expected a list of weights, got one tensor"):
        nhwc.ops.set_strides_(torch.randn(4, 3, 3, 3), [(27, 1, 9, 3)])
