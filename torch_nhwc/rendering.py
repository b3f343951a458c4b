"""Plain text for people: numbers of bytes, paragraphs and tables that fit the terminal, and warnings."""

import inspect
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from itertools import zip_longest

_GAP = "  "
# The first column of a table gives way before the others until it is this wide.
_PATH_WIDTH = 16


def amount(count: int) -> str:
    """A number of bytes for people."""
    if count < 1e3:
        return several(count, "byte")
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def first_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def first_line(text: str) -> str:
    """The first line of a text that is not blank; nothing of one without."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def printable(text: str) -> str:
    """Text as one line in which what would steer a terminal, or cannot be encoded, is written as an escape."""
    characters = (" " if each == "\n" else each for each in text)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in characters)


def several(count: int, noun: str) -> str:
    """A number of things for people."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def paragraphs(lines: Iterable[str]) -> str:
    """Each line broken where the terminal ends, and indented from there."""
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
    """Rows in columns, within the terminal; empty columns are left out.

    Where they do not fit, the paths of the first column lose what they begin with, and then the widest of the others
    their middle.

    Args:
        rows: the cells, at least one row of them.
        head: the columns' names, if they are to be seen.
        indent: what each line begins with.
        most: rows to show; below is how many more there are.
        sizes: of the rows, where the largest are to be shown and not the first.
        name: of the attribute that has all rows.
    """
    order = sorted(range(len(rows)), key=lambda index: -sizes[index]) if sizes else range(len(rows))
    hidden = max(0, len(rows) - most) if most is not None else 0
    rows = [[*map(printable, rows[index])] for index in sorted(order[: len(rows) - hidden])]
    names = head or [""] * len(rows[0])
    columns = [(name, cells) for name, cells in zip(names, zip(*rows)) if any(cells)]
    widths = [max(map(len, (name, *cells))) for name, cells in columns]
    room = _terminal_width() - len(indent) - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        rest = range(1, len(widths))
        widths[max(rest, key=widths.__getitem__) if rest and widths[0] <= _PATH_WIDTH else 0] -= 1
    (name, paths), *others = columns
    shown = [[name, *_without_front(paths, widths[0])]]
    for (name, cells), width in zip(others, widths[1:]):
        shown.append([_without_middle(cell, width) for cell in (name, *cells)])
    lines = [
        indent + _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in zip(*shown)
    ]
    lines = lines if head else lines[1:]
    if hidden:
        lines.append(f"{indent}... and {hidden} more{f', in .{name}' if name else ''}")
    return "".join(f"{line}\n" for line in lines)


def _terminal_width() -> int:
    return max(shutil.get_terminal_size((120, 24)).columns, 60)  # with less, no cell would say anything


def _without_front(paths: Sequence[str], width: int) -> list[str]:
    """Paths that end as they did: all lose the same front, where they have one, or else each as much as it must."""
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
    """Of a path the names that differ among some paths, counted from the end, and the last one."""
    columns = [{*names} for names in zip_longest(*(each.split(".")[::-1] for each in paths))]
    text = ""
    for depth, name in reversed([*enumerate(path.split(".")[::-1])]):
        if depth == 0 or len(columns[depth]) > 1:
            text += f"{'' if text.endswith('...') or not text else '.'}{name}"
        elif not text.endswith("..."):
            text += "..."
    return text


def _end_of_front(path: str, width: int) -> int:
    """How much a path must lose at its front: whole names, if that will do."""
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
    """Warn the code that called this package, possibly through PyTorch's."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
