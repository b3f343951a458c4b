"""The options that several commands have."""

from enum import Enum
from pathlib import Path
from typing import Annotated

from typer import Option

from torch_nhwc.cli.inputs import DTYPES
from torch_nhwc.cli.models import MODELS

_MODEL, _INPUTS, _OUTPUT, _BUDGET = "The model, one of these", "Its inputs", "Output", "Allowed; ends with 1 beyond it"


class Mode(str, Enum):
    """How the model runs."""

    INFERENCE = "inference"
    TRAINING = "training"


Model = Annotated[str | None, Option(help=f"A built-in model: {', '.join(MODELS)}.", rich_help_panel=_MODEL)]
Models = Annotated[
    list[str] | None,
    Option(help=f"Built-in models: {', '.join(MODELS)}; several, if you like.", rich_help_panel=_MODEL),
]
Factory = Annotated[
    str | None,
    Option(
        help="module:callable, in the current folder or installed. It returns a model, or a model and its inputs: a "
        "tensor, a tuple of positional arguments, or a dict of keyword ones.",
        metavar="MODULE:CALLABLE",
        rich_help_panel=_MODEL,
    ),
]
TorchScript = Annotated[
    str | None,
    Option("--torchscript", help="A file with a TorchScript model.", metavar="FILE", rich_help_panel=_MODEL),
]
Pickle = Annotated[
    str | None,
    Option("--pickle", help="A file with a whole module, by torch.save.", metavar="FILE", rich_help_panel=_MODEL),
]
AllowPickle = Annotated[
    bool,
    Option("--allow-pickle", help="Load --pickle, or IN, though it may run code of its own.", rich_help_panel=_MODEL),
]
InputShape = Annotated[
    list[str] | None,
    Option(
        help="The shape of a random input, such as 1,3,224,224, with a dtype 1,3,224,224:float32, or by name "
        "pixel_values=1,3,224,224. Once for each input; instead of those that the model comes with.",
        metavar="[NAME=]SIZES[:DTYPE]",
        rich_help_panel=_INPUTS,
    ),
]
Device = Annotated[str | None, Option(help="Where to run, such as cpu or cuda; where the model is, without it.")]
Dtype = Annotated[str | None, Option(help=f"Cast the model first: {', '.join(DTYPES)}.")]
Seed = Annotated[int, Option(help="Of random weights and inputs.", rich_help_panel=_INPUTS)]

InMode = Annotated[
    Mode, Option("--mode", help="Call it in evaluation; or in training mode, with a backward through its loss.")
]
Autocast = Annotated[str | None, Option(help="Call it in an autocast region of this dtype, such as bfloat16.")]

MemoryFormat = Annotated[
    str | None,
    Option(help="channels_last (2D alone), channels_last_3d or contiguous_format; channels-last without it."),
]
Preserve = Annotated[bool, Option("--preserve", help="Exchange layers that lose on channels-last.")]
EachForward = Annotated[bool, Option("--each-forward", help="Leave the weights, and convert in each forward.")]

MaxLosses = Annotated[int | None, Option(min=0, help="Losses, forward and backward.", rich_help_panel=_BUDGET)]
MaxMixed = Annotated[int | None, Option(min=0, help="Mixed convolutions.", rich_help_panel=_BUDGET)]
MaxBytes = Annotated[int | None, Option(min=0, help="Bytes of both together.", rich_help_panel=_BUDGET)]

WithTable = Annotated[bool, Option("--table", help="Print a line for every weight as well.", rich_help_panel=_OUTPUT)]
Json = Annotated[bool, Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUTPUT)]
Html = Annotated[
    Path | None, Option(help="Write a page for a browser as well.", metavar="FILE", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, Option("--debug", help="After an error, print where it happened and not a line.", rich_help_panel=_OUTPUT)
]
