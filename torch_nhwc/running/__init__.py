"""Run models: once without a trace, many times against the clock, and compare what comes out.

Nothing here knows of convolution weights or plans.
"""

from torch_nhwc.running.calls import (
    arguments_of,
    call,
    copy_inputs,
    copy_model,
    evaluation_mode,
    preserved_state,
    run_once,
    seconds,
)
from torch_nhwc.running.comparison import (
    TOLERANCES,
    Difference,
    Tolerance,
    compare,
    map_tensors,
    tensors_in,
    tolerance_of,
)
from torch_nhwc.running.machine import machine
from torch_nhwc.running.module_stack import ModuleStack

__all__ = [
    "TOLERANCES",
    "Difference",
    "ModuleStack",
    "Tolerance",
    "arguments_of",
    "call",
    "compare",
    "copy_inputs",
    "copy_model",
    "evaluation_mode",
    "machine",
    "map_tensors",
    "preserved_state",
    "run_once",
    "seconds",
    "tensors_in",
    "tolerance_of",
]
