"""norm_model.cpp by ctypes: the GPU's kernels of group norm, planned for a GPU, run and counted on the CPU."""

import ctypes
import functools
import math
from ctypes import POINTER, Structure, c_bool, c_double, c_int, c_uint, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_model import Counts, compiled
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# Of results in float32.
MIXED = {torch.bfloat16: 4, torch.float16: 5}
ACTIVATIONS = ("none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh")
FORWARD, BACKWARD, PARAMETERS = (0, 1, 2), (3, 4, 5), (6,)
WHOLE_FORWARD, WHOLE_BACKWARD, KNOWN = (7,), (8,), (9,)
DIFFERING = 16  # the offset of tensors that differ in it


class Plan(Structure):
    """As in cuda/norm_plan.h, like the next one; pointers are numbers."""

    _fields_ = [("samples", c_uint64), ("rows", c_uint64), ("channels", c_uint32), ("groups", c_uint32)]
    _fields_ += [("lanes", c_uint32), ("period", c_uint32), ("width", c_uint32), ("tiles", c_uint32)]
    _fields_ += [("slots", c_uint32), ("chunk_rows", c_uint32), ("chunks", c_uint32), ("merged_groups", c_uint32)]
    _fields_ += [("merges", c_uint32)]

    @property
    def is_whole(self) -> bool:
        return self.merges > 0

    def blocks(self, step: int) -> int:
        return library().norm_blocks_of(step, ctypes.byref(self))


class Arguments(Structure):
    _fields_ = [("plan", Plan), ("input", c_void_p), ("grad", c_void_p), ("weight", c_void_p), ("bias", c_void_p)]
    _fields_ += [("residual", c_void_p), ("out", c_void_p), ("mean", c_void_p), ("rstd", c_void_p)]
    _fields_ += [("variance", c_void_p), ("running_mean", c_void_p), ("running_var", c_void_p)]
    _fields_ += [("chunk_sums", c_void_p), ("coefficients", c_void_p), ("sample_sums", c_void_p)]
    _fields_ += [("grad_weight", c_void_p), ("grad_bias", c_void_p), ("has_float_parameters", c_bool)]
    _fields_ += [("has_double_statistics", c_bool), ("is_of_input", c_bool), ("activation", c_uint8)]
    _fields_ += [("has_float_gradients", c_bool)]
    _fields_ += [("parameter", c_double), ("momentum", c_double), ("eps", c_double)]
    _fields_ += [("input_bias", c_void_p), ("slopes", c_void_p)]
    _fields_ += [("has_float_slopes", c_bool), ("has_one_slope", c_bool)]


class Tally(Structure):
    """Count how often each element is loaded and stored."""

    _fields_ = [("begin", c_uint64), ("bytes", c_uint64), ("element_bytes", c_uint32)]
    _fields_ += [("loads", POINTER(c_uint16)), ("stores", POINTER(c_uint16))]


