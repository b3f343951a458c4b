"""depthwise_model.cpp by ctypes: the GPU's kernels of depthwise 3D convolutions, run and counted on the CPU."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_bool, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_model import Counts, compiled
from norm_model import TYPES, placed, poisoned
from torch import Tensor

CONVOLVE, CHUNKS, MERGE = 0, 1, 2


class Plan(Structure):
    """As in cuda/depthwise_plan.h, like the next one; pointers are numbers."""

    _fields_ = [("samples", c_uint32), ("channels", c_uint32)]
    _fields_ += [(name, c_int32 * 3) for name in ("input", "output", "kernel", "stride", "padding")]
    _fields_ += [("lanes", c_uint32), ("channel_tiles", c_uint32), ("runs", c_uint32)]
    _fields_ += [("slots", c_uint32 * 3), ("tiles", c_uint32 * 3), ("steps", c_uint32), ("copies", c_uint32)]
    _fields_ += [("chunks", c_uint32), ("chunk_runs", c_uint32)]

    def blocks(self, step: int) -> int:
        return library().depthwise_blocks_of(step, ctypes.byref(self))


class Arguments(Structure):
    _fields_ = [("plan", Plan), ("input", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p)]
    _fields_ += [("grad", c_void_p), ("sums", c_void_p), ("is_flipped", c_bool)]


class Result(NamedTuple):
    """What a pass wrote, and what its accesses cost."""

    out: Tensor
    counts: dict[int, Counts]
    moved_bytes: int
    plan: Plan


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the model, once in a process."""
    model = compiled(Path(__file__).with_suffix(".cpp"), "-Og")
    model.plan_depthwise_model.argtypes = [POINTER(Plan), c_int, c_uint32]
    model.depthwise_blocks_of.argtypes = [c_int, POINTER(Plan)]
    model.depthwise_blocks_of.restype = c_uint64
    model.run_depthwise_model.argtypes = [c_int, c_int, POINTER(Arguments), c_int, POINTER(c_uint64), c_int]
    model.run_depthwise_model.argtypes += [POINTER(Counts), POINTER(c_uint64)]
    return model


def plan(sizes: dict[str, tuple[int, ...]], is_aligned: bool = True, processors: int = 132) -> Plan:
    """Return the plan; `sizes` has samples and channels, and the sizes of each axis."""
    planned = Plan()
    planned.samples, planned.channels = sizes["samples"]
    for name in ("input", "output", "kernel", "stride", "padding"):
        getattr(planned, name)[:] = sizes[name]
    library().plan_depthwise_model(ctypes.byref(planned), is_aligned, processors)
    return planned


def _run(
    steps: tuple[int, ...],
    input: Tensor,
    out: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    others: dict[str, Tensor],
    *,
    is_flipped: bool = False,
    offset: int = 0,
    processors: int = 2,
    is_reversed: bool = False,
    count: bool = False,
) -> Result:
    last = others.get("grad", out)
    weight = others.get("weight", out)
    sizes = {"samples": (input.shape[0], input.shape[-1]), "input": input.shape[1:4], "output": last.shape[1:4]}
    sizes |= {"kernel": weight.shape[2:], "stride": stride, "padding": padding}
    planned = plan(sizes, input.shape[-1] % 4 == 0 and offset * input.itemsize % (4 * input.itemsize) == 0, processors)
    tensors = {name: placed(each, offset if name == "grad" else 0) for name, each in others.items()}
    tensors |= {"input": placed(input, offset), "out": poisoned(*out.shape, dtype=out.dtype, offset=offset)}
    if "grad" in others:
        tensors["sums"] = poisoned(planned.chunks, weight[0].numel(), input.shape[-1], dtype=torch.float32)
    arguments = Arguments(plan=planned, is_flipped=is_flipped)
    for name, tensor in tensors.items():
        setattr(arguments, name, tensor.data_ptr())
    memory = [number for tensor in tensors.values() for number in (tensor.data_ptr(), tensor.nbytes)]
    counts, moved_bytes = {step: Counts() for step in steps}, c_uint64()
    for step in steps:
        library().run_depthwise_model(
            step,
            TYPES[input.dtype],
            ctypes.byref(arguments),
            is_reversed,
            (c_uint64 * len(memory))(*memory),
            len(memory) // 2,
            ctypes.byref(counts[step]) if count else None,
            ctypes.byref(moved_bytes),
        )
    return Result(tensors["out"], counts, moved_bytes.value, planned)


def rows(volume: Tensor) -> Tensor:
    """Return a volume as `[N, D, H, W, C]`, contiguous."""
    return volume.movedim(1, -1).contiguous()


def volume(result: Result) -> Tensor:
    return result.out.movedim(-1, 1)


def forward(input, weight, bias, out_shape, stride, padding, **options):
    """Return the output of volumes, which has a shape."""
    out = torch.empty(out_shape[0], *out_shape[2:], out_shape[1], dtype=input.dtype)
    others = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return _run((CONVOLVE,), rows(input), out, stride, padding, others, **options)


def input_gradient(grad, weight, in_shape, padding, **options):
    padding = tuple(taps - 1 - pad for taps, pad in zip(weight.shape[2:], padding))
    return forward(grad, weight, None, in_shape, (1, 1, 1), padding, is_flipped=True, **options)


def weight_gradient(grad, input, weight, stride, padding, **options):
    others = {"grad": rows(grad)}
    return _run((CHUNKS, MERGE), rows(input), torch.empty_like(weight), stride, padding, others, **options)
