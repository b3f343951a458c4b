"""Pipelines of diffusers: the convolution weights of all components, by one call."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from types import NoneType
from typing import Any

import torch
from torch import nn

from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.finding.find import find
from torch_nhwc.planning.plans import Plan

try:
    import diffusers
except ImportError as error:
    raise ImportError("diffusers is missing: pip install 'torch_nhwc[diffusers]'") from error

_IN_PLANS = ("filter_fn", "example_inputs", "preserve", "each_forward")


class PipelineReport(dict[str, Report]):
    """The report on each component of a pipeline, by its name; printed, all of them.

    Example:
        >>> components = {"vae": torch.nn.Conv2d(3, 8, 3)}
        >>> report = convert_pipeline_(components)
        >>> report["vae"].rows[0].action
        <Action.CONVERT: 'convert'>
        >>> report.revert()
        >>> components["vae"].weight.is_contiguous()
        True
    """

    def revert(self) -> None:
        """Lays the components' weights out as they lay before, each component all or nothing, the last one first.

        Raises:
            RuntimeError: a component cannot go back, as `Report.revert` says it; the others have gone back, and another
                call brings it back too, once it can.
        """
        with ExitStack() as every:
            for report in self.values():
                every.callback(report.revert)

    def __str__(self) -> str:
        return "".join(f"{name}: {report}" for name, report in self.items())


def convert_pipeline_(
    pipeline: "diffusers.DiffusionPipeline | Mapping[str, Any]",
    memory_format: torch.memory_format | str | None = None,
    *,
    components: Collection[str] | None = None,
    plan: Mapping[str, Plan] | None = None,
    **options: Any,
) -> PipelineReport:
    """Brings the convolution weights of a pipeline's components into a memory format, in place, by `convert_`.

    Schedulers, tokenizers and components that are `None` are passed by, and so are modules without a convolution. What
    two components, or two pipelines, share is converted once. An exception leaves all components as they were. Convert
    before offloading; group offloading to a disk takes contiguous weights only, and `each_forward=True`.

    Args:
        pipeline: a pipeline, or the `components` of one.
        memory_format: as for `convert_`.
        components: the names of those to convert, where it is not all that have convolutions.
        plan: plans by the name of the component that each is for. What a plan says is not asked of `memory_format` and
            `options`, which are for the other components.
        options: what else `convert_` takes, the same for all: `preserve`, `each_forward`, `input_format`, `filter_fn`,
            `storage`, `strict`, `dry_run`. An optimizer, averaged copies and example inputs belong to one component:
            give them to `convert_` with it.

    Returns:
        A dict of the components' reports; its `revert` undoes all of them.

    Raises:
        ValueError: there is no module; a name is not that of a module of the pipeline, or a plan's is not among
            `components`; or `convert_` raises it for a component, which is named.
        TypeError: an argument is of another type; a component is a list or a dict of modules; or `convert_` raises it.
        RuntimeError: `convert_` raises it for a component, which is named.

    Example:
        >>> components = {"vae": torch.nn.Conv2d(3, 8, 3), "text_encoder": torch.nn.Linear(3, 8), "tokenizer": None}
        >>> convert_pipeline_(components, strict=True)
        {'vae': <Report: 1 weight is channels-last: 1 moved (864 bytes), 0 left>}
    """
    if not isinstance(pipeline, (diffusers.DiffusionPipeline, Mapping)):
        raise TypeError(f"convert_pipeline_: expected a pipeline or its components, got {type(pipeline).__name__}")
    if not isinstance(plan, (Mapping, NoneType)) or not isinstance(components, (Collection, NoneType)):
        raise TypeError("convert_pipeline_: expected plan={name: plan}, and components=[name]")
    plans = plan or {}
    held = pipeline if isinstance(pipeline, Mapping) else pipeline.components
    modules = {name: each for name, each in held.items() if isinstance(each, nn.Module)}
    for name, each in held.items():
        inside = each.values() if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else ()
        if any(isinstance(module, nn.Module) for module in inside):
            raise TypeError(f"convert_pipeline_: {name!r} holds several modules: give each by a name of its own")
    if not modules:
        raise ValueError("convert_pipeline_: the pipeline has no module")
    if components is None:
        # Where none has a convolution, convert_ says so.
        names = [name for name, each in modules.items() if name in plans or find(each, None).sites] or [*modules]
    else:
        names = [components] if isinstance(components, str) else [*dict.fromkeys(components)]
    for name in (*names, *plans):
        if name not in modules:
            raise ValueError(f"convert_pipeline_: {name!r} is no module of the pipeline: it has {', '.join(modules)}")
        if name not in names:
            raise ValueError(f"convert_pipeline_: there is a plan for {name!r}, which is not among components")
    of_planned = {key: value for key, value in options.items() if key not in _IN_PLANS}
    reports = PipelineReport()
    with ExitStack() as undo:
        undo.callback(reports.revert)
        for name in names:
            asked = {"plan": plans[name]} | of_planned if name in plans else {"memory_format": memory_format} | options
            try:
                reports[name] = convert_(modules[name], **asked)
            except (RuntimeError, TypeError, ValueError) as error:
                if type(error) not in (RuntimeError, TypeError, ValueError):  # of the caller's code
                    raise
                raise type(error)(f"convert_pipeline_: {name!r}: {error}") from error
        undo.pop_all()
    return reports
