"""What a page shows, as plain data."""

from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A module on the ribbon."""

    path: str
    kind: str
    """Its class."""
    format: str
    """`channels_last`, `contiguous`, or anything else that its outputs are in; empty where there is none to tell."""
    losses: int = 0
    mixed: int = 0
    """Mixed convolutions."""
    details: Sequence[str] = ()
    """Sentences that are shown on hover or tap."""


Cell = str | int | float


class Table(NamedTuple):
    """A table that sorts and filters. Numbers sort as numbers, and are shown to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Page(NamedTuple):
    """All of a page, from top to bottom."""

    title: str
    summary: Sequence[str]
    """Sentences."""
    steps: Sequence[Step]
    """Of the ribbon."""
    tables: Sequence[Table]
    order: str = "Modules, in order of execution"
    """What the ribbon shows."""
