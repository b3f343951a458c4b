"""Optimizers that a conversion was given: after loading, their state takes the layout of the parameters."""

from typing import Any

from torch.optim import Optimizer

from torch_nhwc.planning.companions import Sources, Weight, find_apart, is_plain
from torch_nhwc.stepping.records import lay_out, warn_of_failure


def align_when_loaded(optimizer: Optimizer) -> None:
    """Has the state laid out behind every `load_state_dict`, which takes the checkpoint's layout."""
    if not is_aligned_when_loaded(optimizer):
        optimizer.register_load_state_dict_post_hook(_align)


def leave_as_loaded(optimizer: Optimizer) -> None:
    """Ends that, where a conversion fails."""
    hooks = optimizer._optimizer_load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _align]:
        hooks.pop(key, None)


def is_aligned_when_loaded(optimizer: Optimizer) -> bool:
    """Whether that has been asked for."""
    return _align in optimizer._optimizer_load_state_dict_post_hooks.values()


def loading_optimizer(optimizer: Any) -> Optimizer | None:
    """The one that loads: the optimizer, or what is inside of a wrapper such as accelerate's; `None` without hooks."""
    while optimizer is not None and "_optimizer_load_state_dict_post_hooks" not in (own := _attributes(optimizer)):
        optimizer = own.get("optimizer")
    return optimizer  # type: ignore[no-any-return]


def _attributes(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})  # a wrapper may have slots


def _align(optimizer: Optimizer) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    weights = [Weight(str(index), each, each.stride()) for index, each in enumerate(parameters) if is_plain(each)]
    apart = [each for each in find_apart(weights, Sources((optimizer,))) if each.label != "grad"]
    try:
        lay_out([each.tensor for each in apart], [each.weight.strides for each in apart])
    except RuntimeError as error:
        warn_of_failure(optimizer, error)
