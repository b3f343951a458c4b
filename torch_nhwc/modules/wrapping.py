"""What has been wrapped around a model, told without importing anything that is not loaded."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from torch_nhwc.reasons import Reason


class Wrapper(NamedTuple):
    """What a class makes of the model inside of it."""

    reason: Reason | None
    """Why nothing inside may be converted; `None` where it may."""
    inside: str | None = None
    """The attribute that holds the model, where one does."""


# By the name of a class, or of one of its bases, in one of these packages.
_PACKAGES = ("torch", "apex", "fairscale", "deepspeed", "colossalai")
WRAPPERS = {
    "AveragedModel": Wrapper(None, "module"),
    "DataParallel": Wrapper(None, "module"),
    "DistributedDataParallel": Wrapper(Reason.DDP, "module"),
    "FullyShardedDataParallel": Wrapper(Reason.FSDP1),
    "FSDPModule": Wrapper(Reason.FSDP2),
    "OptimizedModule": Wrapper(Reason.COMPILED, "_orig_mod"),
    "DeepSpeedEngine": Wrapper(Reason.ENGINE, "module"),
    "GeminiDDP": Wrapper(Reason.ENGINE, "module"),
}
REASONS = frozenset(wrapper.reason for wrapper in WRAPPERS.values()) - {None}


_NONE = Wrapper(None)
_known: WeakKeyDictionary[type, Wrapper] = WeakKeyDictionary()  # the classes asked about before


def wrapper_of(module_type: type) -> Wrapper:
    """What is known of a class; of most that they wrap nothing."""
    wrapper = _known.get(module_type)
    if wrapper is None:
        names = (base.__name__ for base in module_type.__mro__ if base.__module__.split(".")[0] in _PACKAGES)
        wrapper = _known[module_type] = next((WRAPPERS[name] for name in names if name in WRAPPERS), _NONE)
    return wrapper


def reason_of(module: nn.Module, wrapper: Wrapper) -> Reason | None:
    """Why nothing below a module may be converted, or `None`; `wrapper` is what is known of its class."""
    if wrapper.reason is not None:
        return wrapper.reason
    # Both leave the class as it is: nn.Module.compile(), and accelerate, which puts whole blocks back at once.
    own = module.__dict__
    if own.get("_compiled_call_impl") is not None:
        return Reason.COMPILED
    hook = own.get("_hf_hook")
    puts_back_all = hook is not None and any(
        getattr(each, "offload", False) and getattr(each, "place_submodules", False)
        for each in getattr(hook, "hooks", [hook])
    )
    return Reason.OFFLOADED if puts_back_all else None


def inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The model that a module wraps, behind the name of the attribute that holds it; `None` where it wraps none."""
    name = wrapper_of(type(module)).inside
    return None if name is None else (name, getattr(module, name))


def is_offloaded(module: nn.Module, weight: Tensor) -> bool:
    """Whether accelerate keeps a weight's values elsewhere, and puts them back before each forward."""
    return weight.is_meta and "_hf_hook" in module.__dict__
