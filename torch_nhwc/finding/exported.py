"""Finding the convolution weights of an exported program: the tensors of its state that its graphs convolve with."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from torch_nhwc.finding.convolutions import OPERATORS, PASSING_ON
from torch_nhwc.finding.held import Held
from torch_nhwc.finding.site import Site
from torch_nhwc.reasons import Reason

_Names = dict[fx.Node, str | None]
_CHANNELS_LAST = torch.channels_last, torch.channels_last_3d
_known: "weakref.WeakKeyDictionary[ExportedProgram, Program]" = weakref.WeakKeyDictionary()


def module_for(model: Any, **arguments: Any) -> Any:
    """What stands for an exported program, one module for as long as it is there; any other model itself.

    Raises:
        ValueError: one of some arguments is given, which are for modules that run, and it is a program.
    """
    if not isinstance(model, ExportedProgram):
        return model
    for name, argument in arguments.items():
        if argument is not None and argument is not False:
            raise ValueError(f"{name} is not for an exported program: give it to the model, before exporting that")
    return _known.setdefault(model, Program(model))


class Program(Held):
    """The tensors of an exported program, under their names in its state dict."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(_tensors_of(program))
        self._program = weakref.ref(program)

    @property
    def program(self) -> ExportedProgram:
        """The program, which whoever has a use for this holds."""
        program = self._program()
        assert program is not None
        return program

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> Any:
        """Raises a RuntimeError."""
        raise RuntimeError(
            "torch_nhwc: an exported program takes no hook that brings its inputs into channels-last: give it such "
            "inputs, or export the model with the hook"
        )

    def sites(self, prefix: str) -> list[Site]:
        """The weights that reach a convolution, in any of the program's graphs."""
        program, found = self.program, dict[str, Site]()
        self.hold(tensors := _tensors_of(program))
        targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
        inputs: _Names = {node: targets.get(node.name) for node in program.graph.find_nodes(op="placeholder")}
        for node, names in _convolutions(program.graph, inputs):
            schema = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
            arguments = {**dict(zip(schema, node.args)), **node.kwargs}
            weight, is_laid_out = _passed_on(arguments["weight"])
            name, groups = names.get(weight), arguments.get("groups", 1 if "groups" in schema else 0)
            if name is None and (is_laid_out or weight.op == "placeholder"):
                continue  # as it should be, or the caller's
            name = name or f"<computed {len(found)}>"
            tensor = tensors.get(name)
            rank = weight.meta["val"].dim() if tensor is None else tensor.dim()
            path, _, last = ".".join(filter(None, (prefix, name))).rpartition(".")
            reason = Reason.ON_THE_FLY if tensor is None else None
            if rank in (4, 5):
                found.setdefault(name, Site(path, last, _layer(node), rank, groups, self, tensor, reason))
        return list(found.values())


def _tensors_of(program: ExportedProgram) -> dict[str, Tensor]:
    held = {**program.constants, **program.state_dict}
    return {name: each for name, each in held.items() if isinstance(each, Tensor)}


def _operator(node: Any) -> str:
    """The name of what a node calls; empty where it is no operator."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _convolutions(graph: fx.Graph, names: _Names) -> Iterator[tuple[fx.Node, _Names]]:
    """The convolutions of a graph and of those that it calls, with what the inputs of their graph are called."""
    for node in graph.nodes:
        if _operator(node) in OPERATORS:
            yield node, names
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            given = [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
            called = [getattr(graph.owning_module, str(each.target)) for each in given if each.op == "get_attr"]
            for inner in (each.graph for each in called if isinstance(each, fx.GraphModule)):
                inputs = list(inner.find_nodes(op="placeholder"))
                # Operators give a graph its inputs as their last arguments.
                passed = [names.get(_passed_on(each)[0]) for each in given[len(given) - len(inputs) :]]
                yield from _convolutions(inner, dict(zip(inputs, passed)))


def _passed_on(node: Any) -> tuple[Any, bool]:
    """Where a weight comes from, and whether it was brought into channels-last on the way."""
    is_laid_out = False
    while _operator(node) in PASSING_ON:
        wanted = node.kwargs.get("memory_format")
        is_laid_out = is_laid_out or _operator(node) == "nhwc::convert_weight" or wanted in _CHANNELS_LAST
        node = node.args[0]
    return node, is_laid_out


def _layer(node: fx.Node) -> str:
    """The class of the module that a node is from, or else its operator."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    kind = stack[-1][1] if stack else _operator(node)
    return getattr(kind, "__name__", str(kind).rpartition(".")[2].rpartition("::")[2])
