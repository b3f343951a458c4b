"""The plan: all that a conversion is to do, as data that can be kept, compared, applied and printed."""

import enum
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from torch_nhwc import serialization
from torch_nhwc.layout import Format, Strides
from torch_nhwc.ops import Outcome, Storage
from torch_nhwc.rendering import amount, first_of, paragraphs, several, table
from torch_nhwc.running.machine import warn_if_tuned_elsewhere
from torch_nhwc.sites.reasons import Kind, Reason

Preserve = bool | Literal["at_once"]


class Action(str, enum.Enum):
    """An action is what happens to a site, that is to one convolution weight, or to a layer.

    Example:
        >>> torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0].action is torch_nhwc.planning.Action.CONVERT
        True
    """

    CONVERT = "convert"
    """The weight is converted; bytes move."""
    RESTRIDE = "restride"
    """Only the weight's strides change."""
    KEEP = "keep"
    """There is nothing to do, or it was not requested."""
    REFUSE = "refuse"
    """The weight should change and cannot; the reason says why, and what to do."""
    EACH_FORWARD = "each_forward"
    """The weight stays as it is, and its layer converts it in each forward."""
    REPLACE = "replace"
    """The layer's class is replaced by one that keeps channels-last."""


@dataclass(slots=True, unsafe_hash=True)
class PlanRow:
    """A row says what happens to one site, that is to one weight of one convolution, and in a report what happened.

    Example:
        >>> row = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0]
        >>> row.full_name, row.strides, row.target_strides
        ('weight', (27, 9, 3, 1), (27, 1, 9, 3))
    """

    path: str
    """The layer's path in the model; empty for the model itself."""
    name: str
    """The tensor's name in the layer."""
    layer: str
    """The layer's class."""
    rank: int
    shape: tuple[int, ...] | None
    """`None` where there is no tensor yet, or none to see."""
    groups: int
    """0 where the number of groups is not known."""
    dtype: str | None
    device: str | None
    strides: Strides | None
    """The weight's strides before the conversion."""
    target_strides: Strides | None
    """`None` where the site is not to change."""
    bytes_to_move: int
    action: Action
    reason: Reason | None
    outcome: Outcome | None = field(default=None, compare=False)
    """What the operators did to the weight, in a report. `None` where they were not called, and in a plan."""

    @property
    def full_name(self) -> str:
        """The weight's name in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_wanted(self) -> bool:
        """Return whether the weight should be in the format, now or once it has a shape."""
        return self.target_strides is not None or self.reason is Reason.LAZY

    @property
    def is_in_each_forward(self) -> bool:
        """Return whether the weight is to be converted in each forward, or is so already."""
        return self.action is Action.EACH_FORWARD or self.reason is Reason.IN_EACH_FORWARD

    @property
    def changes(self) -> bool:
        """Return whether the operators are called for the weight."""
        return self.shape is not None and self.action in _CHANGES

    @property
    def takes_part(self) -> bool:
        """Return whether the weight is in the format in the end, and its companions with it."""
        return self.target_strides is not None and self.action is not _REFUSE and self.reason not in _NO_PART

    def refuse(self, reason: Reason | None, action: Action = Action.REFUSE) -> None:
        """Leave the weight as it is, for a reason that was found after the row was made."""
        self.action, self.reason, self.bytes_to_move = action, reason, 0


# Constants, since looking up a member of an enumeration takes as long as the rest of these properties.
_CHANGES = (Action.CONVERT, Action.RESTRIDE)
_REFUSE = Action.REFUSE
_NO_PART = (Reason.FAKE, Reason.TIED)


class LayerRow(NamedTuple):
    """A row says what happens to one layer that loses channels-last, or that PyTorch computes wrong.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU()))
        >>> plan.layers[0].path, plan.layers[0].layer, plan.layers[0].action
        ('1', 'GELU', <Action.REPLACE: 'replace'>)
    """

    path: str
    """The layer's path in the model; empty for the model itself."""
    layer: str
    """The layer's original class."""
    gains: str
    """What the replacement is: the end of a sentence that begins with "it is"."""
    action: Action
    """`REPLACE` or `KEEP`."""
    reason: Reason | None
    """Why the layer stays as it is, or why it is replaced with `preserve=False`."""

    @property
    def is_wanted(self) -> bool:
        """Return whether the layer is to keep channels-last, or does already."""
        return self.action is Action.REPLACE or self.reason is Reason.REPLACED


