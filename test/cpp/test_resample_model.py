"""The GPU's kernels of resampling, every thread of every block run on the CPU: values, adjoints, and what they move."""

import ctypes
import functools
import itertools
import re
from ctypes import POINTER, Structure, c_double, c_int, c_int32, c_uint, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

import cuda_build
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gpu_model import Counts, compiled
from norm_model import TYPES, placed
from torch import Tensor

MODES = ("reflect", "replicate", "circular", "nearest", "nearest-exact", "linear", "align_corners")
PADDINGS = MODES[:3]


class Cost(Structure):
    """As in resample_model.cpp."""

    _fields_ = [("counts", Counts), ("moved_bytes", c_uint64), ("stores", POINTER(c_uint8))]


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the model, once in a process."""
    model = compiled(Path(__file__).with_name("resample_model.cpp"), "-O1")
    model.run_resample_model.argtypes = [c_int, POINTER(c_int32), POINTER(c_double), c_int, c_uint64, c_uint64, c_int]
    model.run_resample_model.argtypes += [c_uint32, c_void_p, c_uint64, c_void_p, c_uint64, c_uint, POINTER(Cost)]
    model.check_reciprocal.argtypes = [c_uint32] * 3
    return model


def step(mode: str, before: int, after: int, factor: float, double: bool) -> float:
    """Return the input's step for a step of the output, as ops/resample.cpp computes it."""
    if mode == "align_corners":
        exact = (before - 1) / (after - 1) if after > 1 else 0.0
    else:
        exact = 1 / factor if factor > 0 else before / after
    return exact if double and "nearest" not in mode else torch.tensor(exact, dtype=torch.float32).item()


class Case:
    """A resampling of a volume, by PyTorch in float64 and by the model. Of an image the depth is 1."""

    def __init__(self, mode: str, shape: tuple[int, ...], by: tuple[float, ...]) -> None:
        """Pad by `by`, in PyTorch's order, or scale each dimension by it, or to it, where it is of ints."""
        self.mode, self.shape, self.by = mode, shape, by
        self.is_scaled = mode not in PADDINGS and isinstance(by[0], float)
        sizes, axes = list(shape[2:]), len(shape) - 2
        self.before, self.factors = [0] * axes, [0.0] * axes
        if mode in PADDINGS:
            self.before = [by[2 * (axes - 1 - axis)] for axis in range(axes)]
            self.out = [size + by[2 * (axes - 1 - a)] + by[2 * (axes - 1 - a) + 1] for a, size in enumerate(sizes)]
        elif self.is_scaled:
            self.factors, self.out = list(by), [int(size * factor) for size, factor in zip(sizes, by)]
        else:
            self.out = list(by)

    def pytorch(self, x: Tensor) -> Tensor:
        if self.mode in PADDINGS:
            return F.pad(x, self.by, self.mode)
        name = self.mode if "nearest" in self.mode else {4: "bilinear", 5: "trilinear"}[x.dim()]
        options = {} if "nearest" in self.mode else {"align_corners": self.mode == "align_corners"}
        size = {"scale_factor": self.by} if self.is_scaled else {"size": self.by}
        return F.interpolate(x, **size, mode=name, **options)

    def run(self, input: Tensor, is_transposed: bool = False, *, offset: int = 0, seed: int = 0) -> tuple[Tensor, Cost]:
        """Return the result of an input in channels-last, and what it cost."""
        sizes, axes = list(self.shape[2:]), len(self.shape) - 2
        samples, channels = self.shape[:2]
        result = sizes if is_transposed else self.out
        rows = placed(input.movedim(1, -1).contiguous(), offset)
        out = placed(torch.zeros(samples, *result, channels, dtype=input.dtype), offset)

        def axes_of(numbers: list, of_image: float) -> list:  # an image's are the first and the last
            return numbers if axes == 3 else [numbers[0], of_image, numbers[1]]

        numbers = [*axes_of(sizes, 1), *axes_of(self.out, 1), *axes_of(self.before, 0)]
        double = input.dtype == torch.float64
        steps = [step(self.mode, *each, double) for each in zip(sizes, self.out, self.factors)]
        stores = torch.zeros(out.nbytes, dtype=torch.uint8)
        cost = Cost(stores=ctypes.cast(stores.data_ptr(), POINTER(c_uint8)))
        vector = library().run_resample_model(
            MODES.index(self.mode),
            (c_int32 * 9)(*numbers),
            (c_double * 3)(*axes_of(steps, 1.0)),
            is_transposed,
            samples,
            channels,
            TYPES.get(input.dtype, 0),
            input.itemsize,
            rows.data_ptr(),
            rows.nbytes,
            out.data_ptr(),
            out.nbytes,
            seed,
            ctypes.byref(cost),
        )
        assert vector, "cannot be launched"
        assert stores.eq(1).all()
        return out.movedim(-1, 1), cost

    def check(self, dtype: torch.dtype = torch.float32, **options) -> None:
        x = torch.randn(self.shape, dtype=torch.float64).to(dtype)
        exact = x.double().requires_grad_()
        expected = self.pytorch(exact)
        grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
        expected.backward(grad.double())
        room = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
        out, _ = self.run(x, **options)
        if self.mode in MODES[:5]:
            assert torch.equal(out.double(), expected.detach())
        else:
            torch.testing.assert_close(out.double(), expected.detach(), rtol=room, atol=room)
        back, _ = self.run(grad, True, **options)
        torch.testing.assert_close(back.double(), exact.grad, rtol=room, atol=room)


