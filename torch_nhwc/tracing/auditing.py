"""`audit`: the losses in a profile that was saved, from the strides of the operators' inputs."""

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_nhwc.sites.site import OPERATORS
from torch_nhwc.tracing.traces import (
    CONTIGUOUS,
    FormatLoss,
    Layout,
    MixedConvolution,
    Phase,
    Reorder,
    Trace,
    TraceWriter,
    format_of_strides,
    is_channels_last,
)


def audit(path: str | Path) -> Trace:
    """Read where channels-last was lost from a Chrome trace that `torch.profiler` saved with `record_shapes=True`.

    Such a file has the strides of inputs, and not those of outputs: a loss shows as a copy from channels-last to
    contiguous, or by what the next operator reads. The paths are the classes of modules if the profile was taken
    `with_stack=True`, and empty otherwise.

    Args:
        path: The file, which may be compressed with gzip.

    Raises:
        ValueError: The file is not such a profile, or has no strides.

    Example:
        >>> import tempfile
        >>> x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> with torch.profiler.profile(record_shapes=True) as profile:
        ...     _ = x.contiguous()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profile.export_chrome_trace(f"{folder}/trace.json")
        ...     trace = torch_nhwc.tracing.audit(f"{folder}/trace.json")
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
        raise ValueError(f"audit: expected strides, which torch.profiler records with record_shapes=True, in {path}")
    writer = TraceWriter()
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(list)
    for each in events:
        if each.get("cat") in ("cpu_op", "python_function"):
            threads[each.get("tid")].append(each)
        elif each.get("cat") == "kernel" and _REORDERS.search(each["name"]):
            kernels[each["name"]].append(each["dur"] / 1000)
    writer.trace.reorders = tuple(Reorder(name, sum(times), len(times)) for name, times in kernels.items())
    for thread in threads.values():
        _read(thread, writer)
    writer.add_unseen("", _UNSEEN)
    return writer.trace


_UNSEEN = "a profile has no strides of outputs: a loss shows only if the next operator reads it"
# Kernels of cuDNN and CUTLASS that change formats.
_REORDERS = re.compile(
    r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor|transpose_readWrite|ncdhw2ndhwc|ndhwc2ncdhw"
)
_BACKWARD = "autograd::engine::evaluate_function"
_ELEMENT_SIZES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1}
# The position of a convolution's input; the weight is the next argument.
_CONVOLVED = {**dict.fromkeys(OPERATORS, 0), "aten::convolution_backward": 1}


class _Operator:
    """A call of an operator, by its event and the events around it."""

    def __init__(self, event: dict[str, Any], around: list[dict[str, Any]]) -> None:
        self.name: str = event["name"]
        self.outer = [each["name"] for each in around if _is_operator(each)]
        self.path = ".".join(
            each["name"].removeprefix("nn.Module: ") for each in around if "nn.Module: " in each["name"]
        )
        self.phase: Phase = "backward" if any(each["name"].startswith(_BACKWARD) for each in around) else "forward"
        arguments = event.get("args", {})
        pairs = zip(arguments.get("Input Dims", []), arguments.get("Input Strides", []))
        self.inputs = [_layout(dims, strides) for dims, strides in pairs]
        self.types = arguments.get("Input type", [])

    def bytes(self, index: int) -> int:
        """Return the size of an input."""
        layout = self.inputs[index]
        size = _ELEMENT_SIZES.get(self.types[index], 4) if index < len(self.types) else 4
        return size * math.prod(layout.shape) if layout else 0


def _read(events: list[dict[str, Any]], writer: TraceWriter) -> None:
    """Add what the operators of a thread lost."""
    around: list[dict[str, Any]] = []
    before: _Operator | None = None
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        if _is_operator(event):
            operator = _Operator(event, around)
            if not operator.outer:
                writer.trace.operators[operator.phase] += 1
                if before is not None:
                    _add_inferred_loss(before, operator, writer)
                before = operator
            if _add_copy(operator, writer):
                before = None
            _add_mixed(operator, writer)
        around.append(event)


def _is_operator(event: dict[str, Any]) -> bool:
    return event["cat"] == "cpu_op" and "::" in event["name"] and not event["name"].startswith("autograd::")


def _add_inferred_loss(before: _Operator, after: _Operator, writer: TraceWriter) -> None:
    """Add a loss if an operator reads a contiguous activation that the one before it had not read."""
    if before.name in _CONVOLVED or not any(layout and is_channels_last(layout.format) for layout in before.inputs):
        return
    for index, layout in enumerate(after.inputs):
        if layout is not None:
            is_of_rank = any(each and len(each.shape) == len(layout.shape) for each in before.inputs)
            if layout.format == CONTIGUOUS and layout not in before.inputs and is_of_rank:
                layouts = _known(before.inputs), (layout,)
                writer.add(FormatLoss(before.path, before.name, before.phase, *layouts, None, after.bytes(index), 1))
            return


def _add_copy(operator: _Operator, writer: TraceWriter) -> bool:
    """Add the outermost operator around a copy from channels-last to contiguous; return whether this is one."""
    target, source = (*operator.inputs, None, None)[:2]
    if operator.name != "aten::copy_" or not target or not source or target.shape != source.shape:
        return False
    if not is_channels_last(source.format) or target.format != CONTIGUOUS:
        return False
    name = (*operator.outer, operator.name)[0]
    writer.add(FormatLoss(operator.path, name, operator.phase, (source,), (target,), None, operator.bytes(0), 1))
    return True


def _add_mixed(operator: _Operator, writer: TraceWriter) -> None:
    first = _CONVOLVED.get(operator.name)
    if first is None or any(name in _CONVOLVED for name in operator.outer):
        return
    operands = operator.inputs[first : first + 2]
    formats = [layout and layout.format for layout in operands]
    if CONTIGUOUS in formats and any(map(is_channels_last, formats)):
        size = operator.bytes(first + formats.index(CONTIGUOUS))
        writer.add(MixedConvolution(operator.path, operator.name, operator.phase, _known(operands), (), None, size, 1))


def _layout(dims: Any, strides: Any) -> Layout | None:
    """Return the layout of a tensor of 4 or 5 dimensions; lists of tensors are nested deeper."""
    if len(dims) not in (4, 5) or len(strides) != len(dims) or not all(isinstance(size, int) for size in dims):
        return None
    return Layout(format_of_strides(dims, strides), tuple(dims))


def _known(layouts: Iterable[Layout | None]) -> tuple[Layout, ...]:
    return tuple(layout for layout in layouts if layout is not None)
