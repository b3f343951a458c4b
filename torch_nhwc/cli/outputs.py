"""What a command prints and writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from torch_nhwc.cli.command import in_options
from torch_nhwc.converting.report import Report


def check_file(option: str, path: Path | None) -> None:
    """Raises a ValueError where a file cannot be written, before long work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{option}: expected a file in a folder that is there, got {path}")


def check_page(path: Path | None) -> None:
    """Raises a ValueError where a page cannot be written."""
    check_file("--html", path)
    if path is not None and find_spec("jinja2") is None:
        raise ValueError("jinja2 is missing: type `pip install 'torch-nhwc[page]'`")


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Says on a terminal what is being done, as long as it takes."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


def text_of(report: Report, table: bool) -> str:
    """A report with the names that arguments have here, and its table where it is wanted."""
    text = in_options(str(report))
    return (text.replace("(Every row: --table)\n", "") + report.table() if table else text).rstrip("\n")
