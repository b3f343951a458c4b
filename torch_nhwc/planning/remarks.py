"""The hook for a model's inputs, and what a report says about the whole model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_nhwc.layout import Format, is_permuted
from torch_nhwc.nn.hooks import InputHook, expect_hookable, input_hook, state_dict_hook_key
from torch_nhwc.nn.replacements import REPLACEMENTS, is_preserving
from torch_nhwc.ops.qualification import kept_qualifications
from torch_nhwc.planning.faults import (
    FAULTY,
    is_slow_depthwise_volume,
    may_be_wrong_on_one_channel,
    may_get_wrong_gradient,
)
from torch_nhwc.planning.plans import Action, LayerRow, Options, Plan, PlanRow, ranks_of_inputs
from torch_nhwc.rendering import amount
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found, ReplaceableLayer, Site

_Layers = Sequence[tuple[ReplaceableLayer, LayerRow]]


def decide_input_hook(found: Found, options: Options, layers: _Layers) -> InputHook | None:
    """Return the hook that the model is to have: the present one, with what is requested added, or `None`.

    An input of another rank than the convolutions' is no image or volume, for example a video of `[B, T, C, H, W]` for
    convolutions in 2D. One of one channel stays as it is if a convolution of one channel may take it that is not
    replaced, and whose width is strided: on some CPUs PyTorch computes those wrong on channels-last.
    """
    present = input_hook(found.model)
    if options.input_format is None:
        return present if options.format.is_channels_last else None
    expect_hookable(found.model)
    if any(site.reason is Reason.PER_SAMPLE_GRADIENTS for site in found.sites):
        raise RuntimeError(f"torch_nhwc: input_format: {Reason.PER_SAMPLE_GRADIENTS.value}")
    of_weights = {site.rank for site in found.sites if options.format.serves(site.rank)}
    ranks = ranks_of_inputs(options.input_format, of_weights)
    sites = [site for site in found.sites if site.rank in ranks]
    if not sites:
        return present
    right = replaced_layers(layers)
    others = [site for site in sites if id(site.module) not in right and may_be_wrong_on_one_channel(site)]
    return InputHook(_ranks_of(sites), _ranks_of(others)).joined(present)


def _remark_on_input_hook(model: nn.Module, hook: InputHook | None) -> str:
    """Return what the report says if a format of the inputs is requested."""
    if hook is None:
        return (
            "input_format: no input is converted, since no convolution was found that would take one (example_inputs "
            "show more of them)"
        )
    end = "revert removes it"
    if hook == input_hook(model):
        end = "it was there before, and goes with the revert of the report that it came with"
    ranks = " and ".join(f"{rank}D" for rank in hook.ranks)
    remark = f"input_format: a forward pre-hook converts {ranks} inputs of the {type(model).__name__}; {end}"
    if hook.one_channel_ranks:
        remark += "; inputs of one channel stay as they are, since strided convolutions of one channel may take them"
    return remark


def has_lost_input_hook(model: nn.Module, plan: Plan) -> bool:
    """Return whether a model lacks the hook for its inputs that a plan has."""
    if plan.input_format is None or input_hook(model) is not None:
        return False
    of_weights = {row.rank for row in plan.rows if Format(plan.memory_format).serves(row.rank)}
    return bool(ranks_of_inputs(plan.input_format, of_weights))


def _ranks_of(sites: Iterable[Site]) -> tuple[int, ...]:
    return tuple(sorted({site.rank for site in sites}))


def remarks_on(
    found: Found, options: Options, rows: Sequence[PlanRow], layers: _Layers, hook: InputHook | None
) -> list[str]:
    """Return what the report says of the whole model."""
    remarks = []
    each_forward = any(row.action is Action.EACH_FORWARD for row in rows)
    if options.format.is_channels_last and (each_forward or any(row.changes for row in rows)):
        remarks += [reason.value for reason in _faults_of_kept_layers(found, options, layers)]
    has_strides = state_dict_hook_key(found.model) is None and any(map(_is_permuted, rows))
    if has_ranks() and has_strides:
        remarks.append(Reason.BROADCAST.value)
    if each_forward:
        weights = {id(site.tensor): site.tensor for site, row in zip(found.sites, rows) if row.is_in_each_forward}
        size = amount(sum(tensor.nbytes for tensor in weights.values() if tensor is not None))
        remarks.append(
            f"converted in each forward: up to {size} of new memory, until the backward where there are gradients"
        )
    if options.input_format and (hook is not None or not found.sites):
        remarks.append(_remark_on_input_hook(found.model, hook))
    is_hook_new = hook not in (None, input_hook(found.model))
    if options.format.is_channels_last:
        remarks += [reason.value for reason in _remarks_on_layers(found, options, layers)]
    if has_strides and any(row.changes for row in rows):
        remarks.append(Reason.SAVED_STRIDES.value)
    is_replacing = any(row.action is Action.REPLACE for _, row in layers)
    if is_replacing and any(site.tensor is not None and site.tensor.is_cuda for site in found.sites):
        remarks += [f"kernels of norms on {each}" for each in kept_qualifications()]
    if is_hook_new or each_forward or is_replacing:
        remarks.append(Reason.SAVED_WHOLE.value)
    return remarks


def _remarks_on_layers(found: Found, options: Options, layers: _Layers) -> Iterator[Reason]:
    """Yield what to know about layers that stay as they are, and that PyTorch computes wrong."""
    if not options.preserve:
        right = replaced_layers(layers)
        if any(may_get_wrong_gradient(site) for site in found.sites if id(site.module) not in right):
            yield Reason.WRONG_GRADIENTS
    elif any(issubclass(each, torch.jit.ScriptModule) for each in found.module_types):
        names = {getattr(module, "original_name", "") for module in found.model.modules()}
        if not names.isdisjoint(
            each.__name__ for each, row in REPLACEMENTS.items() if row.gains_here is None and row.on_cpu
        ):
            yield Reason.SCRIPTED_LAYERS


def replaced_layers(layers: _Layers) -> set[int]:
    """Return the ids of the layers that are replaced, now or already."""
    return {id(layer.module) for layer, row in layers if row.is_wanted}


def _faults_of_kept_layers(found: Found, options: Options, layers: _Layers) -> list[Reason]:
    """Return why layers that stay as they are will go wrong, or slow."""
    kept = {type(layer.module) for layer, row in layers if row.action is Action.KEEP}
    types: set[Any] = kept if options.preserve else found.module_types
    types = {each for each in types if not is_preserving(each)}
    reasons = [reason for reason, faulty in FAULTY.items() if any(issubclass(each, faulty) for each in types)]
    volumes = [site for site in found.sites if site.rank == 5]
    right = replaced_layers(layers)
    if any(is_slow_depthwise_volume(site) and id(site.module) not in right for site in volumes):
        reasons.append(Reason.DEPTHWISE_VOLUMES)
    return [reason for reason in reasons if volumes or reason is not Reason.PIXEL_SHUFFLE]


def has_ranks() -> bool:
    """Return whether this is one of several processes of a group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_permuted(row: PlanRow) -> bool:
    return row.takes_part and is_permuted(torch.Size(row.shape or ()), row.target_strides or ())
