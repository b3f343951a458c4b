"""Tests that test_emulated_cuda.py runs with the runtime of cpp/emulated_cuda.cpp preloaded.

There are two devices. PyTorch can allocate there and copy what keeps its order, and has no kernels; ours run on the
CPU.
"""

import copy
import ctypes
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from exactness import CASTS
from reference import ALL_DTYPES, DTYPES, FORMATS, canonical_strides, channels_last_of, random_weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_nhwc as nhwc
from torch_nhwc import Outcome
from torch_nhwc.nn import pending
from torch_nhwc.ops import qualification

CL = torch.channels_last
FLAT = torch.contiguous_format
SHAPES = [*reference.SHAPES, (8, 16, 3, 3), (7, 40, 5, 5), (2, 3, 150, 151)]
PROCESSORS = 4
PLAIN_SHARED_BYTES = 48 << 10
# PyTorch's group norm keeps channels-last; ours was not measured beside it.
KEEPS_GROUP_NORM = torch.__version__ >= "2.15"
IS_CACHED = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"


class Emulation(Structure):
    """As in emulated_cuda.cpp, like the next."""

    _fields_ = [("memory_limit", c_int64), ("used", c_int64), ("peak", c_int64)]
    _fields_ += [("driver_version", c_int32), ("launches_that_work", c_int32)]
    _fields_ += [("device_without_image", c_int32), ("wrong_lane", c_int32)]


class Launch(Structure):
    _fields_ = [("stream", c_uint64), ("device", c_int32), ("elements", c_int32), ("is_long", c_int32)]
    _fields_ += [("weights", c_uint32), ("blocks", c_uint32), ("shared_bytes", c_uint32)]


library = ctypes.CDLL(os.environ["LD_PRELOAD"])
emulation = Emulation.in_dll(library, "emulation")


def take_launches():
    """Those since the last call."""
    room = 1000
    launches = (Launch * room)()
    number = library.take_launches(launches, room)
    assert number <= room
    return launches[:number]


@pytest.fixture(autouse=True)
def as_it_begins(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")  # PyTorch's kernels, to compare with, cannot run
    torch.cuda.set_device(0)
    take_launches()
    limit = emulation.memory_limit
    yield
    emulation.memory_limit, emulation.driver_version, emulation.launches_that_work = limit, 13000, -1


def extra_bytes(function):
    """Return what a call needs of a device's memory beyond what it leaves behind."""
    if IS_CACHED:
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    emulation.peak = emulation.used
    function()
    return emulation.peak - emulation.used


def exhaust_memory(leave):
    """From here on the devices have no more memory but for so many bytes."""
    torch.cuda.empty_cache()
    emulation.memory_limit = emulation.used + leave


def parameter_of(values, device="cuda:0"):
    return nn.Parameter(values.to(device, copy=True), requires_grad=values.is_floating_point())


def parameter(shape=(8, 16, 3, 3), device="cuda:0", dtype=torch.float32):
    return parameter_of(random_weight(shape, dtype), device)


def of_host(tensor):
    return tensor.detach().to("cpu", copy=True)


class Untouched:
    """Asserts that a call fails and leaves tensors as they were: their memory, strides and bits."""

    def __init__(self, *tensors):
        self.tensors = tensors
        self.before = [(t.data_ptr(), t.stride(), of_host(t)) for t in self.tensors]

    def after_failing(self, match, function, *arguments, **options):
        with pytest.raises(RuntimeError, match=match):
            function(*arguments, **options)
        emulation.launches_that_work = -1
        self.check()

    def check(self):
        for tensor, (pointer, strides, values) in zip(self.tensors, self.before):
            assert (tensor.data_ptr(), tensor.stride()) == (pointer, strides)
            reference.assert_same(of_host(tensor), values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fresh_weights_of_every_type_both_ways(shape):
    for dtype in ALL_DTYPES:
        weight = random_weight(shape, dtype)
        for source in (weight, weight.to(memory_format=channels_last_of(weight))):
            on_device = source.to("cuda")
            for memory_format in (None, FLAT):
                out = nhwc.convert_weight(on_device, memory_format)
                assert out.is_cuda
                reference.assert_same(of_host(out), reference.convert_weight(source, memory_format))
            reference.assert_same(of_host(on_device), source)


@pytest.mark.parametrize(("of", "to"), CASTS, ids=str)
def test_casts(of, to):
    for shape in SHAPES:
        weight = random_weight(shape, of)
        for source in (weight, weight.to(memory_format=channels_last_of(weight))):
            for memory_format in (None, FLAT):
                out = nhwc.convert_weight(source.to("cuda"), memory_format, dtype=to)
                reference.assert_same(of_host(out), reference.convert_weight(source, memory_format, to))


def test_weights_at_any_address():
    for dtypes, shape, skipped in itertools.product(DTYPES.values(), [(8, 16, 3, 3), (5, 7, 2, 3, 3)], (1, 3)):
        memory = random_weight((8 * 16 * 9 + skipped,), dtypes[0])
        source = memory[skipped : skipped + torch.Size(shape).numel()].view(shape)
        on_device = memory.to("cuda")[skipped : skipped + source.numel()].view(shape)
        reference.assert_same(of_host(nhwc.convert_weight(on_device)), reference.convert_weight(source))


def test_values_go_to_memory_that_is_there_and_nowhere_else():
    weight, guards = random_weight((8, 16, 3, 3)), random_weight((8 * 16 * 9 + 16,), torch.bfloat16)
    memory = guards.to("cuda")
    out = memory[8:-8].as_strided(weight.shape, canonical_strides(weight.shape, CL))
    version = out._version
    assert nhwc.ops.copy_weight_(out, weight.to("cuda")) is out
    assert out._version == version + 1
    reference.assert_same(of_host(out), reference.convert_weight(weight, CL, torch.bfloat16))
    after = of_host(memory)
    assert torch.equal(reference.bits(after[:8]), reference.bits(guards[:8]))
    assert torch.equal(reference.bits(after[-8:]), reference.bits(guards[-8:]))


def test_what_only_kernels_of_pytorch_can_do_fails_loudly():
    weight = parameter()
    untouched = Untouched(weight)
    untouched.after_failing("not supported", lambda: weight + weight)
    untouched.after_failing("not supported", nhwc.convert_weight, weight, dtype=torch.float64)
    sliced = torch.randn(8, 32, 3, 3).to("cuda")[:, ::2]
    untouched.after_failing("not supported", nhwc.convert_weights, [weight, sliced])
    # Staged: the order of its filters is neither.
    permuted = nn.Parameter(torch.randn(16, 8, 3, 3).to("cuda").transpose(0, 1))
    untouched = Untouched(weight, permuted)
    assert nhwc.ops.plan_weights([permuted]) == [Outcome.IN_PLACE]
    untouched.after_failing("not supported", nhwc.convert_weights_, [weight, permuted])


def test_empty_weights_and_lists_launch_nothing():
    assert nhwc.convert_weights([]) == nhwc.convert_weights_([]) == []
    for shape in ((0, 3, 3, 3), (4, 0, 3, 3), (4, 3, 3, 0, 3)):
        for dtype in (None, torch.bfloat16):
            out = nhwc.convert_weight(parameter(shape), dtype=dtype)
            assert out.stride() == canonical_strides(shape, FORMATS[len(shape)])
        weight = parameter(shape)
        assert nhwc.convert_weight_(weight) <= Outcome.RESTRIDED
    assert take_launches() == []


@pytest.mark.parametrize("current", [0, 1])
def test_a_list_over_devices_is_one_launch_on_each(current):
    torch.cuda.set_device(current)
    shapes = [(8, 16, 3, 3), (5, 7, 3, 3), (4, 6, 3, 3, 3), (6, 4, 1, 1)] * 10
    places = ["cuda:0", "cpu", "cuda:1", "cuda:1", "cuda:0", "cuda:0", "cpu"]
    weights = [random_weight(shape) for shape in shapes]
    parameters = [parameter_of(weight, place) for weight, place in zip(weights, itertools.cycle(places))]
    on_device = [sum(p.device == torch.device("cuda", d) for p in parameters) for d in range(2)]
    results = nhwc.convert_weights(parameters)
    for weight, each, result in zip(weights, parameters, results):
        assert result.device == each.device
        reference.assert_same(of_host(result), reference.convert_weight(weight))
    assert sorted((launch.device, launch.weights) for launch in take_launches()) == [*enumerate(on_device)]
    outcomes = nhwc.convert_weights_(parameters)
    for weight, each, outcome in zip(weights, parameters, outcomes):
        assert outcome == (Outcome.RESTRIDED if weight.shape[2:] == (1, 1) else Outcome.IN_PLACE)
        reference.assert_same(of_host(each), reference.convert_weight(weight))
    assert sorted(launch.device for launch in take_launches()) == [0, 1]
    assert torch.cuda.current_device() == current


@pytest.mark.parametrize("convert", [nhwc.convert_weights, nhwc.convert_weights_])
def test_launches_go_to_the_current_stream_of_the_weights_device(convert):
    streams = [torch.cuda.Stream(f"cuda:{device}") for device in range(2)]
    values = random_weight((8, 16, 3, 3))
    weights = [parameter_of(values, f"cuda:{device}") for device in range(2)]
    with torch.cuda.stream(streams[1]):
        assert torch.cuda.current_device() == 1
        results = convert(weights)
        assert torch.cuda.current_device() == 1
    assert {launch.device: launch.stream for launch in take_launches()} == {0: 0, 1: streams[1].cuda_stream}
    for result in weights if convert is nhwc.convert_weights_ else results:
        reference.assert_same(of_host(result), reference.convert_weight(values))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_permuted_in_place(shape):
    keeps_order = shape[1] == 1 or all(size == 1 for size in shape[2:]) or 0 in shape
    for dtype in ALL_DTYPES:
        values = random_weight(shape, dtype)
        weight = parameter_of(values)
        pointer = weight.data_ptr()
        for memory_format in (None, FLAT):
            expected = reference.convert_weight(values, memory_format)
            is_kept = weight.stride() == expected.stride()
            outcome = Outcome.UNCHANGED if is_kept else Outcome.RESTRIDED if keeps_order else Outcome.IN_PLACE
            assert nhwc.ops.plan_weights([weight], memory_format) == [outcome]
            assert nhwc.convert_weight_(weight, memory_format) == outcome
            assert len(take_launches()) == (outcome == Outcome.IN_PLACE)
            reference.assert_same(of_host(weight), expected)
            assert weight.data_ptr() == pointer


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 1027, 7, 7), torch.float32), ((9, 257, 5, 5), torch.float64)], ids=str
)
def test_filters_that_fit_the_shared_memory_of_a_block_need_no_other(shape, dtype, device):
    weight = parameter(shape, device, dtype)
    expected = reference.convert_weight(of_host(weight))
    assert extra_bytes(lambda: nhwc.convert_weight_(weight, storage="reuse")) == 0
    reference.assert_same(of_host(weight), expected)
    (launch,) = take_launches()
    assert not launch.is_long
    assert launch.shared_bytes > PLAIN_SHARED_BYTES


