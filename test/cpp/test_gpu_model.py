"""A GPU modelled on the CPU: values and the bytes around them, plans of launches, and the costs of accesses."""

import math
from collections.abc import Sequence
from itertools import pairwise

import gpu_model
import pytest
import reference
import torch
from exactness import every_value
from gpu_model import (
    ARGUMENT_BYTES,
    CAST,
    DESTINATION_BYTES,
    DTYPES,
    ELSEWHERE,
    KINDS,
    MOVED,
    SHARED_BYTES,
    SOMEWHERE,
    SOURCE_BYTES,
    TAPS,
    Counts,
    Filters,
    Limits,
    Weight,
    allot,
    count,
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


# The shapes and offsets that lead to each way.
WAYS = {
    "gather": ((16, 4), 0),
    "scatter": ((4, 16), 0),
    "filters": ((5, 7), 0),
    "rectangle": ((16, 4), 1),
    "copy": ((1, 8), 0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(CAST), ids=str)
def test_casts_of_every_value_equal_those_of_torch(kind, way):
    (rows, columns), offset = WAYS[way]
    values = every_value(*kind).flatten()
    values = values[: len(values) // (rows * columns) * rows * columns].view(-1, rows, columns)
    weight = Weight(SOMEWHERE + offset * kind[0].itemsize, ELSEWHERE, *values.shape, CAST[kind])
    assert [filters.way for launch in planned(weight) for filters in launch.filters] == [way]
    check((values, kind[1]), offsets=(offset, 0))


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


def test_what_cannot_be_planned_is_refused_whole():
    good = Weight(SOMEWHERE, ELSEWHERE, 4, 3, 9, MOVED[4])
    for bad in (
        Weight(SOMEWHERE, ELSEWHERE, 1, 2**16, 2**15, MOVED[1]),
        Weight(SOMEWHERE, ELSEWHERE, 1, 2, 2**62, MOVED[1]),
        Weight(SOMEWHERE + 2, ELSEWHERE, 4, 3, 9, MOVED[4]),
        Weight(SOMEWHERE, ELSEWHERE + 8, 4, 3, 9, MOVED[16]),
        Weight(SOMEWHERE, ELSEWHERE + 2, 4, 3, 9, CAST[torch.float16, torch.float32]),
        Weight(SOMEWHERE, SOMEWHERE, 4, 3, 9, CAST[torch.float32, torch.float16]),
    ):
        assert gpu_model.run([good, bad]) == -1
        assert gpu_model.plan([good, bad]) is None


def elements_of(filters: Filters, elements: int, count: int) -> int:
    """Return the number of elements in so many bundles, filters or elements."""
    return {
        "gather": count * (16 // DESTINATION_BYTES[elements]) * filters.columns,
        "scatter": count * (16 // SOURCE_BYTES[elements]) * filters.rows,
        "copy": count,
    }.get(filters.way, count * filters.rows * filters.columns)


def tiles_of(filters: Filters) -> int:
    if filters.way == "rectangle":
        height, width = filters.per_block, filters.width
        return filters.count * math.ceil(filters.rows / height) * math.ceil(filters.columns / width)
    return math.ceil(filters.count / filters.per_block)


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((2**18 + 3, 8, 1024), MOVED[1]),
        ((2**18 + 3, 1024, 8), MOVED[16]),
        ((5, 3, 715827882), MOVED[1]),  # filters of 2^31 - 2 elements
        ((5, 2**28 - 2, 8), MOVED[16]),
        ((3, 2**16, 2**15 - 1), CAST[torch.float32, torch.bfloat16]),
        ((2**31 + 5, 3, 9), MOVED[2]),
        ((2**33 + 1, 64, 1), MOVED[8]),
        ((1, 1, 2**40), MOVED[1]),
    ],
    ids=str,
)
def test_weights_beyond_32_bits_are_covered_once(shape, elements):
    launches = planned(Weight(SOMEWHERE, ELSEWHERE, *shape, elements))
    done = 0
    for launch in launches:
        assert launch.elements == elements
        assert launch.blocks < 2**31
        assert len(launch.filters) <= (ARGUMENT_BYTES[0] - 24) // 40
        for filters in launch.filters:
            assert filters.source == SOMEWHERE + done * SOURCE_BYTES[elements]
            assert filters.destination == ELSEWHERE + done * DESTINATION_BYTES[elements]
            done += elements_of(filters, elements, filters.count)
        # The blocks of a weight end where those of the next begin.
        firsts = [filters.first_block for filters in launch.filters] + [launch.blocks]
        assert firsts[0] == 0
        assert [after - first for first, after in pairwise(firsts)] == [tiles_of(part) for part in launch.filters]
    assert done == math.prod(shape)


def resnet50() -> list[tuple[int, int, int]]:
    """Return the 53 convolutions."""
    layers, channels = [(64, 3, 49)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers += [(width, channels, 1), (width, width, 9), (4 * width, width, 1)]
            layers += [(4 * width, channels, 1)] if block == 0 else []
            channels = 4 * width
    return layers


@pytest.mark.parametrize("argument_bytes", ARGUMENT_BYTES)
def test_resnet50_is_one_launch(argument_bytes):
    layers = resnet50()
    assert len(layers) == 53
    for elements in range(len(SOURCE_BYTES)):
        weights = [Weight(SOMEWHERE, ELSEWHERE, *layer, elements) for layer in layers]
        (launch,) = planned(*weights, limits=Limits(argument_bytes=argument_bytes))
        assert len(launch.filters) == 53
        assert launch.scratch_bytes == 0


def weights_with(channels: int, kind: tuple[torch.dtype, torch.dtype], back: bool, taps: Sequence[int] = TAPS):
    return [gpu_model.matrices_of(kind, channels, tap, back) for tap in taps]


# Of what is not in whole sectors, by its way: the least efficiency, and the worst conflicts. Element by element, which
# is the way of rectangles, the efficiency depends on the bytes of an element.
LINEAR_BARS = {"gather": (0.9, 1.25), "scatter": (0.9, 1.25), "filters": (0.95, 4.7)}
RECTANGLE_BARS = {1: 0.45, 2: 0.5, 4: 0.7, 8: 0.8}


def assert_costs(counts: Counts, load: float, store: float, conflicts: float, weight: tuple[int, int, int]) -> None:
    assert counts.load_efficiency >= load, weight
    assert counts.store_efficiency >= store, weight
    assert counts.conflict_degree <= conflicts, weight


@pytest.mark.exhaustive
@both_ways
@all_kinds
def test_channels_in_whole_sectors_meet_the_bars(kind, back):
    """Use at least 95 % of the sectors that are read and written, and lose at most a quarter to conflicts."""
    sector = 32 // min(kind[0].itemsize, kind[1].itemsize)
    for multiple in (1, 2, 3, 5, 12, 40):
        for weight in weights_with(multiple * sector, kind, back):
            for in_place in {False, kind[0] == kind[1]}:
                _, counts = count(kind, weight, in_place=in_place)
                assert_costs(counts, 0.95, 0.95, 1.25, weight)


@both_ways
@all_kinds
@pytest.mark.parametrize("channels", [3, 4, 5, 7, 33])
def test_odd_numbers_of_channels_are_read_and_written_linearly(kind, back, channels):
    for weight in weights_with(channels, kind, back):
        way, counts = count(kind, weight)
        if way == "rectangle":
            assert channels == 33, weight  # and the taps are many
            continue
        efficiency, conflicts = LINEAR_BARS[way]
        assert_costs(counts, efficiency, efficiency, conflicts, weight)


@both_ways
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0].itemsize < 16], ids=str)
def test_misaligned_weights_go_element_by_element(kind, back):
    load, store = (RECTANGLE_BARS[dtype.itemsize] for dtype in kind)
    for channels in (33, 64, 256):
        for weight in weights_with(channels, kind, back, (4, 9, 49, 125)):
            way, counts = count(kind, weight, offset=1)
            assert way == "rectangle", weight
            assert_costs(counts, load, store, 4, weight)
