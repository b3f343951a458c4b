"""The trace: what was seen while a model ran."""

import json
import os
from typing import Any

import torch

from torch_nhwc.page.rendering import write
from torch_nhwc.tracing.difference import TraceDiff, difference
from torch_nhwc.tracing.layouts import Layout
from torch_nhwc.tracing.page import page_of
from torch_nhwc.tracing.rendering import render
from torch_nhwc.tracing.rows import Gain, Loss, MixedConvolution, Phase, Reorder, Seen, TracedModule, Unseen
from torch_nhwc.tracing.tallies import AMOUNTS, Tallies

_VERSION = 1
_KINDS: dict[str, Any] = {
    "losses": Loss,
    "mixed": MixedConvolution,
    "gained": Gain,
    "reorders": Reorder,
    "unseen": Unseen,
    "modules": TracedModule,
}


class Trace:
    """A trace says where a model lost channels-last while it ran, and what else there was to see of formats.

    It is filled while the block of `trace` runs, and stays as it is afterwards. Calls that are alike but for
    their sizes are one row with their number, so that many steps take no more memory than one.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> x = torch.randn(2, 3, 8, 8)
        >>> with torch_nhwc.trace(model) as trace:
        ...     _ = model(x)
        >>> trace.losses, trace.operators
        ((), {'forward': 1, 'backward': 0})
        >>> torch_nhwc.Trace.from_json(trace.to_json()) == trace
        True
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The operators that lost channels-last, in the order in which they were first seen."""
        return self._tallies.rows(Loss)

    @property
    def mixed(self) -> tuple[MixedConvolution, ...]:
        """The convolutions whose input and weight were in different formats."""
        return self._tallies.rows(MixedConvolution)

    @property
    def gained(self) -> tuple[Gain, ...]:
        """The operators that answered in channels-last though none of their inputs was."""
        return self._tallies.rows(Gain)

    @property
    def reorders(self) -> tuple[Reorder, ...]:
        """What was reordered inside of operators, where `reorders=True` asked for it."""
        return self._tallies.rows(Reorder)

    @property
    def unseen(self) -> tuple[Unseen, ...]:
        """What of the model could not be seen."""
        return self._tallies.rows(Unseen)

    @property
    def modules(self) -> tuple[TracedModule, ...]:
        """The modules that ran, in the order in which they began; what they read and wrote is of the first time."""
        return self._tallies.modules()

    @property
    def operators(self) -> dict[Phase, int]:
        """How many operators ran in each phase."""
        return self._tallies.operators()

    def to_json(self) -> str:
        """The trace as JSON text, for `from_json`."""
        described: dict[str, Any] = {"version": _VERSION, "torch": torch.__version__, "operators": self.operators}
        return json.dumps(
            described | {name: [row._asdict() for row in getattr(self, name)] for name in _KINDS}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The trace that `to_json` wrote.

        Raises:
            ValueError: the text is not such a trace, or one of another version.
        """
        tallies = Tallies()
        try:
            read = json.loads(text)
            if read["version"] != _VERSION:
                raise ValueError(f"version {read['version']!r}")
            tallies.counter()[:] = read["operators"]["forward"], read["operators"]["backward"]
            for name, kind in _KINDS.items():
                for members in read[name]:
                    _add(tallies, kind, members)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Trace.from_json: expected what Trace.to_json writes: {error!r}") from error
        return cls(tallies)

    def diff(self, other: "Trace") -> TraceDiff:
        """What this trace has beside another, such as an earlier one: what is new, gone and changed.

        Example:
            >>> model = torch.nn.Conv2d(3, 8, 3)
            >>> with torch_nhwc.trace(model) as trace:
            ...     _ = model(torch.randn(2, 3, 8, 8))
            >>> trace.diff(trace).new
            ()
        """
        return difference((*self.losses, *self.mixed), (*other.losses, *other.mixed))

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as one HTML file, to be looked at in a browser; it needs the extra `page`.

        Raises:
            ImportError: jinja2 is not installed.
        """
        write(page_of(self._seen()), path)

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Trace) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return render(self._seen())

    def _seen(self) -> Seen:
        return Seen(*(getattr(self, name) for name in Seen._fields))


def _add(tallies: Tallies, kind: Any, members: dict[str, Any]) -> None:
    """Adds the row that JSON has of it."""
    for name in {"inputs", "outputs"} & members.keys():
        members[name] = tuple(Layout(each, tuple(shape)) for each, shape in members[name])
    if kind is TracedModule:
        return tallies.add_module(TracedModule(**members))
    amounts = [members.pop(name) for name in AMOUNTS[kind]]
    advice = members.pop("advice", None)
    row = kind(**members)
    tallies.add(row, *amounts)
    if kind is Loss:
        tallies.advise(row, advice)
