"""A format of the inputs inside of a TorchScript module, which takes no hook: calls in front of its forward."""

from collections.abc import Sequence

import torch

from torch_nhwc.entries import brought  # noqa: F401  by its name in the code below
from torch_nhwc.planning.entry import ranks_to_bring
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import PlanRow

# By the type of an argument, the method that brings it into channels-last, and what it returns.
_METHODS = {
    "Tensor": ("_nhwc_bring_image", "brought(value, {ranks})"),
    "Optional[Tensor]": ("_nhwc_bring_image_if_any", "None if value is None else brought(value, {ranks})"),
    "List[Tensor]": ("_nhwc_bring_images", "[brought(each, {ranks}) for each in value]"),
    "Dict[str, Tensor]": (
        "_nhwc_bring_named_images",
        "{{name: brought(value[name], {ranks}) for name in value.keys()}}",
    ),
}
_NAMES = {method for method, _ in _METHODS.values()}


def bring_inputs(model: torch.jit.ScriptModule, rows: Sequence[PlanRow], request: Request) -> str:
    """Has forward bring its images and volumes into channels-last first; the remark on it for the report.

    Its arguments stay, and so does all that the module holds. The module must not have run before, and its class be
    nobody else's, as that of a loaded one is.
    """
    assert request.input_format is not None
    wanted = ranks_to_bring(request.input_format, request.format)
    ranks = sorted({row.rank for row in rows if row.rank in wanted})
    module = model._c
    if any(module._has_method(name) or module.hasattr(name) for name in _NAMES):
        return "input_format: forward brings its inputs into channels-last already"
    if not ranks or not module._has_method("forward"):
        return "input_format: no input is brought into channels-last: forward has no convolution that would take one"
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
    remark = f"input_format: forward brings its {dimensions} inputs into channels-last, but for those of one channel"
    return f"{remark}; arguments of type {', '.join(others)} stay as they come" if others else remark
