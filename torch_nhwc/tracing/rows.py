"""What a trace tells, as plain data: one row for all calls that are alike but for their sizes."""

from typing import Literal, NamedTuple

from torch_nhwc.rendering import amount
from torch_nhwc.tracing.layouts import Layout

Phase = Literal["forward", "backward"]


class Loss(NamedTuple):
    """A loss is an operator that read a channels-last activation and wrote memory in another format.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Softmax2d())
        >>> with torch_nhwc.channels_last(model), torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> loss, = trace.losses
        >>> loss.path, loss.operator, loss.phase, loss.advice
        ('1', 'aten::_softmax', 'forward', 'exchanged by preserve=True')
    """

    path: str
    """Of the innermost module of the model that was running; empty in the model itself, and outside of it."""
    operator: str
    phase: Phase
    inputs: tuple[Layout, ...]
    """Of 4 and 5 dimensions, and single images; their sizes are those of the first call."""
    outputs: tuple[Layout, ...]
    source: str | None
    """File and line in code that is not PyTorch's, in the forward."""
    bytes: int = 0
    """That were written in the other format, by all calls."""
    count: int = 0  # type: ignore[assignment]
    """How many calls there were."""
    advice: str | None = None
    """What keeps the format instead, where something is known to."""


class MixedConvolution(NamedTuple):
    """A mixed convolution has an input and a weight in different formats, and copies one of them inside.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
        >>> mixed, = trace.mixed
        >>> [layout.format for layout in mixed.inputs], mixed.bytes
        (['channels_last', 'contiguous'], 864)
    """

    path: str
    operator: str
    phase: Phase
    inputs: tuple[Layout, ...]
    """The input and the weight; in backward the gradient, the input and the weight."""
    outputs: tuple[Layout, ...]
    source: str | None
    bytes: int = 0
    """Of the one that is not channels-last, in all calls."""
    count: int = 0  # type: ignore[assignment]


class Gain(NamedTuple):
    """A gain is an operator that answers in channels-last though none of its inputs is.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> [gain.operator for gain in trace.gained]
        ['aten::convolution']
    """

    path: str
    operator: str
    phase: Phase
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    source: str | None
    bytes: int = 0
    """Of the outputs, in all calls."""
    count: int = 0  # type: ignore[assignment]


class TracedModule(NamedTuple):
    """A module that ran, and the formats that it was given and gave, the first time.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> [(module.path, module.layer, module.outputs[0].format) for module in trace.modules]
        [('', 'Sequential', 'contiguous'), ('0', 'Conv2d', 'contiguous'), ('1', 'ReLU', 'contiguous')]
    """

    path: str
    layer: str
    """Its class."""
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class Reorder(NamedTuple):
    """A reorder is a change of format inside of an operator, where no operator of PyTorch's shows it.

    Example:
        >>> row = torch_nhwc.Reorder("stem.conv", "forward", "f32::blocked:acdb -> f32::blocked:ABcd8b8a", 0.2, 1)
        >>> row.milliseconds
        0.2
    """

    path: str
    phase: Phase
    what: str
    """From which format to which, or the kernel, as the library calls it."""
    milliseconds: float = 0
    count: int = 0  # type: ignore[assignment]


class Unseen(NamedTuple):
    """A part of a model in which operators or modules do not show, and why.

    Example:
        >>> torch_nhwc.Unseen("encoder", "it is compiled").path
        'encoder'
    """

    path: str
    why: str


class Seen(NamedTuple):
    """All rows of a trace."""

    operators: dict[Phase, int]
    """How many ran in each phase."""
    losses: tuple[Loss, ...]
    mixed: tuple[MixedConvolution, ...]
    gained: tuple[Gain, ...]
    reorders: tuple[Reorder, ...]
    unseen: tuple[Unseen, ...]
    modules: tuple[TracedModule, ...]


def described(row: Loss | MixedConvolution) -> str:
    """A row as a line for people."""
    formats = " x ".join(layout.format for layout in row.inputs)
    if isinstance(row, Loss):
        formats += f" -> {' x '.join(str(layout) for layout in row.outputs)}"
    where = f"{row.path or 'the model'}, {row.phase}"
    source = f", at {row.source}" if row.source else ""
    advice = f"; {row.advice}" if isinstance(row, Loss) and row.advice else ""
    times = f"{row.count} time{'s' * (row.count != 1)}"
    return f"{row.operator.removeprefix('aten::')} in {where}: {formats}; {times}, {amount(row.bytes)}{source}{advice}"
