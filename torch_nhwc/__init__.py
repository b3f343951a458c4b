"""Convolution weights, and whole models, in channels-last memory format."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_nhwc import functional
from torch_nhwc.converting import (
    Report,
    channels_last,
    convert_,
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
)
from torch_nhwc.ops import Outcome, convert_weight, convert_weight_, convert_weights, convert_weights_
from torch_nhwc.planning import Plan, plan
from torch_nhwc.sites import Reason
from torch_nhwc.training import check

if TYPE_CHECKING:
    from torch_nhwc import checkpoint, cpp_extension, data, integrations, tracing, tuning, verifying  # noqa: F401
    from torch_nhwc.checkpoint import convert_saved
    from torch_nhwc.tracing import trace
    from torch_nhwc.tuning import tune
    from torch_nhwc.verifying import verify

__version__ = "0.1.0"

__all__ = [
    "Outcome",
    "Plan",
    "Reason",
    "Report",
    "__version__",
    "channels_last",
    "check",
    "convert_",
    "convert_conv2d_weight_memory_format",
    "convert_conv3d_weight_memory_format",
    "convert_saved",
    "convert_weight",
    "convert_weight_",
    "convert_weights",
    "convert_weights_",
    "functional",
    "plan",
    "trace",
    "tune",
    "verify",
]

# Tools load on first use, so that `import torch_nhwc` stays fast. Type checkers see them above.
_TOOLS = {"convert_saved": "checkpoint", "trace": "tracing", "tune": "tuning", "verify": "verifying"}
_MODULES = (*_TOOLS.values(), "cpp_extension", "data", "integrations")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _TOOLS:
            return getattr(import_module(f"torch_nhwc.{_TOOLS[name]}"), name)
        if name in _MODULES:
            return import_module(f"torch_nhwc.{name}")
        raise AttributeError(f"module 'torch_nhwc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
