"""The main job on real models: convert, prove that the outputs did not change, and time it honestly."""

import copy
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_nhwc.cli.models import Example
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.planning.planner import plan
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason
from torch_nhwc.running.outputs import TOLERANCES, equal_weights, first_tensor
from torch_nhwc.running.timing import Job, give_freed_memory_back, seconds_in_turns


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


def run(example: Example, device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 5) -> Result:
    """Does the main job on one model, in evaluation mode; the example's own model becomes and stays contiguous."""
    model = example.model.eval().to(device=device, dtype=dtype)
    _convert(model, torch.contiguous_format)
    converted = _copy(model)
    tallies = _tallies(plan(converted))
    _convert(converted)

    jobs = {"ours": _convert, "stock": stock_convert}
    if isinstance(model, torch.jit.ScriptModule):
        del jobs["stock"]  # which does nothing to those
    conversion_ms = _medians({name: _prepared(job, model) for name, job in jobs.items()}, repeats, device)
    stock_ms = conversion_ms.get("stock")

    inputs = example.input.to(device=device, dtype=dtype)
    rank = inputs.dim()
    channels_last_input = inputs.to(memory_format=CHANNELS_LAST[rank]) if rank in CHANNELS_LAST else inputs
    with torch.no_grad():
        reference = first_tensor(model(inputs)).double()
        output = first_tensor(converted(inputs)).double()
        forwards: dict[str, Callable[[], Job]] = {
            "contiguous": lambda: lambda: model(inputs),
            "converted": lambda: lambda: converted(inputs),
            "channels_last_input": lambda: lambda: converted(channels_last_input),
        }
        forward_ms = _medians(forwards, repeats, device)
    largest_output = reference.abs().max().item()
    return Result(
        example.name,
        device,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        **tallies,
        weights_equal=equal_weights(model, converted),
        convert_ms=conversion_ms["ours"],
        stock_convert_ms=stock_ms,
        stock_over_ours=stock_ms and stock_ms / conversion_ms["ours"],
        forward_contiguous_ms=forward_ms["contiguous"],
        forward_converted_ms=forward_ms["converted"],
        forward_channels_last_input_ms=forward_ms["channels_last_input"],
        largest_output=largest_output,
        largest_difference=(output - reference).abs().max().item(),
        tolerance=TOLERANCES[dtype] * largest_output,
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


def _copy(model: nn.Module) -> nn.Module:
    with torch.no_grad():  # a copied TorchScript module would otherwise remember where its parameters came from
        return copy.deepcopy(model)


def _prepared(job: Callable[[nn.Module], object], model: nn.Module) -> Callable[[], Job]:
    def prepare() -> Job:
        fresh = _copy(model)
        give_freed_memory_back()  # since a model is converted once in a process's life
        return lambda: job(fresh)

    return prepare


def _medians(preparations: dict[str, Callable[[], Job]], repeats: int, device: str) -> dict[str, float]:
    """The median time of each job in milliseconds."""
    taken = seconds_in_turns(preparations, repeats, device)
    return {name: statistics.median(samples) * 1e3 for name, samples in taken.items()}
