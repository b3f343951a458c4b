"""Plans and reports as pages."""

from collections.abc import Sequence

import torch

from torch_nhwc.formats import CONTIGUOUS, Format, Strides
from torch_nhwc.page.content import Page, Step, Table
from torch_nhwc.planning.rendering import done, summary
from torch_nhwc.planning.rows import Action, EntryRow, LayerRow, PlanRow

_ORDER = "Weights, and layers that lose, in the model's order"


def page_of(
    title: str,
    rows: Sequence[PlanRow],
    layers: Sequence[LayerRow],
    entries: Sequence[EntryRow],
    memory_format: str | None,
    is_done: bool,
    lines: Sequence[str] = (),
) -> Page:
    """The weights and the layers that lose, in the formats that they are to have, and a table of each.

    Args:
        title: of the page.
        rows: of a plan, or of a report.
        layers: its rows of layers.
        entries: its rows of entries.
        memory_format: the plan's.
        is_done: whether it has been carried out.
        lines: what else is to say.
    """
    steps = [
        Step(row.full_name, row.layer, _format(row), details=[done(row), *_sentences(row), *_strides(row)])
        for row in rows
    ]
    steps += [
        Step(
            row.path,
            row.layer,
            "channels_last" if row.is_wanted else "contiguous",
            losses=not row.is_wanted,
            details=[row.action.value, f"On channels-last it loses {row.loses}.", *_sentences(row)],
        )
        for row in layers
    ]
    head = ["weight", "layer", "shape", "dtype", "what", "bytes to move", "reason"]
    tables = [
        Table(
            "Weights",
            head,
            [
                [
                    *(row.full_name, row.layer, "x".join(map(str, row.shape or ()))),
                    *((row.dtype or "").removeprefix("torch."), done(row), row.bytes_to_move, _reason(row)),
                ]
                for row in rows
            ],
        )
    ]
    if layers:
        cells = [[row.path or "the model", row.layer, row.action.value, row.loses, _reason(row)] for row in layers]
        tables.append(Table("Layers that lose", ["layer", "class", "what", "loses", "reason"], cells))
    if entries:
        brought = [[row.path or "the model", row.memory_format] for row in entries]
        tables.append(Table("Inputs that are brought into a format", ["module", "format"], brought))
    return Page(title, [f"{summary(rows, memory_format, is_done)}.", *lines], steps, tables, _ORDER)


def _format(row: PlanRow) -> str:
    """That which the weight is to have; that of an activation's ribbon, channels-last of either rank alike."""
    if row.is_in_each_forward:
        return "channels_last"
    strides: Strides | None = row.target_strides or row.strides
    if strides is None or row.shape is None:
        return ""
    shape = torch.Size(row.shape)
    if strides == CONTIGUOUS.strides(shape):
        return "contiguous"
    is_last = row.rank in (4, 5) and strides == Format(None).strides(shape)
    return "channels_last" if is_last else "other"


def _reason(row: PlanRow | LayerRow) -> str:
    return "" if row.reason is None else f"{row.reason.name}: {row.reason.value}"


def _sentences(row: PlanRow | LayerRow) -> list[str]:
    return [] if row.reason is None else [_reason(row)]


def _strides(row: PlanRow) -> list[str]:
    shape = "x".join(map(str, row.shape or ()))
    if row.action in (Action.CONVERT, Action.RESTRIDE):
        return [f"{shape}, strides {row.strides} to {row.target_strides}"]
    return [f"{shape}, strides {row.strides}"] if row.strides else []
