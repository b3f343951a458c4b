"""The commands `plan` and `convert`."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer
from torch.nn.parameter import is_lazy

from torch_nhwc.cli.command import answer, errors_in_a_line, with_example
from torch_nhwc.cli.conversion import convert_and_compare, read_plan, write
from torch_nhwc.cli.models import Example
from torch_nhwc.cli.options import EachForward, Html, Json, MemoryFormat, Preserve, WithTable
from torch_nhwc.cli.outputs import check_file, check_page, showing, text_of
from torch_nhwc.cli.saved import or_files
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.rendering import paragraphs


@errors_in_a_line
@with_example
def plan(
    example: Example,
    memory_format: MemoryFormat = None,
    preserve: Preserve = False,
    each_forward: EachForward = False,
    table: WithTable = False,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """Print what a conversion would do to a model, and why, without doing it.

    With inputs the model runs once, to see what reaches its convolutions, unless it has lazy layers.

    For example: torch-nhwc plan --factory my_model:build --preserve --table
    """
    check_page(html)
    with showing(f"Planning for {example.name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says as much
        report = convert_(
            example.model,
            memory_format,
            preserve=preserve,
            each_forward=each_forward,
            example_inputs=None if any(map(is_lazy, example.model.parameters())) else example.inputs,
            dry_run=True,
        )
    answer(report.plan.to_json() if json_output else text_of(report, table))
    if html is not None:
        report.plan.html(html)


@errors_in_a_line
@or_files
@with_example
def convert(
    example: Example,
    memory_format: MemoryFormat = None,
    preserve: Preserve = False,
    each_forward: EachForward = False,
    from_plan: Annotated[
        Path | None,
        typer.Option("--plan", help="What `tune --save` or `plan --json` wrote, instead of these.", metavar="FILE"),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Leave the layers as they are that would compute something else.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where a weight is refused.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the archive, of a TorchScript model, or else the state dict.",
            metavar="FILE",
            rich_help_panel="Output",
        ),
    ] = None,
    table: WithTable = False,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """Convert a model, print the report, and compare its outputs with those from before.

    It ends with 1 where they differ by more than the tolerance, and writes no model then. Of files IN and OUT, as in
    `torch-nhwc convert model.pt converted.pt`, a saved model is converted into a file of the same kind, without running
    it.

    For example: torch-nhwc convert --factory my_model:build --preserve --out converted.pt
    """
    check_file("--out", out)
    check_page(html)
    if verify:
        example.expect_to_run()
    options = {
        "preserve": preserve,
        "each_forward": each_forward,
        "plan": None if from_plan is None else read_plan(from_plan),
        "verify": example.inputs if verify else None,
        "strict": strict,
    }
    with showing(f"Converting {example.name}"):
        converted = convert_and_compare(example, memory_format=memory_format, **options)
    if json_output:
        told = {"is_right": converted.is_right, "comparison": converted.comparison}
        answer(json.dumps(json.loads(converted.report.to_json()) | told, indent=1))
    else:
        answer(text_of(converted.report, table))
        answer(paragraphs([converted.comparison]), end="")
    if html is not None:
        converted.report.html(html)
    if not converted.is_right:
        raise SystemExit(1)
    if out is not None:
        kind = write(example.model, out)
        if not json_output:
            answer(paragraphs([f"Written to {out}: {kind}."]), end="")
