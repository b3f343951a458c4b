"""What has been wrapped around a model, told without importing anything that is not loaded."""

from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from torch_nhwc.formats import CONTIGUOUS, Strides
from torch_nhwc.reasons import CONTIGUOUS_ONLY, Reason


class Wrapper(NamedTuple):
    """What a class makes of the model inside of it."""

    reason: Reason | None
    """Why nothing inside may be converted; `None` where it may."""
    inside: str | None = None
    """The attribute that holds the model, where one does."""
    where: str | None = None
    """The attribute that is not empty where the reason holds, if there are others."""


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
    if wrapper.reason is not None and (wrapper.where is None or len(getattr(module, wrapper.where, ()))):
        return wrapper.reason
    # All leave the class as it is: nn.Module.compile(), Opacus' hooks, diffusers', and accelerate's, of blocks too.
    own = module.__dict__
    if own.get("_compiled_call_impl") is not None:
        return Reason.COMPILED
    if "autograd_grad_sample_hooks" in own:
        return Reason.PER_SAMPLE_GRADIENTS
    if own.keys().isdisjoint(("_hf_hook", "_diffusers_hook")):
        return None
    puts_back_all = any(getattr(each, "place_submodules", False) for each in _offloading_hooks(module))
    # Group offloading keeps copies, with streams in memory, otherwise on a disk or none.
    group = _offloading_group(module)
    puts_back_all |= any(getattr(group, name, None) for name in ("cpu_param_dict", "offload_to_disk_path"))
    return Reason.OFFLOADED if puts_back_all else None


def _offloading_hooks(module: nn.Module) -> list[Any]:
    """Accelerate's, of one module."""
    hook = module.__dict__.get("_hf_hook")
    return [each for each in getattr(hook, "hooks", [hook]) if getattr(each, "offload", False)]


def _offloading_group(module: nn.Module) -> Any:
    """The group of diffusers' that a module is put back by, or `None`."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return getattr(hooks.get("group_offloading"), "group", None)


def strides_put_back(model: nn.Module, full_name: str, weight: Tensor) -> Strides | None:
    """Those in which the values of an offloaded weight come back before each forward; `None` where it is not known."""
    module: Any = model
    names = full_name.split(".")
    for depth, name in enumerate(names):
        group = _offloading_group(module)
        if getattr(group, "offload_to_disk_path", None):
            return CONTIGUOUS.strides(weight.shape)
        copies = getattr(group, "cpu_param_dict", None) or {}
        if weight in copies:
            return copies[weight].stride()  # type: ignore[no-any-return]
        for hook in _offloading_hooks(module):
            with suppress(AttributeError, KeyError, OSError, TypeError):  # from a disk, it is read
                strides: Strides = hook.weights_map[".".join(names[depth:])].stride()
                return strides
        module = getattr(module, name, None)
        if not isinstance(module, nn.Module):
            break
    return None


def inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The model that a module wraps, behind the name of the attribute that holds it; `None` where it wraps none."""
    name = wrapper_of(type(module)).inside
    return None if name is None else (name, getattr(module, name))


def is_offloaded(module: nn.Module, weight: Tensor) -> bool:
    """Whether accelerate keeps a weight's values elsewhere, and puts them back before each forward."""
    return weight.is_meta and "_hf_hook" in module.__dict__
