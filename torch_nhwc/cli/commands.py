"""The program `torch-nhwc`. It needs the extra `cli`, and built-in models need the extra `models`."""

import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from rich.console import Console
from torch import nn
from typer import Argument, Exit, Option, Typer

import torch_nhwc as nhwc
from torch_nhwc import cli
from torch_nhwc.cli.models import MODELS, Example, dtype_of, import_from_here, load_example
from torch_nhwc.cli.trace_page import write_page
from torch_nhwc.planning.plans import plan_from
from torch_nhwc.rendering import paragraphs
from torch_nhwc.running.calls import call, copy_inputs, copy_model, evaluation_mode
from torch_nhwc.running.comparison import Difference, compare
from torch_nhwc.serialization import write_whole
from torch_nhwc.tracing import Trace, assert_layout
from torch_nhwc.tracing import audit as read_profile
from torch_nhwc.tuning import Tuning
from torch_nhwc.tuning.workload import loss_of

_HELP = (
    "See what channels-last does to your model, without writing code. To find out whether it helps, start with: "
    "torch-nhwc tune --factory module:callable, where the callable returns a model and its inputs."
    "\n\nA command ends with 0 if all is well; with 1 if outputs or layers differ, or if more is lost than "
    "--max-losses, --max-mixed or --max-bytes allow; with 2 after an error, which is one line unless --debug is given "
    "before the command; and with 130 after Ctrl-C."
)
_debug = False
app = Typer(add_completion=False, no_args_is_help=True, help=_HELP, pretty_exceptions_enable=False)


@app.callback()
def main(debug: Annotated[bool, Option("--debug", help="After an error, print where it happened.")] = False) -> None:
    """Take the options of all commands."""
    global _debug
    _debug = debug


