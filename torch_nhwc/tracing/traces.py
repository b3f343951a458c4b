"""What a trace found, as plain data, and a budget for it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn

from torch_nhwc import serialization
from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.rendering import amount, paragraphs, printable, several, table

Phase = Literal["forward", "backward"]
CONTIGUOUS, AMBIGUOUS, OTHER = "contiguous", "ambiguous", "other"
_NAMES = {rank: str(memory_format).removeprefix("torch.") for rank, memory_format in CHANNELS_LAST.items()}
RANKS = {name: rank for rank, name in _NAMES.items()}
CHANNELS_LAST_NAMES = frozenset(RANKS)
INPUT_HOOK = "the input hook"


class Layout(NamedTuple):
    """The format and the shape of an activation with 4 or 5 dimensions, or of one image or volume of a batch.

    The format is `contiguous`, `channels_last` or `channels_last_3d`; `ambiguous` if both fit, as with one channel or
    one voxel; `other` if neither fits. An image that is taken out of a batch, as by `x[0]`, has the batch's format.
    """

    format: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.format} {'x'.join(map(str, self.shape))}"


@dataclass
class OperatorRow:
    """What losses, mixed convolutions and gains have: calls of an operator that differ in nothing but their sizes."""

    path: str
    """The path of the innermost module that ran; empty in the model itself and outside of it."""
    operator: str
    phase: Phase
    inputs: tuple[Layout, ...]
    """The tensors with 4 or 5 dimensions, and single images or volumes, of the first call."""
    outputs: tuple[Layout, ...]
    source: str | None
    """The file and line of the forward, in code that is not PyTorch's; or `the input hook` of `convert_`."""
    bytes: int
    """The bytes that all calls wrote in the other format."""
    count: int
    """The number of calls."""

    def __str__(self) -> str:
        formats = " x ".join(layout.format for layout in self.inputs)
        if not isinstance(self, MixedConvolution):
            formats += f" -> {' x '.join(map(str, self.outputs))}"
        where = f"{self.path or 'the model'}, {self.phase}"
        source = f", at {self.source}" if self.source else ""
        total = f"{several(self.count, 'time')}, {amount(self.bytes)}"
        return f"{self.operator.removeprefix('aten::')} in {where}: {formats}; {total}{source}"


@dataclass
class FormatLoss(OperatorRow):
    """An operator that read a channels-last activation and wrote memory in another format.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Softmax2d())
        >>> with torch_nhwc.channels_last(model, preserve=False), torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> loss, = trace.losses
        >>> loss.path, loss.operator, loss.phase, loss.advice
        ('1', 'aten::_softmax', 'forward', 'replaced by preserve=True')
    """

    advice: str | None = None
    """What keeps the format instead, if something is known to."""

    def __str__(self) -> str:
        return f"{super().__str__()}{f'; {self.advice}' if self.advice else ''}"


@dataclass
class MixedConvolution(OperatorRow):
    """A convolution whose input and weight have different formats, so that it copies one of them.

    `inputs` are the input and the weight; in backward the gradient, the input and the weight. `bytes` are those of the
    one that is not channels-last.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
        >>> mixed, = trace.mixed
        >>> [layout.format for layout in mixed.inputs], mixed.bytes
        (['channels_last', 'contiguous'], 864)
    """


@dataclass
class Gain(OperatorRow):
    """An operator that returned a channels-last activation although none of its inputs was channels-last.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> [gain.operator for gain in trace.gained]
        ['aten::convolution']
    """


@dataclass
class TracedModule:
    """A module that ran, and the layouts that it read and wrote the first time.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> [(module.path, module.layer, module.outputs[0].format) for module in trace.modules]
        [('', 'Sequential', 'contiguous'), ('0', 'Conv2d', 'contiguous'), ('1', 'ReLU', 'contiguous')]
    """

    path: str
    layer: str
    """The module's class."""
    inputs: tuple[Layout, ...]
    """The layouts of positional arguments."""
    outputs: tuple[Layout, ...]


