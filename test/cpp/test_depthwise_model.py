"""The GPU's kernels of depthwise 3D convolutions, every thread of every block run on the CPU: values and costs."""

import cuda_build
import depthwise_model as model
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from selection import some_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE, TWO = (1, 1, 1), (2, 2, 2)
# Shape, kernel, stride, padding: whole vectors of channels or not, runs that fill rows or do not, padding beyond the
# kernel's half, strides along some axes, volumes below a tile.
CASES = [
    ((2, 40, 9, 10, 34), (3, 3, 3), ONE, (1, 1, 1)),
    ((1, 32, 6, 7, 24), (5, 5, 5), ONE, (2, 2, 2)),
    ((1, 36, 8, 7, 17), (7, 7, 7), ONE, (3, 3, 3)),
    ((2, 5, 3, 4, 9), (3, 3, 3), ONE, (1, 1, 1)),
    ((1, 33, 2, 1, 3), (3, 5, 7), ONE, (1, 2, 3)),
    ((1, 8, 4, 5, 6), (1, 2, 3), ONE, (0, 3, 4)),
    ((2, 12, 7, 8, 9), (3, 3, 3), ONE, (0, 0, 0)),
    ((1, 40, 9, 8, 19), (3, 3, 3), TWO, (1, 1, 1)),
    ((1, 32, 8, 9, 16), (5, 5, 5), TWO, (2, 2, 2)),
    ((1, 3, 9, 8, 15), (7, 7, 7), (1, 2, 2), (3, 3, 3)),
    ((1, 4, 6, 6, 9), (3, 3, 3), (2, 1, 1), (1, 1, 1)),
    ((3, 68, 1, 1, 1), (3, 3, 3), ONE, (1, 1, 1)),
    ((1, 8, 33, 1, 2), (3, 3, 3), ONE, (1, 1, 1)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


class Convolution:
    """A convolution, its derivative in float64, and the kernels' own."""

    def __init__(self, case, dtype):
        self.shape, kernel, self.stride, self.padding = case
        channels = self.shape[1]
        self.input, self.weight = (torch.randn(each).to(dtype) for each in (self.shape, (channels, 1, *kernel)))
        self.bias = torch.randn(channels).to(dtype)
        exact = [each.double().requires_grad_() for each in (self.input, self.weight, self.bias)]
        out = F.conv3d(*exact, self.stride, self.padding, 1, channels)
        self.grad = torch.randn(out.shape).to(dtype)
        gradients = torch.autograd.grad(out, exact[:2], self.grad.double())
        self.exact = {"out": out.detach(), "grad_input": gradients[0], "grad_weight": gradients[1]}

    def forward(self, **options):
        shape = self.exact["out"].shape
        return model.forward(self.input, self.weight, self.bias, shape, self.stride, self.padding, **options)

    def run(self, **options):
        """Return the result of each pass that the kernels compute."""
        results = {
            "out": self.forward(**options),
            "grad_weight": model.weight_gradient(
                self.grad, self.input, self.weight, self.stride, self.padding, **options
            ),
        }
        if self.stride == ONE:
            results["grad_input"] = model.input_gradient(self.grad, self.weight, self.shape, self.padding, **options)
        return results

    @staticmethod
    def values(results):
        return {name: each.out if name == "grad_weight" else model.volume(each) for name, each in results.items()}


@cases
@pytest.mark.parametrize("dtype", some_of(DTYPES, *DTYPES[:2]), ids=str)
def test_values_and_gradients(case, dtype):
    convolution = Convolution(case, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for offset in (0, 1):
        for name, result in convolution.values(convolution.run(offset=offset)).items():
            assert result.dtype == dtype
            assert error(result, convolution.exact[name]) <= tolerance, name


def test_results_do_not_depend_on_the_order_of_blocks():
    convolution = Convolution(CASES[0], torch.bfloat16)
    first, last = (convolution.values(convolution.run(is_reversed=each, processors=16)) for each in (False, True))
    for name, result in first.items():
        assert torch.equal(result, last[name]), name


def test_no_filter_reaches_another_channel():
    convolution = Convolution(CASES[0], torch.float32)
    convolution.input[0, 7, 2, 3, 4] = float("nan")
    out = model.volume(convolution.forward())
    assert out[0, 7, 1:4, 2:5, 3:6].isnan().all()
    assert out.isnan().sum() == 27


@pytest.mark.exhaustive
@dtypes
def test_accesses_take_whole_sectors_and_wait_for_no_other(dtype):
    for case in (CASES[1], CASES[8], ((2, 64, 9, 10, 34), (3, 3, 3), ONE, (1, 1, 1))):
        for name, result in Convolution(case, dtype).run(count=True).items():
            for step, counts in result.counts.items():
                assert counts.shared_passes == counts.shared_passes_at_least, (case, name, step)
            if name != "grad_weight":
                counts = result.counts[model.CONVOLVE]
                assert counts.store_sectors * 32 == counts.store_bytes


def test_a_tile_shares_most_of_its_input():
    """A block reads its tile with the margins, and as much as that again costs no more than the arithmetic."""
    shape = (1, 32, 16, 16, 32)
    for taps, most in ((3, 4), (5, 8), (7, 12)):
        convolution = Convolution((shape, (taps,) * 3, ONE, (taps // 2,) * 3), torch.bfloat16)
        result = convolution.forward(count=True)
        assert result.moved_bytes <= most * convolution.input.nbytes


def test_plans_are_work_for_all_processors():
    for edge, channels in ((64, 32), (32, 64), (16, 128), (8, 256)):
        for taps in (3, 5, 7):
            sizes = {"samples": (2, channels), "input": (edge,) * 3, "output": (edge,) * 3, "kernel": (taps,) * 3}
            plan = model.plan(sizes | {"stride": ONE, "padding": (taps // 2,) * 3})
            assert plan.slots[0] * plan.slots[1] * plan.slots[2] in (8, 16, 32)
            for step in (model.CONVOLVE, model.CHUNKS):
                assert plan.blocks(step) >= 64
            assert plan.chunks * plan.channels * taps**3 * 4 <= 64 << 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["75", "90", "100", "120"])
def test_the_kernels_stay_in_registers(architecture, tmp_path):
    kernels = cuda_build.kernels("depthwise", architecture, tmp_path)
    # For each type those of lanes, taps and strides, and one that merges.
    assert len(kernels) == len(DTYPES) * (2 * 2 * 3 * 2 + 1)
    for kernel in kernels:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel
