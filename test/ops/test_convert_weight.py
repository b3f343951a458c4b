"""convert_weight and convert_weights: values, strides, dtypes, errors."""

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import reference
import sanitized
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ALL_DTYPES, DTYPES, FLOATING_DTYPES, SHAPES, SOURCES, arrange, assert_same, random_weight

import torch_nhwc as nhwc


def formats(weight):
    return [None, torch.contiguous_format, reference.channels_last_of(weight)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_arrangement_converts_to_canonical_strides(shape, source, device):
    for dtypes in DTYPES.values():
        weight = arrange(random_weight(shape, dtypes[0], device), source)
        before = weight.stride(), weight.data_ptr(), reference.bits(weight)
        for memory_format in formats(weight):
            out = nhwc.convert_weight(weight, memory_format)
            assert_same(out, reference.convert_weight(weight, memory_format))
            assert out.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr() or out.numel() == 0
            assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
        assert (weight.stride(), weight.data_ptr()) == before[:2]
        assert torch.equal(reference.bits(weight), before[2])


SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 6e-8, 5.9e-8, 1e-5, 65504.0]
SPECIAL += [65519.99, 65520.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 240.0, 3.3e38, 1 / 3, 2**-149, 2**-150, 0.5**24]


@pytest.mark.parametrize("to", FLOATING_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING_DTYPES, ids=str)
def test_casts_equal_those_of_torch(dtype, to, device):
    special = torch.tensor(SPECIAL * 6, dtype=torch.float64)[: 6 * 3 * 8].view(6, 3, 2, 4).to(dtype).to(device)
    for values in (
        special,
        random_weight((6, 5, 3, 3), dtype, device),
        torch.randn(6, 5, 3, 3, device=device).to(dtype),
    ):
        for source in ("contiguous", "channels_last", "sliced"):
            weight = arrange(values, source)
            for memory_format in formats(weight):
                assert_same(nhwc.convert_weight(weight, memory_format, dtype=to), torch_cast(weight, memory_format, to))


def torch_cast(weight, memory_format, dtype):
    return reference.convert_weight(weight.to(dtype), memory_format)


