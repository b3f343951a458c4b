"""Checkpoints and the format: contiguous state dicts, restoring it, and checking that it is there."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torch_nhwc.companions import find_companions, followers_of
from torch_nhwc.distributed import gather
from torch_nhwc.ops import Storage, convert_weights, lay_out_weights_
from torch_nhwc.planning import Action, Plan, PlanRow, Strides, canonical_strides, match
from torch_nhwc.reasons import Reason
from torch_nhwc.report import CompanionRow, Report
from torch_nhwc.sites import Site

_T = TypeVar("_T")


def contiguous_state_dict(model_or_state_dict: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors are contiguous, for tools that take no others: safetensors, distributed checkpoints.

    Args:
        model_or_state_dict: a model, which is not changed, or a state dict, that of an optimizer as well.

    Returns:
        A copy of the state dict, nested ones included. Tensors that are contiguous already are the same ones; the
        others are contiguous copies. Exact aliases stay aliases.
    """
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, nn.Module) else model_or_state_dict
    copies: dict[tuple[Any, ...], Tensor] = {}

    def contiguous(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_contiguous():
            return tensor
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copies[place]

    return _map_tensors(state, contiguous)  # type: ignore[no-any-return]


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = copy.copy(value)  # keeps the type, and the metadata that load_state_dict looks for
        for key, each in value.items():
            mapped[key] = _map_tensors(each, function)  # type: ignore[index]
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(each, function) for each in value)
    return value