class Result(NamedTuple):
    """What the kernels wrote, how often they loaded and stored each element, and what the accesses cost."""

    tensors: dict[str, Tensor]
    loads: dict[str, Tensor]
    stores: dict[str, Tensor]
    counts: dict[int, Counts]
    moved_bytes: int
    plan: Plan


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the model, once in a process."""
    model = compiled(Path(__file__).with_suffix(".cpp"), "-Og")
    sizes = [c_uint64, c_uint64, c_uint32, c_uint32]
    model.plan_norm_model.argtypes = [*sizes, c_int, c_uint32, c_uint32, c_int, POINTER(Plan)]
    model.norm_blocks_of.argtypes = [c_int, POINTER(Plan)]
    model.norm_blocks_of.restype = c_uint32
    model.run_norm_model.argtypes = [c_int, c_int, POINTER(Arguments), c_uint, POINTER(c_uint64), c_int]
    model.run_norm_model.argtypes += [POINTER(Counts), POINTER(c_uint64), POINTER(Tally), c_int]
    return model


def plan(
    samples: int,
    rows: int,
    channels: int,
    groups: int,
    dtype: torch.dtype,
    *,
    offset: int = 0,
    processors: int = 132,
    in_chunks: bool = False,
) -> Plan | None:
    """Return the plan, or None if it cannot be launched."""
    planned = Plan()
    sizes = (samples, rows, channels, groups, TYPES[dtype], offset, processors, in_chunks)
    return planned if library().plan_norm_model(*sizes, ctypes.byref(planned)) else None


def placed(like: Tensor, offset: int = 0) -> Tensor:
    """Return a copy in memory that begins so many elements after where a GPU's memory would begin."""
    whole = torch.empty(like.numel() + (1024 // like.itemsize), dtype=like.dtype)
    first = -whole.data_ptr() % 256 // like.itemsize + offset
    return whole[first : first + like.numel()].view(like.shape).copy_(like)


def poisoned(*shape: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    return placed(torch.full(shape, math.nan, dtype=dtype), offset)


def run(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    grad: Tensor | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    momentum: float = 0.1,
    is_of_input: bool = True,
    result: torch.dtype | None = None,
    input_bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    parameter: float = math.nan,
    slopes: Tensor | None = None,
    has_float_gradients: bool = False,
    offsets: tuple[int, int, int] = (0, 0, 0),
    processors: int = 2,
    order: int = 0,
    count: bool = False,
    in_chunks: bool = False,
    in_two: bool = False,
) -> Result:
    """Run the forward on `[samples, rows, channels]`, or with a gradient the backward.

    The result has the input's dtype, or is float32. `offsets` says by how many elements the memory of input, gradient
    and output is off an alignment, `order` in which order the blocks run, `count` whether what accesses cost is
    counted, `in_chunks` whether there is a kernel for each step in any case, `in_two` whether the forward is one of
    statistics, of double, and then one of the output, as for a result that waits.
    """
    samples, rows, channels = input.shape
    dtype, result = input.dtype, result or input.dtype
    real = torch.float64 if dtype == torch.float64 else torch.float32
    used = offsets if grad is not None else (offsets[0], offsets[2])
    off = {offset * input.itemsize % 16 for offset in used}
    offset = off.pop() if len(off) == 1 and (result == dtype or off == {0}) else DIFFERING
    has_more = input_bias is not None or residual is not None or activation != "none" or result != dtype
    in_chunks = in_chunks or in_two or has_more
    planned = plan(samples, rows, channels, groups, dtype, offset=offset, processors=processors, in_chunks=in_chunks)
    assert planned is not None
    parameters = next((each for each in (weight, bias, *(running or ())) if each is not None), input)
    of_out = result if grad is None else dtype
    tensors = {"input": placed(input, offsets[0]), "out": poisoned(*input.shape, dtype=of_out, offset=offsets[2])}
    assert input_bias is None or in_two or grad is not None
    given = {"weight": weight, "bias": bias, "input_bias": input_bias, "residual": residual, "slopes": slopes}
    given |= dict(zip(("running_mean", "running_var"), running or ()))
    tensors |= {name: placed(tensor) for name, tensor in given.items() if tensor is not None}
    if grad is None:
        for name in ("mean", "rstd") if in_two else ("mean", "rstd", "variance"):
            of_each = groups if input_bias is None else channels
            tensors[name] = poisoned(samples, of_each, dtype=torch.float64 if in_two else real)
        steps = WHOLE_FORWARD if planned.is_whole else FORWARD
        if not is_of_input:
            steps = (*KNOWN, FORWARD[-1])
    else:
        assert statistics is not None
        tensors["grad"] = placed(grad, offsets[1])
        tensors |= dict(zip(("mean", "rstd"), map(placed, statistics)))
        tensors["sample_sums"] = poisoned(samples, 2, channels, dtype=real)
        for name in ("grad_weight", "grad_bias"):
            tensors[name] = poisoned(channels, dtype=torch.float32 if has_float_gradients else parameters.dtype)
        steps = (WHOLE_BACKWARD if planned.is_whole else BACKWARD) + PARAMETERS
    of_chunks, of_samples = (3, 3) if grad is None else (2, 4)
    tensors["chunk_sums"] = poisoned(samples, planned.chunks, of_chunks, channels, dtype=real)
    if not in_two or grad is not None:
        tensors["coefficients"] = poisoned(samples, of_samples, channels, dtype=real)
    arguments = Arguments(
        plan=planned,
        eps=eps,
        momentum=momentum,
        parameter=parameter,
        activation=ACTIVATIONS.index(activation),
        is_of_input=is_of_input,
        has_float_parameters=parameters.dtype == torch.float32,
        has_float_gradients=has_float_gradients or parameters.dtype == torch.float32,
        has_float_slopes=slopes is not None and slopes.dtype == torch.float32,
        has_one_slope=slopes is not None and slopes.numel() == 1,
        has_double_statistics=tensors["mean"].dtype == torch.float64,
    )
    for name, tensor in tensors.items():
        setattr(arguments, name, tensor.data_ptr())
    memory = [number for tensor in tensors.values() for number in (tensor.data_ptr(), tensor.nbytes)]
    activations = [name for name in ("input", "grad", "out", "residual") if name in tensors]
    loads, stores = ({name: torch.zeros(input.shape, dtype=torch.int16) for name in activations} for _ in range(2))
    tallies = [
        Tally(
            tensors[name].data_ptr(),
            tensors[name].nbytes,
            tensors[name].itemsize,
            *(ctypes.cast(each[name].data_ptr(), POINTER(c_uint16)) for each in (loads, stores)),
        )
        for name in activations
    ]
    counts = {step: Counts() for step in steps}
    moved_bytes = c_uint64()
    for step in steps:
        if input_bias is not None:
            # As `arguments_of_step`: to those on activations, statistics of each channel are those of groups of one.
            arguments.plan.groups = channels if step in FORWARD[::2] + BACKWARD[::2] else groups
        library().run_norm_model(
            step,
            TYPES[dtype] if result == dtype else MIXED[dtype],
            ctypes.byref(arguments),
            order,
            (c_uint64 * len(memory))(*memory),
            len(memory) // 2,
            ctypes.byref(counts[step]) if count else None,
            ctypes.byref(moved_bytes),
            (Tally * len(tallies))(*tallies),
            len(tallies),
        )
    return Result(tensors, loads, stores, counts, moved_bytes.value, planned)