class CompanionRow(NamedTuple):
    """A row says what was done to a gradient, a state of an optimizer or an averaged copy.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> model.weight.grad = torch.zeros(8, 3, 3, 3)
        >>> torch_nhwc.convert_(model).companions
        (CompanionRow(site='weight', label='grad', outcome=<Outcome.IN_PLACE: 2>, reason=None),)
    """

    site: str
    """The full name of its weight."""
    label: str
    """`grad`, `ema`, `ema.grad`, or the optimizer's name for its state."""
    outcome: Outcome | None
    """`None` where the tensor stays as it is."""
    reason: Reason | None
    """Why the tensor stays as it is."""


FilterFunction = Callable[[nn.Module, str], bool]
# Cached, since a model has few different dtypes and devices, and many weights.
as_text = cache(str)


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan is all that a conversion does to a model; `convert_(model, plan=plan)` applies it.

    The argument may also be the path of a file that `to_json` wrote. A plan fits the model that it was made for, and
    other instances of the same architecture. It says which sites change, and to what; what can be done to their tensors
    is decided again when it is applied.

    Attributes:
        rows: One for each site, that is each convolution weight, in the model's order.
        memory_format: The name of the requested format; `None` is channels-last by rank.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as in `convert_weights_`.
        input_format: `"channels_last"` if a hook converts the model's inputs, images and volumes alike,
            `"channels_last_3d"` if it converts volumes only, else `None`.
        layers: One for each layer that loses channels-last, or that PyTorch computes wrong, in the model's order. With
            `preserve=False` only those whose training the conversion itself makes wrong.
        preserve: Whether layers that lose channels-last are replaced.
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
    preserve: Preserve = field(default=True, compare=False)
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
        """Return whether a layer converts its weight in each forward."""
        return any(row.is_in_each_forward for row in self.rows)

    def options(self, storage: Storage | None = None, input_format: Any = None) -> "Options":
        """Return the options that the plan was made with, with another storage or format of the inputs if given."""
        storage, input_format = storage or self.storage, input_format or self.input_format
        return Options.of(self.memory_format, storage, None, input_format, self.preserve, self.each_forward)

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
        return render(self, is_done=False, lines=in_vain(self, "the model"))

    def __repr__(self) -> str:
        return f"<Plan: {summary(self.rows, self.memory_format, is_done=False)}>"


PlanOrPath = Plan | str | os.PathLike[str]


def plan_from(given: PlanOrPath) -> Plan:
    """Return a plan itself, or the one in a file that `Plan.to_json` or `Tuning.to_json` wrote.

    Raises:
        TypeError: It is neither a plan nor a path; a report, for example.
        ValueError: There is no such file.

    Warns:
        UserWarning: The file holds a tuning that was measured under other conditions than those here.
    """
    if isinstance(given, (str, os.PathLike)):
        return _read_plan(Path(given))
    if not isinstance(given, Plan):
        holder = type(given).__name__.lower() if isinstance(getattr(given, "plan", None), Plan) else ""
        hint = f": pass {holder}.plan" if holder else ""
        raise TypeError(f"expected a Plan, got {type(given).__name__}{hint}")
    return given


