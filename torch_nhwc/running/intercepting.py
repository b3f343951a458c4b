"""Being asked first, wherever in the process a method is called, for a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

_LOCK = threading.Lock()


@contextmanager
def intercepted(owner: type, name: str, around: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, everybody's calls of a method go to what `around` makes of it.

    Blocks of several threads may end in any order: one that is over stays while another stands above it, and has to
    pass calls on.
    """
    with _LOCK:
        method: Any = vars(owner)[name]
        ours: Any = wraps(method)(around(method))
        ours.is_over = False
        setattr(owner, name, ours)
    try:
        yield
    finally:
        with _LOCK:
            ours.is_over = True
            while getattr(vars(owner)[name], "is_over", False):
                setattr(owner, name, vars(owner)[name].__wrapped__)
