"""What a GPU would make of weights, thread by thread on the CPU: values, and the bytes around them."""

import gpu_model
import pytest
import reference
import torch
from gpu_model import (
    ARGUMENT_BYTES,
    CAST,
    DTYPES,
    ELSEWHERE,
    KINDS,
    SHARED_BYTES,
    SOMEWHERE,
    Limits,
    Weight,
    allot,
    number_of,
    planned,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

# Filters, channels and taps: of real layers, of one channel or tap, and of filters that no shared memory holds.
LAYERS = [(64, 3, 49), (64, 64, 9), (5, 512, 9), (3, 2560, 9), (32, 1, 9), (16, 64, 1), (1, 1, 1), (6, 16, 27)]
LAYERS += [(3, 128, 125), (2, 320, 49), (1, 48, 25), (96, 4, 4), (9, 33, 16), (40, 5, 8), (2, 17000, 2), (3, 331, 101)]
both_ways = pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".replace("torch.", ""))


def check(
    *weights: tuple[Tensor, torch.dtype],
    limits: Limits | None = None,
    offsets: tuple[int, int] = (0, 0),
    order: int = 0,
    in_place: bool = False,
) -> int:
    """Convert weights, [filters, rows, columns] each, and expect torch's results. Return the number of launches."""
    listed, results = [], []
    for values, to in weights:
        source, around_source = allot(values.nbytes, offsets[0] * values.itemsize)
        source.copy_(reference.bits(values))
        result, around = (source, around_source)
        if not in_place:
            result, around = allot(values.numel() * to.itemsize, offsets[1] * to.itemsize)
        kind = number_of((values.dtype, to))
        listed.append(Weight(source.data_ptr(), result.data_ptr(), *values.shape, kind))
        results.append((source, result, around))
    launches = gpu_model.run(listed, limits, order=order)
    for (values, to), (source, result, around) in zip(weights, results, strict=True):
        expected = values.to(to).transpose(1, 2).flatten()
        reference.assert_same(result.view(to), expected)
        assert all((guard == 0xA5).all() for guard in around)
        assert in_place or torch.equal(source, reference.bits(values))
    return launches


def filters_of(layer: tuple[int, int, int], dtype: torch.dtype, back: bool) -> Tensor:
    filters, channels, taps = layer
    return reference.random_weight((filters, taps, channels) if back else (filters, channels, taps), dtype)


@both_ways
@all_kinds
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3)], ids=["aligned", "source_odd", "destination_odd"])
def test_every_layer_equals_torch(kind, back, offsets):
    for number, layer in enumerate(LAYERS):
        limits = Limits(SHARED_BYTES[number % 4])
        assert check((filters_of(layer, kind[0], back), kind[1]), limits=limits, offsets=offsets, order=number) == 1


@both_ways
@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_permutation_in_place_equals_torch(dtype, shared_bytes, back):
    for number, layer in enumerate(LAYERS):
        for offset in (0, 1):
            values = filters_of(layer, dtype, back)
            limits = Limits(shared_bytes, processors=1 + number % 3)
            launches = check((values, dtype), limits=limits, offsets=(offset, 0), order=number, in_place=True)
            assert launches == (1 not in layer[1:])