@dataclass
class Reorder:
    """A kernel of a GPU that changes a format, by its name in a profile that `audit` read."""

    kernel: str
    milliseconds: float
    count: int


@dataclass(frozen=True)
class Unseen:
    """A part of a model in which operators or modules do not show, and why."""

    path: str
    why: str


_MOST_ROWS = 20  # in each printed table


@dataclass(repr=False)
class Trace:
    """What was seen of the formats of activations while a model ran.

    Calls that differ in nothing but their sizes are one row with their count, so that many steps take no more memory
    than one. A trace is filled while its block runs.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(x)
        >>> trace.losses, trace.operators
        ((), {'forward': 1, 'backward': 0})
        >>> torch_nhwc.tracing.Trace.from_json(trace.to_json()) == trace
        True
    """

    operators: dict[Phase, int]
    """The number of operators that ran in each phase."""
    losses: tuple[FormatLoss, ...] = ()
    """The operators that lost channels-last, in the order in which they were first seen."""
    restored: tuple[FormatLoss, ...] = ()
    """Operators inside of replaced layers, and of `torch_nhwc.functional`, whose other format these restore."""
    mixed: tuple[MixedConvolution, ...] = ()
    """The convolutions whose input and weight had different formats."""
    gained: tuple[Gain, ...] = ()
    """The first operators that returned channels-last although none of their inputs was."""
    reorders: tuple[Reorder, ...] = ()
    """The kernels that changed a format inside of operators; only from `audit`."""
    unseen: tuple[Unseen, ...] = ()
    """What could not be seen."""
    modules: tuple[TracedModule, ...] = ()
    """The modules that ran, in the order in which they began."""

    def to_json(self) -> str:
        """Return the trace as JSON text, for `from_json`."""
        return serialization.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """Return the trace that `to_json` wrote.

        Raises:
            ValueError: The text is not such a trace.
        """
        return serialization.from_json(cls, text, _expect_both_phases)

    def headline(self) -> str:
        """Return how many operators ran, and what was lost in all."""
        if not any(self.operators.values()):
            return "nothing ran: call the model inside of the block of `with`"
        ran = f"{self.operators['forward']} operators forward, {self.operators['backward']} backward"
        total = amount(sum(row.bytes for row in self.losses))
        layouts = [layout.format for module in self.modules for layout in (*module.inputs, *module.outputs)]
        none = "nothing to lose" if CONTIGUOUS in layouts and not any(map(is_channels_last, layouts)) else "no loss"
        lost = f"{len(self.losses)} loss{'es' * (len(self.losses) != 1)} of {total}" if self.losses else none
        mixed = several(len(self.mixed), "mixed convolution") if self.mixed else "no mixed convolution"
        return f"{ran}: {lost}, {mixed}"

    def verdict(self) -> str:
        """Return in a few words where the model ran channels-last; nothing if no module wrote images or volumes.

        Only modules that call no others count, and those that write what fits both formats are in either.
        """
        wrote = [(module.path or "the model", module.outputs[0].format) for module in self.leaves() if module.outputs]
        known = [(path, is_channels_last(name)) for path, name in wrote if name != AMBIGUOUS]
        if not known:
            return ""
        kept, total = sum(is_last for _, is_last in known), several(len(wrote), "module")
        if kept == len(known):
            lost = next(
                (f", but {_bare(row.operator)} in {row.path or 'the model'} loses it" for row in self.losses), ""
            )
            return (
                f"channels-last in all of {total}{lost}" if lost or self.mixed else f"channels-last throughout: {total}"
            )
        changes = [path for (path, is_last), before in zip(known, (None, *known)) if before and before[1] != is_last]
        is_last_at_end = known[-1][1]
        if len(changes) > 1 or (changes and is_last_at_end):
            first = next(path for path, is_last in known if not is_last)
            return f"channels-last in {kept} of {total}, and not from {first} on"
        name = "contiguous" if all(name in (CONTIGUOUS, AMBIGUOUS, *RANKS) for _, name in wrote) else "other formats"
        return f"{name} from {(changes or [known[0][0]])[0]} on: {len(known) - kept} of {total}"

    def leaves(self) -> list[TracedModule]:
        """Return the modules that ran, except those that only call other modules."""
        names = [module.path.split(".") for module in self.modules if module.path]
        callers = {".".join(each[:depth]) for each in names for depth in range(len(each))}
        return [module for module in self.modules if module.path not in callers]

    def mixed_by_the_input(self) -> tuple[MixedConvolution, ...]:
        """Return the mixed convolutions that copy because the input stayed contiguous: those before the first gain."""
        places = {module.path: place for place, module in enumerate(self.leaves())}
        changes: list[OperatorRow] = [row for row in (*self.gained, *self.losses) if row.phase == "forward"]
        end = min((places.get(row.path, -1) for row in changes), default=len(places))
        rows = tuple(row for row in self.mixed if places.get(row.path, len(places)) <= end)
        is_contiguous = [row.inputs[-2].format == CONTIGUOUS for row in rows if len(row.inputs) >= 2]
        given = [layout for module in self.modules[:1] for layout in module.inputs]
        is_last = not _has_one_channel(given) and any(is_channels_last(layout.format) for layout in given)
        is_one_row = bool(changes) and len({row.path for row in rows}) < 2  # which a table says as well
        return () if is_last or is_one_row or not all(is_contiguous) else rows

    def mixed_by_others(self) -> list[MixedConvolution]:
        """Return the mixed convolutions that have causes of their own, for a table."""
        rows = self.mixed_by_the_input()
        return [row for row in self.mixed if row not in rows]

    def mixed_cause(self) -> str:
        """Return the one cause of the mixed convolutions that `mixed_by_the_input` returns."""
        rows = self.mixed_by_the_input()
        if not rows:
            return ""
        given = [layout for module in self.modules[:1] for layout in module.inputs]
        why = f"the input {'has one channel and ' * _has_one_channel(given)}stayed contiguous"
        first, *others = dict.fromkeys(row.path or "the model" for row in rows)  # in backward they come again
        end = "on" if len(rows) == len(self.mixed) else f"to {others[-1]}"
        return f"{why}; from {first} {end} each convolution copies"

    def remarks(self) -> list[str]:
        """Return where channels-last begins, what replaced layers restore, and the cause of mixed convolutions."""
        remarks = []
        for gain in self.gained[:_MOST_ROWS]:
            where = gain.path or gain.source or "the model"
            remarks.append(f"channels-last from {where} on, by {_bare(gain.operator)}")
        if self.restored:
            count, size = several(len(self.restored), "operator"), amount(sum(row.bytes for row in self.restored))
            remarks.append(f"{count} inside of replaced layers, of {size}, by design: the layers restore the format")
        cause = self.mixed_cause()
        if cause:
            remarks.append(f"{cause} ({amount(sum(row.bytes for row in self.mixed_by_the_input()))})")
        return remarks

    def __str__(self) -> str:
        text = paragraphs(filter(None, [f"Trace: {self.headline()}", self.verdict(), *self.remarks()]))
        if self.losses:
            counts = Counter(row.advice for row in self.losses if row.advice)
            advice = [f"{count} of {len(self.losses)}: {each}" for each, count in counts.items()]
            text += _table("loss in", self.losses, "losses") + paragraphs(advice)
        if mixed := self.mixed_by_others():
            text += _table("mixed convolution", mixed, "mixed")
        if self.reorders:
            cells = [[row.kernel, f"{row.milliseconds:.2f}", str(row.count)] for row in self.reorders]
            text += "\n" + table(cells, ["kernel that reorders", "ms", "times"], most=_MOST_ROWS, name="reorders")
        return text + paragraphs(f"not seen: {row.path or 'the model'}: {row.why}" for row in self.unseen)