class Answer(NamedTuple):
    """What a command prints, and whether all is well."""

    text: str
    is_well: bool = True


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
    _check_file("--html", html)
    is_training, kind = mode is Mode.TRAINING, dtype_of(autocast, "--autocast")
    example = load_example(model, factory, input_shape, device, dtype)
    example.require_inputs()
    example.model.train(is_training)
    if convert or preserve is not None:
        with _converting(example.name):  # `plan` and `convert` say what is refused
            nhwc.convert_(
                example.model,
                input_format="channels_last",
                preserve=preserve is not False,
                example_inputs=example.inputs,
            )
    region = _region(example, kind)
    with _showing(f"Tracing {example.name}"), nhwc.trace(example.model) as traced:
        with torch.set_grad_enabled(is_training), region:
            output = call(example.model, example.inputs)
            loss = loss_of(output) if is_training else None
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    layouts = [layout for module in traced.modules for layout in (*module.inputs, *module.outputs)]
    if not any((layout.format or "").startswith("channels_last") for layout in layouts):
        print(
            "torch-nhwc: the model ran contiguous: --convert shows what it would still lose after a conversion, and "
            "--convert --no-preserve what it would lose without replaced layers",
            file=sys.stderr,
        )
    return _answer_of_trace(traced, max_losses, max_mixed, max_bytes, json_output, html)


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
    _check_file("--save", save)
    if optimizer is not None and mode is not Mode.TRAINING:
        raise ValueError("--optimizer: expected --mode training, since an optimizer takes no steps in inference")
    kind = getattr(torch.optim, optimizer, None) if optimizer else None
    if optimizer and not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"--optimizer: expected a class of torch.optim, such as AdamW, got {optimizer!r}")
    region = dtype_of(autocast, "--autocast")
    example = load_example(model, factory, input_shape, device, dtype)
    example.require_inputs()
    with _showing(f"Tuning {example.name} for {budget:g} s"):
        tuning = nhwc.tune(
            example.model,
            example.inputs,
            mode="training" if mode is Mode.TRAINING else "inference",
            budget_seconds=budget,
            preserve=preserve,
            autocast=region,
            optimizer=kind,
            compile=compile,
        )
    if save is not None:
        with write_whole(save) as temporary:
            temporary.write_text(tuning.to_json())
    return Answer(tuning.to_json() if json_output else f"{tuning}{_advice(tuning, save)}")


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
    kind = dtype_of(autocast, "--autocast")
    example = load_example(model, factory, input_shape, device, dtype)
    example.require_inputs()
    before = example.model.train(mode is Mode.TRAINING)
    after = copy_model(before)
    with _converting(example.name):
        report = nhwc.convert_(
            after, memory_format, preserve=preserve, each_forward=each_forward, example_inputs=example.inputs
        )
    with _showing(f"Verifying {example.name}"), _region(example, kind):
        verification = nhwc.verify(before, after, example.inputs, backward=mode is Mode.TRAINING, rtol=rtol, atol=atol)
    text = verification.to_json() if json_output else f"{_text_of(report, False)}\n\n{verification}"
    return Answer(text, verification.ok)


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
    example = load_example(model, factory, input_shape, device, dtype)
    inputs = None if example.is_lazy else example.inputs
    with _converting(example.name, "Planning for"):
        planned = nhwc.plan(
            example.model, memory_format, preserve=preserve, each_forward=each_forward, example_inputs=inputs
        )
    return Answer(planned.to_json() if json_output else _text_of(planned, table))


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
    if path_in is not None:
        if (
            path_out is None
            or preserve is not None
            or any((model, factory, input_shape, device, dtype, each_forward, from_plan, out))
        ):
            raise ValueError("a saved model: expected the files IN and OUT, without options for models that run")
        if allow_pickle:
            import_from_here()  # classes that the file may name
        with _converting(str(path_in)):
            report = nhwc.convert_saved(
                path_in,
                path_out,
                memory_format=memory_format,
                input_format=input_format,  # type: ignore[arg-type]
                allow_pickle=allow_pickle,
                strict=strict,
            )
        text = paragraphs([f"Written to {path_out}."])
        return Answer(report.to_json() if json_output else f"{_text_of(report, table)}\n{text}")
    if input_format is not None or allow_pickle:
        raise ValueError("--input-format and --allow-pickle are for saved models: name the files IN and OUT")
    _check_file("--out", out)
    chosen = None if from_plan is None else plan_from(from_plan)
    example = load_example(model, factory, input_shape, device, dtype)
    before = _outputs(example)
    with _converting(example.name):
        report = nhwc.convert_(
            example.model,
            memory_format,
            preserve=preserve is not False,
            each_forward=each_forward,
            plan=chosen,
            strict=strict,
            example_inputs=None if chosen else example.inputs,
        )
    difference = None if before is None else compare(_outputs(example), before, example.like.dtype)
    is_right = difference is None or difference.is_within
    lines = [_comparison(difference)]
    if is_right and out is not None:
        lines.append(f"Written to {out}: {_write(example.model, out)}.")
    if json_output:
        described = json.loads(report.to_json()) | {"is_right": is_right, "comparison": lines[0]}
        return Answer(json.dumps(described, indent=1), is_right)
    return Answer(f"{_text_of(report, table)}\n{paragraphs(lines)}", is_right)


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
    _check_file("--html", html)
    if not path.is_file():
        raise ValueError(f"expected a file, got {path}")
    with _showing(f"Reading {path}"):
        traced = read_profile(path)
    return _answer_of_trace(traced, max_losses, max_mixed, max_bytes, json_output, html)


@command
def env(json_output: Json = False) -> Answer:
    """Show versions, compilers and devices, for a bug report.

    For example: torch-nhwc env --json
    """
    return Answer(json.dumps(cli.describe_environment(), indent=2) if json_output else cli.environment_as_text())


def _answer_of_trace(
    traced: Trace,
    max_losses: int | None,
    max_mixed: int | None,
    max_bytes: int | None,
    json_output: bool,
    html: Path | None,
) -> Answer:
    """Write the page of a trace, and compare the trace with the limits that are given."""
    if html is not None:
        write_page(traced, html)
    losses = len(traced.losses) if max_losses is None else max_losses
    mixed = len(traced.mixed) if max_mixed is None else max_mixed
    answer = Answer(traced.to_json() if json_output else _in_options(str(traced)))
    try:
        assert_layout(traced, losses, mixed, max_bytes)
    except AssertionError as error:
        print(f"torch-nhwc: {error}", file=sys.stderr)
        return answer._replace(is_well=False)
    return answer


