"""The result: one row for everything that was compared, the first layer that differs, and whether there is one."""

import enum
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_nhwc.page.content import Page, Table
from torch_nhwc.page.rendering import write
from torch_nhwc.rendering import first_of, paragraphs, table


class Verdict(str, enum.Enum):
    """A verdict says what a comparison came to.

    Example:
        >>> torch_nhwc.Verdict("differs") is torch_nhwc.Verdict.DIFFERS
        True
    """

    EQUAL = "equal"
    """Within the tolerance, on all inputs and in both formats."""
    DIFFERS = "differs"
    """Farther apart than the tolerance, or the layer raises."""
    UNREPEATABLE = "unrepeatable"
    """The reference differs from itself when it is called again: nothing can be said."""
    NOT_COMPARED = "not compared"
    """No tensor is found in what the reference returns: nothing can be said."""


_VERSION = 1
_NUMBERS = "error", "floor", "tolerance", "largest"
_MOST = 20  # rows that are shown
_BEFORE_DIFFERS = "so does the layer of the reference, in the same format; preserve=True exchanges those that are known"


class VerificationRow(NamedTuple):
    """A row says how far one thing that a layer computes is from what the reference computes.

    Numbers are absolute, those of the inputs and the channel on which the row was worst.

    Example:
        >>> before, after = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3)
        >>> row = torch_nhwc.verify(before, after, torch.randn(1, 3, 8, 8)).rows[0]
        >>> row.layer, row.what, row.verdict
        ('Conv2d', 'weight', <Verdict.DIFFERS: 'differs'>)
    """

    path: str
    """Of the layer in the model, or of the module whose own code between its layers it is; empty for the model."""
    layer: str
    """Its class in the reference."""
    what: str
    """What was compared: an output, a gradient, a parameter or a buffer; of code between layers, a layer's input."""
    error: float
    """The largest difference at one position; infinite where shapes differ, or where the layer raises."""
    floor: float | None
    """The noise floor: how far the reference is from its own float64 run, from itself when it is called again, and
    when its input changes by a rounding. `None` where the error was within the tolerance without it."""
    tolerance: float
    """How large the error may be."""
    largest: float
    """The largest magnitude in the reference's result, in the channel that the other numbers are of."""
    inputs: str
    """What was special about the inputs, and whether they came in channels-last."""
    verdict: Verdict
    before_differs: bool = False
    """Whether the reference's own layer is as far off in the same formats: then the fault is the layer's, and what
    brought it about is the format alone."""
    note: str = ""
    """What was raised, or why nothing was compared."""

    @property
    def severity(self) -> tuple[int, float]:
        """By which rows are ordered: the worse, the larger."""
        share = self.error / self.tolerance if self.tolerance else math.inf if self.error else 0.0
        own = self.verdict is Verdict.DIFFERS and not self.before_differs
        rank = {Verdict.DIFFERS: 2 + own, Verdict.EQUAL: 0}
        return rank.get(self.verdict, 1), share

    @property
    def remark(self) -> str:
        """What there is to say of the row, beside its numbers."""
        return self.note or (_BEFORE_DIFFERS if self.before_differs else "")


