"""What torch.compile is doing where a model is traced."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_compiled() -> bool:
    """Whether this runs in what is compiled: eagerly, since nothing is under a dispatch mode."""
    return get_eval_frame_callback() is not None


def left_alone(function: _Function) -> _Function:
    """Keeps the compiler from a function, and from all that it calls."""
    return _skipped(function, _FrameAction.SKIP)


def looked_through(function: _Function) -> _Function:
    """Keeps the compiler from a function, but not from what it calls, so that `is_compiled` can be asked in it."""
    return _skipped(function, _FrameAction.DEFAULT)


def _skipped(function: _Function, inside: _FrameAction) -> _Function:
    code: Any = getattr(function, "__code__")  # noqa: B009
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, inside))
    return function
