"""Plans and reports as a table for people."""

from collections import Counter
from collections.abc import Sequence

from torch_nhwc.planning.rows import Action, LayerRow, PlanRow
from torch_nhwc.reasons import Reason
from torch_nhwc.text import amount, paragraphs, table

_SEEN_BY_EXAMPLE = (
    "Layers that call torch.nn.functional.conv2d and its kin themselves, as those from torch.export do, show with "
    "example_inputs."
)
# What deserves a look comes first where not everything fits: by the lowest number, which is 0 for all others.
_DULL: dict[Reason | None, int] = {None: 1, Reason.IN_FORMAT: 2, Reason.FILTERED: 2, Reason.OTHER_RANK: 2}


def render(
    what: str,
    rows: Sequence[PlanRow],
    layers: Sequence[LayerRow],
    memory_format: str | None,
    storage: Sequence[str] | None = None,
) -> str:
    """Rows as a table that fits the terminal, with totals above and the reasons' sentences below.

    Args:
        what: the first word: of a plan, a report or a dry run.
        rows: its rows.
        layers: its rows of layers, which are summed up by their class.
        memory_format: the plan's.
        storage: where each weight went, in a report.
    """
    if not rows:
        return paragraphs([f"{what}: no convolution was found. {_SEEN_BY_EXAMPLE}", *_layer_lines(layers)])
    counts = Counter(row.action for row in rows)
    totals = ", ".join(f"{counts[action]} {action.value}" for action in Action if counts[action])
    moved = amount(sum(row.bytes_to_move for row in rows))
    verb = "moved" if what == "Report" else "to move"
    dtypes = {row.dtype.removeprefix("torch.") for row in rows if row.dtype}
    of_one = f" of {min(dtypes)}" if len(dtypes) == 1 else ""
    sites = f"{len(rows)} site{'s' if len(rows) > 1 else ''}"
    head = f"{what}: {sites}{of_one} to {memory_format or 'channels-last'}: {totals}; {moved} {verb}"
    cells = [
        [
            row.full_name.removesuffix(".weight"),
            row.layer,
            "x".join(map(str, row.shape or ())),
            "" if of_one else (row.dtype or "").removeprefix("torch."),
            row.action.value,
            done,
            row.reason.name if row.reason else "",
        ]
        for row, done in zip(rows, storage or [""] * len(rows))
    ]
    by_interest = sorted(range(len(rows)), key=lambda index: (_DULL.get(rows[index].reason, 0), index))
    body = table(["site", "layer", "shape", "dtype", "action", "storage", "reason"], cells, by_interest)
    reasons = dict.fromkeys(row.reason for row in rows if row.reason and row.reason is not Reason.IN_FORMAT)
    sentences = [f"{reason.name}: {reason.value}" for reason in reasons if reason]
    return paragraphs([head]) + body + paragraphs(sentences + _layer_lines(layers))


def _layer_lines(layers: Sequence[LayerRow]) -> list[str]:
    counts = Counter((row.action, row.layer, row.reason, row.loses) for row in layers)
    return [
        f"{action.value} {count} {layer}: {reason.value if reason else f'loses {loses}'}"
        for (action, layer, reason, loses), count in counts.items()
    ]
