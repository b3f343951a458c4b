"""The plan: all that a conversion does, as data that can be kept, compared and applied."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from torch_nhwc import serialization
from torch_nhwc.ops import Storage
from torch_nhwc.planning.options import Options
from torch_nhwc.planning.rows import LayerRow, PlanRow
from torch_nhwc.planning.summaries import full_table, render, summary


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan is all that a conversion does to a model; `convert_(model, plan=plan)` applies it.

    It fits the model that it was made for, and other instances of the same architecture. The plan says which sites
    change, and to what; what can be done to their tensors is decided again when it is applied.

    Attributes:
        rows: One for each site, that is each convolution weight, in the model's order.
        memory_format: The name of the requested format; `None` is channels-last by rank.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as in `convert_weights_`.
        input_format: `"channels_last"` if a hook converts the model's inputs to channels-last, `"channels_last_3d"` if
            it converts volumes only, else `None`.
        layers: One for each layer that loses channels-last, in the model's order; empty without `preserve=True`.
        observed: Whether the model ran on example inputs, which show convolutions that are called by forward itself.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> torch_nhwc.Plan.from_json(plan.to_json()) == plan
        True
        >>> torch_nhwc.convert_(torch.nn.Conv2d(3, 8, 3), plan=plan).outcomes
        (<Outcome.IN_PLACE: 2>,)
    """

    rows: tuple[PlanRow, ...]
    memory_format: str | None
    storage: Storage = field(default="auto", compare=False)
    input_format: str | None = None
    layers: tuple[LayerRow, ...] = ()
    observed: bool = field(default=False, compare=False)

    @property
    def digest(self) -> str:
        """A hash of what the model is converted to.

        It covers name, shape, dtype and target strides of every site, which sites convert their weight in each forward,
        which layers are replaced, and the format of the inputs. It is equal on all ranks that plan the same conversion
        of the same architecture, whatever the present strides, devices and storages of the weights are.
        """
        described: list[object] = [self.input_format]
        described += [
            (row.full_name, row.shape, row.dtype, row.target_strides, row.is_in_each_forward) for row in self.rows
        ]
        described += [(row.path, row.layer, row.is_wanted) for row in self.layers]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def bytes_to_move(self) -> int:
        """The bytes of all weights that are converted."""
        return sum(row.bytes_to_move for row in self.rows)

    @property
    def each_forward(self) -> bool:
        """Whether a layer converts its weight in each forward."""
        return any(row.is_in_each_forward for row in self.rows)

    def options(self, storage: Storage | None = None, input_format: Any = None) -> Options:
        """Return the options that the plan was made with, with another storage or format of the inputs if given.

        Raises:
            ValueError: One of them is not valid.
        """
        storage, input_format = storage or self.storage, input_format or self.input_format
        return Options.of(self.memory_format, storage, None, input_format, bool(self.layers), self.each_forward)

    def to_json(self) -> str:
        """Return the plan as JSON text, for `from_json`."""
        return json.dumps(serialization.to_data(self) | {"digest": self.digest}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: The text is not such a plan, or was changed since.
        """
        try:
            data = json.loads(text)
            digest = data.pop("digest")
            plan: Plan = serialization.from_data(cls, data)
            plan.options()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"Plan.from_json: expected what Plan.to_json writes: {error}") from error
        if plan.digest != digest:
            raise ValueError("Plan.from_json: the digest does not fit the rows: the text was changed")
        return plan

    def table(self) -> str:
        """Return a line for every site and every layer that loses channels-last, as text that fits the terminal."""
        return full_table(self.rows, self.layers)

    def __str__(self) -> str:
        return render(self.rows, self.layers, self.memory_format, is_done=False, observed=self.observed)

    def __repr__(self) -> str:
        return f"<Plan: {summary(self.rows, self.memory_format, is_done=False)}>"


def expect_plan(plan: object) -> Plan:
    """Return the plan itself.

    Raises:
        TypeError: It is anything else, such as a report.
    """
    if not isinstance(plan, Plan):
        holder = type(plan).__name__.lower() if isinstance(getattr(plan, "plan", None), Plan) else ""
        hint = f": pass {holder}.plan" if holder else ""
        raise TypeError(f"expected a Plan, got {type(plan).__name__}{hint}")
    return plan
