"""What `convert` does with a saved model that is named by its file."""

import warnings
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_nhwc.cli.command import Command, answer, taking
from torch_nhwc.cli.models import look_here_for_modules
from torch_nhwc.cli.outputs import check_page, showing, text_of
from torch_nhwc.rendering import paragraphs
from torch_nhwc.saving.saved import convert_saved

_FILES = {
    "path_in": (Annotated[Path | None, typer.Argument(help="The file of a saved model.", metavar="IN")], None),
    "path_out": (Annotated[Path | None, typer.Argument(help="The file to write.", metavar="OUT")], None),
    "input_format": (
        Annotated[
            str | None,
            typer.Option(help="Of an archive IN: have its code bring inputs into channels_last, or channels_last_3d."),
        ],
        None,
    ),
}
# The other options that are for files as well.
_OPTIONS = {"memory_format", "allow_pickle", "strict", "table", "json_output", "html"}


def or_files(command: Command) -> Command:
    """Has a command that takes a model convert one file into another, where files are named."""
    own = signature(command).parameters

    @wraps(command)
    def run(path_in: Path | None, path_out: Path | None, input_format: str | None, **options: Any) -> None:
        if path_in is None:
            if input_format is not None:
                raise ValueError("--input-format is for saved models: name the files IN and OUT")
            command(**options)
            return
        others = [name for name, value in options.items() if name not in _OPTIONS and value != own[name].default]
        if others or path_out is None:
            also = f", without {', '.join(f'--{name}' for name in others)}".replace("_", "-") if others else ""
            raise ValueError(f"a saved model: expected the files IN and OUT{also}")
        _convert(path_in, path_out, input_format=input_format, **{name: options[name] for name in _OPTIONS})

    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in _FILES.items()
    ]
    return taking(run, [*parameters, *own.values()])


def _convert(path_in: Path, path_out: Path, table: bool, json_output: bool, html: Path | None, **options: Any) -> None:
    check_page(html)
    if options["allow_pickle"]:
        look_here_for_modules()  # whose classes the file may name
    with showing(f"Converting {path_in}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says as much
        report = convert_saved(path_in, path_out, **options)
    answer(report.to_json() if json_output else text_of(report, table))
    if not json_output:
        answer(paragraphs([f"Written to {path_out}."]), end="")
    if html is not None:
        report.html(html)
