"""The commands and their options. What a command does is in `torch_nhwc.cli`, which loads torch."""

import importlib.util
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from enum import Enum
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

from typer import Argument, BadParameter, Exit, Option, Typer
from typer.core import TyperGroup

from torch_nhwc_cli.options import (
    MODELS,
    Answer,
    Limits,
    check_file,
    dtype_name,
    format_name,
    in_options,
    model_options,
)

_HELP = (
    "See what channels-last does to your model, without writing code. To find out whether it helps, start with: "
    "torch-nhwc tune --factory module:callable, where the callable returns a model and its inputs."
    "\n\nA command ends with 0 if all is well; with 1 if outputs or layers differ, or if more is lost than "
    "--max-losses, --max-mixed or --max-bytes allow; with 2 after an error, which is one line unless --debug is given "
    "before the command; and with 130 after Ctrl-C."
)
_debug = False


# The base of all errors of wrong use, which Typer does not export.
_UsageError: Any = BadParameter.__base__


class _Commands(TyperGroup):
    """The commands, with an error of options in one line, as all errors."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except _UsageError as error:
            message = " ".join(error.format_message().split()).replace("Value error, ", "")
            if message.startswith("Got unexpected extra argument"):
                message += (
                    ". A model is named by --factory module:callable or --model; files are for torch-nhwc convert"
                )
            if message:  # without any argument the help was printed
                print(f"torch-nhwc: {message}", file=sys.stderr)
            code = 2
        sys.exit(code or 0)


app = Typer(cls=_Commands, add_completion=False, no_args_is_help=True, help=_HELP, pretty_exceptions_enable=False)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"torch-nhwc {version('torch-nhwc')}")
        raise Exit


@app.callback()
def main(
    debug: Annotated[bool, Option("--debug", help="After an error, print where it happened.")] = False,
    version: Annotated[
        bool, Option("--version", help="Print the version; `env` has more.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options of all commands."""
    global _debug
    _debug = debug


