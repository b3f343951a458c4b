"""Plans for a GPU: few launches, of tiles that are balanced by bytes and cover every weight once."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import gpu_model
import pytest
import torch
from gpu_model import (
    ARGUMENT_BYTES,
    CAST,
    DESTINATION_BYTES,
    ELSEWHERE,
    MOVED,
    SOMEWHERE,
    SOURCE_BYTES,
    Filters,
    Limits,
    Weight,
    planned,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


def bytes_of_a_tile(filters: Filters, elements: int) -> int:
    wider = max(SOURCE_BYTES[elements], DESTINATION_BYTES[elements])
    if filters.way == "rectangle":
        return filters.per_block * filters.width * wider
    return elements_of(filters, elements, min(filters.count, filters.per_block)) * wider


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


def weights_of(layers: Sequence[tuple[int, int, int]], elements: int, in_place: bool = False) -> list[Weight]:
    return [Weight(SOMEWHERE, SOMEWHERE if in_place else ELSEWHERE, *layer, elements) for layer in layers]


@pytest.mark.parametrize("argument_bytes", ARGUMENT_BYTES)
def test_resnet50_is_one_launch(argument_bytes):
    layers = resnet50()
    assert len(layers) == 53
    for elements in range(len(SOURCE_BYTES)):
        (launch,) = planned(*weights_of(layers, elements), limits=Limits(argument_bytes=argument_bytes))
        assert len(launch.filters) == 53
        assert launch.scratch_bytes == 0


def test_in_place_what_has_one_tap_or_channel_is_in_no_launch():
    limits = Limits(227 << 10)
    (launch,) = planned(*weights_of(resnet50(), MOVED[4], in_place=True), limits=limits)
    assert len(launch.filters) == sum(taps > 1 for _, _, taps in resnet50()) == 17
    assert planned(*weights_of([(64, 64, 1), (64, 1, 9), (1, 1, 1)], MOVED[4], in_place=True)) == []


def test_tiles_are_balanced_by_bytes_in_plain_shared_memory():
    shapes = resnet50() + [(100, 40, 7), (5, 4000, 9), (2, 17000, 2)]
    flipped = [(filters, taps, channels) for filters, channels, taps in shapes]
    for elements in range(len(SOURCE_BYTES)):
        for misaligned in (0, 1):
            weights = weights_of(shapes + flipped, elements)
            for weight in weights:
                weight.source += misaligned * SOURCE_BYTES[elements]
            limits = Limits(227 << 10, 32764)
            for launch in planned(*weights, limits=limits):
                assert launch.shared_bytes <= 48 << 10
                assert max(bytes_of_a_tile(filters, elements) for filters in launch.filters) <= 2 * 48 << 10
