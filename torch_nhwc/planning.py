"""The plan: what a conversion would do to every site of a model, decided before anything is touched."""

import enum
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc import computed, observation, wrapping
from torch_nhwc.ops import Outcome, Storage, plan_weights
from torch_nhwc.reasons import Reason
from torch_nhwc.sites import CHANNELS_LAST, Site, find_sites
from torch_nhwc.text import amount, paragraphs, table

if TYPE_CHECKING:
    from torch_nhwc.report import Report

Strides = tuple[int, ...]
FilterFunction = Callable[[nn.Module, str], bool]
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d")


class Action(str, enum.Enum):
    """What happens to a site."""

    CONVERT = "convert"
    """It is brought into the format; bytes move."""
    RESTRIDE = "restride"
    """Only its strides change."""
    KEEP = "keep"
    """There is nothing to do, or it was not asked for."""
    REFUSE = "refuse"
    """It should change and cannot; the reason says why, and what to do."""


class PlanRow(NamedTuple):
    """One site of a plan."""

    path: str
    """Of the layer in the model; empty for the model itself."""
    name: str
    """Of the tensor in the layer."""
    layer: str
    """The layer's class."""
    rank: int
    shape: tuple[int, ...] | None
    """`None` where there is no tensor yet, or none to see."""
    groups: int
    """0 where they are not known."""
    dtype: str | None
    device: str | None
    strides: Strides | None
    target_strides: Strides | None
    """`None` where the site is not to change."""
    bytes_to_move: int
    action: Action
    reason: Reason | None

    @property
    def full_name(self) -> str:
        """As in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_wanted(self) -> bool:
        """Whether the site is to be in the format, now or once it can be."""
        return self.target_strides is not None or self.reason is Reason.LAZY

    def refused(self, reason: Reason) -> "PlanRow":
        """The same site, left as it is."""
        return self._replace(action=Action.REFUSE, reason=reason, bytes_to_move=0)


# Why the operators refuse, as a reason.
_REFUSALS = {outcome: Reason[outcome.name] for outcome in Outcome if outcome.name in Reason.__members__}
# The class of a fake tensor, by name, since its module may not be loaded.
_FAKE = "FakeTensor"


@dataclass(frozen=True)
class Plan:
    """The decision for every site of a model.

    Attributes:
        rows: one for each site, in the model's order.
        memory_format: the name of the format asked for; `None` is channels-last by rank.
    """

    rows: tuple[PlanRow, ...]
    memory_format: str | None

    @property
    def digest(self) -> str:
        """A hash over name, shape, dtype and target strides of every site.

        Equal on all ranks that plan the same conversion of the same architecture, whatever the weights' layouts are.
        """
        described = [(row.full_name, row.shape, row.dtype, row.target_strides) for row in self.rows]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def bytes_to_move(self) -> int:
        """By all sites together."""
        return sum(row.bytes_to_move for row in self.rows)

    def apply(
        self, model: nn.Module, optimizer: Any = None, ema: Any = None, storage: Storage = "auto", strict: bool = False
    ) -> "Report":
        """Converts a model by this plan: the one it was made for, or another instance of the same architecture.

        Which sites are to change, and to what, is the plan's; what can be done to their tensors is decided anew.

        Args:
            model: has the plan's sites, of the same shapes and dtypes.
            optimizer: as in `convert_`.
            ema: as in `convert_`.
            storage: as in `convert_`.
            strict: as in `convert_`.

        Raises:
            ValueError: the model differs from the plan; the first differing site is named. Nothing is touched then.
            RuntimeError: as `convert_`.
        """
        from torch_nhwc.conversion import convert_

        return convert_(model, plan=self, optimizer=optimizer, ema=ema, storage=storage, strict=strict)

    def to_json(self) -> str:
        """The plan as JSON text, for `from_json`."""
        rows = [row._asdict() | {"reason": row.reason and row.reason.name} for row in self.rows]
        return json.dumps({"memory_format": self.memory_format, "digest": self.digest, "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not such a plan, or was changed since.
        """
        try:
            read = json.loads(text)
            plan = cls(tuple(_row_from_json(row) for row in read["rows"]), read["memory_format"])
            expected = read["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Plan.from_json: expected what Plan.to_json writes: {error!r}") from error
        if plan.digest != expected:
            raise ValueError("Plan.from_json: the digest does not fit the rows: the text was changed")
        return plan

    def __str__(self) -> str:
        return render(self.rows, self.memory_format)