def command(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make a function a command, with its docstring as help.

    Only its answer goes to the standard output; what the user's code prints goes to the standard error. An error is one
    line, which says where it was raised if that is in the user's code or in PyTorch.
    """

    @wraps(function)
    def run(**options: Any) -> None:
        try:
            with redirect_stdout(sys.stderr):
                answer = function(**options)
        except KeyboardInterrupt:  # also while torch is loaded
            before = " before anything was measured" if function.__name__ == "tune" else ""
            print(f"torch-nhwc: interrupted{before}", file=sys.stderr)
            raise
        except Exception as error:
            if _debug:
                traceback.print_exception(error)
            else:
                print(f"torch-nhwc: {_in_a_line(error)}", file=sys.stderr)
            raise Exit(2) from error
        print(answer.text.rstrip("\n"))
        if not answer.is_well:
            raise Exit(1)

    app.command(help=re.sub(r"(?<!\n)\n(?!\n) *", " ", function.__doc__ or ""))(run)
    return function


class Mode(str, Enum):
    """How the model runs."""

    INFERENCE = "inference"
    TRAINING = "training"


_MODEL, _OUTPUT, _BUDGET = "The model and its inputs", "Output", "Limits; beyond them the command ends with 1"
_FACTORY = (
    "A function in a module of the current folder or of an installed package. It returns a model, or a model and its "
    "inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments."
)
_INPUT_SHAPE = (
    "The shape of a random input, such as 1,3,224,224, with a dtype 1,3,224,224:float32, or with a name "
    "pixel_values=1,3,224,224. Give it once for each input. It replaces the inputs that the model comes with."
)
_MEMORY_FORMAT = (
    "channels_last (2D only), channels_last_3d or contiguous_format. The default is channels-last for both ranks."
)

Model = Annotated[str | None, Option(help=f"A built-in model: {', '.join(MODELS)}.", rich_help_panel=_MODEL)]
Factory = Annotated[str | None, Option(help=_FACTORY, metavar="MODULE:CALLABLE", rich_help_panel=_MODEL)]
InputShape = Annotated[
    list[str] | None, Option(help=_INPUT_SHAPE, metavar="[NAME=]SIZES[:DTYPE]", rich_help_panel=_MODEL)
]
Device = Annotated[
    str | None, Option(help="The device to run on, such as cuda. The default is the model's.", rich_help_panel=_MODEL)
]
Dtype = Annotated[str | None, Option(help="Cast the model first, for example to bfloat16.", rich_help_panel=_MODEL)]
InMode = Annotated[
    Mode, Option("--mode", help="Run the model in evaluation mode, or in training mode with a backward.")
]
Autocast = Annotated[str | None, Option(help="Run the model in an autocast region of this dtype, such as bfloat16.")]
MemoryFormat = Annotated[str | None, Option(help=_MEMORY_FORMAT)]
_PRESERVE = "Replace layers that lose channels-last or that PyTorch computes wrong."
Preserve = Annotated[bool, Option("--preserve/--no-preserve", help=_PRESERVE)]
# The same for commands that have to know whether it was given.
GivenPreserve = Annotated[bool | None, Option("--preserve/--no-preserve", help=_PRESERVE, show_default="preserve")]
EachForward = Annotated[bool, Option("--each-forward", help="Leave the weights, and convert them in each forward.")]
MaxLosses = Annotated[int | None, Option(min=0, help="Allowed losses, forward and backward.", rich_help_panel=_BUDGET)]
MaxMixed = Annotated[int | None, Option(min=0, help="Allowed mixed convolutions.", rich_help_panel=_BUDGET)]
MaxBytes = Annotated[int | None, Option(min=0, help="Allowed bytes of both together.", rich_help_panel=_BUDGET)]
WithTable = Annotated[bool, Option("--table", help="Also print a row for every weight.", rich_help_panel=_OUTPUT)]
Json = Annotated[bool, Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUTPUT)]
Html = Annotated[Path | None, Option(help="Also write a page for a browser.", metavar="FILE", rich_help_panel=_OUTPUT)]


@command
def trace(
    model: Model = None,
    factory: Factory = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    convert: Annotated[bool, Option("--convert", help="Convert weights and inputs to channels-last first.")] = False,
    preserve: GivenPreserve = None,
    max_losses: MaxLosses = None,
    max_mixed: MaxMixed = None,
    max_bytes: MaxBytes = None,
    json_output: Json = False,
    html: Html = None,
) -> Answer:
    """Show where a model loses channels-last while it runs, operator by operator.

    A contiguous model has nothing to lose: --convert shows what it would still lose after a conversion, and
    --no-preserve what it would lose if no layers were replaced. Both convert the model in memory only.

    For example: torch-nhwc trace --factory my_model:build --convert --mode training
    """
    check_file("--html", html)
    named = model_options(model, factory, input_shape, device, dtype)
    region = dtype_name(autocast, "--autocast")
    from torch_nhwc.cli import commands

    limits = Limits(max_losses, max_mixed, max_bytes)
    is_converted = convert or preserve is not None
    preserves = preserve is not False
    return commands.trace(
        named, mode is Mode.TRAINING, region, preserves if is_converted else None, limits, json_output, html
    )


@command
def tune(
    model: Model = None,
    factory: Factory = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    budget: Annotated[float, Option(help="The seconds it may take, roughly.")] = 60,
    preserve: Annotated[bool, Option("--preserve/--no-preserve", help="Allow plans that replace layers.")] = True,
    optimizer: Annotated[
        str | None, Option(help="In training mode, also take steps by this class of torch.optim, such as AdamW.")
    ] = None,
    compile: Annotated[
        bool, Option("--compile", help="Measure torch.compile as well. Compiling is not part of the budget.")
    ] = False,
    save: Annotated[
        Path | None,
        Option(help="Write the decision as JSON, for convert --plan.", metavar="FILE", rich_help_panel=_OUTPUT),
    ] = None,
    json_output: Json = False,
) -> Answer:
    """Measure whether channels-last makes a model faster, and by which plan.

    The result depends on the shapes, the mode and the dtype: give those that you use in production. After Ctrl-C the
    command ends with the best plan so far.

    For example: torch-nhwc tune --factory my_model:build --mode training --optimizer AdamW --save tuning.json
    """
    check_file("--save", save)
    if optimizer is not None and mode is not Mode.TRAINING:
        raise ValueError("--optimizer: expected --mode training, since an optimizer takes no steps in inference")
    if not budget > 0:
        raise ValueError(f"--budget: expected a positive number, got {budget}")
    named = model_options(model, factory, input_shape, device, dtype)
    region = dtype_name(autocast, "--autocast")
    from torch_nhwc.cli import commands

    return commands.tune(named, mode is Mode.TRAINING, region, budget, preserve, optimizer, compile, save, json_output)


@command
def verify(
    model: Model = None,
    factory: Factory = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    mode: InMode = Mode.INFERENCE,
    autocast: Autocast = None,
    memory_format: MemoryFormat = None,
    preserve: Preserve = True,
    each_forward: EachForward = False,
    rtol: Annotated[
        float | None,
        Option(help="Allowed, relative to the largest value; by default by the dtype."),
    ] = None,
    atol: Annotated[float | None, Option(help="Allowed absolute difference, in addition to it.")] = None,
    json_output: Json = False,
) -> Answer:
    """Convert a copy of a model, and check layer by layer that it computes the same.

    In training mode gradients are compared as well. The comparison takes as long as fifty to a hundred training steps:
    use small inputs.

    For example: torch-nhwc verify --factory my_model:build --mode training
    """
    named = model_options(model, factory, input_shape, device, dtype)
    region, wanted = dtype_name(autocast, "--autocast"), format_name(memory_format)
    from torch_nhwc.cli import commands

    return commands.verify(
        named, mode is Mode.TRAINING, region, wanted, preserve, each_forward, rtol, atol, json_output
    )


@command
def plan(
    model: Model = None,
    factory: Factory = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    memory_format: MemoryFormat = None,
    preserve: Preserve = True,
    each_forward: EachForward = False,
    table: WithTable = False,
    json_output: Json = False,
) -> Answer:
    """Show what a conversion would do to a model, and why, without doing it.

    A model with inputs runs once, to find the tensors that reach its convolutions, unless it has lazy layers.

    For example: torch-nhwc plan --factory my_model:build --table
    """
    named, wanted = model_options(model, factory, input_shape, device, dtype), format_name(memory_format)
    from torch_nhwc.cli import commands

    return commands.plan(named, wanted, preserve, each_forward, table, json_output)


@command
def convert(
    path_in: Annotated[Path | None, Argument(help="The file of a saved model.", metavar="IN")] = None,
    path_out: Annotated[Path | None, Argument(help="The file to write.", metavar="OUT")] = None,
    model: Model = None,
    factory: Factory = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    memory_format: MemoryFormat = None,
    preserve: GivenPreserve = None,
    each_forward: EachForward = False,
    from_plan: Annotated[
        Path | None,
        Option("--plan", help="Convert by a plan that tune --save or plan --json wrote.", metavar="FILE"),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Fail if a weight is refused.")] = False,
    input_format: Annotated[
        str | None,
        Option(help="Make the code of a TorchScript archive convert inputs to channels_last or channels_last_3d."),
    ] = None,
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Load IN even if that may run code in it.")] = False,
    out: Annotated[
        Path | None,
        Option(
            help="Write the converted model: a TorchScript archive, or the state dict of any other model.",
            metavar="FILE",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    table: WithTable = False,
    json_output: Json = False,
) -> Answer:
    """Convert a model, print the report, and compare the outputs with those from before.

    If outputs differ by more than the tolerance, the command writes no model and ends with 1. With files IN and OUT, as
    in torch-nhwc convert model.pt converted.pt, it converts a saved model to a file of the same kind, without running
    the model.

    For example: torch-nhwc convert --factory my_model:build --out converted.pt
    """
    wanted = format_name(memory_format)
    if path_in is not None:
        if preserve is not None or any((model, factory, input_shape, device, dtype, each_forward, from_plan, out)):
            raise ValueError(
                "with the files IN and OUT, leave out --preserve, --each-forward, --plan, --out and what names a model"
            )
        if path_out is None:
            example = path_in.with_name(f"converted{path_in.suffix}")
            raise ValueError(f"name the file to write: torch-nhwc convert {path_in} {example}")
        of_inputs = format_name(input_format, "--input-format", ("channels_last", "channels_last_3d"))
        from torch_nhwc.cli import commands

        return commands.convert_file(path_in, path_out, wanted, of_inputs, allow_pickle, strict, table, json_output)
    if input_format is not None or allow_pickle:
        raise ValueError("--input-format and --allow-pickle are for saved models: name the files IN and OUT")
    check_file("--out", out)
    named = model_options(model, factory, input_shape, device, dtype)
    from torch_nhwc.cli import commands

    return commands.convert(
        named, wanted, preserve is not False, each_forward, from_plan, strict, out, table, json_output
    )


@command
def audit(
    path: Annotated[Path, Argument(help="A Chrome trace, which may be compressed with gzip.", metavar="FILE")],
    max_losses: MaxLosses = None,
    max_mixed: MaxMixed = None,
    max_bytes: MaxBytes = None,
    json_output: Json = False,
    html: Html = None,
) -> Answer:
    """Show where channels-last was lost in a profile that torch.profiler saved with record_shapes=True.

    The model is not needed.

    For example: torch-nhwc audit profile.json.gz --max-losses 0
    """
    check_file("--html", html)
    if not path.is_file():
        raise ValueError(f"expected a file, got {path}")
    from torch_nhwc.cli import commands

    return commands.audit(path, Limits(max_losses, max_mixed, max_bytes), json_output, html)


@command
def env(json_output: Json = False) -> Answer:
    """Show versions, compilers and devices, for a bug report.

    For example: torch-nhwc env --json
    """
    from torch_nhwc import cli

    return Answer(json.dumps(cli.describe_environment(), indent=2) if json_output else cli.environment_as_text())


_OURS = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("torch_nhwc", "torch_nhwc_cli"))


def _in_a_line(error: Exception) -> str:
    """Return an error as a line; where it was raised is the innermost line of the user's, if there is one."""
    message = in_options((str(error).splitlines() or [""])[0].removeprefix("torch_nhwc: "))
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = frames[-1].filename.startswith(_OURS)
    if is_ours and isinstance(error, (ImportError, OSError, RuntimeError, TypeError, ValueError)):
        return message
    where = _place([each for each in frames if not each.filename.startswith(_OURS)])
    return f"{type(error).__name__}{where}: {message}"


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the file and the line of the innermost frame outside of PyTorch; of one outside of packages, if any is."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    torch = importlib.util.find_spec("torch")
    ofs_torch = tuple(torch.submodule_search_locations or ()) if torch else ()
    outside = [each for each in frames if not each.filename.startswith((*ofs_torch, "<"))]
    of_the_user = [each for each in outside if not each.filename.startswith(tuple(folders))]
    for frame in (of_the_user or outside)[-1:]:
        return f" in {Path(frame.filename).name}, line {frame.lineno}"
    return ""
