"""The front door: all sites of a model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_nhwc.finding import observed
from torch_nhwc.finding.layers import walk_layers
from torch_nhwc.finding.site import Found

_INSTEAD = {
    "ExportedProgram": ": convert its module(), with example_inputs",
    "Mapping": ": convert_state_dict takes state dicts",
}


def find(model: nn.Module, example_inputs: Any = None) -> Found:
    """The sites of a model, in its order, with those that only example inputs show, in one walk.

    Raises:
        TypeError: it is not a module.
        ValueError: lazy layers and example inputs together.
    """
    if not isinstance(model, nn.Module):
        names = {base.__name__ for base in type(model).__mro__} | ({"Mapping"} if isinstance(model, Mapping) else set())
        instead = next((text for name, text in _INSTEAD.items() if name in names), "")
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{instead}")
    found = walk_layers(model)
    return found if example_inputs is None else observed.add_sites(found, example_inputs)
