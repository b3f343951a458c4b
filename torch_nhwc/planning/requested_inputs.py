"""The hook that converts a model's inputs to channels-last: whether it gets one, and what reports say of it."""

from collections.abc import Iterable

from torch import nn

from torch_nhwc.layout import CHANNELS_LAST, Format
from torch_nhwc.nn.input_hooks import InputHook, expect_hookable, input_hook
from torch_nhwc.planning.options import Options
from torch_nhwc.planning.plans import Plan
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found, Site


def decide_input_hook(found: Found, options: Options) -> InputHook | None:
    """Return the hook that the model is to have: the present one, with what is requested added, or `None`.

    An input of another rank than the convolutions' is no image or volume, such as a video of `[B, T, C, H, W]` for
    convolutions in 2D. One of one channel stays as it is if a convolution of one channel may take it whose width is
    strided: on some CPUs PyTorch computes those wrong where weight or input are channels-last.

    Raises:
        RuntimeError: A format of the inputs is requested, and the model takes no hook, or computes per-sample
            gradients, which channels-last inputs make wrong.
    """
    present = input_hook(found.model)
    if options.input_format is None:
        return present if options.format.is_channels_last else None
    expect_hookable(found.model)
    if any(site.reason is Reason.PER_SAMPLE_GRADIENTS for site in found.sites):
        raise RuntimeError(f"torch_nhwc: input_format: {Reason.PER_SAMPLE_GRADIENTS.value}")
    ranks = ranks_to_bring(options.input_format, options.format)
    sites = [site for site in found.sites if site.rank in ranks]
    if not sites:
        return present
    return InputHook(_ranks_of(sites), _ranks_of(filter(_may_be_wrong_on_one_channel, sites))).joined(present)


def remark_on_input_hook(model: nn.Module, hook: InputHook | None) -> str:
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
    ranks = ranks_to_bring(plan.input_format, Format(plan.memory_format))
    return any(row.rank in ranks for row in plan.rows)


def ranks_to_bring(input_format: str, weights: Format) -> list[int]:
    """Return the ranks of inputs that a format of the inputs means, for weights in a format."""
    of_inputs = Format(None if input_format == "channels_last" else input_format)
    return [rank for rank in CHANNELS_LAST if weights.serves(rank) and of_inputs.serves(rank)]


def _may_be_wrong_on_one_channel(site: Site) -> bool:
    """Return whether a convolution of one group takes one channel and strides over its width, if that is known."""
    strides = getattr(site.module, "stride", None)
    if isinstance(strides, tuple) and strides[-1:] == (1,):
        return False
    if site.tensor is None:
        return True
    channels = getattr(site.module, "in_channels", None)  # a computed weight may come from tensors of other shapes
    has_one = site.tensor.shape[1:2] == (1,) if channels is None else channels == 1
    return bool(has_one) and site.groups <= 1


def _ranks_of(sites: Iterable[Site]) -> tuple[int, ...]:
    return tuple(sorted({site.rank for site in sites}))
