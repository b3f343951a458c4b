"""The command `verify`."""

import warnings
from typing import Annotated

import torch
import typer

from torch_nhwc.cli.command import answer, errors_in_a_line, with_example
from torch_nhwc.cli.inputs import parse_dtype
from torch_nhwc.cli.models import Example
from torch_nhwc.cli.options import Autocast, EachForward, Html, InMode, Json, MemoryFormat, Mode, Preserve
from torch_nhwc.cli.outputs import check_page, showing, text_of
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.running.copying import deep_copy
from torch_nhwc.verifying import verifier


@errors_in_a_line
@with_example
def verify(
    example: Example,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    memory_format: MemoryFormat = None,
    preserve: Preserve = False,
    each_forward: EachForward = False,
    rtol: Annotated[float | None, typer.Option(help="Allowed, of the largest value; by the dtype without it.")] = None,
    atol: Annotated[float | None, typer.Option(help="Allowed on top of that.")] = None,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """Convert a copy of a model, and prove layer by layer that it computes what the model does.

    In training mode gradients are compared as well. It ends with 1 where something differs. It takes as long as fifty
    to a hundred steps of training: small inputs do.

    For example: torch-nhwc verify --factory my_model:build --preserve --mode training
    """
    check_page(html)
    dtype = parse_dtype(autocast, "--autocast")
    example.expect_to_run()
    before = example.model.train(mode is Mode.TRAINING)
    with warnings.catch_warnings(), showing(f"Verifying {example.name}"):
        warnings.simplefilter("ignore")  # the report says as much
        options = {"preserve": preserve, "each_forward": each_forward, "example_inputs": example.inputs}
        after = deep_copy(before)
        report = convert_(after, memory_format, **options)
        with torch.autocast(example.like.device.type, dtype=dtype, enabled=dtype is not None):
            verification = verifier.verify(
                before, after, example.inputs, backward=mode is Mode.TRAINING, rtol=rtol, atol=atol
            )
    if json_output:
        answer(verification.to_json())
    else:
        answer(f"{text_of(report, table=False)}\n\n{verification}", end="")
    if html is not None:
        verification.html(html)
    if not verification.ok:
        raise SystemExit(1)
