"""What CUDA alone has: streams, devices, graphs, launches, memory. What both devices share is in the other files."""

import itertools
import os
import subprocess
import sys

import pytest
import reference
import torch
from exactness import check, every_value
from reference import DTYPES
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Outcome

pytestmark = pytest.mark.cuda

CL = torch.channels_last
STRIDES = (27, 1, 9, 3)
CASTS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
CASTS += [(to, of) for of, to in CASTS]
SOME_TENTHS_OF_A_SECOND = 500_000_000  # in cycles


def parameter(shape=(4, 3, 3, 3), device="cuda"):
    return nn.Parameter(torch.randn(shape, device=device))


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (4, 4), (5, 5), (7, 7), (3, 3, 3), (2, 4, 4), (5, 5, 5), (1, 13)])
def test_every_way_of_the_kernels(kernel):
    """Channels that fill 16 bytes, words, warps and cache lines, or just do not."""
    for channels in (2, 3, 4, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 128, 130, 256, 257, 512):
        for dtypes in DTYPES.values():
            check((5, channels, *kernel), dtypes[0], device="cuda")
        for of, to in CASTS:
            check((5, channels, *kernel), of, to, device="cuda")


@pytest.mark.parametrize(("of", "to"), CASTS, ids=str)
def test_casts_of_every_value_equal_those_of_torch(of, to):
    weight = every_value(of, to).to("cuda")
    for source in (weight, weight.to(memory_format=CL)):
        for memory_format in (CL, torch.contiguous_format):
            expected = reference.convert_weight(source, memory_format, to)
            reference.assert_same(nhwc.convert_weight(source, memory_format, dtype=to), expected)


def test_work_is_queued_on_the_current_stream_and_nobody_waits_for_it():
    shape = (256, 128, 3, 3)
    values, later = (torch.randn(shape, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()

    def convert(weight, buffer):
        fresh, (listed,) = nhwc.convert_weight(weight), nhwc.convert_weights([weight], dtype=torch.bfloat16)
        nhwc.ops.copy_weight_(buffer, weight)
        assert nhwc.convert_weight_(weight, storage="reuse") == Outcome.IN_PLACE
        return fresh + 0, listed + 0, buffer + 0, weight + 0

    with torch.cuda.stream(stream):
        # The first time loads code and allocates memory, both of which wait for the device.
        convert(values.clone(), torch.zeros(shape, device="cuda").to(memory_format=CL))
        weight, buffer = torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda").to(memory_format=CL)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SOME_TENTHS_OF_A_SECOND)
        weight.copy_(values)
        results = convert(weight, buffer)
        weight.copy_(later)
        assert not stream.query()
    torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result, values.to(result.dtype))
        assert result.is_contiguous(memory_format=CL)
    assert torch.equal(weight, later)


def test_old_memory_is_not_handed_out_before_another_stream_has_read_it():
    weight = parameter((256, 128, 3, 3), "cuda")
    values = weight.detach().cpu()
    stream = torch.cuda.Stream()
    # To load code and to allocate memory may wait for the device: both are done once before.
    with torch.cuda.stream(stream):
        nhwc.convert_weight_(parameter((256, 128, 3, 3), "cuda"), storage="fresh")
    taken = [torch.full_like(values, index, device="cuda") for index in range(8)]
    del taken
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SOME_TENTHS_OF_A_SECOND)
        assert nhwc.convert_weight_(weight, storage="fresh") == Outcome.COPIED
    taken = [torch.full_like(values, index, device="cuda") for index in range(8)]  # on the stream of the old memory
    assert not stream.query()
    torch.cuda.synchronize()
    assert torch.equal(weight.detach().cpu(), values)
    del taken


def test_lists_and_gradients_on_several_devices_go_together():
    weights = [parameter(device=device) for device in ("cuda", "cpu", "cuda", "meta")]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    values = [weight.grad.clone() for weight in weights]
    pointers = [(weight.data_ptr(), weight.grad.data_ptr()) for weight in weights]
    outcomes = nhwc.convert_weights_(weights)
    assert outcomes == [Outcome.IN_PLACE] * 3 + [Outcome.RESTRIDED]
    assert {tensor.stride() for weight in weights for tensor in (weight, weight.grad)} == {STRIDES}
    assert [(weight.data_ptr(), weight.grad.data_ptr()) for weight in weights] == pointers
    for weight, value in zip(weights[:3], values):
        assert torch.equal(weight.grad, value)


