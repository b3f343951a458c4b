"""The plan: all that a conversion is to do, as data that can be kept, compared and applied."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch_nhwc.formats import Format
from torch_nhwc.outcomes import Storage
from torch_nhwc.page.rendering import write
from torch_nhwc.planning.page import page_of
from torch_nhwc.planning.rendering import full_table, render, summary
from torch_nhwc.planning.rows import Action, EntryRow, LayerRow, PlanRow
from torch_nhwc.reasons import Reason

EachForward = bool | Literal["keep"]


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan is all that a conversion is to do to a model; `convert_(model, plan=plan)` applies it.

    It goes for the model that it was made for, and for other instances of the same architecture. Which sites are to
    change, and to what, is the plan's; what can be done to their tensors is decided anew. Two plans are equal where
    they say the same of all weights.

    Attributes:
        rows: one for each site, that is each convolution weight, in the model's order.
        memory_format: the name of the format asked for; `None` is channels-last by rank.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` explains them.
        input_format: `"channels_last"` where inputs are brought into channels-last at the model's entry,
            `"channels_last_3d"` for volumes alone, else `None`.
        layers: one for each layer that loses on channels-last, in the model's order; none without `preserve=True`.
        each_forward: as `convert_` takes it. Which weights are converted in each forward is said by the rows.
        entries: one for each module whose inputs are brought into a format at its entry, as `tune` may find it best.
        observed: whether the model ran on example inputs, which show convolutions that are called by forward itself.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> torch_nhwc.Plan.from_json(plan.to_json()) == plan
        True
        >>> torch_nhwc.convert_(torch.nn.Conv2d(3, 8, 3), plan=plan).outcomes
        (<Outcome.REUSED: 2>,)
    """

    rows: tuple[PlanRow, ...]
    memory_format: str | None
    storage: Storage = field(default="auto", compare=False)
    input_format: str | None = field(default=None, compare=False)
    layers: tuple[LayerRow, ...] = ()
    each_forward: EachForward = field(default=False, compare=False)
    entries: tuple[EntryRow, ...] = ()
    observed: bool = field(default=False, compare=False)

    @property
    def digest(self) -> str:
        """A hash over name, shape, dtype and target strides of every site, and over the layers to exchange.

        Those that convert their weight in each forward are among them.

        Equal on all ranks that plan the same conversion of the same architecture, whatever the weights' layouts are.
        """
        described: list[tuple[object, ...]]
        described = [(row.full_name, row.shape, row.dtype, row.target_strides) for row in self.rows]
        described += [(row.path, row.layer, row.is_wanted) for row in self.layers]
        described += [(row.full_name, Action.EACH_FORWARD) for row in self.rows if row.is_in_each_forward]
        described += [tuple(row) for row in self.entries]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def bytes_to_move(self) -> int:
        """By all sites together."""
        return sum(row.bytes_to_move for row in self.rows)

    def to_json(self) -> str:
        """The plan as JSON text, for `from_json`."""
        names = "memory_format", "storage", "input_format", "each_forward", "observed", "digest"
        described = {name: getattr(self, name) for name in names}
        described["rows"] = [row_as_data(row) for row in self.rows]
        described["layers"] = [row_as_data(row) for row in self.layers]
        described["entries"] = [row._asdict() for row in self.entries]
        return json.dumps(described, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not such a plan, or was changed since.
        """
        try:
            read = json.loads(text)
            rows = tuple(_row_from_data(row) for row in read["rows"])
            layers = tuple(LayerRow(**_members(row)) for row in read.get("layers", ()))
            entries = tuple(EntryRow(**row) for row in read.get("entries", ()))
            formats = read["memory_format"], read["storage"], read["input_format"]
            each_forward = expect_each_forward(read.get("each_forward", False))
            plan = cls(rows, *formats, layers, each_forward, entries, bool(read.get("observed", False)))
            expected = read["digest"]
            Format.of(plan.memory_format)
            if plan.storage not in get_args(Storage):
                raise ValueError(f"storage {plan.storage!r}")
            for row in entries:
                Format.of(row.memory_format)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Plan.from_json: expected what Plan.to_json writes: {error!r}") from error
        if plan.digest != expected:
            raise ValueError("Plan.from_json: the digest does not fit the rows: the text was changed")
        return plan

    def table(self) -> str:
        """A line for every site and every layer that loses, as text that fits the terminal."""
        return full_table(self.rows, self.layers)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one HTML file, to be looked at in a browser; it needs the extra `page`.

        Raises:
            ImportError: jinja2 is not installed.
        """
        write(page_of("Plan", self.rows, self.layers, self.entries, self.memory_format, is_done=False), path)

    def __str__(self) -> str:
        return render(self.rows, self.layers, self.memory_format, is_done=False, observed=self.observed)

    def __repr__(self) -> str:
        return f"<Plan: {summary(self.rows, self.memory_format, is_done=False)}>"


def row_as_data(row: PlanRow | LayerRow) -> dict[str, Any]:
    """A row as JSON has it: its reason by name, and no outcome, which is a report's."""
    data = row._asdict() | {"reason": row.reason and row.reason.name}
    data.pop("outcome", None)
    return data


def _row_from_data(row: dict[str, Any]) -> PlanRow:
    for name in ("shape", "strides", "target_strides"):
        row[name] = None if row[name] is None else tuple(row[name])
    return PlanRow(**_members(row))


def _members(row: dict[str, Any]) -> dict[str, Any]:
    reason = None if row["reason"] is None else Reason[row["reason"]]
    return row | {"reason": reason, "action": Action(row["action"])}


def expect_each_forward(value: Any) -> EachForward:
    """The value itself.

    Raises:
        ValueError: it is none that `convert_` takes.
    """
    if value is not True and value is not False and value != "keep":
        raise ValueError(f"expected each_forward to be True, False or 'keep', got {value!r}")
    return value  # type: ignore[no-any-return]


def expect_plan(plan: object) -> Plan:
    """The plan itself.

    Raises:
        TypeError: it is anything else, such as a report.
    """
    if not isinstance(plan, Plan):
        holder = type(plan).__name__.lower() if isinstance(getattr(plan, "plan", None), Plan) else ""
        hint = f": pass {holder}.plan" if holder else ""
        raise TypeError(f"expected a Plan, got {type(plan).__name__}{hint}")
    return plan