def _read_plan(path: Path) -> Plan:
    try:
        text = path.read_text()
        data = json.loads(text)
        if "choice" not in data:
            return Plan.from_json(text)
        plan = Plan.from_json(json.dumps(data["plan"]))
        machine, device = dict(data["machine"]), torch.device(data["workload"]["device"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"plan: expected a file that Plan.to_json or Tuning.to_json wrote, got {str(path)!r}: {why}"
        ) from error
    warn_if_tuned_elsewhere(machine, device)
    return plan


@dataclass(frozen=True)
class Options:
    """What `plan` and `convert_` were called with, checked."""

    format: Format
    storage: Storage = "auto"
    filter_fn: FilterFunction | None = None
    input_format: str | None = None
    preserve: Preserve = True
    each_forward: bool = False

    @classmethod
    def of(
        cls,
        memory_format: torch.memory_format | str | None = None,
        storage: Storage | None = None,
        filter_fn: FilterFunction | None = None,
        input_format: Any = None,
        preserve: Preserve = True,
        each_forward: bool = False,
    ) -> "Options":
        """Check the arguments of `plan` and `convert_`, and raise a ValueError or TypeError for one that is wrong."""
        wanted = Format.of(memory_format)
        input_name = None if input_format is None else str(input_format).removeprefix("torch.")
        if input_name not in (None, "channels_last", "channels_last_3d"):
            raise ValueError(
                "expected input_format to be 'channels_last', 'channels_last_3d' for volumes alone, or None, "
                f"got {input_format!r}"
            )
        storage = "auto" if storage is None else storage
        if storage not in get_args(Storage):
            raise ValueError(f"expected storage to be one of {', '.join(get_args(Storage))}, got {storage!r}")
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"expected filter_fn to be a function of a module and its path, got {filter_fn!r}")
        if not isinstance(preserve, bool) and preserve != "at_once":
            raise ValueError(f"expected preserve to be True, False or 'at_once', got {preserve!r}")
        if not isinstance(each_forward, bool):
            raise ValueError(f"expected each_forward to be True or False, got {each_forward!r}")
        if each_forward and not wanted.is_channels_last:
            raise ValueError(
                "each_forward=True is for channels-last: torch.contiguous_format restores the layers' original classes"
            )
        return cls(wanted, storage, filter_fn, input_name, preserve, each_forward)

    def skip_reason(self, module: nn.Module, path: str) -> Reason | None:
        """Return why a layer is left out, or `None`."""
        if self.filter_fn is None:
            return None
        try:
            return None if self.filter_fn(module, path) else Reason.FILTERED
        except (AttributeError, TypeError) as error:  # of arguments in the other order, or of one
            raise TypeError(f"filter_fn is called as filter_fn(module, path), and raised: {error}") from error


SEEN_BY_EXAMPLE = (
    "Modules that call torch.nn.functional.conv2d or a similar function themselves, as those from torch.export do, are "
    "found only by running the model: pass example_inputs"
)
# What happens to weights, in the order of the summary.
_CONVERT, _IN_FORMAT, _REFUSED, _KEPT = "to convert", "in format already", "refused", "kept"
_IN_EACH_FORWARD = "in each forward"
_BY_ACTION = {
    Action.CONVERT: _CONVERT,
    Action.RESTRIDE: _CONVERT,
    Action.REFUSE: _REFUSED,
    Action.EACH_FORWARD: _IN_EACH_FORWARD,
}
# The sites of any other reason are named below the summary.
_BY_REASON: dict[Reason | None, str] = {
    Reason.IN_FORMAT: _IN_FORMAT,
    Reason.ONE_CHANNEL: "left contiguous (one channel)",
    Reason.META: "on the meta device (convert after loading the weights)",
    Reason.IN_EACH_FORWARD: _IN_EACH_FORWARD,
    Reason.LAZY: "waiting for a shape",
    Reason.FILTERED: "left out by the filter",
    Reason.OTHER_RANK: "of the other rank",
    Reason.FAKE: "fake",
    Reason.TIED: "tied to another",
}
_ORDER = [*dict.fromkeys((_CONVERT, *_BY_REASON.values(), _REFUSED, _KEPT))]
_MOST = 10  # sites that are named for one reason
# Why a weight got new storage: in the table of a report, and in its text.
NEW_STORAGE = {
    Outcome.COPIED: ("new storage", ""),
    Outcome.COPIED_HELD: ("new storage: held", "something else holds the old one"),
    Outcome.COPIED_FOREIGN: ("new storage: foreign", "the old memory is foreign"),
    Outcome.COPIED_SHARED: ("new storage: shared", "no longer shared with other processes"),
}


