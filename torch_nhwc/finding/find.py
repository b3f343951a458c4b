"""The front door: all sites of a model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_nhwc.finding import observed
from torch_nhwc.finding.layers import walk_layers
from torch_nhwc.finding.site import Found


def find(model: nn.Module, example_inputs: Any = None) -> Found:
    """The sites of a model, in its order, with those that only example inputs show, in one walk.

    Raises:
        TypeError: it is not a module.
        ValueError: lazy layers and example inputs together.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{instead_of(model)}")
    found = walk_layers(model)
    return found if example_inputs is None else observed.add_sites(found, example_inputs)


def instead_of(given: Any) -> str:
    """What to give instead of something that is no module, for the end of an error's sentence."""
    if any(base.__name__ == "ExportedProgram" for base in type(given).__mro__):
        return ": convert its module(), with example_inputs"
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    if parts and all(isinstance(each, nn.Module) for each in parts):
        return f": give torch.nn.{'ModuleDict' if isinstance(given, Mapping) else 'ModuleList'}(modules)"
    return ": convert_state_dict takes state dicts" if isinstance(given, Mapping) else ""
