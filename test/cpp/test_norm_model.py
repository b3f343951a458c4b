"""The GPU's kernels of group norm, every thread of every block run on the CPU: values, gradients, and costs."""

import copy
import itertools
import math
import re

import cuda_build
import norm_model
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from norm_model import BACKWARD, FORWARD, MIXED, TYPES, Result
from selection import some_of
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)
# Samples, rows, channels, groups: vectors that fill rows or do not, one row, tiles of wide rows, periods of several
# rows and too long for a block, more groups than a block merges, and groups wider than one.
SHAPES = [
    (2, 300, 24, 4),
    (2, 77, 33, 3),
    (3, 1, 8, 2),
    (2, 50, 5, 5),
    (1, 40, 1280, 32),
    (2, 30, 513, 27),
    (1, 90, 1, 1),
]
SHAPES += [(2, 64, 600, 1), (1, 1100, 16, 16), (5, 130, 12, 3), (1, 3000, 3, 1), (40, 20, 20, 10)]
SHAPE_IDS = ["x".join(map(str, shape)) for shape in SHAPES]


class Norm:
    """A norm, its derivative in float64, and PyTorch's own in its dtype on contiguous activations."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        mean: float = 0.0,
        parameters: torch.dtype | None = None,
    ) -> None:
        samples, rows, channels, self.groups = shape
        generator = torch.Generator().manual_seed(0)

        def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

        self.input = (draw(samples, rows, channels, dtype=torch.float64) + mean).to(dtype)
        self.grad = draw(samples, rows, channels)
        self.weight, self.bias = (draw(channels, dtype=parameters or dtype) for _ in range(2))

    def pytorch(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the results on contiguous activations, computed in float64 or in the dtypes that they have."""
        rows, weight, bias, grad = (
            each.detach().to(dtype or each.dtype) for each in (self.input, self.weight, self.bias, self.grad)
        )
        input, weight, bias = (
            each.requires_grad_() for each in (rows.transpose(1, 2).contiguous(), weight.clone(), bias.clone())
        )
        out = F.group_norm(input, self.groups, weight, bias)
        out.backward(grad.transpose(1, 2).contiguous())
        results = {"out": out.detach().transpose(1, 2), "grad_input": input.grad.transpose(1, 2)}
        return results | {"grad_weight": weight.grad, "grad_bias": bias.grad}

    def run(self, **options) -> tuple[dict[str, Tensor], Result, Result]:
        forward = norm_model.run(self.input, self.groups, self.weight, self.bias, **options)
        statistics = forward.tensors["mean"], forward.tensors["rstd"]
        gradients = {"grad": self.grad, "statistics": statistics}
        backward = norm_model.run(self.input, self.groups, self.weight, self.bias, **gradients, **options)
        results = {name: backward.tensors[name] for name in ("grad_weight", "grad_bias")}
        results |= {"out": forward.tensors["out"], "grad_input": backward.tensors["out"]}
        return results, forward, backward

    def check(self, **options) -> None:
        """Expect at most twice PyTorch's error on contiguous, and each element read and written as often as it must."""
        results, forward, backward = self.run(**options)
        exact, theirs = self.pytorch(torch.float64), self.pytorch()
        for name, result in results.items():
            assert result.isfinite().all(), name
            ours, bar = (error(each, exact[name]) for each in (result, theirs[name]))
            # Of float64 there is nothing more exact; of a few elements PyTorch's results may be exact by chance, and of
            # a single group its statistics.
            is_single = self.groups * len(self.input) == 1
            room = 1e-13 if result.dtype == torch.float64 else torch.finfo(result.dtype).eps / (1 if is_single else 2)
            assert ours <= 2 * bar + room, (name, ours, bar)
        for each in (forward.loads["input"], backward.loads["input"], backward.loads["grad"]):
            assert each.eq(2).all()
        for each in (forward.stores["out"], backward.stores["out"]):
            assert each.eq(1).all()
        for each in (forward.stores["input"], backward.stores["grad"], forward.loads["out"], backward.loads["out"]):
            assert each.eq(0).all()


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


