"""`verify`: whether a model computes what another one computes."""

import time
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.running import ModuleStack, arguments_of, copy_inputs
from torch_nhwc.verifying.reference import Options, compare_module, compare_parameter
from torch_nhwc.verifying.repeatable_run import Inputs, repeatable
from torch_nhwc.verifying.verification import Verdict, Verification, VerificationRow


def verify(
    before: nn.Module,
    after_or_report: Any,
    example_inputs: Any,
    *,
    backward: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Compare a model with its reference: each layer by itself, on the inputs of the reference's layer, and the whole.

    Layers run in both formats, on the inputs as they are and on changed ones: with a large mean, with a constant
    channel, as a batch of 1 and of 2. Outputs, gradients of inputs and parameters, and buffers are compared by
    position, in each layer and in the whole model. Where a difference is larger than rounding errors usually are, a
    noise floor decides: how far the reference is from its own float64 run, from another run, and from one on inputs
    that change by a rounding error.

    Both models run several times, in the caller's autocast region if there is one. Buffers, random generators,
    gradients and the example inputs stay as they are. It takes as long as fifty to a hundred training steps, and the
    memory of a few: small inputs are enough.

    Args:
        before: The reference, such as a deep copy made before a conversion.
        after_or_report: The model to verify, or the report of its conversion.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        backward: Whether to compare gradients.
        rtol: How large a difference may be in units of the largest value in the same channel. `None` depends on the
            dtype: 1e-10 in float64, 1e-4 in float32, 4e-3 in float16, 2e-2 in bfloat16; see
            `torch_nhwc.running.TOLERANCES`, also for the whole model, whose gradients are compared in float32 and
            float64 only.
        atol: What is added to that.

    Returns:
        A row for everything that was compared; true where nothing differs.

    Raises:
        TypeError: One of the models is not a module.
        ValueError: Both are the same model, have different modules or parameters, are in different modes, have lazy
            layers or are on the meta device, or the model of the report no longer exists.
        Exception: Whatever the reference raises on the example inputs.

    Example:
        >>> import copy
        >>> before = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
        >>> model = copy.deepcopy(before)
        >>> report = torch_nhwc.convert_(model)
        >>> verification = torch_nhwc.verify(before, report, torch.randn(2, 3, 8, 8))
        >>> verification.first.layer, verification.first.inputs
        ('GroupNorm', 'a large mean, channels-last')
    """
    start = time.perf_counter()
    is_module = isinstance(after_or_report, nn.Module) or not hasattr(after_or_report, "model")
    after = after_or_report if is_module else after_or_report.model
    _expect_comparable(before, after)
    inputs = Inputs(*arguments_of(before, copy_inputs(example_inputs)))
    options = Options(backward, rtol, atol or 0.0)
    with repeatable(before, after):
        calls = _layer_calls(before, inputs)
        layers = {path for path, _ in calls}
        rows = _parameter_rows(before, after)
        theirs = _modules(after)
        for path, given in calls:
            rows += compare_module(path, before.get_submodule(path), theirs[path], given, options)
        rows += compare_module("", before, after, inputs, options, is_model=True)
    not_run = tuple(
        path for path, module in _modules(before).items() if module._parameters and layers.isdisjoint(_and_above(path))
    )
    return Verification(_in_order(rows, calls), not_run, time.perf_counter() - start)


def _layer_calls(model: nn.Module, inputs: Inputs) -> list[tuple[str, Inputs]]:
    """Run the model and return the calls of its layers, the modules that call no other module, with their inputs."""
    calls: list[tuple[str, Inputs]] = []
    containers: set[str] = set()

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        containers.update(outer.path for outer in stack.running[:-1])
        calls.append((stack.path, Inputs(args, kwargs).mapped(Tensor.clone)))  # before the module writes to them

    stack = ModuleStack(model)
    # A TorchScript module refuses hooks, but calls those that it has.
    handles = [
        nn.Module.register_forward_pre_hook(module, note, with_kwargs=True) for module in _modules(model).values()
    ]
    try:
        with repeatable(model), stack:
            given = inputs.mapped(Tensor.clone)
            model(*given.args, **given.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return [(path, given) for path, given in calls if path not in containers]


def _parameter_rows(before: nn.Module, after: nn.Module) -> list[VerificationRow]:
    modules, theirs = _modules(before), dict(after.named_parameters())
    rows = []
    for name, parameter in before.named_parameters():
        path = next(each for each in _and_above(name) if each in modules)
        what = name.removeprefix(f"{path}.")
        rows.append(compare_parameter(path, modules[path], what, parameter.detach(), theirs[name].detach()))
    return rows


def _in_order(rows: list[VerificationRow], calls: list[tuple[str, Inputs]]) -> tuple[VerificationRow, ...]:
    """Return the worst row about each thing: layers as they ran, layers that did not run, and the model."""
    worst: dict[tuple[str, str], VerificationRow] = {}
    for row in rows:
        key = row.path, row.what
        worst[key] = max(worst.get(key, row), row, key=_severity)
    order = {path: index for index, path in reversed([*enumerate(path for path, _ in calls)])}
    last = len(calls)
    return tuple(sorted(worst.values(), key=lambda row: order.get(row.path, last if row.path else last + 1)))


def _severity(row: VerificationRow) -> tuple[int, float]:
    share = row.error / row.tolerance if row.tolerance else row.error and float("inf")
    if row.verdict is Verdict.DIFFERS:
        return 2 + (not row.before_differs), share
    return int(row.verdict is not Verdict.EQUAL), share


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by path; those that compute a parametrized weight count as part of their layer."""
    return {path: module for path, module in model.named_modules() if "parametrizations" not in path.split(".")}


def _and_above(path: str) -> list[str]:
    """Return a path and those of the modules around it."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names), -1, -1)]


def _expect_comparable(before: Any, after: Any) -> None:
    """Raise where two models cannot be compared."""
    if after is None:
        raise ValueError("verify: the model of the report no longer exists")
    for model in (before, after):
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: expected two modules, or a module and a report, got {type(model).__name__}")
    if before is after:
        raise ValueError("verify: before and after are the same model: give a deep copy made before the conversion")
    ours, theirs = _description(before), _description(after)
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            both = f"{ours.get(name, 'absent')} in one, {theirs.get(name, 'absent')} in the other"
            raise ValueError(f"verify: the models do not have the same {name}: {both}")


def _description(model: nn.Module) -> dict[str, str]:
    """Return what two models that can be compared have in common."""
    described = {}
    for path, module in _modules(model).items():
        described[f"module {path!r}"] = "training" if getattr(module, "training", False) else "evaluation"
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(f"verify: {name!r} has no values yet: run the model once, or load its weights")
        described[f"parameter {name!r}"] = f"{tuple(parameter.shape)}, requires_grad={parameter.requires_grad}"
    return described
