"""The main job on real models: convert, prove that the outputs did not change, and time it honestly."""

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_nhwc.cli.inputs import in_channels_last
from torch_nhwc.cli.models import Example
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.planning.planner import plan
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason
from torch_nhwc.running.copying import deep_copy
from torch_nhwc.running.inputs import call
from torch_nhwc.running.outputs import difference_of, equal_weights, first_tensor
from torch_nhwc.running.timing import Job, differ, give_freed_memory_back, seconds_in_turns


@dataclass
class Tally:
    """How many weights, and their bytes."""

    sites: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Result:
    """What the main job saw on one model. Times are medians in milliseconds of interleaved runs."""

    model: str
    device: str
    dtype: str
    threads: int
    converted: Tally
    restrided: Tally
    kept: Tally
    left: list[str]
    weights_equal: bool
    convert_ms: float
    stock_convert_ms: float | None
    stock_over_ours: float | None
    forward_contiguous_ms: float
    forward_converted_ms: float
    forward_channels_last_input_ms: float
    measurable: dict[str, bool]
    """Of each comparison of two times, whether they differ by more than the spread of the runs behind them."""
    largest_output: float
    largest_difference: float
    tolerance: float

    @property
    def unchanged(self) -> bool:
        """Whether the weights are equal bit for bit and the outputs within the tolerance."""
        return self.weights_equal and self.largest_difference <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self) | {"unchanged": self.unchanged}


def run(example: Example, repeats: int = 5) -> Result:
    """Does the main job on one model, in evaluation mode; the example's own model becomes and stays contiguous."""
    model, inputs = example.model.eval(), example.inputs
    device, dtype = str(example.like.device), example.like.dtype
    _convert(model, torch.contiguous_format)
    converted = deep_copy(model)
    planned = plan(converted)
    _convert(converted)

    jobs = {"ours": _convert, "stock": stock_convert}
    if isinstance(model, torch.jit.ScriptModule):
        del jobs["stock"]  # which does nothing to those
    times = seconds_in_turns({name: _prepared(job, model) for name, job in jobs.items()}, repeats, device)
    channels_last_inputs = in_channels_last(inputs, {row.rank for row in planned.rows})
    with torch.no_grad():
        difference = difference_of(first_tensor(call(converted, inputs)), first_tensor(call(model, inputs)), dtype)
        forwards: dict[str, Callable[[], Job]] = {
            "contiguous": lambda: lambda: call(model, inputs),
            "converted": lambda: lambda: call(converted, inputs),
            "channels_last_input": lambda: lambda: call(converted, channels_last_inputs),
        }
        times |= seconds_in_turns(forwards, repeats, device)
    ms = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    return Result(
        example.name,
        device,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        **_tallies(planned),
        weights_equal=equal_weights(model, converted),
        convert_ms=ms["ours"],
        stock_convert_ms=ms.get("stock"),
        stock_over_ours=ms["stock"] / ms["ours"] if "stock" in ms else None,
        forward_contiguous_ms=ms["contiguous"],
        forward_converted_ms=ms["converted"],
        forward_channels_last_input_ms=ms["channels_last_input"],
        measurable={
            "stock_over_ours": "stock" in times and differ(times["stock"], times["ours"]),
            "converted": differ(times["contiguous"], times["converted"]),
            "channels_last_input": differ(times["contiguous"], times["channels_last_input"]),
        },
        largest_output=difference.of,
        largest_difference=difference.largest,
        tolerance=difference.tolerance,
    )


def stock_convert(model: nn.Module) -> None:
    """What PyTorch itself has for the main job."""
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def _tallies(planned: Plan) -> dict[str, Any]:
    """The fields of a result that tell what a plan does."""
    tallies = {Action.CONVERT: Tally(), Action.RESTRIDE: Tally(), Action.KEEP: Tally()}
    left = []
    for row in planned.rows:
        if row.action is Action.REFUSE:
            layer = repr(row.path) if row.path else "the module itself"
            left.append(f"{layer} ({row.layer}): {row.reason.value if row.reason else ''}")
        elif row.shape is not None and row.dtype is not None and row.reason is not Reason.TIED:
            tally = tallies[row.action]
            tally.sites += 1
            tally.bytes += math.prod(row.shape) * getattr(torch, row.dtype.removeprefix("torch.")).itemsize
    return dict(zip(("converted", "restrided", "kept"), tallies.values()), left=left)


def _convert(model: nn.Module, memory_format: torch.memory_format | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tally names what was left as it is
        convert_(model, memory_format)


def _prepared(job: Callable[[nn.Module], object], model: nn.Module) -> Callable[[], Job]:
    def prepare() -> Job:
        fresh = deep_copy(model)
        give_freed_memory_back()  # since a model is converted once in a process's life
        return lambda: job(fresh)

    return prepare
