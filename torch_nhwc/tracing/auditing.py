"""The losses in a profile that was saved, without the model: what strides of inputs tell."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from torch_nhwc.finding.convolutions import OPERATORS
from torch_nhwc.tracing.layouts import AMBIGUOUS, CONTIGUOUS, OTHER, Layout, format_of_strides, is_channels_last
from torch_nhwc.tracing.record import Trace
from torch_nhwc.tracing.reorders import KERNELS
from torch_nhwc.tracing.rows import Loss, MixedConvolution, Phase, Reorder, Unseen
from torch_nhwc.tracing.tallies import Tallies

_BACKWARD = "autograd::engine::evaluate_function"
_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1}
# Where the input of a convolution stands, before its weight.
_CONVOLVED = {**dict.fromkeys(OPERATORS, 0), "aten::convolution_backward": 1}


class _Event(NamedTuple):
    """An operator in the profile."""

    name: str
    start: float
    end: float
    inputs: tuple[Layout | None, ...]
    sizes: tuple[int, ...]
    """Of an element of each input, in bytes."""


def audit(path: str | Path) -> Trace:
    """Reads where channels-last was lost from a Chrome trace that `torch.profiler` saved with `record_shapes=True`.

    The strides of inputs are in it, those of outputs are not: a loss shows as a copy from channels-last to contiguous,
    or by what the next operator reads. Paths are the classes that a profile `with_stack=True` has, and empty without.

    Args:
        path: of the file, which may be compressed with gzip.

    Raises:
        ValueError: it is no such file, or has no strides.

    Example:
        >>> import tempfile
        >>> x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> with torch.profiler.profile(record_shapes=True) as profile:
        ...     _ = x.contiguous()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profile.export_chrome_trace(f"{folder}/trace.json")
        ...     trace = torch_nhwc.audit(f"{folder}/trace.json")
        >>> [(loss.operator, loss.bytes) for loss in trace.losses]
        [('aten::contiguous', 1536)]
    """
    raw = Path(path).read_bytes()
    try:
        events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [each for each in (events if isinstance(events, list) else events["traceEvents"]) if "dur" in each]
    except (EOFError, KeyError, TypeError, ValueError, gzip.BadGzipFile) as error:
        raise ValueError(f"audit: expected a Chrome trace that torch.profiler saved: {path}: {error!r}") from error
    if not any("Input Strides" in each.get("args", {}) for each in events):
        raise ValueError(f"audit: expected strides, which torch.profiler has with record_shapes=True, in {path}")
    tallies = Tallies()
    counter = tallies.counter()
    threads: dict[Any, list[dict[str, Any]]] = {}
    for each in events:
        if each.get("cat") in ("cpu_op", "python_function"):
            threads.setdefault(each.get("tid"), []).append(each)
        elif each.get("cat") == "kernel" and KERNELS.search(each["name"]):
            tallies.add(Reorder("", "forward", each["name"]), each["dur"] / 1000, 1)
    for thread in threads.values():
        _read(thread, tallies, counter)
    tallies.add(Unseen("", "a profile has no strides of outputs: what a later operator does not read is not known"))
    return Trace(tallies)


def _read(events: list[dict[str, Any]], tallies: Tallies, counter: list[int]) -> None:
    """Goes through the events of a thread in their order, with those around each."""
    around: list[dict[str, Any]] = []
    last: tuple[_Event, str, Phase] | None = None
    for each in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        while around and each["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        operators = [outer for outer in around if outer["cat"] == "cpu_op" and "::" in outer["name"]]
        operators = [outer for outer in operators if not outer["name"].startswith("autograd::")]
        is_backward = any(outer["name"].startswith(_BACKWARD) for outer in around)
        modules = [outer["name"].removeprefix("nn.Module: ") for outer in around if "nn.Module: " in outer["name"]]
        phase: Phase = "backward" if is_backward else "forward"
        around.append(each)
        if each["cat"] != "cpu_op" or "::" not in each["name"] or each["name"].startswith("autograd::"):
            continue
        event, path = _event(each), ".".join(modules)
        if not operators:
            counter[is_backward] += 1
            if last is not None:
                _compare(*last, event, tallies)
            last = event, path, phase
        outermost = operators[0]["name"] if operators else event.name
        if event.name == "aten::copy_" and _copies(event):
            target, source = event.inputs[:2]
            row = Loss(path, outermost, phase, _known([source]), _known([target]), None)
            tallies.add(row, _bytes(event, 0), 1)
            last = None  # it is told
        first = _CONVOLVED.get(event.name)
        operands = event.inputs[first : first + 2] if first is not None else ()
        formats = [layout and layout.format for layout in operands]
        is_inner = any(outer["name"] in _CONVOLVED for outer in operators)
        if CONTIGUOUS in formats and any(map(is_channels_last, formats)) and not is_inner:
            copied = _bytes(event, (first or 0) + formats.index(CONTIGUOUS))
            tallies.add(MixedConvolution(path, event.name, phase, _known(operands), (), None), copied, 1)


def _compare(before: _Event, path: str, phase: Phase, after: _Event, tallies: Tallies) -> None:
    """Tells a loss by what the next operator reads: a shape in contiguous format that was not there before."""
    if before.name in _CONVOLVED or not any(layout and is_channels_last(layout.format) for layout in before.inputs):
        return
    read = next((index for index, layout in enumerate(after.inputs) if layout is not None), None)
    layout = None if read is None else after.inputs[read]
    if read is not None and layout is not None and layout.format == CONTIGUOUS and layout not in before.inputs:
        is_of_rank = any(each and len(each.shape) == len(layout.shape) for each in before.inputs)
        if is_of_rank:
            row = Loss(path, before.name, phase, _known(before.inputs), (layout,), None)
            tallies.add(row, _bytes(after, read), 1)


def _event(each: dict[str, Any]) -> _Event:
    arguments = each.get("args", {})
    dims, strides = arguments.get("Input Dims", []), arguments.get("Input Strides", [])
    types = arguments.get("Input type", [])
    layouts = tuple(_layout(*pair) for pair in zip(dims, strides))
    sizes = tuple(_BYTES.get(name, 4) for name in types)
    return _Event(each["name"], each["ts"], each["ts"] + each["dur"], layouts, sizes)


def _layout(dims: Any, strides: Any) -> Layout | None:
    """Of a tensor; lists of tensors are nested deeper."""
    if len(dims) not in (4, 5) or len(strides) != len(dims) or not all(isinstance(size, int) for size in dims):
        return None
    return Layout(format_of_strides(dims, strides), tuple(dims))


def _copies(event: _Event) -> bool:
    """Whether an activation is copied out of channels-last."""
    target, source = (*event.inputs, None, None)[:2]
    if target is None or source is None or target.shape != source.shape:
        return False
    return is_channels_last(source.format) and target.format not in (AMBIGUOUS, OTHER) and target.format == CONTIGUOUS


def _bytes(event: _Event, index: int) -> int:
    layout = event.inputs[index]
    count = event.sizes[index] if index < len(event.sizes) else 4
    for size in layout.shape if layout else ():
        count *= size
    return count


def _known(layouts: Any) -> tuple[Layout, ...]:
    return tuple(layout for layout in layouts if layout is not None)