def _row_from_json(row: dict[str, Any]) -> PlanRow:
    for field in ("shape", "strides", "target_strides"):
        row[field] = None if row[field] is None else tuple(row[field])
    row["reason"] = None if row["reason"] is None else Reason[row["reason"]]
    row["action"] = Action(row["action"])
    return PlanRow(**row)


def render(
    rows: Sequence[PlanRow], memory_format: str | None, what: str = "Plan", storage: Sequence[str] | None = None
) -> str:
    """Rows as a table that fits the terminal, with totals above and the reasons' sentences below.

    Args:
        rows: of a plan or a report.
        memory_format: the plan's.
        what: the first word.
        storage: where each weight went, in a report.
    """
    if not rows:
        return paragraphs([f"{what}: no convolution was found. {_SEEN_BY_EXAMPLE}"])
    counts = Counter(row.action for row in rows)
    totals = ", ".join(f"{counts[action]} {action.value}" for action in Action if counts[action]) or "nothing to do"
    moved = amount(sum(row.bytes_to_move for row in rows))
    verb = "moved" if what == "Report" else "to move"
    dtypes = {row.dtype.removeprefix("torch.") for row in rows if row.dtype}
    of_one = f" of {min(dtypes)}" if len(dtypes) == 1 else ""
    sites = f"{len(rows)} site{'s' if len(rows) > 1 else ''}"
    head = f"{what}: {sites}{of_one} to {memory_format or 'channels-last'}: {totals}; {moved} {verb}"
    cells = [
        [
            row.full_name.removesuffix(".weight"),
            row.layer,
            "x".join(map(str, row.shape or ())),
            "" if of_one else (row.dtype or "").removeprefix("torch."),
            row.action.value,
            done,
            row.reason.name if row.reason else "",
        ]
        for row, done in zip(rows, storage or [""] * len(rows))
    ]
    # What deserves a look comes first where not everything fits.
    by_interest = sorted(range(len(rows)), key=lambda index: (_DULL.get(rows[index].reason, 0), index))
    body = table(["site", "layer", "shape", "dtype", "action", "storage", "reason"], cells, by_interest)
    reasons = dict.fromkeys(row.reason for row in rows if row.reason and row.reason is not Reason.IN_FORMAT)
    return paragraphs([head]) + body + paragraphs([f"{reason.name}: {reason.value}" for reason in reasons if reason])


_SEEN_BY_EXAMPLE = (
    "Layers that call torch.nn.functional.conv2d and its kin themselves, as those from torch.export do, show with "
    "example_inputs."
)
_DULL: dict[Reason | None, int] = {None: 1, Reason.IN_FORMAT: 2, Reason.FILTERED: 2, Reason.OTHER_RANK: 2}


def plan(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    example_inputs: Any = None,
    filter_fn: FilterFunction | None = None,
) -> Plan:
    """Decides what a conversion would do to every convolution weight of a model, without writing anything.

    Args:
        model: any module, TorchScript modules included, or one layer.
        memory_format: `None` is channels-last by the weights' rank, 2D and 3D in one call. `torch.channels_last` means
            the 2D sites, `torch.channels_last_3d` the 3D ones, `torch.contiguous_format` both. Names do as well.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones. The model then runs once
            on them, under `no_grad` and in its own mode, and every parameter that reaches a convolution as its weight
            is a site, whatever the layer; buffers and random generators are brought back afterwards.
        filter_fn: called as `filter_fn(module, path)`; false keeps the layer as it is.

    Raises:
        TypeError: `model` is not a module, or a layer's weight is not a tensor.
        ValueError: the memory format is none of these; lazy layers and example inputs together.
    """
    name = format_name(memory_format)
    sites = sites_of(model, example_inputs)
    return Plan(tuple(decide(sites, name, filter_fn=filter_fn)), name)


def format_name(memory_format: torch.memory_format | str | None) -> str | None:
    """The name of a memory format; `None` stays."""
    if memory_format is None:
        return None
    name = str(memory_format).removeprefix("torch.") if isinstance(memory_format, (str, torch.memory_format)) else ""
    if name not in _FORMATS:
        got = repr(memory_format) if name else f"{type(memory_format).__name__} (give optimizers and others by name)"
        raise ValueError(f"expected memory_format to be None or one of {', '.join(_FORMATS)}, got {got}")
    return name


def operator_format(name: str | None) -> torch.memory_format | None:
    """What the operators take for a format's name: channels-last is that of each weight's rank, by `None`."""
    return torch.contiguous_format if name == "contiguous_format" else None


_INSTEAD = {
    "ExportedProgram": ": convert its module(), with example_inputs",
    "Mapping": ": convert_state_dict takes state dicts",
}


