"""See where a model loses channels-last while it runs, operator by operator.

A trace changes nothing in a model.
"""

from torch_nhwc.tracing.auditing import audit
from torch_nhwc.tracing.recorder import trace
from torch_nhwc.tracing.traces import (
    FormatLoss,
    Gain,
    Layout,
    MixedConvolution,
    OperatorRow,
    Phase,
    Reorder,
    Trace,
    TracedModule,
    Unseen,
    assert_layout,
)

__all__ = [
    "FormatLoss",
    "Gain",
    "Layout",
    "MixedConvolution",
    "OperatorRow",
    "Phase",
    "Reorder",
    "Trace",
    "TracedModule",
    "Unseen",
    "assert_layout",
    "audit",
    "trace",
]