def _has_one_channel(layouts: Iterable[Layout]) -> bool:
    return any(len(layout.shape) in CHANNELS_LAST and layout.shape[1] == 1 for layout in layouts)


def _expect_both_phases(trace: Trace) -> None:
    if trace.operators.keys() != set(get_args(Phase)):
        raise ValueError(f"the operators of both phases, got {trace.operators}")


def _table(title: str, rows: Sequence[OperatorRow], name: str) -> str:
    cells = []
    for row in rows:
        formats = " x ".join(layout.format for layout in row.inputs) if isinstance(row, MixedConvolution) else ""
        written = "" if formats else " x ".join(map(str, row.outputs[:1]))
        operator = _bare(row.operator)
        where = [row.path or "(the model)", operator, row.phase, formats, written]
        cells.append([*where, amount(row.bytes), str(row.count), short_source(row.source)])
    head = [title, "operator", "phase", "formats", "written", "bytes", "times", "source"]
    return "\n" + table(cells, head, most=_MOST_ROWS, sizes=[row.bytes for row in rows], name=name)


def _bare(operator: str) -> str:
    return operator.removeprefix("aten::")


def short_source(source: str | None) -> str:
    """Return a line's file relative to the working directory, or with its last folder only."""
    if source is None:
        return ""
    file, colon, line = source.rpartition(":")
    if not colon:
        return source
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
    return f"{shown}:{line}"