all_dtypes = pytest.mark.parametrize("dtype", TYPES, ids=str)
# Costs depend on the bytes of an element alone.
costs_of_dtypes = pytest.mark.parametrize("dtype", some_of(TYPES, torch.bfloat16), ids=str)
both_plans = pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "in chunks"])


@all_dtypes
@both_plans
@pytest.mark.parametrize("shape", some_of(SHAPES, *SHAPES[:7]), ids=SHAPE_IDS)
def test_values_and_gradients(shape, in_chunks, dtype):
    Norm(shape, dtype).check(in_chunks=in_chunks)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_parameters_may_be_float_where_activations_are_not(dtype):
    Norm((2, 77, 24, 4), dtype, parameters=torch.float32).check()


# Aligned by no more than an element, all alike; and each in its own way, which leaves single elements.
@all_dtypes
@both_plans
@pytest.mark.parametrize("offsets", [(1, 1, 1), (3, 3, 3), (0, 1, 0), (1, 0, 2)], ids=str)
def test_memory_of_any_alignment(offsets, in_chunks, dtype):
    for shape in ((2, 77, 33, 3), (3, 50, 16, 4), (1, 1, 3, 1), (2, 3, 1, 1), (1, 30, 600, 4)):
        Norm(shape, dtype).check(offsets=offsets, in_chunks=in_chunks)