def captured(function):
    """Return the result of `function` while a CUDA graph is captured, and the graph; run it once before that."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph


def test_functional_conversions_are_captured_and_replayed():
    weights = [torch.randn(64, 32, 3, 3, device="cuda"), torch.randn(16, 8, 3, 3, 3, device="cuda")]
    weights += [torch.randn(2, 4096, 5, 5, device="cuda"), torch.randn(64, 32, 1, 1, device="cuda")]
    weights += [torch.randn(16, 16, 3, 3, device="cuda")[:, ::2]]
    buffer = torch.empty(64, 32, 3, 3, dtype=torch.float16, device="cuda").to(memory_format=CL)

    def convert():
        nhwc.ops.copy_weight_(buffer, weights[0])
        return (
            [nhwc.convert_weight(weight) for weight in weights]
            + nhwc.convert_weights(weights)
            + nhwc.convert_weights(weights, dtype=torch.bfloat16)
        )

    results, graph = captured(convert)
    for _ in range(3):
        for weight in weights:
            weight.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffer, weights[0].half())
        for result, weight in zip(results, itertools.cycle(weights)):
            reference.assert_same(result, reference.convert_weight(weight, dtype=result.dtype))


@pytest.mark.parametrize("storage", ["auto", "fresh", "reuse"])
def test_in_place_conversions_refuse_while_a_graph_is_captured(storage):
    weight = parameter()
    weight.grad = torch.randn_like(weight)
    pointwise = parameter((4, 3, 1, 1))
    before = [(t.data_ptr(), t.stride(), t.clone()) for t in (weight, weight.grad, pointwise)]
    calls = {
        "convert_weight_": lambda: nhwc.convert_weight_(weight, storage=storage),
        "convert_weights_": lambda: nhwc.convert_weights_([pointwise, weight], storage=storage),
        "set_strides_": lambda: nhwc.ops.set_strides_([weight], [STRIDES], storage=storage),
    }
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)  # an empty graph would be warned of
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=f"nhwc::{name}: expected no CUDA graph to be captured"):
                call()
    for tensor, (pointer, strides, values) in zip((weight, weight.grad, pointwise), before):
        assert (tensor.data_ptr(), tensor.stride()) == (pointer, strides)
        assert torch.equal(tensor, values)
    assert nhwc.convert_weights_([pointwise, weight]) == [Outcome.RESTRIDED, Outcome.IN_PLACE]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_converts(mode):
    torch._dynamo.reset()

    def layer(x, weight):
        converted = torch.ops.nhwc.convert_weight(weight)
        (half,) = torch.ops.nhwc.convert_weights([weight * 2], dtype=torch.bfloat16)
        return torch.nn.functional.conv2d(x, converted), converted, half

    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    weight = torch.randn(8, 4, 3, 3, dtype=torch.double, device="cuda", requires_grad=True)
    for _ in range(5):  # the first calls record, the next ones replay
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, 4, 8, 8, dtype=torch.double, device="cuda")
        actual, expected = compiled(x, weight), layer(x, weight)
        torch.testing.assert_close(actual, expected)
        assert [a.stride() for a in actual[1:]] == [e.stride() for e in expected[1:]]
        gradients = [torch.autograd.grad(out[0].sum(), weight)[0] for out in (actual, expected)]
        torch.testing.assert_close(*gradients)
        with torch.no_grad():
            weight.mul_(1.5)


def test_a_lack_of_memory_changes_nothing():
    shape, size = (4096, 256, 4, 4), 64 << 20
    weights = [parameter(shape) for _ in range(3)]
    before = [(weight.data_ptr(), weight.stride(), weight.detach().clone()) for weight in weights]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties("cuda").total_memory
    # Room for one of the three.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / total)
    try:
        for call in (
            lambda: nhwc.convert_weights(weights),
            lambda: nhwc.convert_weights_(weights, storage="fresh"),
        ):
            with pytest.raises(torch.OutOfMemoryError):
                call()
            assert torch.cuda.memory_allocated() == allocated
            for weight, (pointer, strides, _) in zip(weights, before):
                assert (weight.data_ptr(), weight.stride()) == (pointer, strides)
        assert nhwc.convert_weights_(weights) == [Outcome.IN_PLACE] * 3  # which needs none
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for weight, (pointer, _, values) in zip(weights, before):
        assert weight.data_ptr() == pointer
        assert torch.equal(weight, values)


def test_permuting_in_place_needs_memory_for_long_filters_alone():
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    for shape, most in (
        ((2048, 512, 3, 3), 0),
        ((512, 512, 3, 3, 3), 0),  # more than a block has without asking for it
        ((300, 4096, 5, 5), blocks * 4096 * 25 * 4 + (2 << 20)),  # the allocator rounds up
    ):
        weight = torch.randn(shape, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert nhwc.convert_weight_(weight, storage="reuse") == Outcome.IN_PLACE
        assert torch.cuda.max_memory_allocated() - before <= most
        assert torch.cuda.memory_allocated() == before


def kernels_of(function):
    """Return the kernels, copies and fills that a second call starts."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.fixture
