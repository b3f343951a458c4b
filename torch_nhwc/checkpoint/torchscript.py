"""An input format inside of a TorchScript module, which takes no hooks: methods that its forward calls first."""

import torch

# For each type of an argument, the method that converts it, and the expression that the method returns.
_METHODS = {
    "Tensor": ("_nhwc_bring_image", "to_channels_last(value, {ranks})"),
    "Optional[Tensor]": ("_nhwc_bring_image_if_any", "None if value is None else to_channels_last(value, {ranks})"),
    "List[Tensor]": ("_nhwc_bring_images", "[to_channels_last(each, {ranks}) for each in value]"),
    "Dict[str, Tensor]": (
        "_nhwc_bring_named_images",
        "{{name: to_channels_last(value[name], {ranks}) for name in value.keys()}}",
    ),
}


def convert_inputs_(model: torch.jit.ScriptModule, ranks: list[int]) -> str:
    """Make forward convert its images and volumes to channels-last first; return the remark for the report.

    The signature of forward stays, and so does everything that the module holds. The module must not have run yet, and
    no other object may have its class, as is true for a module that was just loaded.

    Args:
        model: A loaded module.
        ranks: The ranks of inputs to convert; empty if no convolution takes such inputs.
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
