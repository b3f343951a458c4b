"""Converting a model: planned, carried out in one call of the operators, and reported."""

import inspect
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torch_nhwc import computed, wrapping
from torch_nhwc.commit import Edit, commit
from torch_nhwc.companions import Companion, Followers, find_companions, followers_of
from torch_nhwc.hooks import ChannelsLastInput, ConvertWhenMaterialised, add_hook, find_hook, remove_hook
from torch_nhwc.ops import Outcome, Storage, convert_weights_
from torch_nhwc.planning import (
    Action,
    FilterFunction,
    Plan,
    PlanRow,
    Strides,
    decide,
    format_name,
    match,
    operator_format,
    outcomes_of,
    sites_of,
    step_reason,
)
from torch_nhwc.reasons import Reason
from torch_nhwc.report import Before, Report, expect_plan, new_bytes
from torch_nhwc.sites import CHANNELS_LAST, Site, walk


def convert_(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    plan: Plan | None = None,
    example_inputs: Any = None,
    storage: Storage = "auto",
    strict: bool = False,
    dry_run: bool = False,
    input_format: Literal["channels_last"] | torch.memory_format | None = None,
) -> Report:
    """Brings the convolution weights of a model into a memory format, in place, with all that belongs to them.

    Parameters stay the objects that they are. Gradients follow, and so do the optimizer state and averaged copies that
    are given. Everything is checked before anything changes; then weights and companions change in one call of the
    operators, and an exception leaves the model as it was. A site that is in format is left alone, so that a second
    call moves nothing.

    Args:
        model: as in `plan`. Convert before wrapping it for distributed training, and before compiling it.
        memory_format: as in `plan`.
        optimizer: one, or several, whose state follows.
        ema: averaged copies that follow: `swa_utils.AveragedModel`, a deep copy of the model, or a mapping of full
            names to the tensors themselves (not a module's `state_dict()`, whose tensors are others); one or several.
        filter_fn: as in `plan`.
        plan: a plan to apply instead of making one; it has its own memory format, filter and example inputs.
        example_inputs: as in `plan`.
        storage: as in `convert_weights_`: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`.
        strict: whether a site that is refused raises, before anything is touched.
        dry_run: whether only to report what would happen.
        input_format: `"channels_last"` also brings 4D and 5D inputs into channels-last at the model's entry, by a
            forward pre-hook.

    Returns:
        What was done to every site, and why; its `revert` undoes it.

    Raises:
        RuntimeError: `strict`, and a site was refused; or a tensor cannot change, with the operators' sentence.
        ValueError, TypeError: as `plan`, `Plan.apply` and the operators.

    Warns:
        UserWarning: once, where sites were refused.
    """
    start = time.perf_counter()
    if input_format is not None and format_name(input_format) != "channels_last":
        raise ValueError(f"expected input_format to be None or 'channels_last', got {input_format!r}")
    if storage not in get_args(Storage):
        raise ValueError(f"expected storage to be one of {', '.join(get_args(Storage))}, got {storage!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"expected filter_fn to be a function of a module and its path, got {filter_fn!r}")
    if plan is None:
        name = format_name(memory_format)
        sites = sites_of(model, example_inputs)
        rows = decide(sites, name, storage, filter_fn)
    elif memory_format is not None or filter_fn is not None or example_inputs is not None:
        raise ValueError("a plan has its own memory format, filter and example inputs: give the one or the others")
    else:
        expect_plan(plan)
        name, sites = plan.memory_format, match(plan, model)
        anew = decide(sites, name, storage)
        rows = [_as_planned(planned, row) for planned, row in zip(plan.rows, anew)]
    job = Job(model, sites, rows, name, storage, followers_of(optimizer, ema))
    _tell_refused(job.rows, strict)
    return job.run(input_format is not None, dry_run, start)


# Refused for the sake of companions that are not known when a plan is applied again.
_FOR_COMPANIONS = (Reason.FLATTENING_OPTIMIZER, Reason.STATE_IN_THE_WAY)


def _as_planned(planned: PlanRow, row: PlanRow) -> PlanRow:
    """What is decided anew for a site, unless the plan leaves it as it is."""
    if planned.is_wanted and planned.reason not in _FOR_COMPANIONS:
        return row
    return row._replace(target_strides=None, bytes_to_move=0, action=planned.action, reason=planned.reason)


@contextmanager
def channels_last(model: nn.Module, **options: Any) -> Iterator[Report]:
    """Converts a model by `convert_(model, **options)`, and reverts it on the way out, after exceptions too.

    An optimizer that is made inside is not known here: its state follows by `report.revert(optimizer)`.
    """
    report = convert_(model, **options)
    try:
        yield report
    finally:
        report.revert()


def _takes_part(row: PlanRow) -> bool:
    """Whether a site is in the format or will be: its companions are looked after, also where it changes no more."""
    return (
        row.target_strides is not None
        and row.action is not Action.REFUSE
        and row.reason not in (Reason.FAKE, Reason.TIED)
    )


def _stays_lazy(row: PlanRow) -> bool:
    """Whether a site is left as it materialises."""
    return row.reason is Reason.LAZY and row.action is Action.KEEP


def _strides_to_restore(row: PlanRow) -> Strides | None:
    """`None` where contiguous ones will have to do: there was no shape, or the elements overlapped."""
    return None if row.reason is Reason.OVERLAPPING else row.strides


def _tell_refused(rows: list[PlanRow], strict: bool) -> None:
    refused = [row for row in rows if row.action is Action.REFUSE]
    if not refused:
        return
    by_reason: dict[Reason, list[str]] = {}
    for row in refused:
        if row.reason is not None:
            by_reason.setdefault(row.reason, []).append(f"{row.full_name!r} ({row.layer})")
    sentences = [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {reason.value}"
        for reason, names in by_reason.items()
    ]
    message = f"torch_nhwc: {len(refused)} of {len(rows)} sites stay as they are: {'; '.join(sentences)}"
    if strict:
        raise RuntimeError(f"{message} (nothing was changed, since strict=True)")
    warnings.warn(message, UserWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How far up the stack, from the calling function, the code is that called the package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch_nhwc", "contextlib"):
        level, frame = level + 1, frame.f_back
    return level


# Tuples: the members of an enumeration compare fast and hash slowly.
_CHANGES = (Action.CONVERT, Action.RESTRIDE)
_STAYS = (None, Outcome.KEPT)


class Job:
    """A conversion that is decided: who follows, what is refused for their sake, and carrying it out."""

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        rows: list[PlanRow],
        memory_format: str | None,
        storage: Storage,
        followers: Followers,
    ) -> None:
        self.model, self.sites, self.rows = model, sites, rows
        self.memory_format, self.storage, self.followers = memory_format, storage, followers
        self.remarks = [
            f"{type(optimizer).__name__}: {Reason.VIEWS_PARAMETERS.value}"
            for optimizer in followers.optimizers
            if wrapping.views_parameters(optimizer)
        ]
        followers.check_optimizers(model, (site.tensor for site in sites))
        self._refuse_flattened()
        self.companions, self.foreseen = self._follow_or_refuse()

    def _refuse_flattened(self) -> None:
        if self.memory_format == "contiguous_format":
            return
        for optimizer in filter(wrapping.flattens_parameters, self.followers.optimizers):
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for index, (site, row) in enumerate(zip(self.sites, self.rows)):
                if row.action is Action.CONVERT and id(site.tensor) in held:
                    self.rows[index] = row.refused(Reason.FLATTENING_OPTIMIZER)

    def _follow_or_refuse(self) -> tuple[list[Companion], list[Outcome | None]]:
        """The companions, and what will happen to each; a row whose companions cannot follow is refused."""
        weights = [
            (index, row.full_name, site.tensor)
            for index, (site, row) in enumerate(zip(self.sites, self.rows))
            if site.tensor is not None and _takes_part(row)
        ]
        companions = find_companions(weights, self.followers)
        following = [companion.tensor for companion in companions if companion.reason is None]
        foreseen = outcomes_of(following, self.memory_format, self.storage)
        if len(foreseen) < len(companions):
            outcomes = iter(foreseen)
            foreseen = [next(outcomes) if companion.reason is None else None for companion in companions]
        stuck = {
            id(companion.tensor): companion.row
            for companion, outcome in zip(companions, foreseen)
            if companion.reason is Reason.STATE_IN_THE_WAY
            or (companion.reason is None and (outcome is None or outcome < 0))
        }
        if not stuck:
            return companions, foreseen
        # Two parameters over one storage change together or not at all.
        stuck_rows = set(stuck.values())
        places = {_place(tensor) for index, _, tensor in weights if index in stuck_rows}
        for index, _, tensor in weights:
            if self.rows[index].action is not Action.KEEP and _place(tensor) in places:
                self.rows[index] = self.rows[index].refused(Reason.STATE_IN_THE_WAY)
        stay = [
            (each._replace(reason=Reason.STATE_IN_THE_WAY), None) if id(each.tensor) in stuck else (each, outcome)
            for each, outcome in zip(companions, foreseen)
            if self.rows[each.row].action is not Action.REFUSE
        ]
        return [each for each, _ in stay], [outcome for _, outcome in stay]

    def _lazy(self) -> list[int]:
        return [
            index for index, row in enumerate(self.rows) if row.reason is Reason.LAZY and row.action is Action.CONVERT
        ]

    def _edits(self, with_inputs: bool) -> list[Edit]:
        """What changes besides tensors: lazy layers convert later, computed weights are laid out, and inputs."""
        lazy = [self.sites[index].module for index in self._lazy()]
        edits = [
            _hook_edit(module, ConvertWhenMaterialised())
            for module in lazy
            if not find_hook(module, ConvertWhenMaterialised)
        ]
        seen: set[int] = set()
        for site, row in zip(self.sites, self.rows):
            module = site.module
            if module._forward_pre_hooks and (_takes_part(row) or _stays_lazy(row)):
                waiting = find_hook(module, ConvertWhenMaterialised)
                if waiting:  # from an earlier call, that this one takes the place of
                    edits.append(_hook_edit(module, waiting).reverse)
            is_tied = row.reason is Reason.TIED
            if row.name != "weight" and (_takes_part(row) or is_tied) and id(module) not in seen:
                seen.add(id(module))
                reason = step_reason(site, self.memory_format != "contiguous_format", {}) if is_tied else row.reason
                wanted = None
                if reason is Reason.COPIED_EACH_FORWARD:
                    wanted = self.memory_format or str(CHANNELS_LAST[row.rank]).removeprefix("torch.")
                current = computed.step_format(module)
                if wanted != current:
                    forth, back = (partial(computed.set_step, memory_format=name) for name in (wanted, current))
                    layers = [module, *self.followers.layers_at(site.path)]
                    edits += [Edit(weakref.ref(layer), forth, back) for layer in layers]
        hook = find_hook(self.model, ChannelsLastInput)
        if with_inputs and not hook:
            edits.append(_hook_edit(self.model, ChannelsLastInput()))
        elif hook and self.memory_format == "contiguous_format":
            edits.append(_hook_edit(self.model, hook).reverse)
        return edits

    def run(self, with_inputs: bool = False, dry_run: bool = False, start: float | None = None) -> Report:
        """Does it, unless `dry_run`, and reports; `start` is when the whole call began."""
        start = time.perf_counter() if start is None else start
        rows, sites = self.rows, self.sites
        changing = [i for i, row in enumerate(rows) if row.action in _CHANGES and sites[i].tensor is not None]
        moving = [place for place, outcome in enumerate(self.foreseen) if outcome not in _STAYS]
        following = [self.companions[place] for place in moving]
        tensors: list[Tensor] = [sites[index].tensor for index in changing]  # type: ignore[misc]
        tensors += [companion.tensor for companion in following]
        edits = self._edits(with_inputs)
        if changing and self.memory_format != "contiguous_format" and _has_instance_norm(self.model):
            self.remarks.append(Reason.INSTANCE_NORM.value)
        touched = sorted({*changing, *(each.row for each in following), *self._lazy()})
        before = Before(
            weakref.ref(self.model),
            self.followers.weakly(),
            {index: _strides_to_restore(rows[index]) for index in touched},
            # Those that lay as their weight did go back with it, as those do that have come since.
            Before.layouts(
                each.tensor
                for each in (self.companions if touched else ())
                if each.reason is None and each.tensor.stride() != rows[each.row].strides
            ),
            tuple(edits),
        )
        if dry_run:
            outcomes = []
        elif tensors or edits:
            wanted = operator_format(self.memory_format)
            outcomes = commit(tensors, partial(convert_weights_, tensors, wanted, storage=self.storage), edits)
        else:
            outcomes = []
        done = dict(zip(changing, outcomes))
        kept = None if dry_run else Outcome.KEPT
        return Report(
            plan=Plan(tuple(rows), self.memory_format),
            outcomes=tuple(done.get(index, kept if _takes_part(row) else None) for index, row in enumerate(rows)),
            remarks=tuple(self.remarks),
            new_bytes=new_bytes(tensors, outcomes),
            seconds=time.perf_counter() - start,
            dry_run=dry_run,
            _companions=tuple((each.row, each.label, each.reason) for each in self.companions),
            _companion_outcomes=dict(zip(moving, outcomes[len(changing) :])),
            _before=None if dry_run else before,
        )


def _has_instance_norm(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.InstanceNorm2d, nn.InstanceNorm3d)) for _, module, _ in walk(model))


def _place(tensor: Tensor) -> int:
    """Equal for tensors over the same memory."""
    return tensor.data_ptr() or id(tensor)


def _hook_edit(module: nn.Module, hook: object) -> Edit:
    return Edit(weakref.ref(module), partial(add_hook, hook=hook), partial(remove_hook, hook=hook))
