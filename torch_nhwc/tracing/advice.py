"""What keeps the format where an operator loses it: only what was tried, in test/tracing/test_advice.py."""

from typing import Any

from torch import nn

from torch_nhwc.preserving.find import find_layers
from torch_nhwc.tracing.places import OURS
from torch_nhwc.tracing.rows import Loss

PRESERVE = "exchanged by preserve=True"
RESHAPE = "a reshape that is unavoidable"
# Functions of ours that stand in for what loses: by the function of `torch.nn.functional` that called the operator,
_BY_FUNCTION = frozenset(("cross_entropy", "instance_norm", "lp_pool3d", "pad"))
# or by the operator itself.
_BY_OPERATOR = {
    **dict.fromkeys(("aten::avg_pool3d", "aten::avg_pool3d_backward"), "avg_pool3d"),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::_adaptive_avg_pool3d_backward"), "adaptive_avg_pool3d"),
    **dict.fromkeys(("aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward"), "adaptive_max_pool3d"),
    **dict.fromkeys(("aten::upsample_nearest3d_backward",), "interpolate"),
    **dict.fromkeys(("aten::_upsample_nearest_exact3d_backward",), "interpolate"),
    **dict.fromkeys(("aten::_softmax", "aten::_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("aten::_log_softmax", "aten::_log_softmax_backward_data"), "log_softmax"),
}


class Adviser:
    """Knows the layers of a model that would be exchanged."""

    def __init__(self, model: nn.Module) -> None:
        self._exchangeable = {layer.path for layer in find_layers(model) if layer.reason is None}

    def of(self, loss: Loss, function: str | None, arguments: Any) -> str | None:
        """What keeps the format; `None` where nothing is known to.

        Args:
            loss: the row.
            function: of `torch.nn.functional`, where the operator was called in one.
            arguments: of the operator, positional ones.
        """
        if function == OURS:  # it brings the format back itself
            return None
        if loss.path in self._exchangeable:
            return PRESERVE
        name = function if function in _BY_FUNCTION else _BY_OPERATOR.get(loss.operator)
        if name in ("softmax", "log_softmax"):
            dim = arguments[2 if loss.operator.endswith("_backward_data") else 1]
            name = name if dim in (1, 1 - len(loss.inputs[0].shape)) else None
        return name and f"torch_nhwc.functional.{name}"
