"""The command `tune`."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from torch_nhwc.cli.command import answer, errors_in_a_line, with_example
from torch_nhwc.cli.inputs import parse_dtype
from torch_nhwc.cli.models import Example
from torch_nhwc.cli.options import Autocast, Html, InMode, Json, Mode
from torch_nhwc.cli.outputs import check_file, check_page
from torch_nhwc.rendering import paragraphs
from torch_nhwc.tuning import tuner
from torch_nhwc.tuning.policies import CONTIGUOUS
from torch_nhwc.tuning.tunings import Tuning

_AS_IT_IS = "Leave the model as it is: no plan is faster with certainty here."


@errors_in_a_line
@with_example
def tune(
    example: Example,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    budget: Annotated[float, typer.Option(help="The seconds that it may take, roughly.")] = 60,
    preserve: Annotated[
        bool, typer.Option("--preserve/--no-preserve", help="Whether layers that lose may be exchanged.")
    ] = True,
    optimizer: Annotated[
        str | None, typer.Option(help="In training, take steps of this class of torch.optim, such as AdamW.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Keep the decision for convert_ as JSON.", metavar="FILE", rich_help_panel="Output"),
    ] = None,
    json_output: Json = False,
    html: Html = None,
) -> None:
    """Decide by measurement whether channels-last makes a model faster, and by which plan.

    Give it the shapes, the mode and the dtype of earnest use: they decide. Ctrl-C ends it with the best so far.

    For example: torch-nhwc tune --factory my_model:build --mode training --optimizer AdamW --save tuning.json
    """
    check_file("--save", save)
    check_page(html)
    dtype, kind = parse_dtype(autocast, "--autocast"), None if optimizer is None else _optimizer(optimizer, mode)
    example.expect_to_run()
    tuning = tuner.tune(
        example.model,
        example.inputs,
        mode="training" if mode is Mode.TRAINING else "inference",
        budget_seconds=budget,
        preserve=preserve,
        autocast=dtype,
        optimizer=kind,
    )
    if save is not None:
        save.write_text(tuning.to_json())
    answer(tuning.to_json() if json_output else f"{tuning}{_answer(tuning, save)}", end="\n" * json_output)
    if html is not None:
        tuning.html(html)


def _optimizer(name: str, mode: Mode) -> type[torch.optim.Optimizer]:
    if mode is not Mode.TRAINING:
        raise ValueError("--optimizer: expected --mode training, where it takes its steps")
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"--optimizer: expected a class of torch.optim, such as AdamW, got {name!r}")
    return kind


def _answer(tuning: Tuning, save: Path | None) -> str:
    """What to do, in a paragraph."""
    if tuning.choice == CONTIGUOUS:
        return paragraphs([_AS_IT_IS])
    kept = f"nhwc.Tuning.from_json(open({str(save or 'tuning.json')!r}).read())"
    text = f"Convert the model by the plan {tuning.choice!r}: nhwc.convert_(model, plan={kept}.plan)"
    return paragraphs([text if save else f"{text}, which --save tuning.json keeps."])
