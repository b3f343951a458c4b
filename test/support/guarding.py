"""Turning the guard at the step off, to see what PyTorch does by itself, and seeing whether it is there."""

from contextlib import contextmanager

from torch.optim import optimizer as torch_optimizer

import torch_nhwc as nhwc


@contextmanager
def unguarded(is_unguarded=True):
    """Without the guard."""
    nhwc.set_step_guard(not is_unguarded)
    try:
        yield
    finally:
        nhwc.set_step_guard(True)


def hooks():
    """What PyTorch calls around the steps of all optimizers."""
    return [
        hook
        for of_all in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        for hook in of_all.values()
        if hook.__module__.startswith("torch_nhwc")
    ]
