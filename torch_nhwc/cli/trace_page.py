"""The page of a trace: one HTML file with the modules by name, in order of execution, and tables that sort."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_nhwc import __version__
from torch_nhwc.serialization import write_whole
from torch_nhwc.tracing import FormatLoss, Layout, MixedConvolution, Trace
from torch_nhwc.tracing.traces import CHANNELS_LAST_NAMES, short_source

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# The formats that the legend names. All others have the same colour.
_FORMATS = {"channels_last": "channels-last", "contiguous": "contiguous", "": "no images or volumes"}
_OTHER = "another format"
_HEAD = ["module", "operator", "phase", "read", "written", "bytes", "times", "source"]


class Bar(NamedTuple):
    """A module that ran."""

    path: str
    layer: str
    format: str
    """The format of the output: `channels_last` for either rank; empty if there is no image or volume."""
    losses: int
    mixed: int
    details: Sequence[str]
    """Sentences that show on hover or tap."""


Cell = str | int | float


class Table(NamedTuple):
    """A table. Numbers sort as numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def write_page(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as one HTML file for a browser.

    Example:
        >>> import tempfile
        >>> from torch_nhwc.cli.trace_page import write_page
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(torch.randn(2, 3, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(trace, f"{folder}/trace.html")
    """
    text = page_of(trace)
    with write_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a name may have a lone surrogate


def page_of(trace: Trace) -> str:
    """Return a trace as HTML that loads no other files. All names of the model are escaped."""
    import jinja2  # PyTorch requires it; the import takes a while

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = _shown
    model = next((module.layer for module in trace.modules if not module.path), "")
    sentences = [*filter(None, [trace.verdict()]), trace.headline(), *trace.remarks()]
    sentences += [f"not seen: {row.path or 'the model'}: {row.why}" for row in trace.unseen]
    summary = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences]
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=f"Trace of {model}" if model else "Trace",
        summary=summary,
        bars=_bars(trace),
        tables=_tables(trace),
        formats=_FORMATS,
        other=_OTHER,
        version=__version__,
    )


def _bars(trace: Trace) -> list[Bar]:
    """Return the modules that ran, except those that only call other modules."""
    lost, mixed = (Counter(row.path for row in rows) for rows in (trace.losses, trace.mixed))
    details: dict[str, list[str]] = {}
    for row in (*trace.losses, *trace.mixed):
        details.setdefault(row.path, []).append(str(row))
    leaves = {module.path for module in trace.leaves()}
    bars = []
    for module in trace.modules:
        path = module.path
        if path in leaves or path in details:
            name = module.outputs[0].format if module.outputs else ""
            name = "channels_last" if name in CHANNELS_LAST_NAMES else name
            shown = [f"{_described(module.inputs)} to {_described(module.outputs)}", *details.get(path, ())]
            bars.append(Bar(path, module.layer, name, lost[path], mixed[path], shown))
    return bars


def _tables(trace: Trace) -> list[Table]:
    tables = []
    if trace.losses:
        losses: list[list[Cell]] = [[*_cells(row), row.advice or ""] for row in trace.losses]
        tables.append(Table("Losses", [*_HEAD, "advice"], losses))
    mixed = trace.mixed_by_others()
    if mixed:
        tables.append(Table("Mixed convolutions", _HEAD, [_cells(row) for row in mixed]))
    if trace.reorders:
        rows: list[list[Cell]] = [[row.kernel, row.milliseconds, row.count] for row in trace.reorders]
        tables.append(Table("Kernels that reorder", ["kernel", "milliseconds", "times"], rows))
    return tables


def _cells(row: FormatLoss | MixedConvolution) -> list[Cell]:
    read, written = (", ".join(map(str, layouts)) for layouts in (row.inputs, row.outputs))
    where = row.path or "the model"
    return [where, row.operator, row.phase, read, written, row.bytes, row.count, short_source(row.source)]


def _described(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts)) or "no images or volumes"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