def _class_names(value: object) -> set[str]:
    return {base.__name__ for base in type(value).__mro__} | ({"Mapping"} if isinstance(value, Mapping) else set())


def sites_of(model: nn.Module, example_inputs: Any = None) -> list[Site]:
    """The sites of a model, with those that only example inputs show."""
    if not isinstance(model, nn.Module):
        instead = next((text for name, text in _INSTEAD.items() if name in _class_names(model)), "")
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{instead}")
    sites = find_sites(model)
    return sites if example_inputs is None else observation.add_sites(model, sites, example_inputs)


def decide(
    sites: Sequence[Site],
    memory_format: str | None,
    storage: Storage = "auto",
    filter_fn: FilterFunction | None = None,
) -> list[PlanRow]:
    """A row for every site, by what kind of site it is and by what the operators say of its tensor."""
    last = memory_format != "contiguous_format"
    other_rank = memory_format and {"channels_last": 5, "channels_last_3d": 4}.get(memory_format)
    tensors = [site.tensor for site in sites if site.tensor is not None]
    outcomes = iter(outcomes_of(tensors, memory_format, storage))
    barred = _barred(sites, filter_fn)
    steps: dict[int, Reason | None] = {}
    seen: dict[int, int] = {}
    rows: list[PlanRow] = []
    for site in sites:
        path, name, layer, rank, groups, _, tensor, reason = site
        outcome = None if tensor is None else next(outcomes)
        if barred:
            reason = barred.get(_identity(tensor) if tensor is not None else id(site), reason)
        is_wanted = False
        if rank == other_rank:
            action, reason = Action.KEEP, Reason.OTHER_RANK
        elif reason is Reason.FILTERED:
            action = Action.KEEP
        elif reason is Reason.LAZY:
            action = Action.CONVERT if last else Action.KEEP
        elif tensor is None or (reason is not None and reason is not Reason.COMPUTED_IN_FORWARD):
            action, is_wanted = Action.REFUSE, tensor is not None
            if outcome is Outcome.KEPT:
                action, reason = Action.KEEP, Reason.IN_FORMAT
        else:
            is_wanted = True
            if id(tensor) in seen:
                first = rows[seen[id(tensor)]]
                is_refused = first.action is Action.REFUSE
                action, reason = (first.action, first.reason) if is_refused else (Action.KEEP, Reason.TIED)
            elif outcome is Outcome.KEPT and name == "weight":
                action, reason = Action.KEEP, reason or Reason.IN_FORMAT
            else:
                action, reason = _judge(site, tensor, outcome, last, steps)
            seen.setdefault(id(tensor), len(rows))
        if tensor is None:
            rows.append(PlanRow(path, name, layer, rank, None, groups, None, None, None, None, 0, action, reason))
            continue
        moved = tensor.nbytes if action is Action.CONVERT else 0
        shape, strides = tensor.shape, tensor.stride()
        target = canonical_strides(shape, last) if is_wanted else None
        dtype, device = _text(tensor.dtype), _text(tensor.device)
        rows.append(
            PlanRow(
                path, name, layer, rank, tuple(shape), groups, dtype, device, strides, target, moved, action, reason
            )
        )
    return rows


def _barred(sites: Sequence[Site], filter_fn: FilterFunction | None) -> dict[int, Reason]:
    """What keeps a site as it is keeps all sites of the same tensor, and of others over the same memory."""
    barred: dict[int, Reason] = {}
    for site in sites:
        reason = site.reason
        if filter_fn is not None and not filter_fn(site.module, site.path):
            reason = Reason.FILTERED
        if reason is not None and reason is not Reason.COMPUTED_IN_FORWARD:
            barred[_identity(site.tensor) if site.tensor is not None else id(site)] = reason
    return barred


def _identity(tensor: Tensor) -> int:
    """Equal for tensors that begin at one place in memory; of the object itself where there is no memory to see."""
    has_memory = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return (tensor.data_ptr() if has_memory else 0) or id(tensor)


