"""The commands `trace` and `audit`."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_nhwc.cli.command import answer, errors_in_a_line, with_example
from torch_nhwc.cli.inputs import in_channels_last, parse_dtype
from torch_nhwc.cli.models import Example
from torch_nhwc.cli.options import Autocast, Html, InMode, Json, MaxBytes, MaxLosses, MaxMixed, Mode
from torch_nhwc.cli.outputs import check_page, showing
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.running.inputs import call
from torch_nhwc.tracing import auditing, tracer
from torch_nhwc.tracing.budget import assert_layout
from torch_nhwc.tracing.layouts import is_channels_last
from torch_nhwc.tracing.record import Trace
from torch_nhwc.tuning.workload import loss_of

_NOTHING_TO_LOSE = "the model ran contiguous throughout: see what it would lose by --convert, or --preserve"


@errors_in_a_line
@with_example
def trace(
    example: Example,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Bring weights and inputs into channels-last first.")
    ] = False,
    preserve: Annotated[bool, typer.Option("--preserve", help="And exchange the layers that lose it.")] = False,
    reorders: Annotated[
        bool, typer.Option("--reorders", help="Also ask oneDNN, or a GPU's profiler, what is reordered inside.")
    ] = False,
    max_losses: MaxLosses = None,
    max_mixed: MaxMixed = None,
    max_bytes: MaxBytes = None,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """See where a model loses channels-last while it runs, operator by operator.

    A model that is contiguous has nothing to lose: --convert shows what it would lose converted, and --preserve what
    is left of that where layers are exchanged.

    For example: torch-nhwc trace --factory my_model:build --convert --mode training
    """
    check_page(html)
    is_training, dtype = mode is Mode.TRAINING, parse_dtype(autocast, "--autocast")
    example.expect_to_run()
    inputs = _in_channels_last(example, preserve) if convert or preserve else example.inputs
    model = example.model.train(is_training)
    kind = example.like.device.type
    with showing(f"Tracing {example.name}"), tracer.trace(model, reorders=reorders) as traced:
        with torch.set_grad_enabled(is_training), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            output = call(model, inputs)
            loss = loss_of(output) if is_training else None
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    if not (traced.losses or traced.mixed or traced.gained or _ran_channels_last(traced)):
        print(f"torch-nhwc: {_NOTHING_TO_LOSE}", file=sys.stderr)
    _tell(traced, json_output, html)
    _hold_to_budget(traced, max_losses, max_mixed, max_bytes)


@errors_in_a_line
def audit(
    path: Annotated[Path, typer.Argument(help="A Chrome trace, which may be compressed with gzip.", metavar="FILE")],
    max_losses: MaxLosses = None,
    max_mixed: MaxMixed = None,
    max_bytes: MaxBytes = None,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """See where channels-last was lost in a profile that torch.profiler saved with record_shapes=True.

    The model is not needed.

    For example: torch-nhwc audit profile.json.gz --max-losses 0
    """
    check_page(html)
    if not path.is_file():
        raise ValueError(f"expected a file, got {path}")
    with showing(f"Reading {path}"):
        traced = auditing.audit(path)
    _tell(traced, json_output, html)
    _hold_to_budget(traced, max_losses, max_mixed, max_bytes)


def _in_channels_last(example: Example, preserve: bool) -> Any:
    """Converts a model; its inputs in channels-last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `plan` and `convert` tell what is left as it is
        report = convert_(example.model, preserve=preserve, example_inputs=example.inputs)
    return in_channels_last(example.inputs, {row.rank for row in report.rows})


def _ran_channels_last(traced: Trace) -> bool:
    layouts = (layout for module in traced.modules for layout in (*module.inputs, *module.outputs))
    return any(is_channels_last(layout.format) for layout in layouts)


def _tell(traced: Trace, json_output: bool, html: Path | None) -> None:
    answer(traced.to_json() if json_output else str(traced).rstrip("\n"))
    if html is not None:
        traced.html(html)


def _hold_to_budget(traced: Trace, max_losses: int | None, max_mixed: int | None, max_bytes: int | None) -> None:
    """Ends the program with 1 where there is more than allowed, and names it; what has no limit may be as it is."""
    losses = len(traced.losses) if max_losses is None else max_losses
    mixed = len(traced.mixed) if max_mixed is None else max_mixed
    try:
        assert_layout(traced, losses, mixed, max_bytes)
    except AssertionError as error:
        print(f"torch-nhwc: {error}", file=sys.stderr)
        raise SystemExit(1) from None