def in_vain(plan: Plan, model: str) -> list[str]:
    """Return what was requested of a model and does nothing, because of the arguments: sentences that name the way.

    Args:
        plan: The plan of the call.
        model: The model as the object of a sentence, such as "the UNet".
    """
    why, inputs = _without_weights(plan), without_inputs(plan)
    return [*([f"nothing to convert in {model}: {why}"] if why else ()), *([inputs] if inputs else ())]


def _without_weights(plan: Plan) -> str | None:
    """Return why none of the weights is requested; the end of a sentence."""
    requested = [row for row in plan.rows if row.reason is not Reason.OTHER_RANK]
    if plan.rows and not requested:
        rank = plan.rows[0].rank
        return (
            f"its convolutions are {rank - 2}D: omit memory_format, or pass {Format(None).name_at(rank)!r} instead of "
            f"{plan.memory_format!r}"
        )
    reasons = {row.reason for row in requested}
    if len(reasons) != 1 or any(layer.is_wanted for layer in plan.layers):
        return None
    paths = [*dict.fromkeys(repr(row.path) for row in requested)]
    is_one = len(paths) == 1
    which = "its only convolution" if is_one else f"all {len(paths)} of its convolutions"
    if reasons == {Reason.FILTERED}:
        return f"filter_fn returns false for {which}: {first_of(paths)}"
    if reasons == {Reason.LAZY}:
        return (
            f"{which} {'waits' if is_one else 'wait'} for a shape, which a call of the model gives: {first_of(paths)}"
        )
    return None


def without_inputs(plan: Plan) -> str | None:
    """Return why a format of the inputs converts none."""
    ranks = {row.rank for row in plan.rows if Format(plan.memory_format).serves(row.rank)}
    if plan.input_format is None or not ranks or ranks_of_inputs(plan.input_format, ranks):
        return None
    found = " and ".join(f"{rank - 2}D" for rank in sorted(ranks))
    return (
        f"input_format={plan.input_format!r} converts no inputs, since the convolutions are {found}: pass "
        "'channels_last', which is for images and volumes alike"
    )


def ranks_of_inputs(input_format: str, ranks: Iterable[int]) -> list[int]:
    """Return those of some ranks of inputs that a format of the inputs means."""
    wanted = Format(None if input_format == "channels_last" else input_format)
    return sorted(filter(wanted.serves, ranks))


def render(plan: Plan, is_done: bool, lines: Sequence[str] = ()) -> str:
    """Return the summary, the weights that need a look, the layers that lose channels-last, and more lines."""
    rows, layers = plan.rows, plan.layers
    hint = "" if rows or plan.observed else f" {SEEN_BY_EXAMPLE}."
    text = paragraphs([f"{summary(rows, plan.memory_format, is_done)}.{hint}"])
    alike: dict[tuple[str, Reason], list[PlanRow]] = {}
    for row in rows:
        if row.reason is not None and row.reason not in _BY_REASON:
            fate = _fate(row)
            fate = fate if fate in (_REFUSED, _KEPT) else "with a remark"
            alike.setdefault((fate, row.reason), []).append(row)
    for (fate, reason), some in alike.items():
        text += paragraphs([f"{len(some)} {fate}, {reason.name}: {reason.value}"])
        text += table(_cells(some, rows), indent="  ", most=_MOST)
    all_rows = ["(All rows: .table())"] if rows or layers else []
    said = {reason for _, reason in alike}
    return text + paragraphs([*_layer_lines(layers, is_done, said), *lines, *all_rows])