def match(plan: Plan, model: nn.Module, any_dtype: bool = False) -> list[Site]:
    """The model's sites in the order of a plan's rows.

    Args:
        plan: of the model, or of another instance of the same architecture.
        model: the one to find the sites in.
        any_dtype: whether the weights may be of another dtype than the plan's.

    Raises:
        ValueError: naming the first site that differs.
    """
    sites = {site.full_name: site for site in sites_of(model)}
    matched = []
    for row in plan.rows:
        site = sites.pop(row.full_name, None) or _site_from_example(model, row)
        if site is None:
            raise ValueError(f"the model differs from the plan: it has no {row.full_name!r} ({row.layer})")
        if site.tensor is not None and row.shape is not None:
            shape, dtype = tuple(site.tensor.shape), _text(site.tensor.dtype)
            if shape != row.shape or not (any_dtype or dtype == row.dtype):
                raise ValueError(
                    f"the model differs from the plan: {row.full_name!r} is {shape} of {dtype}, "
                    f"the plan has {row.shape} of {row.dtype}"
                )
        matched.append(site if row.reason is not Reason.COMPUTED_IN_FORWARD else site._replace(reason=row.reason))
    for site in sites.values():
        raise ValueError(f"the model differs from the plan: the plan does not know {site.full_name!r} ({site.layer})")
    return matched


def _site_from_example(model: nn.Module, row: PlanRow) -> Site | None:
    """The site of a row that only example inputs have shown."""
    try:
        module = model.get_submodule(row.path)
    except AttributeError:
        return None
    tensor = getattr(module, row.name, None)
    if not isinstance(tensor, Tensor):
        tensor = None
        if row.reason is not Reason.ON_THE_FLY:
            return None
    return Site(
        row.path, row.name, row.layer, row.rank, row.groups, module, tensor, None if tensor is not None else row.reason
    )


_texts: dict[object, str] = {}


def _text(value: torch.dtype | torch.device) -> str:
    text = _texts.get(value)
    if text is None:
        text = _texts[value] = str(value)
    return text


def _judge(
    site: Site, tensor: Tensor, outcome: Outcome | None, last: bool, steps: dict[int, Reason | None]
) -> tuple[Action, Reason | None]:
    """What an outcome of `plan_weights` means for a site."""
    if outcome is None:
        return Action.REFUSE, Reason.UNSUPPORTED
    if outcome is Outcome.TRACED:
        is_fake = _FAKE in (type(tensor).__name__, type(tensor.data).__name__)
        return (Action.KEEP, Reason.FAKE) if is_fake else (Action.REFUSE, Reason.SUBCLASS)
    if outcome < 0:
        return Action.REFUSE, _REFUSALS[outcome]
    if wrapping.is_offloaded(site.module, tensor):
        return Action.REFUSE, Reason.OFFLOADED
    remark = site.reason
    if remark is None and site.name != "weight":
        remark = step_reason(site, last, steps)
        if remark is Reason.COMPUTED:
            return Action.REFUSE, remark
    if outcome is Outcome.KEPT:
        return Action.KEEP, remark or Reason.IN_FORMAT
    if remark is None and 0 in tensor.stride():
        remark = Reason.OVERLAPPING
    if outcome is Outcome.RESTRIDED:
        return Action.RESTRIDE, Reason.META if tensor.is_meta else remark
    return Action.CONVERT, remark


def outcomes_of(tensors: list[Tensor], memory_format: str | None, storage: Storage = "auto") -> list[Outcome | None]:
    """What the operators would do to each tensor; `None` for one that they do not take."""
    if not tensors:
        return []
    try:
        return list(plan_weights(tensors, operator_format(memory_format), storage=storage))
    except (RuntimeError, NotImplementedError):
        if len(tensors) == 1:
            return [None]
        half = len(tensors) // 2
        return [each for part in (tensors[:half], tensors[half:]) for each in outcomes_of(part, memory_format, storage)]


_canonical: dict[tuple[torch.Size, bool], Strides] = {}


def canonical_strides(shape: torch.Size, last: bool) -> Strides:
    """What `torch.empty` gives in channels-last of the shape's rank, or in contiguous format."""
    strides = _canonical.get((shape, last))
    if strides is None:
        memory_format = CHANNELS_LAST.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
        _canonical[shape, last] = strides
    return strides


def step_reason(site: Site, last: bool, known: dict[int, Reason | None]) -> Reason | None:
    """Whether a computed weight will have the wanted strides by itself, once its originals have them."""
    module = site.module
    if id(module) not in known:
        tensors = computed.originals(module)
        if tensors is None or site.name not in tensors:  # a parameter under another name
            return None
        replacements = {
            name: tensor.new_empty_strided(tensor.shape, canonical_strides(tensor.shape, last)).copy_(tensor.detach())
            for name, tensor in tensors.items()
            if tensor.dim() == site.rank
        }
        weight = computed.evaluate(module, replacements)
        if weight is None:
            known[id(module)] = Reason.COMPUTED
        elif weight.stride() == canonical_strides(weight.shape, last):
            known[id(module)] = None
        else:
            known[id(module)] = Reason.COPIED_EACH_FORWARD
    return known[id(module)]
