"""Saved programs: the inputs of TorchScript archives, and the weights of exported programs (.pt2)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

# The source text that `convert_inputs_` compiles calls the function by this name.
from torch_nhwc.nn.hooks import converted_input as to_channels_last  # noqa: F401
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import OPERATORS, PASSING_ON, Site, TensorContainer

_Names = dict[fx.Node, str | None]
_CHANNELS_LAST = torch.channels_last, torch.channels_last_3d
# For each type of an argument, the method that converts it and the expression that the method returns.
_METHODS = {
    "Tensor": ("_nhwc_convert_image", "to_channels_last(value, {ranks})"),
    "Optional[Tensor]": ("_nhwc_convert_optional_image", "None if value is None else to_channels_last(value, {ranks})"),
    "List[Tensor]": ("_nhwc_convert_images", "[to_channels_last(each, {ranks}) for each in value]"),
    "Dict[str, Tensor]": (
        "_nhwc_convert_named_images",
        "{{name: to_channels_last(value[name], {ranks}) for name in value.keys()}}",
    ),
}


def convert_inputs_(model: torch.jit.ScriptModule, ranks: list[int]) -> str:
    """Make forward convert its images and volumes to channels-last first; return the remark for the report.

    The signature of forward stays, and so does everything that the module holds. The module must not have run yet, and
    no other object may have its class, as is true for a module that was just loaded. Without ranks nothing changes.
    """
    module = model._c
    if any(module._has_method(name) or module.hasattr(name) for name, _ in _METHODS.values()):
        return "input_format: forward converts its inputs to channels-last already"
    if not ranks or not module._has_method("forward"):
        return "input_format: no input is converted to channels-last: forward has no convolution that would take one"
    graph = module._get_method("forward").graph
    itself, *arguments = list(graph.inputs())
    first = next(graph.nodes(), graph.return_node())
    others = []
    for argument in arguments:
        kind = argument.type().annotation_str
        if kind not in _METHODS:
            others += [kind] * ("Tensor" in kind)
            continue
        name, result = _METHODS[kind]
        if not module._has_method(name):
            model.define(f"def {name}(self, value: {kind}) -> {kind}:\n    return {result.format(ranks=ranks)}\n")
        call = graph.create("prim::CallMethod", [itself, argument], 1)
        call.s_("name", name)
        call.insertBefore(first)
        call.output().setType(argument.type())
        argument.replaceAllUsesAfterNodeWith(call, call.output())
    dimensions = " and ".join(f"{rank}D" for rank in ranks)
    remark = f"input_format: forward converts its {dimensions} inputs to channels-last, except those with one channel"
    return f"{remark}; arguments of type {', '.join(others)} stay as they are" if others else remark


class ProgramTensors(TensorContainer):
    """The tensors of an exported program, under their names in its state dict."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(_tensors_of(program))
        self._program = program

    def sites(self, prefix: str) -> list[Site]:
        """Return the weights that reach a convolution in any of the program's graphs."""
        program, found = self._program, dict[str, Site]()
        tensors = _tensors_of(program)
        for node, names in _convolutions(program.graph, _names_of_inputs(program)):
            schema = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
            arguments = {**dict(zip(schema, node.args)), **node.kwargs}
            weight, is_converted = _source_of(arguments["weight"])
            name, groups = names.get(weight), arguments.get("groups", 1 if "groups" in schema else 0)
            if name is None and (is_converted or weight.op == "placeholder"):
                continue  # in format already, or an input of the program
            name = name or f"<computed {len(found)}>"
            tensor = tensors.get(name)
            rank = weight.meta["val"].dim() if tensor is None else tensor.dim()
            path, _, last = ".".join(filter(None, (prefix, name))).rpartition(".")
            reason = Reason.ON_THE_FLY if tensor is None else None
            if rank in (4, 5):
                found.setdefault(name, Site(path, last, _layer(node), rank, groups, self, tensor, reason))
        return list(found.values())


