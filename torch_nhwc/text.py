"""Text that fits the terminal: numbers of bytes, paragraphs and tables."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

_GAP = "  "


def amount(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def paragraphs(lines: Iterable[str]) -> str:
    """Each line broken where the terminal ends, and indented from there."""
    width = _terminal_width()
    return "".join(f"{textwrap.fill(line, width, subsequent_indent='  ', break_on_hyphens=False)}\n" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], by_interest: Sequence[int], most: int = 40) -> str:
    """Rows in columns, within the terminal: empty columns are left out, and the widest give way, in their middle.

    The first column may be twice as wide as the others.

    Args:
        head: the columns' names.
        rows: the cells.
        by_interest: the rows' indices; where there are more than `most`, the first of them are shown, in order.
        most: rows to show.
    """
    shown = [rows[index] for index in sorted(by_interest[:most])]
    columns = [[name, *cells] for name, *cells in zip(head, *shown) if any(cells)]
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - _terminal_width()
    for _ in range(excess):
        widest = max(range(len(widths)), key=lambda column: widths[column] / (1 if column else 2))
        widths[widest] -= 1
    lines = [
        _GAP.join(_shortened(cell, width).ljust(width) for cell, width in zip(cells, widths)).rstrip()
        for cells in zip(*columns)
    ]
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} more, in .rows")
    return "".join(f"{line}\n" for line in lines)


def _terminal_width() -> int:
    return max(shutil.get_terminal_size((120, 24)).columns, 60)  # with less, no cell would say anything


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = (width - 3) * 2 // 3
    return f"{text[: width - 3 - end]}...{text[-end:]}"