def profiler():
    x = torch.ones(3, device="cuda")
    if len(kernels_of(lambda: x + 1)) != 1:
        pytest.skip("torch.profiler sees no kernels on this machine")


@pytest.mark.usefixtures("profiler")
def test_a_list_is_one_launch():
    weights = [torch.randn(32 + n, 3 + n, 3, 3, device="cuda") for n in range(50)]
    out = torch.empty_like(weights[9], memory_format=CL)
    formats = itertools.cycle([CL, torch.contiguous_format])
    assert len(kernels_of(lambda: nhwc.convert_weight(weights[9]))) == 1
    assert len(kernels_of(lambda: nhwc.ops.copy_weight_(out, weights[9]))) == 1
    assert len(kernels_of(lambda: nhwc.convert_weights(weights))) == 1
    assert len(kernels_of(lambda: nhwc.convert_weights(weights, dtype=torch.float16))) == 1
    assert len(kernels_of(lambda: nhwc.convert_weights_(weights, next(formats)))) == 1


@pytest.mark.usefixtures("profiler")
def test_nothing_is_launched_where_nothing_moves():
    weights = [torch.randn(64, 32, 1, 1, device="cuda"), torch.randn(64, 1, 3, 3, device="cuda")]
    weights += [nhwc.convert_weight(torch.randn(8, 4, 3, 3, device="cuda")), torch.empty(0, 3, 3, 3, device="cuda")]
    formats = itertools.cycle([CL, torch.contiguous_format])
    assert kernels_of(lambda: nhwc.convert_weights_(weights[:2] + weights[3:], next(formats))) == []
    assert kernels_of(lambda: nhwc.convert_weight_(weights[2])) == []
    assert kernels_of(lambda: nhwc.convert_weights([weights[3]])) == []
    assert kernels_of(lambda: nhwc.ops.plan_weights(weights)) == []


class Exported:
    """Memory that another library owns."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@pytest.mark.parametrize("load", [torch.from_dlpack, lambda t: torch.as_tensor(Exported(t), device="cuda")])
def test_memory_of_other_libraries_is_left_alone(load):
    owner = torch.randn(4, 3, 3, 3, device="cuda")
    weight, values = load(owner), owner.clone()
    assert weight.data_ptr() == owner.data_ptr()
    with pytest.raises(RuntimeError, match="its memory is not from the device's own allocator"):
        nhwc.convert_weight_(weight, storage="reuse")
    assert nhwc.convert_weight_(weight) == Outcome.COPIED_FOREIGN
    assert weight.data_ptr() != owner.data_ptr()
    assert owner.is_contiguous()
    for each in (weight, owner):
        assert torch.equal(each, values)


@pytest.mark.parametrize("allocator", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_weights_are_permuted_in_place_whichever_of_torchs_allocators_owns_them(allocator):
    script = """
import torch, torch_nhwc as nhwc
weight = torch.randn(64, 32, 3, 3, device="cuda")
values = weight.clone()
assert nhwc.convert_weight_(weight, storage="reuse") == nhwc.Outcome.IN_PLACE
assert torch.equal(weight, values) and weight.is_contiguous(memory_format=torch.channels_last)
"""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": allocator}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_memory_that_another_process_was_given_is_left_alone():
    weight = torch.randn(4, 3, 3, 3, device="cuda")
    values = weight.clone()
    try:
        torch.multiprocessing.reductions.reduce_tensor(weight)  # what a queue sends
    except RuntimeError as error:
        pytest.skip(f"this machine shares no CUDA memory between processes: {error}")
    assert nhwc.convert_weight_(weight) == Outcome.COPIED_FOREIGN
    assert torch.equal(weight, values)
