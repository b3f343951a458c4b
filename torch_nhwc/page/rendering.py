"""Writing a page as HTML."""

import os
from pathlib import Path
from typing import Any

from torch_nhwc.page.content import Page
from torch_nhwc.version import __version__

TEMPLATE = Path(__file__).with_name("page.html.jinja")
# What a legend can name; every other format is drawn alike.
FORMATS = {"channels_last": "channels-last", "contiguous": "contiguous", "": "no images or volumes"}
OTHER = "another format"


def render(page: Page) -> str:
    """The page as one HTML file that needs nothing else; everything from the model is escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("a page needs jinja2: pip install 'torch_nhwc[page]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["number"] = _is_number
    environment.filters["shown"] = _shown
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=page, formats=FORMATS, other=OTHER, version=__version__)


def write(page: Page, path: str | os.PathLike[str]) -> None:
    """Writes the page to a file, whole or not at all."""
    text = render(page)
    beside = Path(f"{os.fspath(path)}.part")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")  # names may have half of a character
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if not _is_number(value):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