LONG = [((3, 4096, 5, 5), torch.float64), ((9, 5001, 5, 5), torch.float32), ((2, 3, 300, 301), torch.float32)]
LONG += [((9, 5003, 3, 3, 3), torch.bfloat16), ((3, 70001, 2, 2), torch.uint8), ((2, 1030, 7, 7), torch.complex128)]


@pytest.mark.parametrize(("shape", "dtype"), LONG, ids=str)
def test_longer_filters_go_through_scratch_memory(shape, dtype):
    weight = parameter(shape, dtype=dtype)
    values, pointer = of_host(weight), weight.data_ptr()
    scratch = min(shape[0], PROCESSORS) * -(-values[0].nbytes // 256) * 256
    for memory_format in (None, FLAT):
        needs = extra_bytes(lambda memory_format=memory_format: nhwc.convert_weight_(weight, memory_format))
        assert needs == (-(-scratch // 512) * 512 if IS_CACHED else scratch)
        reference.assert_same(of_host(weight), reference.convert_weight(values, memory_format))
        assert weight.data_ptr() == pointer
        assert [launch.is_long for launch in take_launches()] == [1]


def test_storages_that_something_else_holds_are_left_alone():
    memory = torch.randn(2, 8, 16, 3, 3).to("cuda")
    cases = [
        (lambda weight: weight, "auto", Outcome.IN_PLACE),
        (lambda weight: weight, "reuse", Outcome.IN_PLACE),
        (lambda weight: weight, "fresh", Outcome.COPIED),
        (lambda weight: (weight, weight.detach()), "auto", Outcome.COPIED_HELD),
        (lambda weight: (weight, nn.ParameterList([weight]).state_dict()), "auto", Outcome.COPIED_HELD),
        (lambda weight: (weight, weight.detach().untyped_storage()), "auto", Outcome.COPIED_HELD),
        (lambda weight: nn.Parameter(torch.from_dlpack(Capsule(weight.detach()))), "auto", Outcome.COPIED_FOREIGN),
        (lambda weight: nn.Parameter(memory[1]), "fresh", Outcome.COPIED),
    ]
    for arrange, storage, outcome in cases:
        arranged = arrange(parameter())
        weight, held = arranged if isinstance(arranged, tuple) else (arranged, None)
        expected, pointer = reference.convert_weight(of_host(weight)), weight.data_ptr()
        assert nhwc.convert_weight_(weight, storage=storage) == outcome
        assert (weight.data_ptr() == pointer) == (outcome == Outcome.IN_PLACE)
        reference.assert_same(of_host(weight), expected)
        if isinstance(held, torch.Tensor):
            reference.assert_same(of_host(held), expected.contiguous())


class Capsule:
    """Memory as another library would hand it over."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_gradients_follow_in_the_same_launch():
    weight = parameter()
    weight.grad = random_weight(weight.shape).to("cuda")
    gradient, pointer = weight.grad, weight.grad.data_ptr()
    expected = [reference.convert_weight(of_host(t)) for t in (weight, gradient)]
    assert nhwc.convert_weight_(weight) == Outcome.IN_PLACE
    assert [launch.weights for launch in take_launches()] == [2]
    assert weight.grad is gradient
    assert gradient.data_ptr() == pointer
    for tensor, each in zip((weight, gradient), expected):
        reference.assert_same(of_host(tensor), each)


@pytest.mark.parametrize(("driver", "launches"), [(12000, 10), (12010, 2), (13000, 2)])
def test_a_thousand_weights(driver, launches):
    emulation.driver_version = driver
    values = [random_weight((3, 4, 3, 3)) for _ in range(1000)]
    weights = [parameter_of(each) for each in values]
    results = nhwc.convert_weights(weights)
    assert nhwc.convert_weights_(weights) == [Outcome.IN_PLACE] * 1000
    for each, weight, result in zip(values, weights, results):
        expected = reference.convert_weight(each)
        reference.assert_same(of_host(weight), expected)
        reference.assert_same(of_host(result), expected)
    taken = [launch.weights for launch in take_launches()]
    assert len(taken) == 2 * launches
    assert sum(taken[:launches]) == sum(taken[launches:]) == 1000


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.Conv2d(64, 128, 3, groups=2))
        self.head = nn.ModuleList([nn.Conv2d(128, 32, 1), nn.ConvTranspose2d(32, 16, 3), nn.Conv3d(8, 8, 3)])
        self.linear = nn.Linear(4, 4)

    def layouts(self):
        return [tensor.stride() for tensor in self.parameters()]


def assert_values_are_those_of(model, plain):
    for (name, tensor), expected in zip(model.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(tensor.cpu(), expected), name


def test_a_model_is_one_launch_there_and_back():
    plain = Model()
    model = copy.deepcopy(plain).to("cuda")
    layouts = model.layouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for tensor in model.parameters():
        tensor.grad = torch.randn(tensor.shape).to("cuda")
        optimizer.state[tensor]["momentum_buffer"] = torch.randn(tensor.shape).to("cuda")
    weight = model.body[0].weight
    followers = [weight.grad, optimizer.state[weight]["momentum_buffer"]]
    expected = [reference.convert_weight(of_host(follower)) for follower in followers]
    assert nhwc.ops.plan_weights([layer.weight for layer in (model.body[0], model.head[0])]) == [
        Outcome.IN_PLACE,
        Outcome.RESTRIDED,
    ]
    report = nhwc.convert_(model, optimizer=optimizer)
    # The one tap of head[0] moves nothing; what moves takes its gradient and its momentum with it.
    assert [launch.weights for launch in take_launches()] == [4 * 3]
    assert_values_are_those_of(model, plain)
    assert weight is model.body[0].weight
    for follower, each in zip(followers, expected):
        reference.assert_same(of_host(follower), each)
    for layer in (*model.body[::2], *model.head):
        assert layer.weight.stride() == canonical_strides(layer.weight.shape, channels_last_of(layer.weight))
    nhwc.convert_(model, optimizer=optimizer)
    assert take_launches() == []
    report.revert(optimizer=optimizer)
    assert [launch.weights for launch in take_launches()] == [4 * 3]
    assert model.layouts() == layouts
    assert_values_are_those_of(model, plain)


class Graph:
    """What a stream gets in a with statement, recorded by the runtime: PyTorch's own class begins with a kernel."""

    def __init__(self, stream):
        self.stream, self.graph, self.executable = stream, c_void_p(), c_void_p()

    def __enter__(self):
        assert library.cudaStreamBeginCapture(c_void_p(self.stream.cuda_stream), 0) == 0
        return self

    def __exit__(self, *_):
        assert library.cudaStreamEndCapture(c_void_p(self.stream.cuda_stream), ctypes.byref(self.graph)) == 0
        assert library.cudaGraphInstantiateWithFlags(ctypes.byref(self.executable), self.graph, c_uint64(0)) == 0

    def replay(self):
        assert library.cudaGraphLaunch(self.executable, c_void_p(self.stream.cuda_stream)) == 0


def test_functional_operators_are_recorded_in_a_graph():
    weights = [parameter().requires_grad_(False) for _ in range(3)]
    out = torch.empty(weights[0].shape, device="cuda", memory_format=CL)
    before = of_host(out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Graph(stream) as graph:
        results = nhwc.convert_weights(weights, dtype=torch.bfloat16)
        nhwc.ops.copy_weight_(out, weights[0])
    reference.assert_same(of_host(out), before)
    for _ in range(2):
        values = [random_weight(weight.shape) for weight in weights]
        for weight, each in zip(weights, values):
            weight.copy_(each)
        graph.replay()
        for result, each in zip(results, values):
            reference.assert_same(of_host(result), reference.convert_weight(each, CL, torch.bfloat16))
        reference.assert_same(of_host(out), reference.convert_weight(values[0]))


def test_nothing_is_permuted_in_a_graph():
    weights = [parameter(device="cuda:1"), parameter()]
    one_tap = parameter((8, 16, 1, 1))
    untouched = Untouched(*weights, one_tap)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Graph(stream):
        for storage in ("auto", "fresh", "reuse"):
            with pytest.raises(RuntimeError, match="expected no CUDA graph to be captured"):
                nhwc.convert_weights_([one_tap, *weights], storage=storage)
        with pytest.raises(RuntimeError, match="CUDA graph"):
            nhwc.convert_weight_(weights[1])
    untouched.check()
    with torch.cuda.stream(stream), Graph(stream):
        assert nhwc.convert_weight_(one_tap) == Outcome.RESTRIDED
        # Another device's stream records nothing.
        assert nhwc.convert_weight_(weights[0]) == Outcome.IN_PLACE
    assert take_launches()[0].device == 1


@pytest.mark.parametrize("launches_that_work", [0, 1])
def test_a_launch_that_fails_before_bytes_are_permuted_changes_nothing(launches_that_work):
    weights = [
        parameter(),
        parameter(dtype=torch.bfloat16),
        parameter((4, 6, 3, 3, 3), "cuda:1"),
        parameter(device="cpu"),
    ]
    for convert, options in (
        (nhwc.convert_weights, {}),
        (nhwc.convert_weights_, {"storage": "fresh"}),
    ):
        untouched = Untouched(*weights)
        emulation.launches_that_work = launches_that_work
        untouched.after_failing("launch failure", convert, weights, **options)
    untouched = Untouched(weights[0], weights[3])
    emulation.launches_that_work = 0
    untouched.after_failing("launch failure", nhwc.convert_weights_, [weights[3], weights[0]])
    # And afterwards all is well.
    assert nhwc.convert_weights_(weights) == [Outcome.IN_PLACE] * 4


def test_without_memory_nothing_changes():
    weights = [parameter(), parameter(device="cpu"), parameter((512, 640, 3, 3))]
    long = parameter((2, 70000, 5, 5))
    untouched = Untouched(*weights, long)
    exhaust_memory(leave=3 << 20)  # enough for the first, whether PyTorch asks for it alone or for 2 MB
    for convert, options in ((nhwc.convert_weights, {}), (nhwc.convert_weights_, {"storage": "fresh"})):
        untouched.after_failing("out of memory", convert, weights, **options)
    torch.cuda.empty_cache()
    # What is permuted in shared memory needs none, but a scratch is asked for before anything is done.
    untouched.after_failing("out of memory", nhwc.convert_weights_, [*weights, long])
    assert take_launches() == []
    assert nhwc.convert_weights_(weights, storage="reuse") == [Outcome.IN_PLACE] * 3


@pytest.mark.parametrize("memory", ["reused", "held"])
def test_a_device_that_fails_takes_only_its_own_weights_with_it(memory):
    """The second of two devices, after the first has permuted its bytes: no weight elsewhere has lost its values."""
    weights = [parameter(device=device) for device in ("cpu", "cuda:0", "cuda:1", "cuda:0")]
    weights.append(parameter((8, 16, 1, 1), "cuda:0"))
    held = weights[3].detach() if memory == "held" else None
    expected = [reference.convert_weight(of_host(weight)) for weight in weights]
    on_second = Untouched(weights[0], weights[2])
    emulation.launches_that_work = 1 if held is None else 2
    on_second.after_failing("launch failure", nhwc.convert_weights_, weights)
    for index in (1, 3, 4):
        reference.assert_same(of_host(weights[index]), expected[index])
    assert nhwc.convert_weights_(weights)[1] == Outcome.UNCHANGED
    for weight, each in zip(weights, expected):
        reference.assert_same(of_host(weight), each)


def take_steps():
    """Return the steps of the norms' launches since the last call, by their numbers in cuda/norm_plan.h."""
    return [-1 - launch.elements for launch in take_launches()]


# Norms: one channel in each group and more, rows that fill vectors or do not, chunks and single rows.
NORMS = [((2, 32, 9, 9, 9), 32), ((2, 24, 40, 40), 4), ((3, 33, 7, 5), 3), ((4, 640, 2, 2), 32), ((5, 8, 1, 1), 2)]


@pytest.fixture
def norms_on(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")


class NormCall:
    """A call of group norm, or with one channel in each group of instance norm, and what it has to return."""

    def __init__(self, shape, groups, dtype=torch.float32, device="cuda"):
        torch.manual_seed(0)
        memory_format = FORMATS[len(shape)]
        host = [torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])]
        host = [each.to(dtype) for each in host]
        grad = torch.randn(shape).to(dtype)
        exact = [each.double().requires_grad_() for each in host]
        out = F.group_norm(exact[0], groups, *exact[1:])
        self.expected = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
        host[0], grad = (each.to(memory_format=memory_format) for each in (host[0], grad))
        self.tensors = [each.to(device).requires_grad_() for each in host]
        self.groups, self.dtype, self.memory_format, self.grad = groups, dtype, memory_format, grad.to(device)

    def __call__(self):
        if self.groups == self.tensors[0].shape[1]:
            input, weight, bias = self.tensors
            return nhwc.functional.instance_norm(input, weight=weight, bias=bias)
        return nhwc.functional.group_norm(self.tensors[0], self.groups, *self.tensors[1:])

    def backward(self, out):
        return torch.autograd.grad(out, self.tensors, self.grad)

    def check(self, *results):
        room = {torch.float64: 1e-10, torch.float32: 1e-4}.get(self.dtype, 2e-2)
        for result, expected in zip(results, self.expected):
            assert (result.dtype, result.device) == (self.dtype, self.tensors[0].device)
            assert (of_host(result).double() - expected).norm() <= room * expected.norm()
        for result in results[:2]:
            assert result.is_contiguous(memory_format=self.memory_format)


@pytest.mark.usefixtures("norms_on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "groups"), NORMS, ids=str)
def test_norms_and_their_gradients(shape, groups, dtype):
    call = NormCall(shape, groups, dtype)
    out = call()
    call.check(out, *call.backward(out))
    assert take_steps() in ([0, 1, 2, 3, 4, 5, 6], [7, 8, 6])


@pytest.mark.usefixtures("norms_on")
@pytest.mark.parametrize(("side", "forward", "of_input"), [(40, [0, 1, 2], [3, 4, 5]), (9, [7], [8])])
def test_gradients_of_norms_that_nobody_needs_are_not_computed(side, forward, of_input):
    call = NormCall((2, 24, side, side), 4)
    out = call()
    assert take_steps() == forward
    input, *parameters = call.tensors
    (gradient,) = torch.autograd.grad(out, [input], call.grad, retain_graph=True)
    assert take_steps() == of_input
    gradients = torch.autograd.grad(out, parameters, call.grad)
    assert take_steps() == [3, 4, 6]
    call.check(out, gradient, *gradients)


@pytest.mark.usefixtures("norms_on")
def test_norms_run_on_the_current_stream_of_their_device():
    call, stream = NormCall((2, 24, 9, 9), 4, device="cuda:1"), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        out = call()
        assert torch.cuda.current_device() == 0
        call.check(out, *call.backward(out))
    assert {(launch.device, launch.stream) for launch in take_launches()} == {(1, stream.cuda_stream)}


@pytest.mark.skipif(not IS_CACHED, reason="without PyTorch's cache, scratch memory is gone at the graph's replay")
@pytest.mark.usefixtures("norms_on")
def test_norms_are_recorded_in_a_graph():
    call, stream = NormCall((2, 24, 9, 9), 4), torch.cuda.Stream()
    with torch.cuda.stream(stream), Graph(stream) as graph:
        out = call()
        gradients = call.backward(out)
    for _ in range(2):
        graph.replay()
        call.check(out, *gradients)


@pytest.mark.usefixtures("norms_on")
def test_a_norm_whose_launch_fails_raises():
    call = NormCall((2, 24, 9, 9), 4)
    emulation.launches_that_work = 0
    with pytest.raises(RuntimeError, match="launch failure"):
        call()
    emulation.launches_that_work = -1
    call.check(call())


@pytest.mark.usefixtures("norms_on")
def test_norms_of_a_model_are_replaced():
    layers = nn.GroupNorm(2, 8), nn.InstanceNorm3d(8, affine=True), nn.GELU(), nn.Conv3d(8, 4, 1)
    model = nn.Sequential(nn.Conv3d(4, 8, 3, bias=False), *layers)
    plain, volume = copy.deepcopy(model), torch.randn(2, 8, 5, 5, 5)
    nhwc.convert_(model.to("cuda"), preserve=True)
    names = [type(layer).__name__.startswith("Preserving") for layer in model]
    assert names == [False, True, True, False, True]
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda")
    for layer, expected in zip(model[1:3], plain[1:3]):
        torch.testing.assert_close(of_host(layer(on_device)), expected(volume))


@pytest.fixture
def small_ones_wait(monkeypatch):
    for name in ("_FEWEST", "_FEWEST_ON_CUDA", "_FEWEST_CAST"):
        monkeypatch.setattr(pending, name, 0)


WAITING = {
    "group": (lambda: nn.GroupNorm(2, 8), torch.float32, [0, 1]),
    "group in bfloat16": (lambda: nn.GroupNorm(2, 8), torch.bfloat16, [0, 1]),
    "instance": (lambda: nn.InstanceNorm3d(8, affine=True), torch.float32, [0, 1]),
    "batch": (lambda: nn.BatchNorm3d(8, momentum=0.3), torch.float32, [0, 1]),
    "batch in bfloat16": (lambda: nn.BatchNorm3d(8), torch.bfloat16, [0, 1]),
    "batch in evaluation": (lambda: nn.BatchNorm3d(8).eval(), torch.float32, [9]),
}
ACTIVATIONS = {"relu": nn.ReLU(inplace=True), "leaky": nn.LeakyReLU(0.2), "silu": nn.SiLU(), "gelu": nn.GELU()}
# PyTorch's own kernels would make gradients of slopes of the sums.
ACTIVATIONS |= {"slopes": nn.PReLU(8).requires_grad_(False), "slope": nn.PReLU().requires_grad_(False)}


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", WAITING)
def test_a_norm_and_its_activation_are_one_pass(kind, activation):
    make, dtype, statistics = WAITING[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(make(), copy.deepcopy(ACTIVATIONS[activation])).double()
    for parameter in plain.parameters():
        parameter.data = torch.randn_like(parameter).to(dtype).double()
    plain[0].num_batches_tracked = None  # which PyTorch's own kernel would count
    volume, grad = torch.randn(2, 8, 5, 6, 7).to(dtype), torch.randn(2, 8, 5, 6, 7).to(dtype)
    model = copy.deepcopy(plain).to(dtype).to("cuda")
    nhwc.convert_(model)
    exact = volume.double().requires_grad_()
    expected = plain(exact)
    expected.backward(grad.double())
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda").requires_grad_()
    take_launches()
    waiting = model[0](on_device)
    assert (type(waiting).__name__, waiting.device.type, take_steps()) == ("Pending", "cuda", statistics)
    out = model[1](waiting)
    assert take_steps() == [2]
    assert out.is_contiguous(memory_format=torch.channels_last_3d)
    given = grad.to(memory_format=torch.channels_last_3d).to("cuda")
    gradients = torch.autograd.grad(out, [on_device, *model[0].parameters()], given)
    assert take_steps() == [3, 4, 5, 6]
    for result, each in zip((out, *gradients), (expected, exact.grad, plain[0].weight.grad, plain[0].bias.grad)):
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
        torch.testing.assert_close(of_host(result).double(), each, **close)
    for ours, theirs in zip(model.buffers(), plain.buffers()):
        torch.testing.assert_close(of_host(ours).double(), theirs.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_under_autocast_a_group_norm_writes_float_and_reads_half():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    model = copy.deepcopy(plain).to("cuda")
    nhwc.convert_(model)
    volume = torch.randn(2, 8, 5, 6, 7).bfloat16()
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda").requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = model(on_device)
    exact = volume.float().requires_grad_()
    expected = plain(exact)
    assert out.dtype == torch.float32
    torch.testing.assert_close(of_host(out), expected)
    grad = torch.randn(2, 8, 5, 6, 7)
    expected.backward(grad)
    given = grad.to(memory_format=torch.channels_last_3d).to("cuda")
    (gradient,) = torch.autograd.grad(out, [on_device], given)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(of_host(gradient).float(), exact.grad, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_a_sum_and_its_activation_are_in_the_pass_of_the_norm():
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()).to("cuda")
    nhwc.convert_(model)
    volume, residual = (torch.randn(2, 8, 5, 6, 7).to(memory_format=torch.channels_last_3d) for _ in range(2))
    take_launches()
    with torch.no_grad():
        out = model[1](model[0](volume.to("cuda")) + residual.to("cuda"))
    assert take_steps() == [0, 1, 2]
    torch.testing.assert_close(of_host(out), F.relu(F.group_norm(volume, 2) + residual))


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_a_result_that_waits_is_computed_on_the_stream_of_its_norm():
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()).to("cuda")
    nhwc.convert_(model)
    volume = torch.randn(2, 8, 5, 6, 7).to(memory_format=torch.channels_last_3d)
    stream, on_device = torch.cuda.Stream(), volume.to("cuda")
    take_launches()
    with torch.no_grad():
        waiting = model[0](on_device)
        with torch.cuda.stream(stream):
            out = model[1](waiting)
    assert {launch.stream for launch in take_launches()} == {0}
    torch.testing.assert_close(of_host(out), F.relu(F.group_norm(volume, 2)))


# The steps of depthwise convolutions follow those of norms.
CONVOLVE, CHUNKS, MERGE = 10, 11, 12


@pytest.mark.usefixtures("norms_on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "kernel", "device"),
    [((2, 32, 5, 6, 9), 3, "cuda"), ((1, 36, 6, 5, 8), 5, "cuda:1"), ((1, 5, 7, 4, 9), 7, "cuda")],
)
def test_depthwise_volumes_and_their_gradients(shape, kernel, device, dtype):
    channels, padding = shape[1], kernel // 2
    host = [torch.randn(each).to(dtype) for each in (shape, (channels, 1, *[kernel] * 3))]
    grad, exact = torch.randn(shape).to(dtype), [each.double().requires_grad_() for each in host]
    out = F.conv3d(*exact, None, 1, padding, 1, channels)
    expected = out.detach(), *torch.autograd.grad(out, exact, grad.double())
    given = [each.to(memory_format=torch.channels_last_3d).to(device) for each in (*host, grad)]
    input, weight = (each.requires_grad_() for each in given[:2])
    out = nhwc.functional.conv3d(input, weight, None, 1, padding, 1, channels)
    assert take_steps() == [CONVOLVE]
    results = out, *torch.autograd.grad(out, (input, weight), given[2], retain_graph=True)
    assert take_steps() == [CONVOLVE, CHUNKS, MERGE]
    for result, each in zip(results, expected):
        assert (of_host(result).double() - each).norm() <= (1e-6 if dtype == torch.float32 else 5e-3) * each.norm()
    assert all(result.is_contiguous(memory_format=torch.channels_last_3d) for result in results)
    torch.autograd.grad(out, input, given[2], retain_graph=True)
    assert take_steps() == [CONVOLVE]
    torch.autograd.grad(out, weight, given[2])
    assert take_steps() == [CHUNKS, MERGE]


@pytest.mark.usefixtures("norms_on")
def test_depthwise_volumes_of_a_model_are_replaced():
    model = nn.Sequential(nn.Conv3d(4, 4, 3, 2, 1, groups=4), nn.Conv3d(4, 4, 3, bias=False))
    plain, volume = copy.deepcopy(model), torch.randn(2, 4, 5, 6, 9)
    plan = nhwc.plan(model.to("cuda"))
    assert [row.reason for row in plan.layers] == [None, nhwc.Reason.OTHER_DEVICE]
    assert "1 Conv3d to replace" in str(plan)
    report = nhwc.convert_(model)
    assert [type(layer).__name__.startswith("Preserving") for layer in model] == [True, False]
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value not in report.remarks
    out = model[0](volume.to(memory_format=torch.channels_last_3d).to("cuda"))
    torch.testing.assert_close(of_host(out), plain[0](volume))
    report.revert()
    report = nhwc.convert_(model, preserve=False)
    assert [type(layer).__name__ for layer in model] == ["Conv3d", "Conv3d"]
    assert nhwc.Reason.DEPTHWISE_VOLUMES.value in " ".join(str(report).split())


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
@pytest.mark.parametrize("kind", WAITING)
def test_a_norm_has_the_bias_of_the_convolution_before_it(kind):
    """That of a depthwise volume, which PyTorch has no kernel for here, either."""
    make, dtype, statistics = WAITING[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, groups=8), make(), nn.LeakyReLU(0.2)).double()
    for parameter in plain.parameters():
        parameter.data = (torch.randn_like(parameter) * 2).to(dtype).double()
    plain[1].num_batches_tracked = None  # which PyTorch's own kernel would count
    plain[0].bias.requires_grad_(False)  # PyTorch's own kernels would make its gradient: a sum, or zeros
    volume, grad = torch.randn(2, 8, 5, 6, 7).to(dtype), torch.randn(2, 8, 5, 6, 7).to(dtype)
    model = copy.deepcopy(plain).to(dtype).to("cuda")
    nhwc.convert_(model)
    exact = volume.double().requires_grad_()
    expected = plain(exact)
    expected.backward(grad.double())
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda").requires_grad_()
    take_launches()
    convolved = model[0](on_device)
    assert (type(convolved).__name__, take_steps()) == ("Pending", [CONVOLVE])
    waiting = model[1](convolved)
    assert (type(waiting).__name__, take_steps()) == ("Pending", statistics)
    out = model[2](waiting)
    assert take_steps() == [2]
    given = grad.to(memory_format=torch.channels_last_3d).to("cuda")
    leaves = [[on_device, *model.parameters()], [exact, *plain.parameters()]]
    ours, theirs = ([each for each in all if each.requires_grad] for all in leaves)
    gradients = torch.autograd.grad(out, ours, given)
    assert take_steps() == [3, 4, 5, 6, CONVOLVE, CHUNKS, MERGE]
    for result, each in zip((out, *gradients), (expected, *(each.grad for each in theirs)), strict=True):
        room = 1e-4 if dtype == torch.float32 else 0.02
        assert (of_host(result).double() - each).norm() <= room * each.norm() + 1e-6
    for ours, theirs in zip(model.buffers(), plain.buffers()):
        torch.testing.assert_close(of_host(ours).double(), theirs.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_under_autocast_a_norm_takes_a_bias_in_float():
    plain = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    model, volume, bias = copy.deepcopy(plain).to("cuda"), torch.randn(2, 8, 5, 6, 7).bfloat16(), torch.randn(8)
    nhwc.convert_(model)
    operands = volume.to(memory_format=torch.channels_last_3d).to("cuda"), bias.to("cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        convolved = torch.ops.nhwc.bias_waiting(*operands)
        out = model(pending._as_pending(convolved, pending.WaitingBias(model, operands, ())))
    assert out.dtype == torch.float32
    torch.testing.assert_close(of_host(out), plain(volume.float() + bias.view(-1, 1, 1, 1)))


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_a_norm_of_a_bias_and_a_sum_are_one_pass():
    plain = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8))
    model, volume = copy.deepcopy(plain).to("cuda"), torch.randn(2, 8, 5, 6, 7)
    nhwc.convert_(model)
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda")
    take_launches()
    with torch.no_grad():
        out = F.relu(model(on_device) + on_device)
        assert take_steps() == [CONVOLVE, 0, 1, 2]
        torch.testing.assert_close(of_host(out), F.relu(plain(volume) + volume))


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
@pytest.mark.parametrize("residual", [False, True])
def test_a_bias_and_what_follows_are_one_pass(residual):
    plain = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, groups=8), nn.SiLU())
    model, volume = copy.deepcopy(plain).to("cuda"), torch.randn(2, 8, 5, 6, 7)
    nhwc.convert_(model)
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda")
    take_launches()
    with torch.no_grad():
        out = model[1](model[0](on_device) + on_device if residual else model[0](on_device))
        assert take_steps() == [CONVOLVE, 9, 2]
        torch.testing.assert_close(of_host(out), F.silu(plain[0](volume) + (volume if residual else 0)))


@pytest.mark.usefixtures("norms_on", "small_ones_wait")
def test_a_normalisation_over_channels_has_the_bias_of_the_convolution_before_it():
    plain = nn.Conv3d(8, 8, 3, padding=1, groups=8)
    model, volume = nn.Sequential(copy.deepcopy(plain)).to("cuda"), torch.randn(2, 8, 5, 6, 7)
    nhwc.convert_(model)
    on_device, gamma = volume.to(memory_format=torch.channels_last_3d).to("cuda"), torch.randn(8)
    take_launches()
    with torch.no_grad():
        convolved = model[0](on_device)
        waiting = pending.pending_normalization(model, convolved, gamma.to("cuda"), None, 2.0, 1e-12)
        assert take_steps() == [CONVOLVE]
        out = F.silu(waiting)
        assert [launch.elements for launch in take_launches()] == [-102]
        expected = F.silu(F.normalize(plain(volume), dim=1) * 2 * gamma.view(-1, 1, 1, 1))
    torch.testing.assert_close(of_host(out), expected)


COPIED, SUMMED = -100, -101
RESAMPLINGS = [
    ((2, 24, 9, 7), lambda of, x: of.pad(x, (1, 2, 3, 0), "reflect"), COPIED),
    ((2, 3, 4, 5, 6), lambda of, x: of.pad(x, (1, 2, 3, 0, 4, 9), "replicate"), COPIED),
    ((2, 33, 9, 7), lambda of, x: of.pad(x, (1, 2, 3, 0), "circular"), COPIED),
    ((1, 16, 5, 6), lambda of, x: of.interpolate(x, scale_factor=2), COPIED),
    ((2, 16, 5, 6, 3), lambda of, x: of.interpolate(x, (7, 9, 2), mode="nearest-exact"), COPIED),
    ((2, 8, 5, 6), lambda of, x: of.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"), SUMMED),
    ((2, 5, 5, 6, 3), lambda of, x: of.interpolate(x, scale_factor=2, mode="trilinear"), SUMMED),
    ((1, 8, 3, 4, 3), lambda of, x: of.interpolate(x, (5, 1, 9), mode="trilinear", align_corners=True), SUMMED),
    ((1, 8, 3, 4, 3), lambda of, x: of.interpolate(x, None, 1.5, "trilinear", None, True), SUMMED),
]


def resample(call, host, dtype=torch.float32, device="cuda"):
    """Return an output and a gradient on a device, and what they have to be."""
    torch.manual_seed(0)
    host = host.to(dtype).to(memory_format=FORMATS[host.dim()])
    exact = host.double().requires_grad_()
    expected = call(F, exact)
    grad = torch.randn_like(expected).to(dtype).to(memory_format=FORMATS[host.dim()])
    x = host.to(device).requires_grad_()
    out = call(nhwc.functional, x)
    (back,) = torch.autograd.grad(out, x, grad.to(device), retain_graph=True)
    return (out, back), (expected.detach(), torch.autograd.grad(expected, exact, grad.double())[0])


@pytest.mark.usefixtures("norms_on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "call", "kind"), RESAMPLINGS)
def test_padding_and_interpolation(shape, call, kind, dtype):
    take_launches()
    found, expected = resample(call, torch.randn(shape), dtype)
    assert [launch.elements for launch in take_launches()] == [kind, SUMMED]
    room = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
    for result, right in zip(found, expected):
        assert result.is_contiguous(memory_format=FORMATS[len(shape)])
        torch.testing.assert_close(of_host(result).double(), right, rtol=room, atol=room)


@pytest.mark.usefixtures("norms_on")
def test_pads_of_other_dtypes_and_parts():
    x = torch.randint(0, 100, (2, 6, 7, 8)).to(memory_format=torch.channels_last)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.complex128):
        on_device = x.to(dtype).to("cuda")
        take_launches()
        out = nhwc.functional.pad(on_device, (3, 1, 2, 4), "circular")
        assert [launch.elements for launch in take_launches()] == [COPIED]
        assert torch.equal(of_host(out), F.pad(x.to(dtype), (3, 1, 2, 4), "circular"))
    z = torch.randn(1, 3, 4, 5, dtype=torch.complex64).to(memory_format=torch.channels_last)
    found = nhwc.functional.pad(w := z.to("cuda").requires_grad_(), (1, 0, 2, 1), "reflect")
    expected = F.pad(z.requires_grad_(), (1, 0, 2, 1), "reflect")
    grad = torch.randn_like(expected)
    (back,) = torch.autograd.grad(found, w, grad.to("cuda"))
    torch.testing.assert_close(of_host(back), torch.autograd.grad(expected, z, grad)[0])


@pytest.mark.usefixtures("norms_on")
def test_pads_and_interpolations_of_a_model_are_replaced():
    layers = (nn.ReflectionPad3d(1), nn.Upsample(scale_factor=2, mode="trilinear"), nn.Upsample(9, mode="nearest"))
    model, volume = nn.Sequential(nn.Conv3d(4, 8, 3), *layers, nn.ZeroPad3d(1)), torch.randn(2, 8, 5, 5, 5)
    nhwc.convert_(model.to("cuda"), preserve=True)
    names = [type(layer).__name__.startswith("Preserving") for layer in model]
    assert names == [True, True, True, True, False]
    on_device = volume.to(memory_format=torch.channels_last_3d).to("cuda")
    for layer, stock in zip(model[1:4], layers):
        torch.testing.assert_close(of_host(layer(on_device)), stock(volume))


@pytest.mark.usefixtures("norms_on")
def test_resampling_runs_on_the_current_stream_of_its_device():
    _, call, _ = RESAMPLINGS[5]
    stream = torch.cuda.Stream("cuda:1")
    take_launches()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        found, expected = resample(call, torch.randn(2, 8, 5, 6), device="cuda:1")
    launches = take_launches()
    assert {(launch.device, launch.stream) for launch in launches} == {(1, stream.cuda_stream)}
    torch.testing.assert_close(of_host(found[0]).double(), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("norms_on")
def test_resampling_is_recorded_in_a_graph():
    _, call, _ = RESAMPLINGS[6]
    host, stream = torch.randn(2, 5, 5, 6, 3), torch.cuda.Stream()
    x = host.to(memory_format=torch.channels_last_3d).to("cuda")
    with torch.cuda.stream(stream), Graph(stream) as graph:
        out = call(nhwc.functional, x)
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(of_host(out), call(F, host))


def test_resampling_that_is_switched_off_is_pytorchs(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    for shape, call, _ in RESAMPLINGS:
        with pytest.raises(RuntimeError, match="not supported"):
            call(nhwc.functional, torch.randn(shape).to(memory_format=FORMATS[len(shape)]).to("cuda"))


def test_norms_run_on_measured_architectures_or_as_the_switch_says(monkeypatch, capfd):
    """The first device is one of compute capability 8.0, the second of 9.0."""
    monkeypatch.delenv("TORCH_NHWC_CUDA_NORMS", raising=False)
    assert [nhwc.ops.runs_cuda_norms(f"cuda:{index}") for index in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="not supported"):
        NormCall((2, 24, 9, 9), 4)()
    if KEEPS_GROUP_NORM:
        capfd.readouterr()
        with pytest.raises(RuntimeError, match="not supported"):
            NormCall((2, 24, 9, 9), 4, device="cuda:1")()
        # The first kernel: nothing has copied the input.
        assert "MomentsChannelsLast" in capfd.readouterr().err
    call = NormCall((2, 24, 9, 9), 24 if KEEPS_GROUP_NORM else 4, device="cuda:1")
    call.check(call())
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    assert not nhwc.ops.runs_cuda_norms("cuda:1")
    with pytest.raises(RuntimeError, match="not supported"):
        call()


def test_pytorchs_norm_gets_one_dtype(capfd):
    """Autocast gives instance norm parameters in float32, which PyTorch's group norm of a GPU does not take."""
    input = torch.randn(2, 8, 1, 1, dtype=torch.bfloat16).to("cuda")
    parameters = [torch.randn(8).to("cuda") for _ in range(2)]
    grad, statistics = torch.ones_like(input, device="cpu").to("cuda"), torch.ones(2, 8).to("cuda")
    backward = (grad, input, statistics, statistics, parameters[0], 8, 1e-5, [True] * 3)
    for call, given in [("native_group_norm", (input, 8, *parameters, 1e-5)), ("native_group_norm_backward", backward)]:
        capfd.readouterr()
        with pytest.raises(RuntimeError, match="not supported"):
            getattr(torch.ops.nhwc, call)(*given)
        assert "copy_kernel" in capfd.readouterr().err  # the first


# --- Qualified on the user's own GPU ---


@pytest.fixture
def unqualified(monkeypatch, tmp_path):
    """Nothing is known of any device; the clock, without PyTorch's own kernels to run, is a test's."""
    monkeypatch.delenv("TORCH_NHWC_CUDA_NORMS", raising=False)
    monkeypatch.setenv("TORCH_NHWC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 8 << 30))
    monkeypatch.setattr(qualification, "_speedup", lambda kind, size, device: 2.0)
    forget()
    yield
    forget()
    emulation.wrong_lane = emulation.device_without_image = -1


def forget():
    qualification._qualified.clear()
    for index in range(2):
        torch.ops.nhwc.set_cuda_norms(torch.device("cuda", index), [])


@pytest.mark.usefixtures("unqualified")
def test_a_gpu_that_is_right_and_fast_runs_norms_from_then_on(tmp_path):
    """Also in processes that read what an earlier one measured."""
    assert not nhwc.ops.runs_cuda_norms("cuda:0")
    found = nhwc.ops.qualify_norms("cuda:0")
    assert (found.right, found.least_bytes) == (found.cases, [0, 0, 0])
    assert nhwc.ops.runs_cuda_norms("cuda:0")
    assert f"right in {found.cases} of {found.cases} cases; group norm 2.0x PyTorch's way" in str(found)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 4096
    take_launches()
    assert nhwc.ops.qualify_norms("cuda:0") is found
    forget()
    assert qualification.kept_qualifications()[0] == str(found)
    assert nhwc.ops.qualify_norms("cuda:0") == found
    assert not take_launches()
    model = nn.Sequential(nn.Conv3d(4, 8, 3), nn.GroupNorm(2, 8)).to("cuda")
    report = nhwc.convert_(model)
    assert "Preserving" in type(model[1]).__name__
    assert f"kernels of norms on {found}" in report.remarks


@pytest.mark.usefixtures("unqualified")
def test_a_gpu_is_measured_in_any_mode():
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        found = nhwc.ops.qualify_norms("cuda:0")
    assert found.right == found.cases
    forget()
    with FakeTensorMode():
        assert nhwc.ops.qualify_norms("cuda:1") is None


@pytest.mark.usefixtures("unqualified")
def test_a_model_on_a_gpu_qualifies_it():
    model = nn.Sequential(nn.Conv3d(4, 8, 3), nn.GroupNorm(2, 8)).to("cuda:0")
    nhwc.plan(model)
    assert torch.device("cuda", 0) in qualification._qualified
    assert nhwc.ops.runs_cuda_norms("cuda:0")


@pytest.mark.usefixtures("unqualified")
@pytest.mark.parametrize(
    ("speedups", "least"), [([1.0, 1.0], -1), ([1.0, 1.5], 32 << 20), ([1.5, 1.0], -1), ([1.1, 1.1], 0)]
)
def test_a_gpu_that_is_slow_runs_norms_from_the_size_on_where_it_gains(speedups, least, monkeypatch):
    of_size = dict(zip(qualification.SIZES, speedups))
    monkeypatch.setattr(qualification, "_speedup", lambda kind, size, device: of_size[size] if kind == "group" else 0.5)
    assert nhwc.ops.qualify_norms("cuda:0").least_bytes == [least, -1, -1]
    assert nhwc.ops.runs_cuda_norms("cuda:0") == (least >= 0)


@pytest.mark.usefixtures("unqualified")
def test_a_gpu_that_is_wrong_in_one_lane_runs_none():
    emulation.wrong_lane = 1
    found = nhwc.ops.qualify_norms("cuda:1")  # of an architecture on which they ran
    assert found.right < found.cases
    assert found.least_bytes == [-1, -1, -1]
    assert not nhwc.ops.runs_cuda_norms("cuda:1")


@pytest.mark.usefixtures("unqualified")
def test_a_gpu_without_an_image_is_not_asked_twice():
    emulation.device_without_image = 0
    assert "no kernel image" in torch.ops.nhwc.missing_cuda_image(torch.device("cuda:0"))
    take_launches()
    assert nhwc.ops.qualify_norms("cuda:0") is None
    assert not take_launches()
    assert not nhwc.ops.runs_cuda_norms("cuda:0")
    weight = random_weight((8, 4, 3, 3), torch.float32).to("cuda:0")
    before = of_host(weight)
    with pytest.raises(RuntimeError, match=r"no code for cuda:0, a GPU of compute capability 8.0: build it on that"):
        nhwc.convert_weights_([weight])
    reference.assert_same(of_host(weight), before)


@pytest.mark.usefixtures("unqualified")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "of another"])
def test_a_file_that_is_damaged_or_foreign_is_measured_again(damage, tmp_path):
    found = nhwc.ops.qualify_norms("cuda:0")
    (file,) = tmp_path.iterdir()
    file.write_text(
        file.read_text().replace('"processors": 4', '"processors": 5') if damage == "of another" else damage
    )
    forget()
    take_launches()
    assert nhwc.ops.qualify_norms("cuda:0") == found
    assert take_launches()


@pytest.mark.usefixtures("unqualified")
def test_processes_that_measure_at_once_leave_one_file(tmp_path):
    device = torch.device("cuda", 0)
    found = nhwc.ops.qualify_norms(device)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: qualification._write(device, found), range(40)):
            assert qualification._read(device) == found
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.usefixtures("unqualified")
def test_what_the_switch_decides_is_not_measured(monkeypatch, tmp_path):
    for switch in ("0", "1"):
        monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", switch)
        assert nhwc.ops.qualify_norms("cuda:0") is None
        assert nhwc.ops.runs_cuda_norms("cuda:0") == (switch == "1")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "measure")
    nhwc.ops.qualify_norms("cuda:0")
    forget()
    take_launches()
    nhwc.ops.qualify_norms("cuda:0")
    assert take_launches()


@pytest.mark.usefixtures("unqualified")
def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_NHWC_CACHE_DIR", str(tmp_path / "file"))
    found = nhwc.ops.qualify_norms("cuda:0")
    assert found.kept == ""
    assert nhwc.ops.runs_cuda_norms("cuda:0")


@pytest.mark.usefixtures("unqualified")
def test_nothing_is_measured_during_a_capture():
    with Graph(stream := torch.cuda.Stream()), torch.cuda.stream(stream):
        assert nhwc.ops.qualify_norms("cuda:0") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("channels", "activation"), [(33, "none"), (64, "silu"), (96, "none")])
def test_normalisation_over_channels(channels, activation, dtype, monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")
    activation = "none" if dtype == torch.float64 else activation
    x = torch.randn(2, channels, 5, 6).to(dtype).to(memory_format=CL)
    leaves = [x, *(torch.randn(channels).to(dtype) for _ in "wb")]
    results = []
    for device in ("cuda", "cpu"):
        given = [each.to(device, copy=True).requires_grad_() for each in leaves]
        out = torch.ops.nhwc.normalize(*given, 3.0, 1e-12, activation)
        results.append([of_host(each) for each in (out, *torch.autograd.grad(out, given, x.to(device)))])
        if device == "cuda":
            assert [launch.elements for launch in take_launches()] == [-102, -103, -7]
    room = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip(*results, strict=True):
        assert float((ours.double() - theirs.double()).norm()) <= room * float(theirs.double().norm())
