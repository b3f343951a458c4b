"""`convert_`: find the sites, decide, and change everything or nothing."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from torch_nhwc.converting.edits import change, warn_held, warn_unshared
from torch_nhwc.converting.report import Report
from torch_nhwc.converting.step_guard import is_guarded
from torch_nhwc.ops import Outcome, Storage
from torch_nhwc.planning.companions import sources_of
from torch_nhwc.planning.deciding import Decisions, decide
from torch_nhwc.planning.matching import match
from torch_nhwc.planning.plans import (
    SEEN_BY_EXAMPLE,
    Action,
    CompanionRow,
    FilterFunction,
    Options,
    PlanOrPath,
    PlanRow,
    Preserve,
    in_vain,
    plan_from,
)
from torch_nhwc.rendering import first_of, several, warn
from torch_nhwc.sites.finding import find
from torch_nhwc.sites.reasons import Reason


def convert_(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    plan: PlanOrPath | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    strict: bool = False,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: Preserve = True,
    each_forward: bool = False,
) -> Report:
    """Convert the convolution weights of a model to a memory format, in place, with all that belongs to them.

    Parameters stay the same objects; gradients follow, and so do the optimizer state and averaged copies that are
    given. All or nothing: after an exception the model is as it was. A second call does nothing.

    Args:
        model: Any module, TorchScript modules included, or one layer. Convert before wrapping and compiling it.
        memory_format: `None` is channels-last by the weights' rank. `torch.channels_last` means 2D weights,
            `torch.channels_last_3d` 3D ones, `torch.contiguous_format` both. Their names mean the same.
        optimizer: One or several, whose state follows, also after `load_state_dict`; `()` if there is none.
        ema: Averaged copies: a copy of the model, `AveragedModel`, or a mapping of full names to tensors; or several.
        filter_fn: Called as `filter_fn(module, path)`; if it returns false, the layer stays as it is.
        plan: A plan to apply, or the path of a file that `Plan.to_json`, `Tuning.to_json` or the command line wrote. It
            has its own memory format, filter and example inputs.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments, on which the model
            runs once, to see which tensors reach its convolutions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as in `convert_weights_`. The default is `"auto"`.
        strict: Whether to raise, before anything changes, if a weight is refused, or the arguments fit no
            weight or no input.
        input_format: `"channels_last"` also converts the model's inputs, images and volumes alike, by a forward
            pre-hook; those of a rank that its convolutions have. `"channels_last_3d"` means volumes only.
        preserve: Whether layers that lose channels-last, or that PyTorch computes wrong, are replaced: their class
            changes. If false, only layers whose training the conversion itself makes wrong are, in training mode. With
            `"at_once"` they are replaced, and no result waits for the activation after it.
        each_forward: Whether weights stay as they are, and layers convert them in each forward: for parameters that
            have to be contiguous, before or after wrapping.

    Returns:
        What was done to every weight, and why; its `revert` undoes it.

    Raises:
        ValueError, TypeError: An argument is not valid, or the model differs from the plan.
        RuntimeError: `strict`; or the operators refuse a tensor, and their error says why.

    Warns:
        UserWarning: Weights are refused or leave shared memory; something else holds the memory of an averaged copy, a
            gradient or optimizer state, and will not follow; no weight or no input is converted, because of
            `memory_format`, `filter_fn` or `input_format` or since there is none; or weights that move have gradients
            and `optimizer` is `None`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv3d(3, 8, 3))
        >>> report = torch_nhwc.convert_(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].weight.stride(), model[1].weight.stride()
        ((27, 1, 9, 3), (81, 1, 27, 9, 3))
    """
    start = time.perf_counter()
    given = None
    if not isinstance(strict, bool):
        raise ValueError(f"expected strict to be True or False, got {strict!r}")
    if plan is None:
        options = Options.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
        found = find(model, example_inputs)
    elif any(each is not None for each in (memory_format, filter_fn, example_inputs)) or not preserve or each_forward:
        raise ValueError(
            "a plan has its own memory format, filter and example inputs, and says which layers to replace, and what "
            "to convert in each forward: pass the one or the others"
        )
    else:
        given = plan_from(plan)
        found = match(given, model)
        options = given.options(storage, input_format)
    decisions = decide(found, options, sources_of(optimizer, ema, model), given)
    return apply(decisions, strict, start)


@contextmanager
def channels_last(model: nn.Module, **options: Any) -> Iterator[Report]:
    """Convert a model by `convert_(model, **options)`, and revert it at the end, after exceptions too.

    The state of an optimizer that is made inside of the context follows by `report.revert(optimizer)`.

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


