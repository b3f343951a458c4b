"""Converting a model: find, decide, follow, prepare, commit, report."""

import inspect
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from torch_nhwc.converting.commit import commit_changes
from torch_nhwc.converting.preparing import prepare
from torch_nhwc.converting.report import Report, report_of
from torch_nhwc.converting.undoing import Undo
from torch_nhwc.finding.find import find
from torch_nhwc.finding.site import Found
from torch_nhwc.outcomes import Storage
from torch_nhwc.planning.companions import Sources, sources_of
from torch_nhwc.planning.deciding import Decision, FilterFunction, Request, decide
from torch_nhwc.planning.following import follow
from torch_nhwc.planning.layers import LayerDecision, decide_layers
from torch_nhwc.planning.matching import match, match_layers
from torch_nhwc.planning.planner import plan_of
from torch_nhwc.planning.plans import EachForward, Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.preserving.find import find_layers
from torch_nhwc.reasons import Reason


def convert_(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    plan: Plan | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    strict: bool = False,
    dry_run: bool = False,
    input_format: Literal["channels_last"] | torch.memory_format | None = None,
    preserve: bool = False,
    each_forward: EachForward = False,
) -> Report:
    """Brings the convolution weights of a model into a memory format, in place, with all that belongs to them.

    Parameters stay the objects that they are. Gradients follow, and so do the optimizer state and averaged copies that
    are given. Everything is checked before anything changes; then weights and what follows them change in one call of
    the operators, and an exception leaves the model as it was. A weight that is in the format is left alone, so that a
    second call moves nothing.

    Args:
        model: any module, TorchScript modules included, or one layer. Convert before wrapping it for distributed
            training, and before compiling it.
        memory_format: `None` is channels-last by the weights' rank, 2D and 3D in one call. `torch.channels_last` means
            the 2D weights, `torch.channels_last_3d` the 3D ones, `torch.contiguous_format` both. Their names, such as
            `"channels_last"`, mean the same.
        optimizer: one, or several, whose state follows.
        ema: averaged copies that follow: `swa_utils.AveragedModel`, a deep copy of the model, or a mapping of full
            names to the tensors themselves (not a module's `state_dict()`, whose tensors are others); one or several.
        filter_fn: called as `filter_fn(module, path)`; false keeps the layer as it is.
        plan: a plan to apply instead of making one; it has its own memory format, filter and example inputs.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones, on which the model runs
            once, to see which tensors reach its convolutions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` explains them; `None` is the
            plan's, and `"auto"` without one.
        strict: whether a weight that is refused raises, before anything is touched.
        dry_run: whether only to report what would happen.
        input_format: `"channels_last"` also brings 4D and 5D inputs into channels-last at the model's entry, by a
            forward pre-hook.
        preserve: whether layers that lose on channels-last are exchanged for such as keep it: the class of the object
            changes, and nothing else. `torch.contiguous_format` brings exchanged layers back.
        each_forward: whether weights stay as they are, and are converted on their way to the convolution, in each
            forward: for parameters that have to be contiguous, before or after wrapping. The layers' classes are
            exchanged, and nothing else. `"keep"` also keeps what a forward without gradients has converted, beside the
            weight, until autograd's version of the weight changes: for inference.

    Returns:
        What was done to every weight, and why; its `revert` undoes it.

    Raises:
        RuntimeError: `strict`, and a weight was refused; or the operators refuse a tensor, and their error says why.
        ValueError: an argument is none of those above; the model differs from the plan, whose first differing row is
            named; lazy layers and example inputs together; an optimizer or an averaged copy is that of another model.
        TypeError: an argument is of another type.

    Warns:
        UserWarning: once, where weights were refused.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv3d(3, 8, 3))
        >>> report = torch_nhwc.convert_(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].weight.stride(), model[1].weight.stride()
        ((27, 1, 9, 3), (81, 1, 27, 9, 3))
    """
    start = time.perf_counter()
    sources = sources_of(optimizer, ema)
    if plan is None:
        request = Request.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
        found = find(model, example_inputs)
    elif any(each is not None for each in (memory_format, filter_fn, example_inputs)) or preserve or each_forward:
        raise ValueError(
            "a plan has its own memory format, filter and example inputs, and says which layers to exchange, and what "
            "to convert in each forward: give the one or the others"
        )
    else:
        found = match(plan, model)
        request = request_of(plan, storage, input_format)
    return carry_out(found, request, sources, plan, strict, dry_run, start)


def request_of(plan: Plan, storage: Storage | None, input_format: Any = None) -> Request:
    """What a plan asks for, with another storage or a format of the inputs where they are given."""
    storage = plan.storage if storage is None else storage
    inputs = input_format or plan.input_format
    return Request.of(plan.memory_format, storage, None, inputs, bool(plan.layers), plan.each_forward)


def carry_out(
    found: Found,
    request: Request,
    sources: Sources,
    plan: Plan | None = None,
    strict: bool = False,
    dry_run: bool = False,
    start: float | None = None,
) -> Report:
    """All of a conversion behind finding the sites, with their plan where there is one; `start` is when it began."""
    start = time.perf_counter() if start is None else start
    layers: list[LayerDecision] = []
    if request.preserve:
        of_model = match_layers(plan, found.model) if plan else find_layers(found.model)
        layers = decide_layers(of_model, request, plan)
    following = follow(found, decide(found.sites, request, plan), layers, sources, request)
    _tell_refused(following.decisions, strict)
    changes = prepare(following, request)
    plan = plan_of(following.decisions, layers, request)
    undo = Undo.of(following, changes.edits)
    if not dry_run:
        commit_changes(changes, request)
    return report_of(plan, following, changes, undo, time.perf_counter() - start, dry_run)


@contextmanager
def channels_last(model: nn.Module, **options: Any) -> Iterator[Report]:
    """Converts a model by `convert_(model, **options)`, and reverts it on the way out, after exceptions too.

    An optimizer that is made inside is not known here: its state follows by `report.revert(optimizer)`.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> with torch_nhwc.channels_last(layer):
        ...     layer.weight.stride()
        (27, 1, 9, 3)
        >>> layer.weight.stride()
        (27, 9, 3, 1)
    """
    report = convert_(model, **options)
    try:
        yield report
    finally:
        report.revert()


def _tell_refused(decisions: list[Decision], strict: bool) -> None:
    by_reason: dict[Reason, list[str]] = {}
    for decision in decisions:
        if decision.action is Action.REFUSE and decision.reason is not None:
            name = f"{decision.site.full_name!r} ({decision.site.layer})"
            by_reason.setdefault(decision.reason, []).append(name)
    if not by_reason:
        return
    sentences = [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {reason.value}"
        for reason, names in by_reason.items()
    ]
    count = sum(map(len, by_reason.values()))
    message = f"torch_nhwc: {count} of {len(decisions)} sites stay as they are: {'; '.join(sentences)}"
    if strict:
        raise RuntimeError(f"{message} (nothing was changed, since strict=True)")
    warnings.warn(message, UserWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How far up the stack, from the calling function, the code is that called the package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch_nhwc", "contextlib"):
        level, frame = level + 1, frame.f_back
    return level
