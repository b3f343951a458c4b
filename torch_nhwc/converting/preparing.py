"""Everything that a conversion changes, put together before the first change."""

from typing import NamedTuple

from torch import Tensor

from torch_nhwc.converting.edits import Edit, edits_of
from torch_nhwc.planning.companions import Companion
from torch_nhwc.planning.deciding import Decision, Request
from torch_nhwc.planning.following import Following


class Changes(NamedTuple):
    """What is to change."""

    tensors: list[Tensor]
    records: list[Decision | Companion]
    """Of each tensor, where its outcome is to be noted."""
    edits: list[Edit]


def prepare(following: Following, request: Request) -> Changes:
    """What is to change for a conversion as it is decided."""
    decisions = [decision for decision in following.decisions if decision.changes]
    companions = [companion for companion in following.companions if companion.changes]
    tensors = [decision.tensor for decision in decisions] + [companion.tensor for companion in companions]
    edits = edits_of(following, request)
    return Changes(tensors, [*decisions, *companions], edits)
