"""The result of `verify`: one row for everything that was compared."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_nhwc import serialization
from torch_nhwc.rendering import first_of, paragraphs, several, table
from torch_nhwc.running.machine import multiplies_less

_SHOWN_ROWS = 20
_BEFORE_DIFFERS = (
    "the reference's own layer differs in this format too; preserve=True replaces the layers that are known"
)
_REFERENCE_WRONG = "the reference itself is plainly wrong here: both were compared with its float64 run"
_OTHER_ROUNDINGS = (
    "convolutions of 3x3 may be computed with fewer multiplications, and then have other roundings; the environment "
    "variable TORCH_NHWC_WINOGRAD=0 switches that off"
)


class Verdict(enum.Enum):
    """The result of a comparison.

    Example:
        >>> torch_nhwc.verifying.Verdict("differs") is torch_nhwc.verifying.Verdict.DIFFERS
        True
    """

    EQUAL = "equal"
    """Within the tolerance, on all inputs and in both formats."""
    DIFFERS = "differs"
    """Farther apart than the tolerance, or the layer raises."""
    UNREPEATABLE = "unrepeatable"
    """The reference differs from itself when it is called again, so that nothing is known."""
    NOT_COMPARED = "not compared"
    """The reference returns no tensor that could be found, so that nothing is known."""


class VerificationRow(NamedTuple):
    """How far one thing that a layer computes is from what the reference computes.

    The numbers are absolute, and those of the inputs and the channel on which the row is worst.

    Example:
        >>> before, after = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3)
        >>> row = torch_nhwc.verify(before, after, torch.randn(1, 3, 8, 8)).rows[0]
        >>> row.layer, row.what, row.verdict
        ('Conv2d', 'weight', <Verdict.DIFFERS: 'differs'>)
    """

    path: str
    """The layer's path in the model; empty for the whole model."""
    layer: str
    """The layer's class in the reference."""
    what: str
    """What was compared: an output, a gradient, a parameter or a buffer."""
    error: float = 0.0
    """The largest difference at one position; infinite where shapes differ, or where the layer raises. Gradients of the
    whole model have the root of the mean square of all differences. It is the difference from the float64 run where
    the reference is beyond its tolerance, else that from the reference."""
    floor: float | None = None
    """The noise floor: how far the reference is from its own float64 run, from itself when it is called again, and
    from itself when its inputs change by a rounding error. `None` where the tolerance suffices without it."""
    tolerance: float = 0.0
    """How large the error may be."""
    largest: float = 0.0
    """The largest magnitude in the reference's result, in the same channel."""
    inputs: str = ""
    """How the inputs were changed, and whether they were channels-last."""
    verdict: Verdict = Verdict.EQUAL
    """The result of the comparison."""
    before_differs: bool = False
    """True if the reference's own layer differs as well when it gets the same formats: then the layer is wrong in
    channels-last, whatever model it is in."""
    note: str = ""
    """The error that was raised, or why nothing was compared."""
    reference_error: float | None = None
    """The largest difference of the reference from its own float64 run; `None` where that does not fit into memory, is
    not possible, or draws random numbers."""
    is_reference_wrong: bool = False
    """True if the reference is plainly wrong, so that its float64 run was the judge."""

    @property
    def remark(self) -> str:
        """A sentence about the row; empty for most."""
        if self.is_reference_wrong and not self.note:
            return _REFERENCE_WRONG
        return self.note or (_BEFORE_DIFFERS if self.before_differs else "")


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; true where nothing differs.

    Attributes:
        rows: What was compared: layers in order of execution, then the whole model, whose path is empty.
        not_run: The paths of layers that did not run on the example inputs. Only their parameters were compared.
        seconds: The time it took.

    Example:
        >>> import copy
        >>> before = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(inplace=True))
        >>> model = copy.deepcopy(before)
        >>> report = torch_nhwc.convert_(model)
        >>> verification = torch_nhwc.verify(before, report, torch.randn(2, 3, 8, 8))
        >>> verification.ok, verification.first
        (True, None)
        >>> torch_nhwc.verifying.Verification.from_json(verification.to_json()) == verification
        True
    """

    rows: tuple[VerificationRow, ...]
    not_run: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether nothing differs."""
        return not self.differing

    def __bool__(self) -> bool:
        """Return whether nothing differs."""
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
        """Return the verification as JSON text, for `from_json`."""
        return serialization.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Verification":
        """Return the verification that `to_json` wrote.

        Raises:
            ValueError: The text is not a verification.
        """
        return serialization.from_json(cls, text)

    def __str__(self) -> str:
        """Return a summary and a table of the rows that are not equal, or on which the reference is wrong."""
        remarkable = self._remarkable()
        shown = [row for row in remarkable if row.path] or remarkable  # a fault of a layer is one of the model, too
        cells = [[row.path, row.layer, row.what, *_errors(row), row.inputs] for row in shown]
        columns = ["layer", "class", "compared", "error", "reference's", "allowed", "inputs"]
        body = table(cells, columns, most=_SHOWN_ROWS, name="rows") if cells else ""
        count = len(remarkable) - len(shown)
        others = [f"and {several(count, 'row')} of the whole model"] if count else []
        return paragraphs([self._summary()]) + body + paragraphs([*others, *self._notes()])

    def _remarkable(self) -> list[VerificationRow]:
        """Return the rows that are not equal, first those that differ, and those on which the reference is wrong."""
        others = [row for row in self.rows if row.verdict is not Verdict.DIFFERS]
        return self.differing + [row for row in others if row.verdict is not Verdict.EQUAL or row.is_reference_wrong]

    def _summary(self) -> str:
        first = self.first
        if first is not None:
            where = repr(first.path) if first.path else "the model itself"
            result = f"{len(self.differing)} differ, first {where} ({first.layer}): {first.what}"
        else:
            is_unknown = any(row.verdict not in (Verdict.EQUAL, Verdict.DIFFERS) for row in self.rows)
            result = f"nothing differs{', but not all could be compared' if is_unknown else ''}"
        layers = len({row.path for row in self.rows if row.path})
        return f"Verification: {len(self.rows)} comparisons in {layers} layers, {self.seconds:.1f} s: {result}"

    def _notes(self) -> list[str]:
        """Return sentences about rows that are not equal, and about layers that did not run."""
        paths_of: dict[str, list[str]] = {}
        for row in self._remarkable():
            if row.remark and row.path not in paths_of.setdefault(row.remark, []):
                paths_of[row.remark].append(row.path)
        notes = [f"{_some(paths)}: {remark}" for remark, paths in paths_of.items()]
        unrepeatable = sum(row.verdict is Verdict.UNREPEATABLE for row in self.rows)
        if unrepeatable:
            notes.append(f"{unrepeatable} of these cannot be repeated: nothing is known about them")
        if multiplies_less() and any("Conv" in row.layer for row in self.differing):
            notes.append(_OTHER_ROUNDINGS)
        if self.not_run:
            notes.append(f"did not run, only parameters were compared: {_some(self.not_run)}")
        return notes


def _errors(row: VerificationRow) -> list[str]:
    numbers = row.error, row.reference_error, row.tolerance
    return ["" if each is None else f"{each:.0e}" for each in numbers]


def _some(paths: Sequence[str]) -> str:
    return first_of([path or "the model itself" for path in paths])
