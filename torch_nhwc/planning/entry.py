"""What is brought into a format at the entry of a model, and of modules inside of it, and what reports say of that."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from torch_nhwc.entries import InputFormat, expect_hookable, input_hook
from torch_nhwc.finding.site import Site
from torch_nhwc.formats import CHANNELS_LAST, Format
from torch_nhwc.modules.walk import walk
from torch_nhwc.planning.deciding import Decision
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.request import Request
from torch_nhwc.planning.rows import EntryRow

# By which models run their layers as well.
_BESIDE_FORWARD = (
    *("encode", "decode", "generate", "predict", "sample", "embed", "reconstruct", "extract_features"),
    *("encode_image", "encode_video", "get_image_features", "get_video_features"),
    *("forward_features", "forward_head", "forward_intermediates"),
    *("training_step", "validation_step", "test_step", "predict_step"),
)


class Entry(NamedTuple):
    """A module whose hook for its inputs changes."""

    module: nn.Module
    there: InputFormat | None
    wanted: InputFormat | None


def decide_entries(model: nn.Module, inputs: InputFormat | None, request: Request) -> list[Entry]:
    """The hooks that change: the model's own, and those of a plan, which take the place of all that are there.

    On the way to contiguous all of them go.

    Raises:
        ValueError: the model has no module where a plan has an entry.
        RuntimeError: a module takes no hook.
    """
    wanted = {"": inputs, **{row.path: _hook_of(row) for row in request.entries}}
    of_all = bool(request.entries) or not request.format.is_channels_last
    entries = []
    for path, module, _ in walk(model) if of_all else (("", model, None),):
        there, own = input_hook(module), wanted.pop(path, None)
        if there != own:
            if own is not None:
                expect_hookable(module)
            entries.append(Entry(module, there, own))
    for path in wanted:
        raise ValueError(f"the model differs from the plan: it has no module at {path!r}")
    return entries


def lost_entries(model: nn.Module, plan: Plan) -> Iterator[tuple[str, str]]:
    """The paths of the modules that have lost the hook of a plan, each with the format that it brought inputs into."""
    modules = {path: module for path, module, _ in walk(model)} if plan.entries else {}
    for row in plan.entries:
        if row.path not in modules or input_hook(modules[row.path]) != _hook_of(row):
            yield row.path, row.memory_format
    if plan.input_format is not None and input_hook(model) is None:
        ranks = ranks_to_bring(plan.input_format, Format(plan.memory_format))
        if any(row.rank in ranks for row in plan.rows):
            yield "", plan.input_format


def _hook_of(row: EntryRow) -> InputFormat:
    return InputFormat(memory_format=row.memory_format, is_shared=row.is_shared)


def ranks_to_bring(input_format: str, weights: Format) -> list[int]:
    """Of the inputs that a format of inputs means, beside weights in a format."""
    of_inputs = Format(None if input_format == "channels_last" else input_format)
    return [rank for rank in CHANNELS_LAST if weights.serves(rank) and of_inputs.serves(rank)]


def decide_inputs(model: nn.Module, decisions: Iterable[Decision], request: Request) -> InputFormat | None:
    """What the model is to have for a hook: the one that it has, with what is asked for on top, or `None`.

    An input of another rank than the convolutions' is no image or volume, such as a video of `[B, T, C, H, W]` for
    convolutions in 2D. One of one channel stays as it is where a convolution of one channel may take it whose width is
    strided: on some CPUs PyTorch computes those wrong where weight or input are channels-last.
    """
    there = input_hook(model)
    if request.input_format is None:
        return there if request.format.is_channels_last else None
    ranks = ranks_to_bring(request.input_format, request.format)
    sites = [decision.site for decision in decisions if decision.site.rank in ranks]
    if not sites:
        return there
    return InputFormat(_ranks_of(sites), _ranks_of(filter(_may_be_wrong_on_one_channel, sites))).joined(there)


def _may_be_wrong_on_one_channel(site: Site) -> bool:
    """Whether a convolution of one group takes one channel and strides over its width, as far as that is known."""
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


def remark_on_inputs(model: nn.Module, hook: InputFormat | None) -> str:
    """What the report says where a format of the inputs is asked for."""
    if hook is None:
        return (
            "input_format: no input is brought into channels-last, since no convolution was found that would take one "
            "(example_inputs show more of them)"
        )
    dimensions = " and ".join(f"{rank}D" for rank in hook.ranks)
    end = "revert takes it away"
    if hook == input_hook(model):
        end = "it was there already, and goes by the revert of the report that it came with"
    remark = (
        f"input_format: a forward pre-hook on the {type(model).__name__} brings its {dimensions} inputs into "
        f"channels-last; {end}"
    )
    if hook.one_channel_ranks:
        remark += "; inputs of one channel stay as they are, since strided convolutions of one channel may take them"
    methods = [name for name in _BESIDE_FORWARD if callable(getattr(type(model), name, None))]
    if methods:
        remark += f"; {', '.join(methods)} take theirs as they come, but where they call the model itself"
    return remark