@pytest.mark.parametrize("mean", [10.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("rows", [200, 2000])
def test_the_mean_may_be_ten_thousand_deviations(rows, groups, mean):
    Norm((2, rows, 32, groups), torch.float32, mean).check()


def test_the_first_rows_need_not_be_like_the_others():
    norm = Norm((1, 4000, 8, 8), torch.float32, mean=1e4)
    norm.input[:, :100] = 0
    norm.check()
    norm.input[:, 1:100] = norm.input[:, 100:199]
    norm.check()


def test_statistics():
    norm = Norm((3, 500, 12, 3), torch.float32, mean=50)
    tensors = norm_model.run(norm.input, 3).tensors
    variance, mean = torch.var_mean(norm.input.double().view(3, 500, 3, 4), (1, 3), correction=0)
    for name, expected in (("mean", mean), ("variance", variance), ("rstd", (variance + 1e-5).rsqrt())):
        torch.testing.assert_close(tensors[name].double(), expected, rtol=1e-6, atol=0)


def test_without_parameters():
    norm = Norm((2, 100, 12, 3), torch.float32)
    norm.weight, norm.bias = torch.ones(12), torch.zeros(12)
    exact = norm.pytorch(torch.float64)
    for weight, bias in ((None, None), (norm.weight, None), (None, norm.bias)):
        forward = norm_model.run(norm.input, 3, weight, bias)
        torch.testing.assert_close(forward.tensors["out"], exact["out"].float())
        statistics = forward.tensors["mean"], forward.tensors["rstd"]
        backward = norm_model.run(norm.input, 3, weight, grad=norm.grad, statistics=statistics)
        torch.testing.assert_close(backward.tensors["out"], exact["grad_input"].float())


def test_results_do_not_depend_on_the_order_of_blocks():
    norm = Norm((3, 6000, 24, 4), torch.bfloat16)
    results, forward, _ = norm.run(processors=64)
    assert forward.plan.chunks > 8
    for order in range(1, 4):
        for name, result in norm.run(processors=64, order=order)[0].items():
            assert torch.equal(result, results[name]), name


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_spoils_its_own_group(value):
    norm = Norm((2, 1500, 16, 4), torch.float32)
    for row in (0, 700):
        input = norm.input.clone()
        input[1, row, 5] = value
        out = norm_model.run(input, 4, norm.weight, norm.bias).tensors["out"]
        exact = F.group_norm(input.transpose(1, 2), 4, norm.weight, norm.bias).transpose(1, 2)
        torch.testing.assert_close(out, exact, equal_nan=True)
        assert out[1, :, 4:8].isnan().all()


@costs_of_dtypes
def test_what_is_moved_is_little_more_than_what_must_be(dtype):
    """Two reads and a write forward, four reads and a write backward, where every processor has many rows."""
    shapes = [(1, 4096, 32, 32), (1, 4096, 32, 8), (4, 512, 48, 1), (1, 3000, 320, 32), (2, 1050, 33, 3)]
    for shape in (*shapes, (2, 1600, 512, 4)):
        norm = Norm(shape, dtype)
        _, forward, backward = norm.run(processors=2, count=True)
        assert forward.moved_bytes <= 1.05 * 3 * norm.input.nbytes, shape
        assert backward.moved_bytes <= 1.05 * 5 * norm.input.nbytes, shape


@all_dtypes
def test_a_few_rows_are_work_for_all_processors(dtype):
    for samples, rows, channels in ((2, 256, 1280), (2, 512, 320), (8, 1024, 320), (2, 4096, 128), (1, 32768, 32)):
        assert norm_model.plan(samples, rows, channels, 32, dtype).blocks(FORWARD[0]) >= 32


@all_dtypes
def test_a_small_sample_is_read_once(dtype):
    """By one kernel, which reads it again from the first-level cache: those of 16 rows and more are within the bar."""
    for shape in ((2, 16, 320, 32), (2, 27, 320, 320), (1, 64, 512, 32), (4, 49, 96, 96), (1, 100, 33, 3)):
        norm = Norm(shape, dtype)
        _, forward, backward = norm.run(processors=8, count=True)
        assert forward.plan.is_whole, shape
        assert forward.moved_bytes <= 1.05 * 3 * norm.input.nbytes, shape
        assert backward.moved_bytes <= 1.05 * 5 * norm.input.nbytes, shape


def test_a_block_that_does_all_steps_reads_at_most_what_a_cache_holds():
    for rows in (1, 7, 49, 512, 1024, 4096):
        for channels, groups in itertools.product((32, 320, 1280), (1, 32)):
            for dtype in TYPES:
                plan = norm_model.plan(2, rows, channels, channels if groups == 1 else groups, dtype)
                if plan.is_whole:
                    assert plan.chunks == 1
                    assert rows * min(plan.width * plan.lanes, channels) * dtype.itemsize <= 32 << 10
    assert norm_model.plan(1, 512, 320, 320, torch.bfloat16).is_whole
    assert not norm_model.plan(1, 4096, 320, 320, torch.bfloat16).is_whole


@costs_of_dtypes
@both_plans
def test_no_access_to_shared_memory_waits_for_another(in_chunks, dtype):
    for shape in SHAPES:
        _, forward, backward = Norm(shape, dtype).run(count=True, in_chunks=in_chunks)
        for step, counts in (forward.counts | backward.counts).items():
            assert counts.shared_passes == counts.shared_passes_at_least, (shape, step)


def test_one_channel_in_each_group_makes_as_many_blocks_as_thirty_two():
    for samples, rows, channels in ((1, 64**3, 32), (2, 128**3, 32), (2, 512, 2048), (8, 4096, 320)):
        for dtype in TYPES:
            plans = [norm_model.plan(samples, rows, channels, channels // each, dtype) for each in (1, 32)]
            for step in (FORWARD[0], FORWARD[2], BACKWARD[0], BACKWARD[2]):
                assert plans[0].blocks(step) >= plans[1].blocks(step)
    plan = norm_model.plan(1, 64**3, 32, 32, torch.bfloat16)
    assert plan.blocks(FORWARD[0]) >= 3 * 132


def test_plans_of_any_size():
    """Chunks that begin in whole steps, whose number fits into 32 bits; what no grid takes is refused."""
    for samples, rows, channels in ((1, 2**36, 8), (3, 2**33 + 5, 3), (2**20, 2**14, 64), (1, 5, 2**30), (7, 1, 1)):
        for dtype in TYPES:
            for offset in (0, norm_model.DIFFERING):
                plan = norm_model.plan(samples, rows, channels, 1, dtype, offset=offset)
                assert (plan.chunks - 1) * plan.chunk_rows < rows <= plan.chunks * plan.chunk_rows
                assert plan.chunk_rows * channels < 2**31
                assert plan.slots * plan.width <= 256
                assert (plan.tiles - 1) * plan.width < plan.period <= plan.tiles * plan.width
                assert plan.tiles == 1 or channels % plan.lanes == 0
    assert norm_model.plan(2**32, 1, 8, 1, torch.float32) is None


# --- What follows a norm in the same pass ---


def by_slopes(y: Tensor) -> Tensor:
    """Return PReLU of rows of channels, with a slope for each."""
    return F.prelu(y, SLOPES[: y.shape[1]].to(y.dtype))


SLOPES = torch.arange(1280) % 13 / 8 - 0.5  # which bfloat16 has
FOLLOWERS = {
    "none": (0.0, lambda y: y),
    "slopes": (0.0, by_slopes),
    "relu": (math.nan, F.relu),
    "leaky_relu": (0.1, lambda y: F.leaky_relu(y, 0.1)),
    "silu": (0.0, F.silu),
    "gelu": (0.0, F.gelu),
    "gelu_tanh": (0.0, lambda y: F.gelu(y, approximate="tanh")),
}


def arguments_of(activation: str, input: Tensor) -> dict[str, object]:
    if activation != "slopes":
        return {"activation": activation, "parameter": FOLLOWERS[activation][0]}
    return {"activation": "leaky_relu", "parameter": 0.0, "slopes": SLOPES[: input.shape[2]].to(input.dtype)}


def followed(norm: Norm, activation: str, result: torch.dtype, **options) -> tuple[dict[str, Tensor], Result, Result]:
    """Return what the kernels compute in two steps, as for a result that waits, with an activation."""
    given = {**arguments_of(activation, norm.input), "result": result, **options}
    forward = norm_model.run(norm.input, norm.groups, norm.weight, norm.bias, in_two=True, **given)
    given |= {"grad": norm.grad.to(result), "statistics": (forward.tensors["mean"], forward.tensors["rstd"])}
    backward = norm_model.run(norm.input, norm.groups, norm.weight, norm.bias, **given)
    names = ("grad_weight", "grad_bias")
    results = {"out": forward.tensors["out"], "grad_input": backward.tensors["out"]}
    return results | {name: backward.tensors[name] for name in names}, forward, backward


def by_pytorch(norm: Norm, activation: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the same in a dtype, by PyTorch on contiguous activations."""
    input, weight, bias = (
        each.detach().to(dtype).requires_grad_()
        for each in (norm.input.transpose(1, 2).contiguous(), norm.weight, norm.bias)
    )
    out = FOLLOWERS[activation][1](F.group_norm(input, norm.groups, weight, bias))
    out.backward(norm.grad.to(dtype).transpose(1, 2).contiguous())
    return {
        "out": out.detach().transpose(1, 2),
        "grad_input": input.grad.transpose(1, 2),
        "grad_weight": weight.grad,
        "grad_bias": bias.grad,
    }


@all_dtypes
@pytest.mark.parametrize("activation", FOLLOWERS)
@pytest.mark.parametrize("shape", [(2, 300, 24, 4), (2, 77, 33, 3), (1, 1100, 16, 16), (1, 40, 1280, 32)], ids=str)
def test_an_activation_in_the_same_pass(shape, activation, dtype):
    norm = Norm(shape, dtype, mean=3.0)
    exact, theirs = by_pytorch(norm, activation, torch.float64), by_pytorch(norm, activation, dtype)
    results, forward, backward = followed(norm, activation, dtype)
    for name, value in results.items():
        room = 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps
        assert error(value, exact[name]) <= 2 * error(theirs[name], exact[name]) + room, name
    for each in (forward.loads["input"], backward.loads["input"], backward.loads["grad"]):
        assert each.eq(2).all()
    for each in (forward.stores["out"], backward.stores["out"]):
        assert each.eq(1).all()


@all_dtypes
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("shape", [(2, 300, 24, 4), (2, 77, 33, 33), (1, 1100, 16, 16), (2, 9, 24, 3)], ids=str)
def test_a_bias_of_the_input_in_the_same_pass(shape, activation, dtype):
    norm = Norm(shape, dtype)
    bias = norm.weight.flip(0) * 8
    results, forward, backward = followed(norm, activation, dtype, input_bias=bias)
    biased = copy.copy(norm)
    biased.input = norm.input.double() + bias.double()
    exact = by_pytorch(biased, activation, torch.float64)
    biased.input = biased.input.to(dtype)
    theirs = by_pytorch(biased, activation, dtype)
    for name, value in results.items():
        room = 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps
        assert error(value, exact[name]) <= 2 * error(theirs[name], exact[name]) + room, name
    for each in (forward.loads["input"], backward.loads["input"], backward.loads["grad"]):
        assert each.eq(2).all()


@pytest.mark.parametrize("is_of_input", [True, False])
def test_running_statistics_have_the_bias_of_the_input(is_of_input):
    """Those that are updated, and those that are subtracted."""
    norm, bias = Norm((1, 77, 24, 24), torch.bfloat16, parameters=torch.float32), torch.linspace(-5, 5, 24)
    running, updated = ([torch.full((24,), 0.5), torch.full((24,), 2.0)] for _ in range(2))
    ours = norm_model.run(
        *(norm.input, 24, norm.weight, norm.bias), in_two=True, running=tuple(running), input_bias=bias,
        is_of_input=is_of_input,
    )  # fmt: skip
    out = F.batch_norm(norm.input[0].float() + bias, *updated, norm.weight, norm.bias, is_of_input)
    assert error(ours.tensors["out"][0], out.double()) <= torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(ours.tensors["running_mean"], updated[0])
    torch.testing.assert_close(ours.tensors["running_var"], updated[1])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gradients_of_parameters_in_float(dtype):
    """As the sums of which those of slopes are made."""
    norm = Norm((2, 77, 24, 4), dtype)
    exact = by_pytorch(norm, "slopes", torch.float64)
    results, *_ = followed(norm, "slopes", dtype, has_float_gradients=True)
    for name in ("grad_weight", "grad_bias"):
        assert error(results[name], exact[name]) <= 1e-6, name


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 0, 0), (3, 1, 2)], ids=str)
def test_results_in_float_of_activations_in_half(offsets, dtype):
    """As under autocast, where PyTorch casts the whole activation first."""
    norm = Norm((2, 77, 24, 4), dtype, parameters=torch.float32)
    exact, theirs = by_pytorch(norm, "silu", torch.float64), by_pytorch(norm, "silu", torch.float32)
    results, _, _ = followed(norm, "silu", torch.float32, offsets=offsets)
    for name, value in results.items():
        room = torch.finfo(value.dtype).eps
        assert error(value, exact[name]) <= 2 * error(theirs[name], exact[name]) + room, name
    assert results["out"].dtype == torch.float32
    assert results["grad_input"].dtype == dtype


@all_dtypes
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_a_residual_in_the_same_pass(activation, dtype):
    norm = Norm((2, 77, 33, 3), dtype)
    residual = norm.grad
    out = norm_model.run(
        *(norm.input, 3, norm.weight, norm.bias), residual=residual, activation=activation, in_two=True
    ).tensors["out"]
    y = F.group_norm(norm.input.double().transpose(1, 2), 3, norm.weight.double(), norm.bias.double())
    y = y.transpose(1, 2) + residual.double()
    exact = y if activation == "none" else FOLLOWERS[activation][1](y)
    assert error(out, exact) <= (1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps)


def test_what_is_not_finite_stays_so():
    input = torch.randn(1, 64, 8)
    input[0, 3, 2] = math.nan
    for activation, (_, function) in FOLLOWERS.items():
        out = norm_model.run(input, 8, in_two=True, **arguments_of(activation, input)).tensors["out"]
        expected = function(F.group_norm(input.transpose(1, 2), 8)).transpose(1, 2)
        torch.testing.assert_close(out, expected, equal_nan=True)


@all_dtypes
@pytest.mark.parametrize("in_two", [False, True])
def test_batch_norm_is_group_norm_of_one_sample(in_two, dtype):
    """It updates running statistics, and in evaluation goes by them, in the backward as well."""
    norm = Norm((1, 900, 24, 24), dtype, mean=5.0)
    running = torch.linspace(-1, 1, 24).to(dtype), torch.linspace(0.5, 2, 24).to(dtype)
    layer = torch.nn.BatchNorm1d(24, momentum=0.3).double()
    for name, value in zip(("running_mean", "running_var", "weight", "bias"), (*running, norm.weight, norm.bias)):
        getattr(layer, name).data.copy_(value)
    input = norm.input.double().transpose(1, 2).requires_grad_()
    eps = torch.finfo(dtype).eps * (1 if dtype != torch.float64 else 100)
    expected = layer(input)
    options = {"running": running, "momentum": 0.3, "in_two": in_two}
    forward = norm_model.run(norm.input, 24, norm.weight, norm.bias, **options)
    assert error(forward.tensors["running_mean"], layer.running_mean) <= eps
    assert error(forward.tensors["running_var"], layer.running_var) <= eps
    if not in_two:
        assert error(forward.tensors["out"], expected.detach().transpose(1, 2)) <= eps
    layer.eval()
    layer.running_mean.copy_(running[0])
    layer.running_var.copy_(running[1])
    expected = layer(input)
    expected.backward(norm.grad.double().transpose(1, 2))
    forward = norm_model.run(norm.input, 24, norm.weight, norm.bias, is_of_input=False, **(options | {"in_two": True}))
    assert error(forward.tensors["out"], expected.detach().transpose(1, 2)) <= eps
    given = {"statistics": (forward.tensors["mean"], forward.tensors["rstd"]), "is_of_input": False}
    backward = norm_model.run(norm.input, 24, norm.weight, norm.bias, grad=norm.grad, **given).tensors
    assert error(backward["out"], input.grad.transpose(1, 2)) <= eps
    assert error(backward["grad_weight"], layer.weight.grad) <= 4 * eps
    assert error(backward["grad_bias"], layer.bias.grad) <= eps


def test_one_pass_moves_what_two_would_share():
    """Six bytes an element forward and ten backward in bfloat16; norm and activation by themselves move 14 and 26."""
    norm = Norm((1, 8192, 32, 32), torch.bfloat16)
    for activation in ("leaky_relu", "silu"):
        _, forward, backward = followed(norm, activation, torch.bfloat16, count=True)
        assert forward.moved_bytes <= 1.05 * 3 * norm.input.nbytes
        assert backward.moved_bytes <= 1.05 * 5 * norm.input.nbytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["75", "90", "100", "120"])
def test_the_kernels_stay_in_registers(architecture, tmp_path):
    kernels = cuda_build.kernels("norm", architecture, tmp_path)
    # Those on activations have a kernel of vectors and one of elements, some for each kind of what follows; the others
    # one, for each type.
    assert len(kernels) == (len(TYPES) + len(MIXED)) * (2 + 3 * 2 * 4 + 4) + len(TYPES) * 2 * 2
    for kernel in kernels:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel
        registers = int(re.search(r"Used (\d+) registers", kernel)[1])
        # Four blocks of 256 threads fill a processor's registers, on the newest three; norms alone, which are most,
        # have as many.
        is_alone = re.search(r"NormTypeE[012]EL.*FollowerE0", kernel) and not re.search("NormStepE[78]", kernel)
        assert registers <= ((80 if architecture == "120" else 64) if is_alone else 255), kernel
