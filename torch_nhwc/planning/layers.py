"""What is to happen to the layers that lose on channels-last."""

from collections.abc import Sequence
from typing import NamedTuple

from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action, LayerRow
from torch_nhwc.preserving.find import Layer
from torch_nhwc.reasons import Reason


class LayerDecision(NamedTuple):
    """What is to happen to one layer."""

    layer: Layer
    action: Action
    reason: Reason | None

    @property
    def row(self) -> LayerRow:
        """The decision as a plan has it."""
        return LayerRow(self.layer.path, self.layer.kind, self.layer.loses, self.action, self.reason)


def decide_layers(layers: Sequence[Layer], request: Request, plan: Plan | None = None) -> list[LayerDecision]:
    """What is to happen to every layer that loses.

    Args:
        layers: of a model.
        request: what is asked for.
        plan: which says what is to change; what can be done is decided anew.
    """
    decisions = []
    rows = {row.path: row for row in plan.layers} if plan else {}
    for layer in layers:
        reason, planned = layer.reason, rows.get(layer.path)
        if planned is not None and not planned.is_wanted:
            reason = planned.reason
        elif reason is None:
            reason = request.bar(layer.module, layer.path)
        decisions.append(LayerDecision(layer, Action.KEEP if reason else Action.EXCHANGE, reason))
    return decisions