def summary(rows: Sequence[PlanRow], memory_format: str | None, is_done: bool) -> str:
    """Return how many weights become what; each row is counted once."""
    if not rows:
        return "No 2D or 3D convolution was found"
    counts = Counter(map(_fate, rows))
    wanted = "contiguous" if memory_format == "contiguous_format" else "channels-last"
    size = sum(row.bytes_to_move for row in rows)
    words = {_CONVERT: f"{'converted' if is_done else _CONVERT}{f' ({amount(size)})' if size else ''}"}
    parts = [f"{counts[fate]} {words.get(fate, fate)}" for fate in _ORDER if counts[fate]]
    return f"{several(len(rows), 'weight')} to {wanted}: {', '.join(parts)}"


def full_table(rows: Sequence[PlanRow], layers: Sequence[LayerRow]) -> str:
    """Return a line for every row, and what the reasons in them mean."""
    text = ""
    if rows:
        cells = [[*site, _action(row), _name(row.reason)] for site, row in zip(_cells(rows, rows), rows)]
        text += table(cells, ["weight", "layer", "shape", "dtype", "action", "reason"])
    if layers:
        cells = [[row.path or "(the model itself)", row.layer, row.action.value, _name(row.reason)] for row in layers]
        text += table(cells, ["layer", "class", "action", "reason"])
    # A lazy weight that is kept will not be converted, as the sentence says.
    reasons = [row.reason for row in rows if not (row.reason is Reason.LAZY and row.action is Action.KEEP)]
    reasons += [row.reason for row in layers]
    return text + paragraphs(f"{reason.name}: {reason.value}" for reason in dict.fromkeys(reasons) if reason)


def _fate(row: PlanRow) -> str:
    """Return what the summary counts a row as."""
    if row.reason in _BY_REASON:
        return _BY_REASON[row.reason]
    if row.action is Action.KEEP:  # with a remark, a weight is in the format
        return _IN_FORMAT if row.reason is None or row.reason.kind is Kind.REMARK else _KEPT
    return _BY_ACTION[row.action]


def _action(row: PlanRow) -> str:
    """Return the cell for a row's action, with what is worth knowing about the memory."""
    if row.action is Action.RESTRIDE:
        return f"{Action.CONVERT.value} (strides only)"
    detail, _ = NEW_STORAGE.get(row.outcome, ("", "")) if row.outcome else ("", "")
    return f"{row.action.value} ({detail})" if detail else row.action.value


def _name(reason: Reason | None) -> str:
    return reason.name if reason else ""


def _cells(some: Sequence[PlanRow], rows: Sequence[PlanRow]) -> list[list[str]]:
    """Return the cells that identify some of the rows, with the dtype if the rows have different ones."""
    has_dtypes = len({row.dtype for row in rows if row.dtype}) > 1
    return [
        [
            row.full_name.removesuffix(".weight"),
            row.layer,
            "x".join(map(str, row.shape or ())),
            (row.dtype or "").removeprefix("torch.") if has_dtypes else "",
        ]
        for row in some
    ]


def _layer_lines(layers: Sequence[LayerRow], is_done: bool, said: Iterable[Reason]) -> Iterator[str]:
    """Return what happens to the layers that can be replaced, by their class; for layers that stay, their paths.

    Reasons that the lines above have said are only named.
    """
    alike: dict[tuple[str, str, Action, Reason | None], list[str]] = {}
    for row in layers:
        alike.setdefault((row.layer, row.gains, row.action, row.reason), []).append(row.path or "the model itself")
    for (layer, gains, action, reason), paths in alike.items():
        if action is Action.REPLACE or reason is None:
            why = reason.value if reason else gains
            yield f"{len(paths)} {layer} {'replaced' if is_done else 'to replace'}: {why}"
        elif reason is Reason.REPLACED:
            yield f"{len(paths)} {layer} kept: {reason.value}"
        else:
            why = f"{reason.name}, as above" if reason in said else reason.value
            yield f"{len(paths)} {layer} kept ({first_of(paths)}): {why}"
