"""What has been wrapped around a model already, told without importing anything that is not loaded."""

import inspect
import re
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from torch_nhwc.reasons import Reason

# By the name of a class, or of one of its bases, in one of these packages.
_PACKAGES = ("torch", "apex", "fairscale", "deepspeed", "colossalai")
_WRAPPERS = {
    "DistributedDataParallel": Reason.DDP,
    "FullyShardedDataParallel": Reason.FSDP1,
    "FSDPModule": Reason.FSDP2,
    "OptimizedModule": Reason.COMPILED,
    "DeepSpeedEngine": Reason.ENGINE,
    "GeminiDDP": Reason.ENGINE,
}


REASONS = frozenset(_WRAPPERS.values())


def reason_of(module: nn.Module, known: dict[type, Reason | None]) -> Reason | None:
    """Why nothing below a module may be converted, or `None`.

    Args:
        module: any module.
        known: the classes asked about before; one is added.
    """
    module_type = type(module)
    if module_type in known:
        reason = known[module_type]
    else:
        names = (base.__name__ for base in module_type.__mro__ if base.__module__.split(".")[0] in _PACKAGES)
        reason = known[module_type] = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
    if reason is not None:
        return reason
    # Both leave the class as it is: nn.Module.compile(), and accelerate, which puts whole blocks back at once.
    if module.__dict__.get("_compiled_call_impl") is not None:
        return Reason.COMPILED
    hook = module.__dict__.get("_hf_hook")
    puts_back_all = hook is not None and any(
        getattr(each, "offload", False) and getattr(each, "place_submodules", False)
        for each in getattr(hook, "hooks", [hook])
    )
    return Reason.OFFLOADED if puts_back_all else None


def is_offloaded(module: nn.Module, weight: Tensor) -> bool:
    """Whether accelerate keeps a weight's values elsewhere, and puts them back before each forward."""
    return weight.is_meta and "_hf_hook" in module.__dict__


def flattens_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer makes one flat vector of all its parameters, which takes contiguous ones."""
    return any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__)


def views_parameters(optimizer: Optimizer) -> bool:
    """Whether the code of an optimizer from elsewhere calls `.view(...)`, as those do that normalise by channel.

    A guess from the source: not every call of view is one that a channels-last tensor makes raise.
    """
    return any(re.search(r"\.view\(", source) for source in _foreign_sources(type(optimizer)))


def _foreign_sources(optimizer_type: type) -> Iterable[str]:
    for base in optimizer_type.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            try:
                yield inspect.getsource(base)
            except (OSError, TypeError):  # made without a file
                continue