def convert_state_dict(state_dict: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A state dict in which the weights of a plan's sites are in format, for `load_state_dict(assign=True)`.

    Reading a checkpoint that is mapped into memory, as safetensors and `torch.load(mmap=True)` do, and converting it
    is then one pass over the bytes.

    Args:
        state_dict: of a model that the plan fits; other entries stay the tensors that they are.
        plan: made of the model on the meta device, for example.

    Raises:
        ValueError: an entry has another shape than the plan's site.
    """
    converted = copy.copy(dict(state_dict))
    wanted = [row for row in plan.rows if row.target_strides is not None and row.action is not Action.REFUSE]
    rows = [row for row in wanted if isinstance(state_dict.get(row.full_name), Tensor)]
    for row in rows:
        shape = tuple(state_dict[row.full_name].shape)
        if shape != row.shape:
            raise ValueError(
                f"the state dict differs from the plan: {row.full_name!r} is {shape}, the plan has {row.shape}"
            )
    memory_format = torch.contiguous_format if plan.memory_format == "contiguous_format" else None
    with torch.no_grad():
        results = convert_weights([state_dict[row.full_name].detach() for row in rows], memory_format)
    converted.update((row.full_name, result) for row, result in zip(rows, results))
    return converted


def restore_(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, storage: Storage = "detach"
) -> Report:
    """Brings back the format that a plan describes, where something took it away.

    `load_state_dict(assign=True)`, `vector_to_parameters` and `.to()` do; gradients, state and averaged copies that
    are given follow. Weights may have another dtype than in the plan.

    Args:
        model: one that the plan fits.
        plan: of the conversion, `report.plan`.
        optimizer: as in `convert_`.
        ema: as in `convert_`.
        storage: as in `convert_`; `"detach"`, because `vector_to_parameters` leaves slices of one vector.

    Raises:
        ValueError: the model differs from the plan.
    """
    from torch_nhwc.conversion import convert_

    rows = [
        row._replace(dtype=str(site.tensor.dtype)) if site.tensor is not None else row
        for row, site in zip(plan.rows, match(plan, model, any_dtype=True))
    ]
    return convert_(model, plan=Plan(tuple(rows), plan.memory_format), optimizer=optimizer, ema=ema, storage=storage)


def align_(model: nn.Module, optimizer: Any) -> list[CompanionRow]:
    """Lays gradients and optimizer state out as their parameters lie.

    To be called after `optimizer.load_state_dict` of a checkpoint that may be in another layout: fused CPU optimizers
    step silently wrong, and others slowly, where a parameter and its state differ. Every parameter is looked at, not
    only convolution weights.

    Args:
        model: what the optimizer optimizes.
        optimizer: one, or several.

    Returns:
        What was laid out anew; empty where all was in order.

    Raises:
        ValueError: the optimizer holds none of the model's parameters.
        RuntimeError: state that cannot change; nothing has changed then.
    """
    followers = followers_of(optimizer, None)
    parameters = [(index, name, tensor) for index, (name, tensor) in enumerate(model.named_parameters())]
    ours = {id(tensor) for _, _, tensor in parameters}
    for each in followers.optimizers:
        if not any(id(tensor) in ours for group in each.param_groups for tensor in group["params"]):
            raise ValueError(f"align_: the {type(each).__name__} holds none of the model's parameters")
    strided = [each for each in parameters if type(each[2]) is nn.Parameter and each[2].layout == torch.strided]
    apart = [
        companion
        for companion in find_companions(strided, followers)
        if companion.reason is None
        and not _are_same_places(companion.tensor, parameters[companion.row][2].stride())
        and 0 not in parameters[companion.row][2].stride()
    ]
    strides = [parameters[companion.row][2].stride() for companion in apart]
    outcomes = lay_out_weights_([companion.tensor for companion in apart], strides, storage="detach")
    return [
        CompanionRow(parameters[companion.row][1], companion.label, outcome, None)
        for companion, outcome in zip(apart, outcomes)
    ]


class Deviation(NamedTuple):
    """A tensor that is not laid out as the plan has it."""

    site: str
    """The full name of the weight."""
    what: str
    """`weight`, `grad`, `ema`, the optimizer's name for its state, or `plan` where ranks have different ones."""
    strides: Strides | None
    wanted: Strides | None
    rank: int | None
    """In the process group; `None` without one."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.site!r}, {self.what}: strides {self.strides}, expected {self.wanted}"


def check(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, process_group: Any = None
) -> list[Deviation]:
    """What is not, or no longer, laid out as a plan has it: weights, gradients, optimizer state and averaged copies.

    Args:
        model: one that the plan fits, in any dtype.
        plan: `report.plan`.
        optimizer: as in `convert_`.
        ema: as in `convert_`.
        process_group: compares the ranks of this group as well; all of them call this, and all get the same list.

    Returns:
        Empty where all is in order, so that `assert not check(model, plan)` holds.

    Raises:
        ValueError: the model differs from the plan.
    """
    wanted: dict[int, Strides] = {}
    weights: list[tuple[int, str, Tensor]] = []
    deviations: list[Deviation] = []
    for index, (row, site) in enumerate(zip(plan.rows, match(plan, model, any_dtype=True))):
        strides = _wanted_strides(row, site, plan.memory_format)
        if strides is not None and site.tensor is not None:
            wanted[index] = strides
            weights.append((index, row.full_name, site.tensor))
            if site.tensor.stride() != strides:
                deviations.append(Deviation(row.full_name, "weight", site.tensor.stride(), strides, None))
    for companion in find_companions(weights, followers_of(optimizer, ema)):
        # In dimensions of size 1 PyTorch itself gives gradients and state other strides; no element lies elsewhere.
        if companion.reason is None and not _are_same_places(companion.tensor, wanted[companion.row]):
            name = plan.rows[companion.row].full_name
            deviations.append(Deviation(name, companion.label, companion.tensor.stride(), wanted[companion.row], None))
    if process_group is None:
        return deviations
    layout = {name: tensor.stride() for _, name, tensor in weights}
    return _across_ranks(gather((plan.digest, layout, deviations), process_group))


def _wanted_strides(row: PlanRow, site: Site, memory_format: str | None) -> Strides | None:
    if row.action is Action.REFUSE or row.reason is Reason.FAKE or not row.is_wanted:
        return None
    if row.target_strides is not None or site.tensor is None:
        return row.target_strides
    return canonical_strides(site.tensor.shape, memory_format != "contiguous_format")  # lazy when it was planned


def _are_same_places(tensor: Tensor, strides: Strides) -> bool:
    return all(size <= 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def _across_ranks(gathered: list[tuple[str, dict[str, Strides], list[Deviation]]]) -> list[Deviation]:
    """The deviations of all ranks, and where a layout differs from the first rank's although it fits its own plan."""
    digest, layout, _ = gathered[0]
    found = [each._replace(rank=rank) for rank, (_, _, deviations) in enumerate(gathered) for each in deviations]
    for rank, (other_digest, other, _) in enumerate(gathered):
        for name in dict.fromkeys([*layout, *other]):
            strides, expected = other.get(name), layout.get(name)
            if strides != expected and not any((each.rank, each.site) == (rank, name) for each in found):
                found.append(Deviation(name, "weight", strides, expected, rank))
        if other_digest != digest and not any(each.rank == rank for each in found):
            found.append(Deviation("", "plan", None, None, rank))
    return found