CASES = [Case(mode, (2, 8, 4, 5, 6), (1, 2, 3, 1, 0, 3)) for mode in PADDINGS]
CASES += [Case(mode, (2, 3, 5, 7), (3, 4, 2, 1)) for mode in PADDINGS]
CASES += [Case("replicate", (1, 3, 2, 1), (9, 4, 0, 7)), Case("circular", (1, 2, 3, 4), (4, 4, 3, 3))]
for mode in MODES[3:]:
    CASES += [Case(mode, (2, 8, 4, 5, 6), (8, 10, 12)), Case(mode, (1, 3, 7, 9), (2.0, 3.0))]
    CASES += [Case(mode, (1, 33, 5, 4, 9), (1.7, 0.6, 2.3)), Case(mode, (2, 1, 9, 16), (4, 5))]
    CASES += [Case(mode, (1, 2, 1, 5), (3, 1)), Case(mode, (1, 4, 3, 1, 2), (1, 4, 40))]
IDS = [f"{case.mode} {'x'.join(map(str, case.shape))} {case.by}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_and_gradients(case):
    case.check()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 33, 64])
@pytest.mark.parametrize("mode", MODES)
def test_channels_and_dtypes(mode, channels, dtype):
    by = (1, 2, 2, 0, 1, 1) if mode in PADDINGS else (7, 5, 9)
    for offset in (0, 1, 3):
        Case(mode, (1, channels, 3, 4, 5), by).check(dtype, offset=offset)


@pytest.mark.parametrize("mode", MODES[:5])
def test_copies_are_bits_of_any_size(mode):
    case = Case(mode, (2, 6, 4, 5), (1, 1, 2, 2) if mode in PADDINGS else (8, 10))
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.complex128):
        for channels in (1, 2, 6):
            x = torch.randint(0, 256, (2, channels, 4, 5)).to(dtype)
            case.shape = tuple(x.shape)
            assert torch.equal(case.run(x)[0].real.double(), case.pytorch(x.real.double()))


@pytest.mark.parametrize("mode", MODES)
def test_a_table_of_sizes(mode):
    """Each axis alone, whose adjoint is that of the forward for every pair of sizes."""
    for before, after in itertools.product((1, 2, 3, 5, 8, 13, 32), (1, 2, 3, 7, 16, 33, 96)):
        if mode not in PADDINGS:
            Case(mode, (1, 1, 1, before), (1, after)).check(torch.float64)
            Case(mode, (1, 1, 1, before), (1, after)).check()
        elif after < before:
            Case(mode, (1, 1, 1, before), (after, before - 1, 0, 0)).check()


def test_blocks_of_many_vectors_in_any_order():
    """More vectors than a block takes at a time, in tiles that end outside, and rows wider than a tile."""
    for mode, shape, by in (
        ("reflect", (1, 16, 17, 33, 19), (1, 1, 1, 1, 1, 1)),
        ("linear", (2, 8, 9, 33, 65), (18, 66, 130)),
        ("linear", (1, 4100, 2, 3), (4, 6)),
        ("nearest", (1, 9000, 2, 1), (4, 2)),
    ):
        case = Case(mode, shape, by)
        x = torch.randn(shape)
        results = [case.run(x, seed=seed)[0] for seed in range(3)]
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        torch.testing.assert_close(results[0], case.pytorch(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_moved_is_input_and_output(mode, channels, dtype):
    for shape in ((2, channels, 24, 24), (1, channels, 8, 12, 12)):
        axes = len(shape) - 2
        by = (1,) * 2 * axes if mode in PADDINGS else tuple(2 * side for side in shape[2:])
        case = Case(mode, shape, by)
        x = torch.randn(shape).to(dtype)
        grad = torch.randn(*shape[:2], *case.out).to(dtype)
        for given, is_transposed in ((x, False), (grad, True)):
            _, cost = case.run(given, is_transposed)
            assert cost.moved_bytes <= 1.05 * (x.nbytes + grad.nbytes), (shape, is_transposed)
            assert cost.counts.store_sectors * 32 <= 1.02 * (x if is_transposed else grad).nbytes
            assert cost.counts.shared_passes <= 1.3 * cost.counts.shared_passes_at_least


def test_what_has_too_many_taps_is_refused():
    for last, is_launched in ((1000, True), (1 << 19, False)):
        numbers = (c_int32 * 9)(1, 1, 1, 1, 1, last, 0, 0, 0)
        steps = (c_double * 3)(1, 1, 1 / last)
        arguments = (1, 8, 0, 4, None, 0, None, 0, 0, None)
        assert bool(library().run_resample_model(3, numbers, steps, True, *arguments)) == is_launched


def test_reciprocals():
    for divisor in (1, 2, 3, 5, 7, 64, 66, 130, 641, 65535, 65536, 65537, (1 << 31) - 1):
        for begin in (0, divisor - 1, 7 * divisor % (1 << 31), (1 << 31) - 1000, 1 << 30):
            assert library().check_reciprocal(divisor, max(0, begin - 500), min(begin + 1000, (1 << 31) - 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["75", "90", "120"])
def test_the_kernels_stay_in_registers(architecture, tmp_path):
    kernels = cuda_build.kernels("resample", architecture, tmp_path)
    assert len(kernels) == 5 + 2 * 2 * len(TYPES)
    for kernel in kernels:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel
        # Sums of four rows need more.
        most = 128 if re.search("NormTypeE3|ELj8ELj4E", kernel) else 80 if "ELj4EN" in kernel else 64
        assert int(re.search(r"Used (\d+) registers", kernel)[1]) <= most, kernel
