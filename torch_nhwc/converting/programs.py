"""What an exported program says of the layout of its tensors, kept true while they change."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from torch_nhwc.finding.exported import Program
from torch_nhwc.formats import Strides

Values = dict[fx.Node, Any]


def values_of(module: Program) -> Values:
    """What the program has of the value at each of its nodes: shape, strides, dtype."""
    return {node: node.meta["val"] for node in module.program.graph.nodes if "val" in node.meta}


def set_values(module: Program, values: Values) -> None:
    """Has the program say what it said before."""
    for node, value in values.items():
        node.meta["val"] = value


def agrees(module: Program, strides: Mapping[str, Strides]) -> bool:
    """Whether the program says so of the strides of its tensors, by their names."""
    return all(value.stride() == wanted for _, value, wanted in _inputs(module, strides) if wanted is not None)


def _inputs(module: Program, strides: Mapping[str, Strides]) -> Iterator[tuple[fx.Node, Any, Strides | None]]:
    program = module.program
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        yield node, node.meta.get("val"), strides.get(names.get(node.name) or "")


def set_strides(module: Program, strides: Mapping[str, Strides]) -> None:
    """Has the program know the strides of its tensors, by their names, and of all that is computed from them.

    Raises:
        RuntimeError: it would not run with them.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp  # which imports the compiler, for a second

    before, values = values_of(module), []
    bindings = [(node, node.meta["unbacked_bindings"]) for node in before if "unbacked_bindings" in node.meta]
    for _, value, wanted in _inputs(module, strides):
        if wanted is not None:
            mode = value.fake_mode
            with mode:
                value = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
        values.append(value)
    try:
        FakeTensorProp(module.program.graph_module, mode).propagate_dont_convert_inputs(*values)
        for node, value in before.items():
            for was, now in zip(tree_leaves(value), tree_leaves(node.meta["val"])):
                if isinstance(was, Tensor):
                    now.requires_grad_(was.requires_grad)
                    _expect_not_strided_anew(node, was.stride() != now.stride())
    except Exception as error:
        set_values(module, before)
        raise RuntimeError(
            "torch_nhwc: the exported program was exported, or decomposed, for weights in another format, and would "
            f"not run with these: {str(error).splitlines()[0]} Convert the model before exporting it"
        ) from error
    finally:  # for symbols that are its own
        for node, symbols in bindings:
            node.meta["unbacked_bindings"] = symbols


def _expect_not_strided_anew(node: fx.Node, moves: bool) -> None:
    """Raises a RuntimeError where what comes to lie otherwise is read by strides that the program has as numbers."""
    for user in node.users:
        if moves and str(user.target).startswith("aten.as_strided"):
            raise RuntimeError(f"{user.target} reads {node} by strides of its own.")
