"""Plans and reports as plain text: how many weights become what, then what needs a look; or all rows, as tables."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch_nhwc.ops import Outcome
from torch_nhwc.planning.rows import Action, LayerRow, PlanRow
from torch_nhwc.rendering import amount, first_of, paragraphs, several, table
from torch_nhwc.sites.reasons import Kind, Reason

SEEN_BY_EXAMPLE = (
    "Modules that call torch.nn.functional.conv2d or a similar function themselves, as those from torch.export do, are "
    "found only by running the model: pass example_inputs"
)
# What happens to weights, in the order of the summary; the first two are done in a report.
_MOVED, _RESTRIDED, _IN_FORMAT, _REFUSED, _KEPT = "to move", "to restride", "in format already", "refused", "kept"
_IN_EACH_FORWARD = "in each forward"
_DONE = {_MOVED: "moved", _RESTRIDED: "restrided"}
_BY_ACTION = {
    Action.CONVERT: _MOVED,
    Action.RESTRIDE: _RESTRIDED,
    Action.REFUSE: _REFUSED,
    Action.EACH_FORWARD: _IN_EACH_FORWARD,
}
# The sites of any other reason are named below the summary.
_BY_REASON: dict[Reason | None, str] = {
    Reason.IN_FORMAT: _IN_FORMAT,
    Reason.ONE_CHANNEL: "of one channel stay contiguous",
    Reason.META: "on the meta device",
    Reason.IN_EACH_FORWARD: _IN_EACH_FORWARD,
    Reason.LAZY: "once they have a shape",
    Reason.FILTERED: "left out by the filter",
    Reason.OTHER_RANK: "of the other rank",
    Reason.FAKE: "fake",
    Reason.TIED: "tied to another",
}
_ORDER = [*dict.fromkeys((_MOVED, _RESTRIDED, *_BY_REASON.values(), _REFUSED, _KEPT))]
_MOST = 10  # sites that are named for one reason
# Where the bytes went, in the table of a report.
_WHERE: dict[Outcome | None, str] = {
    Outcome.IN_PLACE: "in place",
    Outcome.COPIED: "to new",
    Outcome.COPIED_HELD: "to new: held",
    Outcome.COPIED_FOREIGN: "to new: foreign",
    Outcome.COPIED_SHARED: "to new: shared",
}


def render(
    rows: Sequence[PlanRow],
    layers: Sequence[LayerRow],
    memory_format: str | None,
    is_done: bool,
    observed: bool,
    lines: Sequence[str] = (),
) -> str:
    """Return the summary, the sites that need a look, the layers that lose channels-last, and more lines.

    Args:
        rows: The plan's rows.
        layers: The plan's rows of layers.
        memory_format: The plan's memory format.
        is_done: Whether the plan has been carried out.
        observed: Whether the model ran on example inputs.
        lines: What else is to be said.
    """
    hint = "" if rows or observed else f" {SEEN_BY_EXAMPLE}."
    text = paragraphs([f"{summary(rows, memory_format, is_done)}.{hint}"])
    alike: dict[tuple[str, Reason], list[PlanRow]] = {}
    for row in rows:
        is_contiguous_now = row.reason is Reason.ONE_CHANNEL and row.action is not Action.KEEP
        if row.reason is not None and (row.reason not in _BY_REASON or is_contiguous_now):
            fate = _fate(row)
            fate = fate if fate in (_REFUSED, _KEPT) else "with a remark"
            alike.setdefault((fate, row.reason), []).append(row)
    for (fate, reason), some in alike.items():
        text += paragraphs([f"{len(some)} {fate}, {reason.name}: {reason.value}"])
        text += table(_cells(some, rows), indent="  ", most=_MOST)
    all_rows = ["(All rows: .table())"] if rows or layers else []
    return text + paragraphs([*_layer_lines(layers, is_done), *lines, *all_rows])


def summary(rows: Sequence[PlanRow], memory_format: str | None, is_done: bool) -> str:
    """Return how many weights become what; each row is counted once."""
    if not rows:
        return "No 2D or 3D convolution was found"
    counts = Counter(map(_fate, rows))
    wanted = "contiguous" if memory_format == "contiguous_format" else "channels-last"
    moved = f" ({amount(sum(row.bytes_to_move for row in rows))})"
    parts = [
        f"{counts[fate]} {_DONE.get(fate, fate) if is_done else fate}{moved if fate == _MOVED else ''}"
        for fate in _ORDER
        if counts[fate]
    ]
    return f"{several(len(rows), 'weight')} to {wanted}: {', '.join(parts)}"


def full_table(rows: Sequence[PlanRow], layers: Sequence[LayerRow]) -> str:
    """Return a line for every row, and what the reasons in them mean."""
    text = ""
    if rows:
        what = [[_WHERE.get(row.outcome, row.action.value), _name(row.reason)] for row in rows]
        cells = [[*site, *done] for site, done in zip(_cells(rows, rows), what)]
        text += table(cells, ["site", "layer", "shape", "dtype", "action", "reason"])
    if layers:
        cells = [[row.path or "(the model itself)", row.layer, row.action.value, _name(row.reason)] for row in layers]
        text += table(cells, ["layer that loses", "class", "action", "reason"])
    # A lazy weight that is kept will not be converted, as the sentence says.
    reasons = [row.reason for row in rows if not (row.reason is Reason.LAZY and row.action is Action.KEEP)]
    reasons += [row.reason for row in layers]
    return text + paragraphs(f"{reason.name}: {reason.value}" for reason in dict.fromkeys(reasons) if reason)


def _fate(row: PlanRow) -> str:
    """Return what the summary counts a row as."""
    if row.reason in _BY_REASON:
        return _BY_REASON[row.reason]
    if row.action is Action.KEEP:  # with a remark, a weight is in the format
        return _IN_FORMAT if row.reason is None or row.reason.kind is Kind.REMARK else _KEPT
    return _BY_ACTION[row.action]


def _name(reason: Reason | None) -> str:
    return reason.name if reason else ""


def _cells(some: Sequence[PlanRow], rows: Sequence[PlanRow]) -> list[list[str]]:
    """Return the cells that identify some of the rows, with the dtype if the rows have different ones."""
    has_dtypes = len({row.dtype for row in rows if row.dtype}) > 1
    return [
        [
            row.full_name.removesuffix(".weight"),
            row.layer,
            "x".join(map(str, row.shape or ())),
            (row.dtype or "").removeprefix("torch.") if has_dtypes else "",
        ]
        for row in some
    ]


def _layer_lines(layers: Sequence[LayerRow], is_done: bool) -> Iterator[str]:
    """Return what happens to the layers that lose channels-last, by their class; for layers that stay, their paths."""
    alike: dict[tuple[str, str, Reason | None], list[str]] = {}
    for row in layers:
        alike.setdefault((row.layer, row.loses, row.reason), []).append(row.path or "the model itself")
    for (layer, loses, reason), paths in alike.items():
        if reason is None:
            yield f"{len(paths)} {layer} {'replaced' if is_done else 'to replace'}: on channels-last it loses {loses}"
        elif reason is Reason.EXCHANGED:
            yield f"{len(paths)} {layer} kept: {reason.value}"
        else:
            yield f"{len(paths)} {layer} kept ({first_of(paths)}): {reason.value}; on channels-last it loses {loses}"