def _advice(tuning: Tuning, save: Path | None) -> str:
    policy = tuning.choice.removesuffix(", compiled")
    if policy == "contiguous":
        advice = "Compile the model and convert nothing: torch.compile(model)"
        return paragraphs([advice if tuning.compile else "Leave the model as it is: no plan is certainly faster here."])
    how = f"Convert the model by the plan {policy!r}{', then compile it' if tuning.compile else ''}"
    # Code is not wrapped, so that it runs as it is printed.
    code = f"import torch, torch_nhwc; torch_nhwc.convert_(model, plan={str(save or 'tuning.json')!r})"
    if tuning.compile:
        code += "; model = torch.compile(model)"
    return f"{paragraphs([f'{how}:' if save else f'{how} (--save tuning.json writes the file):'])}{code}\n"


def _outputs(example: Example) -> Any:
    """Return what the model returns in evaluation mode; `None` without inputs."""
    if example.inputs is None:
        return None
    torch.manual_seed(0)
    with torch.no_grad(), evaluation_mode(example.model):
        return call(example.model, copy_inputs(example.inputs))


def _comparison(difference: Difference | None) -> str:
    if difference is None:
        return "Outputs were not compared: give the model inputs by --input-shape or by the factory."
    return (
        f"Outputs are {'within' if difference.is_within else 'BEYOND'} the tolerance {difference.tolerance:.2g}: the "
        f"largest difference is {difference.largest:.2g}, the largest output {difference.of:.2g}."
    )


def _write(model: nn.Module, path: Path) -> str:
    """Write a TorchScript archive, or the state dict of any other model, and return which it is."""
    with write_whole(path) as temporary:
        if isinstance(model, torch.jit.ScriptModule):
            torch.jit.save(model, str(temporary))  # type: ignore[no-untyped-call, unused-ignore]
            return "TorchScript archive"
        torch.save(model.state_dict(), temporary)
        return "state dict, to be loaded by load_state_dict(..., assign=True)"


def _check_file(option: str, path: Path | None) -> None:
    """Raise a ValueError for a file that cannot be written, before long work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{option}: expected a file in a folder that exists, got {path}")


def _region(example: Example, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(example.like.device.type, dtype=dtype, enabled=dtype is not None)


@contextmanager
def _converting(name: str, verb: str = "Converting") -> Iterator[None]:
    """Show that a model is converted, and leave out warnings, whose content is in the report."""
    with _showing(f"{verb} {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _showing(what: str) -> AbstractContextManager[Any]:
    """Show on a terminal what is being done, while it lasts."""
    return Console(stderr=True).status(f"{what} ...")


def _text_of(printed: nhwc.Report | nhwc.Plan, table: bool) -> str:
    """Return a report or a plan with the names of options, and with its table on request."""
    text = _in_options(str(printed))
    return (text.replace("(All rows: --table)\n", "") + printed.table() if table else text).rstrip("\n")


# How errors and reports name arguments of Python functions, and the options that take their place.
_OPTIONS: dict[str, Any] = {
    r"\b(preserve|each_forward|strict|allow_pickle)=True": lambda found: f"--{found[1].replace('_', '-')}",
    r"\bpreserve=False": "--no-preserve",
    r"\bgive(\s+)example_inputs": r"give\1--input-shape",
    r"^plan:": "--plan:",
    r"\bomit(\s+)memory_format": r"omit\1--memory-format",
    r"\binput_format='(\w+)'": r"--input-format \1",
    r", or give loss=": "",
    r"\bbudget_seconds": "--budget",
    r"\.table\(\)": "--table",
}


def _in_options(text: str) -> str:
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _in_a_line(error: Exception) -> str:
    message = _in_options((str(error).splitlines() or [""])[0].removeprefix("torch_nhwc: "))
    where = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(where.filename).is_relative_to(Path(__file__).parent.parent)
    if is_ours and isinstance(error, (ImportError, OSError, RuntimeError, TypeError, ValueError)):
        return message
    return f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}: {message}"
