"""The program `torch-nhwc`: all of its commands. They need the extra `cli`, and built-in models the extra `models`."""

import inspect
import re

import typer

from torch_nhwc.cli.command import Command
from torch_nhwc.cli.demo_and_env import demo, env
from torch_nhwc.cli.plan_and_convert import convert, plan
from torch_nhwc.cli.trace_and_audit import audit, trace
from torch_nhwc.cli.tune import tune
from torch_nhwc.cli.verify import verify

HELP = (
    "This is torch-nhwc, or python -m torch_nhwc: what channels-last does to a model of yours, without a line of code. "
    "To know whether it helps, start with: torch-nhwc tune --factory module:callable, which names a function of yours "
    "that returns a model and its inputs."
    "\n\nA command ends with 0 where all is well; with 1 where weights, layers or outputs differ, or where more is "
    "lost than --max-losses, --max-mixed or --max-bytes allow; with 2 after an error, which is one line unless --debug "
    "is given; and with 130 after Ctrl-C."
)
app = typer.Typer(add_completion=False, no_args_is_help=True, help=HELP, pretty_exceptions_enable=False)


def _help_of(command: Command) -> str:
    """Its docstring, of which the terminal breaks the lines."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


for command in (trace, tune, verify, plan, convert, audit, demo, env):
    app.command(help=_help_of(command))(command)
