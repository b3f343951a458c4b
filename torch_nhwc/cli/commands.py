"""This is `python -m torch_nhwc`; it needs the extra `cli`, and for the built-in models the extra `models`."""

import json
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from torch_nhwc.cli import demo as main_job
from torch_nhwc.cli import environment
from torch_nhwc.cli.models import MODELS, Example, load_factory, load_torchscript
from torch_nhwc.running.outputs import TOLERANCES

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
DEFAULT_MODELS = ["resnet50", "unet3d"]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


@app.command()
def env(json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, compilers and devices: what a report of a problem needs."""
    print(json.dumps(environment.describe(), indent=2) if json_output else environment.as_text())


@app.command()
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Built-in models: {', '.join(MODELS)}. "
            f"{' and '.join(DEFAULT_MODELS)} where none is named, as far as their packages are installed."
        ),
    ] = None,
    torchscript: Annotated[str | None, typer.Option(help="A saved TorchScript model; needs --input-shape.")] = None,
    factory: Annotated[str | None, typer.Option(help="module:callable, returns a model, or (model, input).")] = None,
    input_shape: Annotated[str | None, typer.Option(help="Shape of the random input, such as 1,3,224,224.")] = None,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs behind every median.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random weights and inputs.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert real models to channels-last, compare their outputs, and time it."""
    shape = _parse_shape(input_shape)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    if torchscript is not None and shape is None:
        raise typer.BadParameter("--torchscript needs --input-shape, such as 1,3,224,224", param_hint="--torchscript")
    if torchscript is not None and factory is not None:
        raise typer.BadParameter("--torchscript and --factory name two models", param_hint="--factory")
    _check_device(device)
    for name in model or []:
        if name not in MODELS:
            raise typer.BadParameter(f"expected one of {', '.join(MODELS)}, got {name!r}", param_hint="--model")

    def examples() -> list[Example]:
        if torchscript is not None and shape is not None:
            return [load_torchscript(torchscript, shape)]
        if factory is not None:
            return [load_factory(factory, shape)]
        return _built_in(model) if model else _built_in(DEFAULT_MODELS, may_lack_packages=True)

    torch.manual_seed(seed)
    try:
        results = [main_job.run(example, device, DTYPES[dtype], repeats) for example in examples()]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if json_output:
        print(json.dumps([result.as_dict() for result in results], indent=2))
    else:
        console = Console()
        for result in results:
            console.print(_table(result))
    if not all(result.unchanged for result in results):
        raise SystemExit(1)


def _built_in(names: list[str], may_lack_packages: bool = False) -> list[Example]:
    made = []
    for name in names:
        try:
            made.append(MODELS[name]())
        except ModuleNotFoundError as error:
            sentence = f"{error.name} is missing: type `pip install 'torch-nhwc[models]'`"
            if not may_lack_packages or (name == names[-1] and not made):
                raise SystemExit(sentence) from error
            print(f"without {name}, because {sentence}", file=sys.stderr)
    return made


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{device!r} cannot be used: {reason}", param_hint="--device") from None


def _parse_shape(text: str | None) -> list[int] | None:
    sizes = [] if text is None else text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise typer.BadParameter(f"expected sizes such as 1,3,224,224, got {text!r}", param_hint="--input-shape")
    return [int(size) for size in sizes] or None


def _table(result: main_job.Result) -> Table:
    title = f"{result.model}, {result.dtype}, {result.device}, {result.threads} threads"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, tally in {"converted": result.converted, "restrided": result.restrided, "kept": result.kept}.items():
        table.add_row(name, f"{tally.sites} weights, {tally.bytes / 1e6:.1f} MB")
    for left in result.left:
        table.add_row("left as it is", left)
    stock = " (torch.nn.utils skips TorchScript layers)"
    if result.stock_convert_ms is not None:
        stock = f"; torch.nn.utils {result.stock_convert_ms:.2f} ms: {result.stock_over_ours:.1f}x ours"
    table.add_row("conversion", f"{result.convert_ms:.2f} ms{stock}")
    before = result.forward_contiguous_ms
    for label, after in (
        ("weights converted", result.forward_converted_ms),
        ("input channels-last as well", result.forward_channels_last_input_ms),
    ):
        change = f"{before / after:.2f}x faster" if after < before else f"{after / before:.2f}x slower"
        table.add_row(f"forward, {label}", f"{after:.1f} ms; contiguous {before:.1f} ms: {change}")
    table.add_row("weights", "equal bit for bit" if result.weights_equal else "[red]DIFFERENT[/red]")
    verdict = "within" if result.largest_difference <= result.tolerance else "[red]BEYOND[/red]"
    table.add_row(
        "largest output difference",
        f"{result.largest_difference:.2g}, {verdict} the tolerance {result.tolerance:.2g} "
        f"(largest output {result.largest_output:.2g})",
    )
    return table