def apply(decisions: Decisions, strict: bool = False, start: float | None = None) -> Report:
    """Do everything that was decided for a model, or nothing; `start` is when the call began."""
    start = time.perf_counter() if start is None else start
    # Before anything changes, since warnings may be errors.
    _warn_of_refused(decisions.rows, strict)
    _warn_of_nothing_done(decisions, strict)
    _warn_of_unknown_optimizer(decisions)
    warn_unshared([site.full_name for site, outcome in decisions.leaving() if outcome is Outcome.COPIED_SHARED])
    warn_held(decisions.held())
    undo, new_bytes = change(decisions)
    companions = [
        CompanionRow(each.weight.name, each.label, None if each.reason else each.outcome, each.reason)
        for each in decisions.companions
    ]
    seconds = time.perf_counter() - start
    return Report(decisions.plan, tuple(companions), tuple(decisions.remarks), new_bytes, seconds, undo)


def _warn_of_refused(rows: Sequence[PlanRow], strict: bool) -> None:
    """Warn about weights that should change and cannot."""
    by_reason: dict[Reason, list[str]] = {}
    for row in rows:
        if row.action is Action.REFUSE and row.reason is not None:
            by_reason.setdefault(row.reason, []).append(f"{row.full_name!r} ({row.layer})")
    if by_reason:
        sentences = [f"{first_of(names)}: {reason.value}" for reason, names in by_reason.items()]
        count = sum(map(len, by_reason.values()))
        _warn(f"{count} of {several(len(rows), 'weight')} refused: {'; '.join(sentences)}", strict)


def _warn_of_nothing_done(decisions: Decisions, strict: bool) -> None:
    """Warn if no weight is requested, or no input that could be converted, unless layers are restored."""
    found, options = decisions.found, decisions.options
    if not options.format.is_channels_last and any(
        layer.reason is Reason.REPLACED and options.skip_reason(layer.module, layer.path) is None
        for layer in found.layers
    ):
        return
    name = f"the {type(found.model).__name__}"
    sentences = in_vain(decisions.plan, name)
    if not decisions.rows and not any(row.is_wanted for _, row in decisions.layers):
        hint = "" if found.observed else f". {SEEN_BY_EXAMPLE}"
        sentences.append(f"nothing to convert in {name}: no 2D or 3D convolution was found{hint}")
    if sentences:
        _warn("; ".join(sentences), strict)


def _warn_of_unknown_optimizer(decisions: Decisions) -> None:
    """Warn if weights that move have gradients, and the state of an optimizer that was not given stays as it is."""
    if not decisions.sources.is_optimizer_unknown:
        return
    if any(row.action is Action.CONVERT and tensor.grad is not None for _, row, tensor in decisions.changing):
        steps = "is right only while torch_nhwc aligns it before each step" if is_guarded() else "is silently wrong"
        _warn(
            "the weights have gradients, and no optimizer was given: pass optimizer=, so that its state follows, or "
            "optimizer=() if there is none. With state that stays as it is, steps are slower, and that of a fused "
            f"optimizer on a CPU {steps}"
        )


def _warn(message: str, strict: bool = False) -> None:
    if strict:
        raise RuntimeError(f"torch_nhwc: {message} (nothing was changed, since strict=True)")
    warn(f"torch_nhwc: {message}")
