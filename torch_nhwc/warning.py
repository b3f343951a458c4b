"""Warnings, each for the line of code that called this package."""

import inspect
import warnings

_PASSED_OVER = ("torch_nhwc", "torch", "contextlib")  # on the way up to that line


def warn(message: str) -> None:
    """Warns the code that called this package, maybe through PyTorch's."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
