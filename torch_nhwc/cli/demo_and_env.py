"""The commands `demo` and `env`."""

import json
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console

from torch_nhwc.cli import demo as main_job
from torch_nhwc.cli import environment
from torch_nhwc.cli.command import answer, answers, errors_in_a_line
from torch_nhwc.cli.demo_table import as_table
from torch_nhwc.cli.inputs import check_device, parse_dtype, parse_shapes
from torch_nhwc.cli.models import Example, load, load_built_in
from torch_nhwc.cli.options import AllowPickle, Dtype, Factory, InputShape, Json, Models, Pickle, Seed, TorchScript

DEFAULT_MODELS = ["resnet50", "unet3d"]


@errors_in_a_line
def demo(
    model: Models = None,
    factory: Factory = None,
    torchscript: TorchScript = None,
    pickle: Pickle = None,
    allow_pickle: AllowPickle = False,
    input_shape: InputShape = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    dtype: Dtype = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs behind every median.")] = 5,
    json_output: Json = False,
) -> None:
    """Convert real models to channels-last, compare their outputs, and time it.

    Where no model is named, these are resnet50 and unet3d, as far as their packages are installed. It ends with 1 where
    weights or outputs differ.

    For example: torch-nhwc demo --factory my_model:build --repeats 9
    """
    shapes, as_dtype = parse_shapes(input_shape), parse_dtype(dtype)
    check_device(device)
    torch.manual_seed(seed)
    if model or factory is not None or torchscript is not None or pickle is not None or shapes:
        names = [*model] if model else [None]
        examples = [load(name, factory, torchscript, pickle, allow_pickle) for name in names]
    else:
        examples = _default_models()
    examples = [example.prepared(device, as_dtype, shapes) for example in examples]
    for example in examples:
        example.expect_to_run()
    results = [main_job.run(example, repeats) for example in examples]
    if json_output:
        answer(json.dumps([result.as_dict() for result in results], indent=2))
    else:
        console = Console(file=answers())
        for result in results:
            console.print(as_table(result))
    if not all(result.unchanged for result in results):
        raise SystemExit(1)


@errors_in_a_line
def env(json_output: Json = False) -> None:
    """Show versions, compilers and devices: what a report of a problem needs.

    For example: torch-nhwc env --json
    """
    answer(json.dumps(environment.describe(), indent=2) if json_output else environment.as_text())


def _default_models() -> list[Example]:
    """Those whose packages are there."""
    made = []
    for name in DEFAULT_MODELS:
        try:
            made.append(load_built_in(name))
        except ValueError as error:
            if name == DEFAULT_MODELS[-1] and not made:
                raise
            print(f"without {name}, because {error}", file=sys.stderr)
    return made