_MOST_NAMED = 10  # in an error


def assert_layout(trace: Trace, max_losses: int = 0, max_mixed: int = 0, max_bytes: int | None = None) -> None:
    """Check that a trace has no more losses than a project allows.

    Args:
        trace: From `trace`, `audit` or `Trace.from_json`.
        max_losses: The largest number of rows in `trace.losses`.
        max_mixed: The largest number of rows in `trace.mixed`.
        max_bytes: The largest number of bytes of both together, in all calls; any number if it is `None`.

    Raises:
        AssertionError: There are more. The message names at most ten of each, the largest first.
        TypeError: The trace is something else.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
        >>> torch_nhwc.tracing.assert_layout(trace)
    """
    if not isinstance(trace, Trace):
        hint = ": run it in `with trace(model) as ...`" if isinstance(trace, nn.Module) else ""
        raise TypeError(f"assert_layout: expected a Trace, got {type(trace).__name__}{hint}")
    total = sum(row.bytes for row in (*trace.losses, *trace.mixed))
    is_too_much = max_bytes is not None and total > max_bytes
    lines = []
    if is_too_much:
        lines.append(f"{amount(total)} lost channels-last or were copied, {amount(max_bytes or 0)} are allowed")
    if len(trace.losses) > max_losses or is_too_much:
        lines += [f"{len(trace.losses)} losses of channels-last, {max_losses} are allowed", *_largest(trace.losses)]
    if len(trace.mixed) > max_mixed or is_too_much:
        lines += [f"{len(trace.mixed)} mixed convolutions, {max_mixed} are allowed", *_largest(trace.mixed)]
    if lines:
        raise AssertionError("\n".join(lines))


def _largest(rows: Sequence[OperatorRow]) -> list[str]:
    shown = sorted(rows, key=lambda row: -row.bytes)[:_MOST_NAMED]
    rest = [f"  ... and {len(rows) - _MOST_NAMED} more"] if len(rows) > _MOST_NAMED else []
    return [f"  {printable(str(row))}" for row in shown] + rest


_FIELDS: dict[type, str] = {FormatLoss: "losses", MixedConvolution: "mixed", Gain: "gained"}