@dataclass(frozen=True)
class Verification:
    """A verification says what of a model computes as the reference does; it is true where nothing differs.

    Attributes:
        rows: what was compared, in order of execution.
        not_run: the paths of the layers with parameters that did not run on the example inputs: of those, parameters
            alone were compared.
        seconds: what it took.

    Example:
        >>> import copy
        >>> before = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(inplace=True))
        >>> model = copy.deepcopy(before)
        >>> report = torch_nhwc.convert_(model)
        >>> verification = torch_nhwc.verify(before, report, torch.randn(2, 3, 8, 8))
        >>> verification.ok, verification.first
        (True, None)
        >>> torch_nhwc.Verification.from_json(verification.to_json()) == verification
        True
    """

    rows: tuple[VerificationRow, ...]
    not_run: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> VerificationRow | None:
        """The first row that differs, in order of execution."""
        return next(iter(self.differing), None)

    @property
    def differing(self) -> list[VerificationRow]:
        """The rows that differ."""
        return [row for row in self.rows if row.verdict is Verdict.DIFFERS]

    def to_json(self) -> str:
        """The verification as JSON text, for `from_json`; what is infinite is a string: JSON has no word for it."""
        rows = [
            {key: str(value) if value == math.inf else value for key, value in row._asdict().items()}
            for row in self.rows
        ]
        described = {"version": _VERSION, "ok": self.ok, "seconds": self.seconds, "not_run": self.not_run}
        return json.dumps(described | {"rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Verification":
        """The verification that `to_json` wrote.

        Raises:
            ValueError: the text is not such a verification, or one of another version.
        """
        try:
            read = json.loads(text)
            if read["version"] != _VERSION:
                raise ValueError(f"version {read['version']!r}, expected {_VERSION}")
            rows = tuple(VerificationRow(**_row_from_data(row)) for row in read["rows"])
            return cls(rows, tuple(read["not_run"]), read["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Verification.from_json: expected what Verification.to_json writes: {error!r}") from error

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the verification as one HTML file, to be looked at in a browser; it needs the extra `page`.

        Raises:
            ImportError: jinja2 is not installed.
        """
        head = [
            "layer",
            "class",
            "compared",
            "verdict",
            "error",
            "allowed",
            "noise floor",
            "largest",
            "inputs",
            "remark",
        ]
        cells = [
            [
                *(row.path or "the model", row.layer, row.what, row.verdict.value, row.error, row.tolerance),
                *("" if row.floor is None else row.floor, row.largest, row.inputs, row.remark),
            ]
            for row in self.rows
        ]
        sentences = [self._summary(), *self._notes()]
        write(Page("Verification", sentences, (), [Table("Comparisons, in order of execution", head, cells)]), path)

    def __str__(self) -> str:
        cells = [
            [row.path, row.layer, row.what, f"{row.error:.0e}", f"{row.tolerance:.0e}", row.inputs]
            for row in self._remarkable
        ]
        columns = ["layer", "class", "compared", "error", "allowed", "inputs"]
        body = table(cells, columns, most=_MOST, name="rows") if cells else ""
        return paragraphs([self._summary()]) + body + paragraphs(self._notes())

    @property
    def _remarkable(self) -> list[VerificationRow]:
        """The rows that are not equal, those that differ first."""
        return self.differing + [row for row in self.rows if row.verdict not in (Verdict.DIFFERS, Verdict.EQUAL)]

    def _summary(self) -> str:
        head = f"Verification: {len(self.rows)} comparisons in {len({row.path for row in self.rows})} layers"
        first = self.first
        if first is None:
            told = f"nothing differs{', but not all could be compared' if self._remarkable else ''}"
        else:
            where = f"{first.path!r}" if first.path else "the model itself"
            told = f"{len(self.differing)} differ, first {where} ({first.layer}): {first.what}"
        return f"{head}, {self.seconds:.1f} s: {told}"

    def _notes(self) -> list[str]:
        """Sentences on the rows that are not equal, and on what did not run."""
        told: dict[str, list[str]] = {}
        for row in self._remarkable:
            if row.remark and row.path not in told.setdefault(row.remark, []):
                told[row.remark].append(row.path)
        notes = [f"{_some(paths)}: {note}" for note, paths in told.items()]
        unrepeatable = sum(row.verdict is Verdict.UNREPEATABLE for row in self.rows)
        if unrepeatable:
            notes.append(f"{unrepeatable} of these cannot be repeated: nothing is said of them")
        if self.not_run:
            notes.append(f"did not run, and had only their parameters compared: {_some(self.not_run)}")
        return notes


def _row_from_data(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: row[name] if row[name] is None else float(row[name]) for name in _NUMBERS}
    return row | numbers | {"verdict": Verdict(row["verdict"])}


def _some(paths: Sequence[str]) -> str:
    return first_of([path or "the model itself" for path in paths])


def worst_of(rows: Iterable[tuple[float, VerificationRow]]) -> list[VerificationRow]:
    """Of rows with their positions in order of execution, the worst on each thing compared, in that order."""
    worst: dict[tuple[str, str], tuple[float, VerificationRow]] = {}
    for position, row in rows:
        key = row.path, row.what
        earlier, kept = worst.get(key, (position, row))
        worst[key] = min(position, earlier), max(row, kept, key=lambda each: each.severity)
    return [row for _, row in sorted(worst.values(), key=lambda each: each[0])]
