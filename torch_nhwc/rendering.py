"""Plain text for people: numbers of bytes, paragraphs and tables that fit the terminal, and warnings."""

import inspect
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from itertools import zip_longest

_GAP = "  "
# The first column of a table is shortened before the others, down to this width.
_PATH_WIDTH = 16


def amount(count: int) -> str:
    """Return a number of bytes as text, such as `1.5 kB`."""
    if count < 1e3:
        return several(count, "byte")
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def first_of(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, or an empty text."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def printable(text: str) -> str:
    """Return text as one line, with control characters and those that cannot be encoded as escapes."""
    characters = (" " if each == "\n" else each for each in text)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in characters)


def several(count: int, noun: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines wrapped at the width of the terminal, with the continuations indented."""
    width = _terminal_width()
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"{wrapper.fill(printable(line))}\n" for line in lines)


def table(
    rows: Sequence[Sequence[str]],
    head: Sequence[str] = (),
    indent: str = "",
    *,
    most: int | None = None,
    sizes: Sequence[float] = (),
    name: str = "",
) -> str:
    """Return rows in columns that fit the terminal, without empty columns.

    If they do not fit, the paths in the first column are shortened at their front, and then the widest of the other
    columns in the middle.

    Args:
        rows: The cells, at least one row of them.
        head: The columns' names, if they are shown.
        indent: The start of each line.
        most: The number of rows to show; a last line says how many more there are.
        sizes: A size for each row; the largest rows are shown instead of the first.
        name: The attribute that holds all rows.
    """
    order = sorted(range(len(rows)), key=lambda index: -sizes[index]) if sizes else range(len(rows))
    hidden = max(0, len(rows) - most) if most is not None else 0
    rows = [[*map(printable, rows[index])] for index in sorted(order[: len(rows) - hidden])]
    titles = head or [""] * len(rows[0])
    columns = [(title, cells) for title, cells in zip(titles, zip(*rows)) if any(cells)]
    widths = [max(map(len, (title, *cells))) for title, cells in columns]
    room = _terminal_width() - len(indent) - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        rest = range(1, len(widths))
        widths[max(rest, key=widths.__getitem__) if rest and widths[0] <= _PATH_WIDTH else 0] -= 1
    (title, paths), *others = columns
    shown = [[title, *_without_front(paths, widths[0])]]
    for (title, cells), width in zip(others, widths[1:]):
        shown.append([_without_middle(cell, width) for cell in (title, *cells)])
    lines = [
        indent + _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in zip(*shown)
    ]
    lines = lines if head else lines[1:]
    if hidden:
        lines.append(f"{indent}... and {hidden} more{f', in .{name}' if name else ''}")
    return "".join(f"{line}\n" for line in lines)


def _terminal_width() -> int:
    return max(shutil.get_terminal_size((120, 24)).columns, 60)  # narrower cells would be unreadable


def _without_front(paths: Sequence[str], width: int) -> list[str]:
    """Return paths without the front that they share, or each one shortened as far as it has to be."""
    longest = max(paths, key=len)
    front = longest[: _end_of_front(longest, width)]
    if all(path.startswith(front) for path in paths):
        return [f"...{path[len(front) :]}" if front else path for path in paths]
    shown = [f"...{path[_end_of_front(path, width) :]}" if len(path) > width else path for path in paths]
    alike: dict[str, list[str]] = {}
    for path, short in zip(paths, shown):
        alike.setdefault(short, []).append(path)
    apart = {path: _told_apart(path, alike[short]) for path, short in zip(paths, shown) if len({*alike[short]}) > 1}
    return [_without_middle(apart.get(path, short), width) for path, short in zip(paths, shown)]


def _told_apart(path: str, paths: Sequence[str]) -> str:
    """Return the names of a path that differ among some paths, counted from the end, and its last name."""
    columns = [{*names} for names in zip_longest(*(each.split(".")[::-1] for each in paths))]
    text = ""
    for depth, name in reversed([*enumerate(path.split(".")[::-1])]):
        if depth == 0 or len(columns[depth]) > 1:
            text += f"{'' if text.endswith('...') or not text else '.'}{name}"
        elif not text.endswith("..."):
            text += "..."
    return text


def _end_of_front(path: str, width: int) -> int:
    """Return how many characters to cut from the front of a path: whole names, if possible."""
    if len(path) <= width:
        return 0
    start = len(path) + 3 - width
    return path.find(".", start - 1) + 1 or start


def _without_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = (width - 3) * 2 // 3
    return f"{text[: width - 3 - end]}...{text[len(text) - end :]}"


# Frames of these packages are skipped to find the line that called this package.
_PASSED_OVER = ("torch_nhwc", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn the code that called this package, directly or through PyTorch."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
