"""Everything that a conversion changes, put together before the first change."""

from typing import NamedTuple

from torch import Tensor

from torch_nhwc.converting.edits import Edit, edits_of
from torch_nhwc.formats import Strides
from torch_nhwc.planning.companions import Companion
from torch_nhwc.planning.deciding import Decision
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.request import Request


class Changes(NamedTuple):
    """What is to change."""

    tensors: list[Tensor]
    strides: list[Strides]
    """Those that each tensor gets."""
    records: list[Decision | Companion]
    """Of each tensor, where its outcome is to be noted."""
    edits: list[Edit]


def prepare(following: Following, request: Request) -> Changes:
    """What is to change for a conversion as it is decided."""
    decisions = [decision for decision in following.decisions if decision.changes]
    companions = [companion for companion in following.companions if companion.changes]
    tensors = [decision.tensor for decision in decisions] + [companion.tensor for companion in companions]
    strides = [decision.strides or () for decision in decisions]
    strides += [companion.weight.strides for companion in companions]
    return Changes(tensors, strides, [*decisions, *companions], edits_of(following, request))
