"""The GPU's kernels of RMS norm, every thread of every block run on the CPU: values, gradients, and what they move."""

import ctypes
import functools
import itertools
import math
import re
from ctypes import POINTER, Structure, c_double, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

import cuda_build
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gpu_model import Counts, compiled
from norm_model import TYPES, placed, poisoned
from torch import Tensor

CHANNELS = (1, 3, 33, 64, 96, 384, 1027)
ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


class Call(Structure):
    """As in rms_model.cpp, like the next one; pointers are numbers."""

    _fields_ = [("rows", c_uint64), ("channels", c_uint32), ("processors", c_uint32), ("type", c_int32)]
    _fields_ += [("has_silu", c_int32), ("is_backward", c_int32), ("seed", c_uint32)]
    _fields_ += [("scale", c_double), ("eps", c_double), ("input", c_void_p), ("grad", c_void_p)]
    _fields_ += [("weight", c_void_p), ("bias", c_void_p), ("input_bias", c_void_p), ("out", c_void_p)]
    _fields_ += [("grad_weight", c_void_p), ("grad_bias", c_void_p)]


class Cost(Structure):
    _fields_ = [("counts", Counts), ("moved_bytes", c_uint64), ("stores", POINTER(c_uint8))]


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the model, once in a process."""
    model = compiled(Path(__file__).with_name("rms_model.cpp"), "-O1")
    model.run_rms_model.argtypes = [POINTER(Call), POINTER(Cost)]
    return model


class Norm:
    """A norm of random rows, the second of which is zero, and its gradients in float64."""

    def __init__(
        self, rows: int, channels: int, dtype: torch.dtype = torch.float32, *, bias: bool = True, silu: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(rows + channels)
        self.shape, self.dtype, self.silu = (rows, channels), dtype, silu
        self.scale, self.eps = math.sqrt(channels), 1e-2
        sizes = {"input": self.shape, "grad": self.shape, "weight": (channels,), "bias": (channels,)}
        self.given = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
        self.given["input"][1:2] = 0
        if not bias:
            del self.given["bias"]

    def expected(self) -> dict[str, Tensor]:
        exact = {name: tensor.double() for name, tensor in self.given.items()}
        leaves = [exact[name].requires_grad_() for name in ("input", "weight", "bias") if name in exact]
        norm = exact["input"].norm(dim=1, keepdim=True).clamp_min(self.eps)
        out = exact["input"] * (self.scale / norm) * exact["weight"] + exact.get("bias", 0)
        out = F.silu(out) if self.silu else out
        out.backward(exact["grad"])
        return {"out": out.detach()} | {name: leaf.grad for name, leaf in zip(GRADIENTS, leaves)}

    def call(self, **options) -> Call:
        of_norm = {"type": TYPES[self.dtype], "has_silu": self.silu, "scale": self.scale, "eps": self.eps}
        return Call(rows=self.shape[0], channels=self.shape[1], processors=2, **of_norm, **options)

    def launch(
        self, given: dict[str, Tensor], written: dict[str, Tensor], is_backward: bool, seed: int
    ) -> tuple[int, Cost]:
        tensors = given | written
        call = self.call(is_backward=is_backward, seed=seed)
        for name, tensor in tensors.items():
            setattr(call, name, tensor.data_ptr())
        stores = torch.zeros(given["input"].nbytes, dtype=torch.uint8)
        cost = Cost(stores=ctypes.cast(stores.data_ptr(), POINTER(c_uint8)))
        lanes = library().run_rms_model(ctypes.byref(call), ctypes.byref(cost))
        assert lanes, "cannot be launched"
        assert stores.eq(1 if "out" in written else 0).all()
        return lanes, cost

    def run(
        self, *, offset: int = 0, seed: int = 0, gradients: tuple[str, ...] = GRADIENTS
    ) -> tuple[dict[str, Tensor], list[Cost]]:
        """Return the output and the gradients, and what forward and backward cost; the memory is off an alignment."""
        given = {name: placed(tensor, offset) for name, tensor in self.given.items()}
        grad = given.pop("grad")
        out = poisoned(*self.shape, dtype=self.dtype, offset=offset)
        lanes, forward = self.launch(given, {"out": out}, False, seed)
        is_vector = (self.shape[1] | offset) * self.given["input"].itemsize % 16 == 0
        assert lanes == (16 // self.given["input"].itemsize if is_vector else 1)
        results = {name: poisoned(self.shape[1], dtype=self.dtype) for name in gradients if name != "grad_input"}
        if "grad_input" in gradients:
            results["out"] = poisoned(*self.shape, dtype=self.dtype, offset=offset)
        _, backward = self.launch(given | {"grad": grad}, results, True, seed)
        if "out" in results:
            results["grad_input"] = results.pop("out")
        return results | {"out": out}, [forward, backward]

    def check(self, **options) -> dict[str, Tensor]:
        """Expect errors to be small beside the largest number of a row, or that an input's gradient is made of."""
        results, costs = self.run(**options)
        expected = self.expected()
        bounds = {name: tensor.abs().amax(-1, keepdim=True) for name, tensor in expected.items()}
        exact = {name: tensor.double() for name, tensor in self.given.items()}
        factor = self.scale / exact["input"].norm(dim=1, keepdim=True).clamp_min(self.eps)
        bounds["grad_input"] = (exact["grad"] * exact["weight"] * factor).abs().amax(-1, keepdim=True)
        for name in expected:
            error = (results[name].double() - expected[name]).abs()
            assert (error <= ROOM[self.dtype] * bounds[name]).all(), name
        for cost in costs:
            assert cost.counts.shared_passes <= 1.05 * cost.counts.shared_passes_at_least
        return results


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_values_and_gradients(channels, dtype):
    for bias, silu in itertools.product((False, True), repeat=2):
        Norm(66, channels, dtype, bias=bias, silu=silu).check(offset=int(bias != silu))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 8), (3000, 1), (1500, 16), (700, 96), (33, 2052), (5, 4096), (1, 1 << 15)], ids=str
)
def test_sizes_in_any_order_of_blocks(shape, silu):
    norm = Norm(*shape, silu=silu)
    first, second = norm.check(), norm.check(seed=1)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("channels", [40, 1092])
