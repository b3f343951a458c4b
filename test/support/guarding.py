"""What the step guard is for: turning it off, whether it is installed, and loading state of another layout."""

import copy
from contextlib import contextmanager

from torch.optim import optimizer as torch_optimizer

from torch_nhwc.training import set_step_guard


@contextmanager
def unguarded(is_unguarded=True):
    """Without the guard."""
    set_step_guard(not is_unguarded)
    try:
        yield
    finally:
        set_step_guard(True)


def hooks():
    """Return the guard's hooks around the steps of all optimizers."""
    return [
        hook
        for of_all in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        for hook in of_all.values()
        if hook.__module__.startswith("torch_nhwc")
    ]


def load_contiguous(_, optimizer):
    """As a trainer does that resumes: a converted model, and the state of a contiguous one."""
    state = copy.deepcopy(optimizer.state_dict())
    for of_parameter in state["state"].values():
        of_parameter.update({key: each.contiguous() for key, each in of_parameter.items()})
    optimizer.load_state_dict(state)
