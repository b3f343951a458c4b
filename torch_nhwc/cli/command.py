"""What commands have in common: the options for a model and its inputs, and errors in a line."""

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, TextIO

import torch

from torch_nhwc.cli.inputs import check_device, parse_dtype, parse_shapes
from torch_nhwc.cli.models import Example, load
from torch_nhwc.cli.options import (
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Factory,
    InputShape,
    Model,
    Pickle,
    Seed,
    TorchScript,
)

Command = Callable[..., None]
_answers: list[TextIO] = []  # of the commands that run
# What errors and reports say of arguments, each as one word, which no line breaks, and what has that name here.
_OPTIONS: dict[str, Any] = {
    r"\b(preserve|each_forward|strict|allow_pickle)=True": lambda found: f"--{found[1].replace('_', '-')}",
    r"\bgive(\s+)example_inputs": r"give\1--input-shape",
    r", or give loss=": "",
    r"\bbudget_seconds": "--budget",
    r"\.table\(\)": "--table",
}


def answers() -> TextIO:
    """The standard output, for what a command answers: what the user's code prints goes to the standard error."""
    return _answers[-1]


def answer(text: str, end: str = "\n") -> None:
    """Prints what a command answers."""
    print(text, end=end, file=answers())


def errors_in_a_line(command: Command) -> Command:
    """Ends the program with 2 after an error, which says where it came from if that is the user's code or PyTorch's."""

    @wraps(command)
    def run(*, debug: Debug = False, **options: Any) -> None:
        _answers.append(sys.stdout)
        try:
            with redirect_stdout(sys.stderr):  # for what the user's code prints
                command(**options)
        except Exception as error:
            if debug:
                traceback.print_exception(error)
            else:
                print(f"torch-nhwc: {_in_a_line(error)}", file=sys.stderr)
            raise SystemExit(2) from error
        finally:
            _answers.pop()

    return taking(
        run,
        [
            *signature(command).parameters.values(),
            Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug),
        ],
    )


def with_example(command: Command) -> Command:
    """Gives a command, instead of its first argument, the options that name a model and its inputs."""
    naming = list(signature(example_of).parameters.values())

    @wraps(command)
    def run(**options: Any) -> None:
        command(example_of(**{each.name: options.pop(each.name) for each in naming}), **options)

    return taking(run, [*naming, *list(signature(command).parameters.values())[1:]])


def example_of(
    *,
    model: Model = None,
    factory: Factory = None,
    torchscript: TorchScript = None,
    pickle: Pickle = None,
    allow_pickle: AllowPickle = False,
    input_shape: InputShape = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
) -> Example:
    """The model that is named, with its inputs, on a device and in a dtype."""
    shapes, as_dtype = parse_shapes(input_shape), parse_dtype(dtype)
    check_device(device)
    torch.manual_seed(seed)
    return load(model, factory, torchscript, pickle, allow_pickle).prepared(device, as_dtype, shapes)


def in_options(text: str) -> str:
    """A text that names options, and not the arguments of Python's functions."""
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _in_a_line(error: Exception) -> str:
    message = in_options((str(error).splitlines() or [""])[0].removeprefix("torch_nhwc: "))
    where = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(where.filename).is_relative_to(Path(__file__).parent.parent)
    if is_ours and isinstance(error, (ImportError, OSError, RuntimeError, TypeError, ValueError)):
        return message
    return f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}: {message}"


def taking(command: Command, parameters: Sequence[Parameter]) -> Command:
    """Has a command take other parameters than its own, as far as one can see from outside."""
    named = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in named}
    return command
