"""gpu_model.cpp by ctypes: weights planned for a GPU, and converted and counted as there, on the CPU."""

import ctypes
import functools
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int, c_int64, c_uint, c_uint8, c_uint16, c_uint32, c_uint64
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torch_nhwc as nhwc

# The numbers of `Elements`: moved, by their bytes, or cast.
MOVED = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
CAST = {
    (torch.float32, torch.bfloat16): 5,
    (torch.float32, torch.float16): 6,
    (torch.bfloat16, torch.float32): 7,
    (torch.float16, torch.float32): 8,
}
SOURCE_BYTES, DESTINATION_BYTES = (1, 2, 4, 8, 16, 4, 4, 2, 2), (1, 2, 4, 8, 16, 2, 2, 4, 4)
# One dtype for each size of elements. Complex numbers are moved like any other 16 bytes.
DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128]
KINDS = [(dtype, dtype) for dtype in DTYPES] + list(CAST)
WAYS = ("gather", "scatter", "filters", "rectangle", "copy")
# Without being asked a block has 48 KB; on sm_86, sm_80 and sm_90 it may have more.
SHARED_BYTES = [48 << 10, 99 << 10, 163 << 10, 227 << 10]
TAPS = (4, 8, 9, 16, 25, 27, 49, 125)
ARGUMENT_BYTES = [4 << 10, (32 << 10) - 4]
SOMEWHERE, ELSEWHERE = 1 << 40, 1 << 50  # addresses for plans, which read and write nothing
CXX = os.environ.get("CXX", "c++")
ROOT = Path(__file__).parents[2]


class Weight(Structure):
    """As in cuda/launch.h, like the next two; pointers are numbers."""

    _fields_ = [("source", c_uint64), ("destination", c_uint64)]
    _fields_ += [("filters", c_int64), ("rows", c_int64), ("columns", c_int64), ("elements", c_uint8)]


class Limits(Structure):
    _fields_ = [("shared_bytes", c_uint), ("argument_bytes", c_uint), ("processors", c_uint)]

    def __init__(self, shared_bytes: int = 48 << 10, argument_bytes: int = 4 << 10, processors: int = 2) -> None:
        super().__init__(shared_bytes, argument_bytes, processors)


class Filters(Structure):
    _fields_ = [("source", c_uint64), ("destination", c_uint64), ("first_block", c_uint32), ("count", c_uint32)]
    _fields_ += [("rows", c_uint32), ("columns", c_uint32), ("per_block", c_uint32), ("width", c_uint16)]
    _fields_ += [("way_number", c_uint8)]

    @property
    def way(self) -> str:
        return WAYS[self.way_number]


class Counts(Structure):
    """What the accesses of all warps cost."""

    _fields_ = [("load_bytes", c_uint64), ("load_sectors", c_uint64)]
    _fields_ += [("store_bytes", c_uint64), ("store_sectors", c_uint64)]
    _fields_ += [("shared_passes", c_uint64), ("shared_passes_at_least", c_uint64)]

    @property
    def load_efficiency(self) -> float:
        return self.load_bytes / 32 / self.load_sectors

    @property
    def store_efficiency(self) -> float:
        return self.store_bytes / 32 / self.store_sectors

    @property
    def conflict_degree(self) -> float:
        return self.shared_passes / max(1, self.shared_passes_at_least)


class LaunchSummary(Structure):
    _fields_ = [("elements", c_uint32), ("weights", c_uint32), ("blocks", c_uint32), ("shared_bytes", c_uint32)]
    _fields_ += [("scratch_bytes", c_uint64)]


class Launch(NamedTuple):
    elements: int
    filters: list[Filters]
    blocks: int
    shared_bytes: int
    scratch_bytes: int


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile a model of kernels of a GPU, and load it."""
    common = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    common += [f"-I{nhwc.cpp_extension.include_paths()[0]}", f"-I{ROOT / 'csrc'}"]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/{source.stem}.so"
        subprocess.run([CXX, *common, *flags, source, "-o", library], check=True)
        return ctypes.CDLL(library)


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the model, once in a process."""
    model = compiled(Path(__file__).with_suffix(".cpp"), "-O2")
    a_list = [POINTER(Weight), c_int, POINTER(Limits)]
    model.plan_model.argtypes = [*a_list, POINTER(LaunchSummary), c_int, POINTER(Filters), c_int]
    model.run_model.argtypes = [*a_list, c_uint, POINTER(Counts)]
    return model


def plan(weights: Sequence[Weight], limits: Limits | None = None) -> list[Launch] | None:
    """Return the launches of the weights, or None if a weight cannot be planned."""
    summaries, filters = (LaunchSummary * 1000)(), (Filters * 10000)()
    listed = (Weight * len(weights))(*weights)
    number = library().plan_model(listed, len(weights), limits or Limits(), summaries, 1000, filters, 10000)
    assert number <= 1000
    assert sum(summary.weights for summary in summaries[:number]) <= 10000
    launches, first = [], 0
    for summary in summaries[: max(number, 0)]:
        own = filters[first : first + summary.weights]
        first += summary.weights
        launches.append(Launch(summary.elements, own, summary.blocks, summary.shared_bytes, summary.scratch_bytes))
    return launches if number >= 0 else None


def run(
    weights: Sequence[Weight], limits: Limits | None = None, *, order: int = 0, counts: Counts | None = None
) -> int:
    """Convert the weights, with the blocks in some order. Return the number of launches, or -1 without a plan."""
    listed = (Weight * len(weights))(*weights)
    return library().run_model(listed, len(weights), limits or Limits(), order, counts)


def count(
    kind: tuple[torch.dtype, torch.dtype],
    matrices: tuple[int, int, int],
    offset: int = 0,
    limits: Limits | None = None,
    in_place: bool = False,
) -> tuple[str, Counts]:
    """Return the way of one weight, so many matrices of rows and columns, and what its accesses cost."""
    size = math.prod(matrices)
    source, _ = allot(size * kind[0].itemsize, offset * kind[0].itemsize)
    destination, _ = allot(size * kind[1].itemsize, 0)
    place = source if in_place else destination
    weight = Weight(source.data_ptr(), place.data_ptr(), *matrices, number_of(kind))
    counts = Counts()
    assert run([weight], limits, counts=counts) == 1
    assert counts.load_bytes % (size * kind[0].itemsize) == counts.store_bytes % (size * kind[1].itemsize) == 0
    ((filters,),) = [launch.filters for launch in planned(weight, limits=limits)]
    return filters.way, counts


def matrices_of(kind: tuple[torch.dtype, torch.dtype], channels: int, taps: int, back: bool) -> tuple[int, int, int]:
    """Return the matrices of a weight of about 64 KB."""
    filters = max(2, (64 << 10) // (channels * taps * kind[0].itemsize))
    return (filters, taps, channels) if back else (filters, channels, taps)


def planned(*weights: Weight, limits: Limits | None = None) -> list[Launch]:
    launches = plan(weights, limits)
    assert launches is not None
    return launches


def number_of(kind: tuple[torch.dtype, torch.dtype]) -> int:
    return MOVED[kind[0].itemsize] if kind[0] == kind[1] else CAST[kind]


def allot(nbytes: int, offset: int) -> tuple[Tensor, list[Tensor]]:
    """Return poisoned bytes at an offset from where a GPU's memory would begin, and those before and after them."""
    whole = torch.full((nbytes + offset + 512,), 0xA5, dtype=torch.uint8)
    first = 128 + -(whole.data_ptr() + 128) % 256 + offset
    return whole[first : first + nbytes], [whole[:first], whole[first + nbytes :]]
