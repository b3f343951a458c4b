"""The fixed policies: what one would try by hand."""

from typing import Any

import torch
from torch import nn

from torch_nhwc.finding.find import find
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.layers import decide_layers
from torch_nhwc.planning.planner import plan_of
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.find import find_layers

CONTIGUOUS = "contiguous"
WEIGHTS = "weights only"
FULL = "full"
PRESERVED = "full, preserved"


def fixed_policies(model: nn.Module, example_inputs: Any = None, preserve: bool = True) -> dict[str, Plan]:
    """The plans of the fixed policies by their names; without one that would do the same as another.

    Args:
        model: to be planned for.
        example_inputs: on which it runs, to see which tensors reach its convolutions.
        preserve: whether layers that lose on channels-last may be exchanged.

    Raises:
        TypeError: `model` is not a module, or a shape was given where tensors are wanted.
        ValueError: a layer is lazy.
    """
    found = find(model, example_inputs)
    layers = find_layers(model) if preserve else []

    def planned(memory_format: torch.memory_format | None, **options: Any) -> Plan:
        request = Request.of(memory_format, None, None, options.get("input_format"), options.get("preserve", False))
        of_layers = decide_layers(layers, request) if request.preserve else []
        return plan_of(decide(found, request), of_layers, request, found.observed)

    plans = {CONTIGUOUS: planned(torch.contiguous_format), WEIGHTS: planned(None)}
    if not isinstance(model, torch.jit.ScriptModule):  # which takes no hook
        plans[FULL] = planned(None, input_format="channels_last")
        plans[PRESERVED] = planned(None, input_format="channels_last", preserve=True)
        if not any(row.is_wanted for row in plans[PRESERVED].layers):
            del plans[PRESERVED]
    stays = Action.REFUSE if FULL not in plans else None  # with an input in channels-last such a weight matters, too
    has_weights = any(row.is_wanted and row.action is not stays for row in plans[WEIGHTS].rows)
    return plans if has_weights or PRESERVED in plans else {CONTIGUOUS: plans[CONTIGUOUS]}
