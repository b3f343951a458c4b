"""Classes of modules that are made while a program runs, and others in their image."""

import sys


def is_made_on_the_fly(module_type: type) -> bool:
    """Whether PyTorch made a class around another, as parametrizing and `fully_shard` do for each layer."""
    package = sys.modules.get(module_type.__module__)
    is_torch = module_type.__module__.split(".")[0] == "torch"
    return is_torch and getattr(package, module_type.__name__, None) is not module_type


def with_base(module_type: type, base: type) -> type:
    """A copy of a class that PyTorch made around another, around a third one.

    A copy, since copies of a module share the class, and what takes a parametrization away changes it.
    """
    body = {name: value for name, value in vars(module_type).items() if name not in ("__dict__", "__weakref__")}
    *others, old = module_type.__bases__
    return type(module_type)(module_type.__name__.replace(old.__name__, base.__name__), (*others, base), body)