def note_strides(program: ExportedProgram) -> None:
    """Make a program note the strides that its tensors have, and those of all that it computes from them.

    Raises:
        RuntimeError: The program would not run with such tensors.
    """
    names, tensors = _names_of_inputs(program), _tensors_of(program)
    values = {node: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    changed = []
    for node, value in values.items():
        tensor = tensors.get(names[node] or "")
        if tensor is not None and value.stride() != tensor.stride():
            changed.append(node)
            with value.fake_mode:
                values[node] = torch.empty_strided(value.shape, tensor.stride(), dtype=value.dtype, device=value.device)
    if not changed:
        return
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp  # imports the compiler, which takes a second

    before = {node: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    symbols = {node: node.meta["unbacked_bindings"] for node in before if "unbacked_bindings" in node.meta}
    try:
        propagation = FakeTensorProp(program.graph_module, before[changed[0]].fake_mode)
        propagation.propagate_dont_convert_inputs(*values.values())
        for node, value in before.items():
            for old, new in zip(tree_leaves(value), tree_leaves(node.meta["val"])):
                if isinstance(old, Tensor):
                    new.requires_grad_(old.requires_grad)
                    if old.stride() != new.stride():
                        _expect_no_fixed_strides(node)
    except Exception as error:
        raise RuntimeError(
            "the exported program was exported, or decomposed, for weights in another format, and would not run with "
            f"these: {str(error).splitlines()[0]} Convert the model before exporting it"
        ) from error
    for node, bindings in symbols.items():  # the propagation has replaced the program's own symbols
        node.meta["unbacked_bindings"] = bindings


def _tensors_of(program: ExportedProgram) -> dict[str, Tensor]:
    named = {**program.constants, **program.state_dict}
    return {name: each for name, each in named.items() if isinstance(each, Tensor)}


def _names_of_inputs(program: ExportedProgram) -> _Names:
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    return {node: targets.get(node.name) for node in program.graph.find_nodes(op="placeholder")}


def _convolutions(graph: fx.Graph, names: _Names) -> Iterator[tuple[fx.Node, _Names]]:
    """Yield the convolutions of a graph and of graphs that it calls, with the names of their graph's inputs."""
    for node in graph.nodes:
        if _operator(node) in OPERATORS:
            yield node, names
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            given = [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
            called = [getattr(graph.owning_module, str(each.target)) for each in given if each.op == "get_attr"]
            for inner in (each.graph for each in called if isinstance(each, fx.GraphModule)):
                inputs = list(inner.find_nodes(op="placeholder"))
                # Operators take the inputs of a graph as their last arguments.
                passed = [names.get(_source_of(each)[0]) for each in given[len(given) - len(inputs) :]]
                yield from _convolutions(inner, dict(zip(inputs, passed)))


def _source_of(node: Any) -> tuple[Any, bool]:
    """Return the node that a weight comes from, and whether it is converted to channels-last on the way."""
    is_converted = False
    while _operator(node) in PASSING_ON:
        memory_format = node.kwargs.get("memory_format")
        is_converted = is_converted or _operator(node) == "nhwc::convert_weight" or memory_format in _CHANNELS_LAST
        node = node.args[0]
    return node, is_converted


def _operator(node: Any) -> str:
    """Return the name of the operator that a node calls; empty if it calls none."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _layer(node: fx.Node) -> str:
    """Return the class of the module that a node comes from, or its operator."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    kind = stack[-1][1] if stack else _operator(node)
    return getattr(kind, "__name__", str(kind).rpartition(".")[2].rpartition("::")[2])


def _expect_no_fixed_strides(node: fx.Node) -> None:
    """Raise a RuntimeError if a value, whose strides change, is read by strides that are numbers in the program."""
    for user in node.users:
        if str(user.target).startswith("aten.as_strided"):
            raise RuntimeError(f"{user.target} reads {node} by strides of its own.")
