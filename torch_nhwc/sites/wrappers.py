"""Wrappers around models and optimizers, and what they mean for the weights.

They are recognised by the names of their classes and attributes, without importing their packages.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from torch_nhwc.sites.reasons import CONTIGUOUS_ONLY, Reason


class Wrapper(NamedTuple):
    """A class that wraps models."""

    reason: Reason | None
    """Why nothing inside may be converted; `None` if it may."""
    inside: str | None = None
    """The attribute that holds the model, if there is one."""
    where: str | None = None
    """The reason holds only if this attribute is not empty."""


# By the name of a class, or of one of its bases, in one of these packages.
_PACKAGES = ("torch", "apex", "fairscale", "deepspeed", "colossalai", "opacus", "peft")
WRAPPERS = {
    "AveragedModel": Wrapper(None, "module"),
    "DataParallel": Wrapper(None, "module"),
    "DistributedDataParallel": Wrapper(Reason.DDP, "module"),
    "FullyShardedDataParallel": Wrapper(Reason.FSDP1),
    "FSDPModule": Wrapper(Reason.FSDP2),
    "OptimizedModule": Wrapper(Reason.COMPILED, "_orig_mod"),
    "DeepSpeedEngine": Wrapper(Reason.ENGINE, "module"),
    "GeminiDDP": Wrapper(Reason.ENGINE, "module"),
    "AbstractGradSampleModule": Wrapper(Reason.PER_SAMPLE_GRADIENTS, "_module"),
    "OFTLayer": Wrapper(Reason.VIEWS_WEIGHT),
    "BOFTLayer": Wrapper(Reason.VIEWS_WEIGHT),
    "HRALayer": Wrapper(Reason.VIEWS_WEIGHT),
    "LoraLayer": Wrapper(Reason.VIEWS_WEIGHT, where="lora_magnitude_vector"),  # DoRA
}
REASONS = frozenset(wrapper.reason for wrapper in WRAPPERS.values()) - {None} - CONTIGUOUS_ONLY


_known: MutableMapping[type, Wrapper] = WeakKeyDictionary()


def wrapper_of(module_type: type) -> Wrapper:
    """Return what is known of a class; most wrap nothing."""
    known = _known.get(module_type)
    if known is None:
        names = (base.__name__ for base in module_type.__mro__ if base.__module__.split(".")[0] in _PACKAGES)
        known = _known[module_type] = next((WRAPPERS[name] for name in names if name in WRAPPERS), Wrapper(None))
    return known


def inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the model that a module wraps, with the name of the attribute that holds it; `None` if it wraps none."""
    name = wrapper_of(type(module)).inside
    return None if name is None else (name, getattr(module, name))


def reason_of(module: nn.Module) -> Reason | None:
    """Return why nothing in a module may be converted, or `None`."""
    wrapper = wrapper_of(type(module))
    if wrapper.reason is not None and (wrapper.where is None or len(getattr(module, wrapper.where, ()))):
        return wrapper.reason
    # nn.Module.compile() and the hooks of Opacus, diffusers and accelerate leave the class unchanged.
    own = module.__dict__
    if own.get("_compiled_call_impl") is not None:
        return Reason.COMPILED
    if "autograd_grad_sample_hooks" in own:
        return Reason.PER_SAMPLE_GRADIENTS
    if own.keys().isdisjoint(("_hf_hook", "_diffusers_hook")):
        return None
    hook = own.get("_hf_hook")
    offloading = (each for each in getattr(hook, "hooks", [hook]) if getattr(each, "offload", False))
    restores_all = any(getattr(each, "place_submodules", False) for each in offloading)
    # Group offloading with streams keeps copies in memory, and without them on a disk or nowhere.
    group = getattr(getattr(own.get("_diffusers_hook"), "hooks", {}).get("group_offloading"), "group", None)
    restores_all |= any(getattr(group, name, None) for name in ("cpu_param_dict", "offload_to_disk_path"))
    return Reason.OFFLOADED if restores_all else None


def is_offloaded(module: nn.Module, weight: Tensor) -> bool:
    """Return whether accelerate keeps a weight's values elsewhere, and restores them before each forward."""
    return weight.is_meta and "_hf_hook" in module.__dict__


# Optimizers that make one flat vector of their parameters, by the name of their class or of one of its bases.
FLATTENING = frozenset({"LBFGS"})


def flattens_parameters(optimizer: Any) -> bool:
    """Return whether an optimizer takes only contiguous parameters."""
    return not FLATTENING.isdisjoint(base.__name__ for base in type(optimizer).__mro__)


def keeps_buckets(optimizer: Any) -> bool:
    """Return whether an optimizer makes its parameters views of flat buckets, with contiguous strides."""
    options = ("parameters_as_bucket_view", "_overlap_with_ddp")
    return _is_zero(optimizer) and any(getattr(optimizer, option, False) for option in options)


def state_of(optimizer: Any) -> Any:
    """Return the state that an optimizer steps with, by parameter; ZeRO's is in the optimizer inside of it."""
    inside = getattr(optimizer, "optim", None) if _is_zero(optimizer) else None
    return getattr(inside, "state", optimizer.state)  # a functional optimizer inside keeps its own


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it wraps, one inside of the other, as Lookahead and accelerate do."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        yield optimizer
        seen.add(id(optimizer))
        own = getattr(optimizer, "__dict__", {})  # a wrapper may have slots
        inside = (own.get(name) for name in ("optimizer", "base_optimizer"))
        optimizer = next((each for each in inside if isinstance(each, Optimizer)), None)


def _is_zero(optimizer: Any) -> bool:
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)