def test_gradients_that_are_asked_for(channels, silu):
    norm = Norm(70, channels, silu=silu)
    every, _ = norm.run()
    for count in range(3):
        for gradients in itertools.combinations(GRADIENTS, count):
            some, _ = norm.run(gradients=gradients)
            assert all(torch.equal(some[name], every[name]) for name in gradients)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", [33, 96, 1028])
def test_a_bias_of_the_input_in_the_same_pass(channels, dtype):
    """Forward alone; it moves no more."""
    for silu in (False, True):
        norm = Norm(600, channels, dtype, silu=silu)
        expected = Norm(600, channels, dtype, silu=silu)
        del norm.given["grad"]
        norm.given["input_bias"] = norm.given["weight"].flip(0)
        expected.given["input"] = norm.given["input"].double() + norm.given["input_bias"].double()
        out = poisoned(*norm.shape, dtype=dtype)
        _, cost = norm.launch({name: placed(each) for name, each in norm.given.items()}, {"out": out}, False, 0)
        exact = expected.expected()["out"]
        assert ((out.double() - exact).abs() <= ROOM[dtype] * exact.abs().amax(-1, keepdim=True)).all()
        if channels == 96 and dtype == torch.bfloat16:
            assert cost.moved_bytes <= 1.02 * 2 * norm.given["input"].nbytes


def test_what_is_undefined_stays_in_its_row():
    norm = Norm(20, 96)
    norm.given["input"][3, 5] = math.nan
    results, _ = norm.run()
    for name in ("out", "grad_input"):
        assert torch.equal(results[name].isnan().all(1), torch.arange(20) == 3)
        assert torch.equal(results[name].isnan().any(1), torch.arange(20) == 3)


def test_rows_below_eps_are_scaled():
    norm = Norm(20, 96)
    norm.given["input"][::2] *= 1e-5
    norm.check()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"),
    [(4000, 96, torch.bfloat16), (1500, 384, torch.bfloat16), (1200, 192, torch.float32)],
    ids=str,
)
def test_what_is_moved_is_read_and_written_once(rows, channels, dtype, silu):
    norm = Norm(rows, channels, dtype, silu=silu)
    _, (forward, backward) = norm.run()
    nbytes = norm.given["input"].nbytes
    assert forward.moved_bytes <= 1.01 * 2 * nbytes
    assert backward.moved_bytes <= 1.05 * 3 * nbytes
    for cost, loads in ((forward, 4), (backward, 9 if silu else 6)):
        assert cost.counts.load_bytes <= 1.05 * loads * nbytes
    for cost in (forward, norm.run(gradients=("grad_input",))[1][1]):
        assert cost.counts.store_sectors * 32 == nbytes


def test_what_cannot_be_launched():
    for rows, channels, is_launched in ((1, 1 << 24, True), (1, 1 << 25, False), (0, 8, False), (1 << 40, 8, False)):
        call = Norm(1, 1).call()
        call.rows, call.channels = rows, channels
        assert bool(library().run_rms_model(ctypes.byref(call), None)) == is_launched


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["75", "80", "90", "100", "120"])
def test_the_kernels_stay_in_registers(architecture, tmp_path):
    kernels = cuda_build.kernels("rms", architecture, tmp_path)
    assert len(kernels) == 2 * 2 * 2 * len(TYPES)
    for kernel in kernels:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel
        most = 80 if "RmsBackward" in kernel and "ELb1E" in kernel else 64
        assert int(re.search(r"Used (\d+) registers", kernel)[1]) <= most, kernel
