"""Converting a model: find, decide, follow, prepare, commit, report."""

import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from torch_nhwc.converting.commit import commit_changes
from torch_nhwc.converting.preparing import prepare
from torch_nhwc.converting.proving import Proof, prove
from torch_nhwc.converting.report import Report, report_of
from torch_nhwc.converting.telling import tell_differing, tell_nothing_found, tell_refused, tell_unnamed, tell_unshared
from torch_nhwc.converting.undoing import Undo
from torch_nhwc.finding.exported import module_for
from torch_nhwc.finding.find import find
from torch_nhwc.finding.site import Found
from torch_nhwc.outcomes import Outcome, Storage
from torch_nhwc.planning.companions import Sources, Weight, sources_of
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.following import follow
from torch_nhwc.planning.layers import LayerDecision, decide_layers
from torch_nhwc.planning.matching import match, match_layers
from torch_nhwc.planning.planner import plan_of
from torch_nhwc.planning.plans import EachForward, Plan
from torch_nhwc.planning.request import FilterFunction, Request
from torch_nhwc.preserving.find import find_layers


def convert_(
    model: nn.Module | ExportedProgram,
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
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: bool = False,
    each_forward: EachForward = False,
    verify: Any = None,
) -> Report:
    """Brings the convolution weights of a model into a memory format, in place, with all that belongs to them.

    Parameters stay the objects that they are. Gradients follow, and so do the optimizer state and averaged copies that
    are given. Everything is checked before anything changes; then weights and what follows them change in one call of
    the operators, and an exception leaves the model as it was. A weight that is in the format is left alone, so that a
    second call moves nothing.

    Args:
        model: any module, TorchScript modules included, one layer, or an exported program, with which the model
            converts that it was exported from. Convert before wrapping it for distributed training, and before
            compiling it.
        memory_format: `None` is channels-last by the weights' rank, 2D and 3D in one call. `torch.channels_last` means
            the 2D weights, `torch.channels_last_3d` the 3D ones, `torch.contiguous_format` both. Their names, such as
            `"channels_last"`, mean the same.
        optimizer: one, or several, whose state follows, also behind every `load_state_dict`; `()` says that there is
            none.
        ema: averaged copies that follow: a deep copy of the model, a wrapper that keeps one (`swa_utils.AveragedModel`,
            and those of timm, ema_pytorch and diffusers), or a mapping of full names to the tensors themselves (not a
            module's `state_dict()`, whose tensors are others); one or several.
        filter_fn: called as `filter_fn(module, path)`; false keeps the layer as it is.
        plan: a plan to apply instead of making one; it has its own memory format, filter and example inputs.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones, on which the model runs
            once, to see which tensors reach its convolutions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` explains them; `None` is the
            plan's, and `"auto"` without one.
        strict: whether a weight that is refused raises, before anything is touched, and a model that has no weight of
            the rank asked for.
        dry_run: whether only to report what would happen.
        input_format: `"channels_last"` also brings inputs into channels-last at the model's entry, by a forward
            pre-hook: those of a rank that the convolutions have which are asked for. `"channels_last_3d"` means volumes
            alone. The report names the hook.
        preserve: whether layers that lose on channels-last are exchanged for such as keep it: the class of the object
            changes, and nothing else. `torch.contiguous_format` brings exchanged layers back.
        each_forward: whether weights stay as they are, and are converted on their way to the convolution, in each
            forward: for parameters that have to be contiguous, before or after wrapping. The layers' classes are
            exchanged, and nothing else. `"keep"` also keeps what a forward without gradients has converted, beside the
            weight, until autograd's version of the weight changes: for inference.
        verify: example inputs, as above, on which a converted copy is compared with the model by `verify`, before
            anything is touched. Layers that differ stay as they are, with the reason `DIFFERS`; the rest converts. It
            takes the memory of another model and a few times that of a training step.

    Returns:
        What was done to every weight, and why; its `revert` undoes it.

    Raises:
        RuntimeError: `strict`, and a weight was refused, there is none to convert, or `verify` has found a difference;
            `verify`, and the model cannot be copied; or the operators refuse a tensor, and their error says why.
        ValueError: an argument is none of those above; the model differs from the plan, whose first differing row is
            named; lazy layers and example inputs together; an optimizer or an averaged copy is that of another model.
        TypeError: an argument is of another type.

    Warns:
        UserWarning: once each, where weights were refused, where there is none to convert and no layer to exchange,
            where weights leave shared memory, where weights that move have gradients and `optimizer` is `None`, and
            where `verify` has found a difference.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv3d(3, 8, 3))
        >>> report = torch_nhwc.convert_(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].weight.stride(), model[1].weight.stride()
        ((27, 1, 9, 3), (81, 1, 27, 9, 3))
    """
    start = time.perf_counter()
    module = module_for(
        model, ema=ema, example_inputs=example_inputs, preserve=preserve, each_forward=each_forward, verify=verify
    )
    sources = sources_of(optimizer, ema, module)
    if plan is None:
        request = Request.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
        found = find(module, example_inputs)
    elif any(each is not None for each in (memory_format, filter_fn, example_inputs)) or preserve or each_forward:
        raise ValueError(
            "a plan has its own memory format, filter and example inputs, and says which layers to exchange, and what "
            "to convert in each forward: give the one or the others"
        )
    else:
        found = match(plan, module)
        request = request_of(plan, storage, input_format)
    proof = None
    if verify is not None:

        def convert_copy(copy: nn.Module, differing: Collection[str]) -> Plan:
            asked = request._replace(differing=differing)
            layers = _decide_layers(found, asked, plan)
            planned = plan_of(decide(found, asked, plan), layers, asked, found.observed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come with the model itself
                return carry_out(
                    match(planned, copy), request_of(planned, None), sources_of(None, None, copy), planned
                ).plan

        proof = prove(module, verify, convert_copy)
        tell_differing(proof.remarks, strict)
        request = request._replace(differing=proof.put_back)
    return carry_out(found, request, sources, plan, strict, dry_run, start, proof)


def request_of(plan: Plan, storage: Storage | None, input_format: Any = None) -> Request:
    """What a plan asks for, with another storage or a format of the inputs where they are given."""
    storage = plan.storage if storage is None else storage
    inputs = input_format or plan.input_format
    request = Request.of(plan.memory_format, storage, None, inputs, bool(plan.layers), plan.each_forward)
    return request._replace(entries=plan.entries)


def carry_out(
    found: Found,
    request: Request,
    sources: Sources,
    plan: Plan | None = None,
    strict: bool = False,
    dry_run: bool = False,
    start: float | None = None,
    proof: Proof | None = None,
) -> Report:
    """All of a conversion behind finding the sites, with their plan where there is one; `start` is when it began."""
    start = time.perf_counter() if start is None else start
    layers = _decide_layers(found, request, plan)
    following = follow(found, decide(found, request, plan), layers, sources, request)
    if proof:
        following.remarks.extend(proof.remarks)
    changes = prepare(following, request)
    tell_refused(following.decisions, strict)
    tell_nothing_found(found, following, request, changes, strict)
    tell_unnamed(following)
    plan = plan_of(following.decisions, layers, request, found.observed)
    undo = Undo.of(following, changes.edits)
    if not dry_run:
        fresh = [each for each in following.decisions if each.outcome in (Outcome.FRESH, Outcome.FRESH_SHARED)]
        tell_unshared([Weight(each.site.full_name, each.tensor, ()) for each in fresh], request.format)
    is_committed = False
    try:
        if not dry_run:
            commit_changes(changes, request)
            is_committed = True
        report = report_of(plan, following, changes, undo, time.perf_counter() - start, dry_run)
        return replace(report, verification=proof.verification) if proof else report
    except BaseException:  # an interrupt
        if is_committed:
            undo.revert(plan, None, None)
        raise


def _decide_layers(found: Found, request: Request, plan: Plan | None) -> list[LayerDecision]:
    if not request.preserve:
        return []
    return decide_layers(match_layers(plan, found.model) if plan else find_layers(found.model), request, plan)


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