PRIMES = [2, 3, 5, 7, 13, 31, 61, 127, 251, 499]
POWERS_OF_TWO = [2**power for power in range(10)]
SIDE = st.integers(1, 300) | st.sampled_from(PRIMES) | st.sampled_from(POWERS_OF_TWO)
LONG = st.tuples(st.integers(300, 50_000), SIDE).map(lambda sides: (sides[0], min(sides[1], 100_000 // sides[0])))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    filters=st.integers(1, 40),
    sides=st.tuples(SIDE, SIDE) | LONG,
    flip=st.booleans(),
    kind=st.sampled_from(KINDS),
    offsets=st.just((0, 0)) | st.tuples(st.integers(0, 20), st.integers(0, 20)),
    shared_bytes=st.sampled_from(SHARED_BYTES),
    processors=st.integers(1, 4),
    order=st.integers(0, 6),
    in_place=st.booleans(),
)
def test_generated_weights(filters, sides, flip, kind, offsets, shared_bytes, processors, order, in_place):
    rows, columns = sides[::-1] if flip else sides
    values = reference.random_weight((min(filters, 1 + 30_000 // (rows * columns)), rows, columns), kind[0])
    limits = Limits(shared_bytes, processors=processors)
    check((values, kind[1]), limits=limits, offsets=offsets, order=order, in_place=in_place and kind[0] == kind[1])


SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 6e-8, 5.9e-8, 1e-5, 65504.0]
SPECIAL += [65519.99, 65520.0, -65520.0, 3.3e38, 3.4e38, 1 / 3, 2**-133, 2**-149, 1.5 * 2**-134, 2**-24, 2**-25]
# Halfway between two results, the lower one even and odd, in normal and subnormal numbers.
SPECIAL += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 3 * 2**-25, 5 * 2**-25, 2049.0, 2051.0]
# The shapes and offsets that lead to each way.
WAYS = {
    "gather": ((len(SPECIAL), 16, 4), 0),
    "scatter": ((len(SPECIAL), 4, 16), 0),
    "filters": ((len(SPECIAL), 5, 7), 0),
    "rectangle": ((len(SPECIAL), 16, 4), 1),
    "copy": ((len(SPECIAL), 1, 8), 0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(CAST), ids=str)
def test_casts_of_special_values_equal_those_of_torch(kind, way):
    shape, offset = WAYS[way]
    weight = Weight(SOMEWHERE + offset * kind[0].itemsize, ELSEWHERE, *shape, CAST[kind])
    assert [filters.way for launch in planned(weight) for filters in launch.filters] == [way]
    # Every value comes to every place.
    places = torch.arange(shape[1] * shape[2]) + torch.arange(shape[0]).view(-1, 1)
    values = torch.tensor(SPECIAL, dtype=torch.float64)[places % len(SPECIAL)].view(shape).to(kind[0])
    check((values, kind[1]), offsets=(offset, 0))


@pytest.mark.parametrize("kind", [kind for kind in CAST if kind[0] != torch.float32], ids=str)
def test_all_numbers_of_16_bits_are_cast_as_by_torch(kind):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(kind[0])
    check((values.view(64, 32, 32), kind[1]), (values.view(2048, 32, 1), kind[1]))


@pytest.mark.parametrize("argument_bytes", ARGUMENT_BYTES)
def test_lists_mix_everything(argument_bytes):
    weights = [
        (filters_of(layer, kind[0], bool(number % 2)), kind[1])
        for number, layer in enumerate([*LAYERS, (0, 3, 9), (4, 0, 9), (4, 3, 0)])
        for kind in KINDS
    ]
    assert check(*weights, limits=Limits(argument_bytes=argument_bytes)) <= 2 * len(KINDS)


@pytest.mark.parametrize(("argument_bytes", "launches"), [(ARGUMENT_BYTES[0], 10), (ARGUMENT_BYTES[1], 2)])
def test_more_weights_than_a_kernel_takes_are_split(argument_bytes, launches):
    weights = [
        (reference.random_weight((1 + n % 4, 1 + n % 37, 1 + n % 10), torch.int32), torch.int32) for n in range(1000)
    ]
    limits = Limits(argument_bytes=argument_bytes)
    assert check(*weights, limits=limits, offsets=(1, 0), order=3) == launches
    check(*weights, limits=limits, in_place=True)


def test_no_weights_and_empty_weights_launch_nothing():
    assert gpu_model.run([]) == 0
    for shape in ((0, 3, 9), (4, 0, 9), (4, 3, 0), (0, 0, 0)):
        for in_place in (False, True):
            assert check((torch.zeros(shape), torch.float32), in_place=in_place) == 0
