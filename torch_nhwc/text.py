"""Plans and reports as text."""

import shutil
from collections.abc import Sequence


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.1f} MB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], by_interest: Sequence[int], most: int = 40) -> str:
    """Rows in columns, as wide as the terminal; the first column gives way, in its middle.

    Args:
        head: the columns' names.
        rows: the cells.
        by_interest: the rows' indices; where there are more than `most`, the first of them are shown, in order.
        most: rows to show.
    """
    shown = [rows[index] for index in sorted(by_interest[:most])]
    widths = [max(len(row[column]) for row in [head, *shown]) for column in range(len(head))]
    room = shutil.get_terminal_size((120, 24)).columns - sum(widths[1:]) - 2 * (len(head) - 1)
    widths[0] = max(min(widths[0], room), 12)
    lines = []
    for row in [head, *shown]:
        cells = [_shortened(row[0], widths[0]), *row[1:]]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} more, in .rows")
    return "\n".join(lines)


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = (width - 3) * 2 // 3
    return f"{text[: width - 3 - end]}...{text[-end:]}"
