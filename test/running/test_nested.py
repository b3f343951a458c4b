"""Tensors are found, and exchanged, inside of whatever a module is given and gives."""

import weakref
from collections import OrderedDict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from torch_nhwc.running.nested import mapped, tensors_in

Pair = namedtuple("Pair", "first second")


class Plain:
    def __init__(self, tensor):
        self.tensor, self.itself, self.name = tensor, self, "no tensor"


class Slotted:
    __slots__ = ("__hidden", "tensor", "unset")

    def __init__(self, tensor):
        self.tensor, self.__hidden = tensor, [tensor + 1]


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    rest: object = None


class WithoutUpdate(OrderedDict):
    """As the outputs of transformers are."""

    def update(self, *args, **kwargs):
        raise TypeError("no update")


def test_tensors_are_found_and_exchanged_in_containers_and_in_the_attributes_of_objects():
    tensor, module = torch.zeros(2), nn.Linear(2, 2)
    others = [Slotted(tensor), deque([tensor]), torch.distributions.Normal(tensor, tensor + 1), module, "text", b"", 1]
    value = (Plain(tensor), Frozen(tensor, {"key": Pair(1, tensor)}), WithoutUpdate(a=tensor), *others)
    found = dict(tensors_in(value, "value"))
    assert list(found) == [
        "value[0].tensor",
        "value[1].tensor",
        "value[1].rest.key[1]",
        "value[2].a",
        "value[3]._Slotted__hidden[0]",
        "value[3].tensor",
        "value[4][0]",
        "value[5].loc",
        "value[5].scale",
    ]
    names = []
    other = mapped(value, "value", lambda name, each: names.append(name) or each + 5)
    assert names == list(found)
    assert [type(each) for each in other] == [type(each) for each in value]
    for (name, each), (other_name, changed) in zip(found.items(), tensors_in(other, "value")):
        assert name == other_name
        assert torch.equal(each + 5, changed)
    assert other[0].itself is other[0] is not value[0]
    assert other[6] is module
    assert torch.equal(value[0].tensor, torch.zeros(2))


def test_what_holds_no_tensor_or_cannot_be_copied_stays_the_object_that_it_is():
    class Sealed(Plain):
        def __copy__(self):
            raise TypeError("no copies")

    value = [Sealed(torch.zeros(2)), {"a": 1}, torch.zeros(2)]
    other = mapped(value, "value", lambda _, each: each + 1)
    assert other[0] is value[0]
    assert other[1] is value[1]
    assert torch.equal(other[2], torch.ones(2))


def test_containers_inside_of_themselves():
    value = [torch.zeros(2)]
    value.append(value)
    assert [name for name, _ in tensors_in(value, "value")] == ["value[0]"]
    other = mapped(value, "value", lambda _, each: each + 1)
    assert other[1] is other


class Unwilling:
    """Objects whose own code raises."""

    __slots__ = ("other",)

    def __getattr__(self, name):
        raise RuntimeError(f"getattr {name}")


class Lazy(Mapping):
    """Values that cannot be had."""

    def __getitem__(self, key):
        raise ValueError("missing")

    def __iter__(self):
        return iter(["key"])

    def __len__(self):
        return 1


def test_what_no_model_looks_into_is_left_alone():
    class Node:
        next = None

    first = last = Node()
    for _ in range(2000):
        last.next = last = Node()
    holder = Plain(torch.zeros(2))
    holder.proxy = weakref.proxy(Node())  # dead
    values = [first, Unwilling(), Lazy(), memoryview(bytes(6)).cast("B", (2, 3)), holder, [1.0] * 10]
    assert [name for name, _ in tensors_in(values, "x")] == ["x[4].tensor"]
    other = mapped(values, "x", lambda _, tensor: tensor + 1)
    assert other[4].tensor.tolist() == [1, 1]
    assert other[0] is first
