"""A trace as a page."""

from collections import Counter

from torch_nhwc.page.content import Cell, Page, Step, Table
from torch_nhwc.tracing.layouts import CHANNELS_LAST_NAMES, Layout
from torch_nhwc.tracing.rendering import headline, place, short_source
from torch_nhwc.tracing.rows import Loss, MixedConvolution, Seen, TracedModule, described

_HEAD = ["module", "operator", "phase", "read", "written", "bytes", "times", "source", "advice"]


def page_of(seen: Seen) -> Page:
    """The modules that ran, those that only call others left out, and a table of each kind of rows."""
    lost, are_mixed = (Counter(row.path for row in rows) for rows in (seen.losses, seen.mixed))
    told: dict[str, list[str]] = {}
    both: list[Loss | MixedConvolution] = [*seen.losses, *seen.mixed]
    for row in both:
        told.setdefault(row.path, []).append(described(row))
    names = [module.path.split(".") for module in seen.modules if module.path]
    calling = {".".join(each[:depth]) for each in names for depth in range(len(each))}
    steps = [
        Step(
            module.path,
            module.layer,
            _format(module),
            lost[module.path],
            are_mixed[module.path],
            [f"{_told(module.inputs)} to {_told(module.outputs)}", *told.get(module.path, ())],
        )
        for module in seen.modules
        if module.path not in calling or module.path in told
    ]
    summary = [f"{headline(seen)}."]
    summary += [f"Channels-last from {place(gain)} on, by {gain.operator}." for gain in seen.gained]
    summary += [f"Not seen: {row.path or 'the model'}: {row.why}." for row in seen.unseen]
    advised: list[list[Cell]] = [[*_cells(row), row.advice or ""] for row in seen.losses]
    tables = [Table("Losses", _HEAD, advised)]
    if seen.mixed:
        tables.append(Table("Mixed convolutions", _HEAD[:-1], [_cells(row) for row in seen.mixed]))
    if seen.reorders:
        head = ["module", "phase", "what", "milliseconds", "times"]
        times: list[list[Cell]] = [
            [each.path or "the model", each.phase, each.what, each.milliseconds, each.count] for each in seen.reorders
        ]
        tables.append(Table("Reorders inside of operators", head, times))
    model = next((module.layer for module in seen.modules if not module.path), "")
    return Page(f"Trace of {model}" if model else "Trace", summary, steps, tables)


def _cells(row: Loss | MixedConvolution) -> list[Cell]:
    read, written = (", ".join(map(str, layouts)) for layouts in (row.inputs, row.outputs))
    source = short_source(row.source)
    return [row.path or "the model", row.operator, row.phase, read, written, row.bytes, row.count, source]


def _format(module: TracedModule) -> str:
    """That of what it gave first, channels-last of either rank alike."""
    name = next((layout.format for layout in module.outputs), "")
    return "channels_last" if name in CHANNELS_LAST_NAMES else name


def _told(layouts: tuple[Layout, ...]) -> str:
    return ", ".join(map(str, layouts)) or "no images or volumes"
