"""Match a plan to a model: its sites and layers, in the order of the plan's rows."""

from torch import Tensor, nn

from torch_nhwc.layout import Format
from torch_nhwc.planning.plans import Plan, PlanRow, as_text
from torch_nhwc.sites import computed_weights
from torch_nhwc.sites.finding import find
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found, ReplaceableLayer, Site


def match(plan: Plan, model: nn.Module, any_dtype: bool = False) -> Found:
    """Return the model's sites in the order of a plan's rows, or raise a ValueError that names the first difference."""
    found = find(model)
    sites = {site.full_name: site for site in found.sites}
    matched = []
    for row in plan.rows:
        site = sites.pop(row.full_name, None) or _site_from_example(model, row)
        if site is None:
            raise ValueError(f"the model differs from the plan: it has no {row.full_name!r} ({row.layer})")
        if site.tensor is not None and row.shape is not None:
            shape, dtype = tuple(site.tensor.shape), as_text(site.tensor.dtype)
            if shape != row.shape or not (any_dtype or dtype == row.dtype):
                raise ValueError(
                    f"the model differs from the plan: {row.full_name!r} is {shape} of {dtype}, "
                    f"the plan has {row.shape} of {row.dtype}"
                )
        matched.append(site if row.reason is not Reason.COMPUTED_IN_FORWARD else site.because(row.reason))
    for site in sites.values():
        raise ValueError(f"the model differs from the plan: the plan does not know {site.full_name!r} ({site.layer})")
    return found._replace(sites=matched, observed=plan.observed)


def match_layers(plan: Plan, found: Found) -> list[ReplaceableLayer]:
    """Return the layers that `match` found, in the order of a plan's rows, and raise a ValueError as `match` does.

    A layer that is kept is not compared: it may have another class since, or be another layer. One that gains on some
    machines alone stays as the plan has it.
    """
    if not Format(plan.memory_format).is_channels_last:
        return []
    layers = {layer.path: layer for layer in found.layers}
    matched = []
    for row in plan.layers:
        layer = layers.pop(row.path, None)
        if row.is_wanted and (layer is None or layer.kind != row.layer):
            got = "no such layer" if layer is None else f"a {layer.kind}"
            raise ValueError(f"the model differs from the plan: it has {got} at {row.path!r}, the plan a {row.layer}")
        if layer is not None:
            matched.append(layer)
    for layer in layers.values():
        if layer.reason is None and layer.gains_here is None and plan.preserve:
            raise ValueError(f"the model differs from the plan: the plan does not know {layer.path!r} ({layer.kind})")
    return [*matched, *layers.values()]


def _site_from_example(model: nn.Module, row: PlanRow) -> Site | None:
    """Return the site of a row that only example inputs have shown."""
    try:
        module = model.get_submodule(row.path)
    except AttributeError:
        return None
    if computed_weights.originals(module) is not None:  # reading the weight would compute it, with side effects
        return None
    tensor = getattr(module, row.name, None)
    tensor, reason = (tensor, None) if isinstance(tensor, Tensor) else (None, row.reason)
    if tensor is None and reason is not Reason.ON_THE_FLY:
        return None
    return Site(row.path, row.name, row.layer, row.rank, row.groups, module, tensor, reason)