@pytest.mark.parametrize("examples", [100, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_generated_weights(examples, device):
    """Any order of dimensions in memory, any steps between elements, any offset."""

    @settings(max_examples=examples, deadline=None)
    @given(
        shape=st.tuples(st.integers(0, 9), st.integers(0, 70), *[st.integers(0, 6)] * 2)
        | st.tuples(st.integers(0, 5), st.integers(0, 40), *[st.integers(0, 4)] * 3),
        order=st.randoms(use_true_random=False),
        steps=st.lists(st.integers(1, 2), min_size=5, max_size=5),
        offset=st.integers(0, 5),
        dtype=st.sampled_from(ALL_DTYPES),
        channels_last=st.booleans(),
        threads=st.sampled_from([1, 2]),
    )
    def converts(shape, order, steps, offset, dtype, channels_last, threads):
        dims = list(range(len(shape)))
        order.shuffle(dims)
        stride = [0] * len(shape)
        step = 1
        for d in dims:
            step *= steps[d]
            stride[d] = step
            step *= max(shape[d], 1)
        weight = random_weight((step + offset + 1,), dtype, device).as_strided(shape, stride, offset)
        memory_format = reference.FORMATS[len(shape)] if channels_last else torch.contiguous_format
        torch.set_num_threads(threads)
        assert_same(nhwc.convert_weight(weight, memory_format), reference.convert_weight(weight, memory_format))

    converts()


def test_the_program_that_sanitizers_watch_finds_every_conversion_right(device):
    sanitized.main(device)


@pytest.mark.parametrize("dtype", ["uint1", "uint7", "int6", "bits8", "float4_e2m1fn_x2"])
@pytest.mark.parametrize("source", ["contiguous", "sliced", "permuted"])
def test_dtypes_that_torch_cannot_copy_move_as_integers(dtype, source, device):
    values = torch.randint(0, 256, (5, 6, 3, 3), dtype=torch.uint8, device=device)
    weight = arrange(values, source).view(getattr(torch, dtype))
    out = nhwc.convert_weight(weight)
    assert out.dtype == weight.dtype
    assert_same(out.view(torch.uint8), reference.convert_weight(values))


@pytest.mark.exhaustive
def test_more_elements_than_32_bits_count(device):
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free memory on the GPU")
    weight = torch.empty((2**18 + 3, 8, 32, 32), dtype=torch.uint8, device=device)  # 2^31 + 24576
    weight.view(-1).view(torch.int64).copy_(torch.arange(weight.numel() // 8, device=device))
    out = nhwc.convert_weight(weight)
    assert out.stride() == (8192, 1, 256, 8)
    for filters in (slice(0, 2), slice(2**17, 2**17 + 2), slice(-2, None)):
        assert torch.equal(out[filters], weight[filters])
    torch.ops.nhwc.convert_weight_(weight, storage="reuse")
    assert weight.stride() == out.stride()
    assert torch.equal(weight.permute(0, 2, 3, 1)[-3:], out.permute(0, 2, 3, 1)[-3:])


def test_lazy_conjugate_and_negative_views_are_read_right(device):
    weight = torch.randn(4, 3, 3, 3, dtype=torch.complex64, device=device)
    assert_same(nhwc.convert_weight(weight.conj()), reference.convert_weight(weight.conj().resolve_conj()))
    assert_same(nhwc.convert_weight(weight.conj().imag), reference.convert_weight(weight.conj().imag.resolve_neg()))


def test_lists_keep_order_and_mix_everything(device):
    weights = [
        torch.randn(4, 3, 3, 3, device=device),
        torch.randn(4, 3, 3, 3, 3, device=device).half(),
        torch.empty(0, 3, 1, 1, device="meta"),
        torch.randn(2, 1, 3, 3),
    ]
    for out, weight in zip(nhwc.convert_weights(weights), weights):
        assert out.device == weight.device
        assert out.stride() == reference.canonical_strides(weight.shape, reference.channels_last_of(weight))
        assert out.is_meta or torch.equal(out, weight)
    back = nhwc.convert_weights(weights, torch.contiguous_format, dtype=torch.bfloat16)
    assert [out.dtype for out in back] == [torch.bfloat16] * 4
    assert nhwc.convert_weights([]) == []
    first, second = nhwc.convert_weights([weights[0].requires_grad_(), weights[1]])
    assert not second.requires_grad
    first.sum().backward()
    assert torch.equal(weights[0].grad, torch.ones_like(weights[0]))


@pytest.mark.parametrize("key", ["PrivateUse1", "MPS", "XPU"])
def test_other_devices_are_served_by_torchs_own_copy(key):
    weight = torch.randn(4, 6, 3, 3)[:, ::2]
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    out = torch.ops.nhwc.convert_weight.default.redispatch(keys, weight, None, dtype=torch.float16)
    assert_same(out, reference.convert_weight(weight, dtype=torch.float16))


def nested():
    return torch.nested.nested_tensor([torch.randn(3, 3, 3), torch.randn(3, 2, 3)])


BAD_WEIGHTS = {
    "sparse": (lambda: torch.randn(4, 3, 3, 3).to_sparse(), "expected a strided weight.*layout Sparse"),
    "quantized dtype": (
        lambda: torch.zeros(180, dtype=torch.uint8).view(torch.quint4x2).view(4, 5, 3, 3),
        "expected a strided weight, got a quantized tensor",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.randn(4, 3, 3, 3), 0.1, 0, torch.qint8),
        "expected a strided weight, got a quantized tensor",
    ),
    "nested": (nested, "expected a strided weight, got a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.randn(2, 3, 3), torch.randn(3, 3, 3)], layout=torch.jagged),
        "expected a strided weight, got a nested tensor",
    ),
    "mkldnn": (lambda: torch.randn(4, 3, 3, 3).to_mkldnn(), "expected a strided weight.*layout Mkldnn"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("op", ["convert_weight", "convert_weight_"])
@pytest.mark.parametrize("kind", BAD_WEIGHTS)
@pytest.mark.filterwarnings("ignore")
def test_layouts_that_are_not_strided_raise(kind, op, inference):
    make, message = BAD_WEIGHTS[kind]
    message = f"nhwc::{op}: {message}"
    if kind == "jagged" and inference and op == "convert_weight":
        message = "nhwc.convert_weight"  # without autograd's key the subclass answers first, and names the operator
    weight = make()
    with torch.inference_mode(inference), pytest.raises(NotImplementedError, match=message):
        getattr(torch.ops.nhwc, op)(weight)


BAD_ARGUMENTS = {
    "rank": ((4, 3, 3), None, r"expected a 4D or 5D weight, got 3D: shape \[4, 3, 3\], strides \[9, 3, 1\]"),
    "rank6": ((1, 1, 1, 1, 1, 1), None, "expected a 4D or 5D weight, got 6D"),
    "3d format": ((4, 3, 3, 3), torch.channels_last_3d, "required rank 5 tensor to use channels_last_3d format"),
    "2d format": ((4, 3, 3, 3, 3), torch.channels_last, "required rank 4 tensor to use channels_last format"),
    "preserve": ((4, 3, 3, 3), torch.preserve_format, "expected contiguous_format, channels_last or channels_last_3d"),
}


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("op", ["convert_weight", "convert_weights", "convert_weight_", "convert_weights_"])
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_ranks_and_formats_raise_and_change_nothing(case, op, where):
    shape, memory_format, message = BAD_ARGUMENTS[case]
    weight = torch.randn(shape, device=where)
    good = torch.randn(4, 3, 3, 3)
    before = weight.stride(), good.stride()
    argument = [good, weight] if "weights" in op else weight
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.nhwc, op)(argument, memory_format)
    assert (weight.stride(), good.stride()) == before


@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        (torch.float32, torch.int8),
        (torch.uint8, torch.float32),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.bool, torch.uint8),
    ],
)
def test_casts_beyond_floating_types_raise(dtype, to, device):
    weight = random_weight((4, 3, 3, 3), dtype, device)
    for call in (lambda: nhwc.convert_weight(weight, dtype=to), lambda: nhwc.convert_weights([weight], dtype=to)):
        with pytest.raises(TypeError, match=r"expected a cast between floating types, got .* to .*cast with Tensor.to"):
            call()
    assert_same(nhwc.convert_weight(weight, dtype=dtype), reference.convert_weight(weight))


@pytest.mark.parametrize("wrong", ["nhwc", 2, 7, -1, True, 2.0, [1], {}, torch.half, torch.tensor(2)], ids=repr)
@pytest.mark.parametrize(
    "function",
    [nhwc.convert_weight, nhwc.convert_weights, nhwc.convert_weight_, nhwc.convert_weights_, nhwc.ops.plan_weights],
)
def test_what_is_not_a_memory_format_raises(function, wrong):
    weight = torch.randn(4, 3, 3, 3)
    expected = f"^{function.__name__}: expected memory_format to be a torch.memory_format or its name, got "
    with pytest.raises(TypeError, match=f"{expected}{re.escape(repr(wrong))}$"):
        function(weight if "weights" not in function.__name__ else [weight], wrong)
    assert weight.is_contiguous()


@pytest.mark.parametrize("prefix", ["", "torch."])
def test_names_mean_memory_formats_and_dtypes(prefix):
    weight = torch.randn(4, 3, 3, 3)
    spellings = {"bfloat16": torch.bfloat16, "half": torch.half, "BF16": torch.bfloat16, "fp32": torch.float32}
    for name, (dtype, meant) in product(("channels_last", "contiguous_format"), spellings.items()):
        expected = reference.convert_weight(weight.to(meant), getattr(torch, name))
        assert_same(nhwc.convert_weight(weight, prefix + name, dtype=prefix + dtype), expected)
        assert_same(nhwc.convert_weights([weight], prefix + name, dtype=prefix + dtype)[0], expected)
    assert nhwc.ops.plan_weights([weight], f"{prefix}channels_last") == [nhwc.Outcome.IN_PLACE]
    nhwc.convert_weight_(weight, f"{prefix}channels_last")
    assert weight.stride() == (27, 1, 9, 3)
    nhwc.convert_weights_([weight], f"{prefix}contiguous_format")
    assert weight.is_contiguous()
    for wrong in ("float33", "nn"):
        for call in (
            lambda: nhwc.convert_weight(weight, dtype=wrong),
            lambda: nhwc.convert_weights([weight], dtype=wrong),
        ):
            with pytest.raises(TypeError, match=f"expected dtype to be a torch.dtype or its name, got {wrong!r}"):
                call()


@pytest.mark.parametrize("names", [{"memory_format": "channels_last"}, {"dtype": "bfloat16"}], ids=str)
def test_operators_take_no_names(names):
    """A schema of PyTorch's knows them as numbers alone."""
    [(argument, _)] = names.items()
    with pytest.raises(RuntimeError, match=f"for argument '{argument}' but instead found type 'str'"):
        torch.ops.nhwc.convert_weight(torch.randn(4, 3, 3, 3), **names)


def test_a_memory_format_may_be_an_input_of_a_traced_graph():
    traced = torch.fx.symbolic_trace(lambda weight, memory_format: nhwc.convert_weight(weight, memory_format))
    assert traced(torch.randn(4, 3, 3, 3), torch.channels_last).stride() == (27, 1, 9, 3)


@pytest.mark.parametrize("function", [nhwc.convert_weight, nhwc.convert_weight_])
def test_what_is_no_tensor_raises(function):
    for weight, name in ((torch.nn.Conv2d(3, 4, 3), "Conv2d"), (None, "NoneType"), ([torch.randn(4, 3, 3, 3)], "list")):
        with pytest.raises(TypeError, match=f"^{function.__name__}: expected a weight to be a tensor, got {name}$"):
            function(weight)


def test_a_list_of_ordinary_weights_is_one_call(device):
    """In a thread of its own: other tests may leave a dispatch key in theirs, by which weights go one by one.

    PyTorch does where the sizes or strides of a wrapper subclass change in place: `Dense` is turned on with `Meta` for
    that, and stays on afterwards.
    """
    weights = [torch.randn(4, 3, 3, 3, device=device, requires_grad=True), torch.randn(4, 3, 3, 3, 3, device=device)]

    def calls():
        with torch.profiler.profile() as profile:
            nhwc.convert_weights(weights)
            with torch.autocast(device):
                nhwc.convert_weights(weights)
        return [event.name for event in profile.events() if event.name.startswith("nhwc::")]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(calls).result() == ["nhwc::convert_weights"] * 2


def test_weights_made_in_inference_mode_convert_alike_in_lists_and_alone(device):
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3, device=device))
    (listed,), alone = nhwc.convert_weights([weight]), nhwc.convert_weight(weight)
    assert listed.requires_grad == alone.requires_grad
    reference.assert_same(listed, alone)
