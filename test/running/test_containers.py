"""Tensors are found, and replaced, in nested containers."""

from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from torch_nhwc.running import copy_inputs, map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


class Unknown(OrderedDict):
    """A subclass that pytree does not know."""


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    rest: object = None


def model_output():
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=ONE)


ONE = torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (ONE, ["x"]),
        ((ONE, [ONE, 1]), ["x[0]", "x[1][0]"]),
        ({"a": {"b": deque([ONE])}}, ["x.a.b[0]"]),
        (Pair(1, ONE), ["x.second"]),
        (Frozen(ONE, {"key": ONE}), ["x.tensor", "x.rest.key"]),
        (UserDict(a=ONE), ["x.a"]),
        (Unknown(a=[ONE]), ["x.a[0]"]),
        (model_output, ["x.last_hidden_state"]),
        (torch.return_types.max((ONE, ONE)), ["x[0]", "x[1]"]),
        ([1, "text", None, object(), Frozen(None)], []),
    ],
    ids=lambda each: type(each).__name__,
)
def test_tensors_are_found_by_name_and_replaced(value, names):
    value = value() if value is model_output else value
    assert [name for name, _ in tensors_in(value, "x")] == names
    other = map_tensors(value, lambda tensor: tensor + 5)
    assert type(other) is type(value)
    assert [(name, each.tolist()) for name, each in tensors_in(other, "x")] == [(name, [5, 5]) for name in names]
    assert not any(each.any() for _, each in tensors_in(value))


def test_containers_without_tensors_stay_the_same_objects_and_a_tensor_stays_one():
    value = [{"label": 1}, ONE, (ONE, ["name"])]
    other = map_tensors(value, torch.clone)
    assert other[0] is value[0]
    assert other[2][1] is value[2][1]
    assert other[1] is other[2][0] is not ONE


class Lock:
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


@pytest.mark.parametrize("rest", [[], Lock()], ids=["list", "lock"])
def test_copied_inputs_are_leaves_that_share_nothing_with_the_original(rest):
    x = torch.zeros(2, requires_grad=True) * 1
    (other, same), given = copy_inputs(((x, x), rest))
    assert other is same is not x
    assert (other.is_leaf, other.requires_grad) == (True, True)
    assert (given is rest) == isinstance(rest, Lock)


def test_registered_classes_without_names_for_their_children_are_looked_into():
    class Output(OrderedDict):
        """As the outputs of diffusers' models are registered."""

    pytree.register_pytree_node(
        Output, lambda each: (list(each.values()), list(each)), lambda values, keys: Output(zip(keys, values))
    )
    output = Output(sample=torch.ones(2), hidden=[torch.zeros(1)])
    assert [name for name, _ in tensors_in(output, "output")] == ["output.sample", "output.hidden[0]"]
    mapped = map_tensors(output, lambda tensor: tensor + 1)
    assert type(mapped) is Output
    assert torch.equal(mapped["sample"], torch.full((2,), 2.0))