class TraceWriter:
    """Writes a trace, in which calls that differ in nothing but their sizes become one row."""

    def __init__(self) -> None:
        self.trace = Trace({"forward": 0, "backward": 0})
        self._rows: dict[tuple[object, ...], OperatorRow] = {}

    def add(self, row: OperatorRow, name: str | None = None) -> OperatorRow:
        """Add a row, or its amounts to those of the row that is like it; return the row that is in the trace.

        It is added to the field of the trace with a name, by default the one for its kind.
        """
        formats = (tuple(layout.format for layout in layouts) for layouts in (row.inputs, row.outputs))
        name = name or _FIELDS[type(row)]
        key = name, row.path, row.operator, row.phase, row.source, *formats
        known = self._rows.setdefault(key, row)
        if known is row:
            setattr(self.trace, name, (*getattr(self.trace, name), row))
        else:
            known.bytes += row.bytes
            known.count += row.count
        return known

    def add_unseen(self, path: str, why: str) -> None:
        """Add a part that could not be seen, once."""
        if Unseen(path, why) not in self.trace.unseen:
            self.trace.unseen = *self.trace.unseen, Unseen(path, why)


# Dimensions from the innermost to the outermost.
_CONTIGUOUS_ORDERS = {rank: tuple(reversed(range(rank))) for rank in CHANNELS_LAST}
_CHANNELS_LAST_ORDERS = {rank: (1, *range(rank - 1, 1, -1), 0) for rank in CHANNELS_LAST}


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Layout, ...]:
    """Return the layouts of the tensors that have a format."""
    named = ((format_of(tensor), tensor) for tensor in tensors)
    return tuple(Layout(name, tuple(tensor.shape)) for name, tensor in named if name is not None)


def is_channels_last(name: str | None) -> bool:
    """Return whether a format is channels-last, of any rank, and not ambiguous."""
    return name in CHANNELS_LAST_NAMES


def is_channels_last_like(name: str | None, tensor: Tensor) -> bool:
    """Return whether a format is channels-last of the rank of a tensor, or of the batch that it is a view of."""
    rank = RANKS.get(name or "")
    return rank == tensor.dim() or (rank == tensor.dim() + 1 and _format_of_batch(tensor) is not None)


def format_of(tensor: Tensor) -> str | None:
    """Return the format of a tensor, or `None` if it has another rank or no strides."""
    rank = tensor.dim()
    if rank not in CHANNELS_LAST:
        return _format_of_batch(tensor) if rank == 3 else None
    try:
        is_contiguous = tensor.is_contiguous()
        if tensor.is_contiguous(memory_format=CHANNELS_LAST[rank]):
            return AMBIGUOUS if is_contiguous else _NAMES[rank]
        name = CONTIGUOUS if is_contiguous else format_of_strides(tensor.shape, tensor.stride())
    except RuntimeError:  # sparse and nested tensors
        return None
    return (name == OTHER and _format_of_batch(tensor)) or name


def format_of_strides(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the format of a tensor with 4 or 5 dimensions, which may be a slice of a larger one."""
    rank = len(shape)
    is_channels_last = _are_nested(shape, strides, _CHANNELS_LAST_ORDERS[rank])
    if _are_nested(shape, strides, _CONTIGUOUS_ORDERS[rank]):
        return AMBIGUOUS if is_channels_last else CONTIGUOUS
    return _NAMES[rank] if is_channels_last else OTHER


def _format_of_batch(tensor: Tensor) -> str | None:
    """Return the format of the batch of which a tensor is one image or volume, or `None` if it is not."""
    base, rank = tensor._base, tensor.dim() + 1
    if base is None or base.dim() != rank or rank not in CHANNELS_LAST:
        return None
    return format_of_strides((1, *tensor.shape), (0, *tensor.stride()))


def _are_nested(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether each dimension in an order steps over all dimensions before it, those of size 1 aside."""
    step = 1
    for dim in order:
        if shape[dim] == 1:
            continue
        if strides[dim] < step:
            return False
        step = strides[dim] * shape[dim]
    return True
