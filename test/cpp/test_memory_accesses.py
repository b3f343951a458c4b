"""What accesses to memory would cost a GPU: sectors of global memory, and conflicts between shared banks."""

import math
from collections.abc import Sequence

import gpu_model
import pytest
from gpu_model import DESTINATION_BYTES, KINDS, SOURCE_BYTES, Counts, Weight, allot, number_of, planned

both_ways = pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".replace("torch.", ""))

TAPS = [4, 8, 9, 16, 25, 27, 49, 125]


def costs(weight: tuple[int, int, int], elements: int, offset: int = 0, in_place: bool = False) -> tuple[str, Counts]:
    """Return the way of one weight, and the costs of its accesses."""
    size = math.prod(weight)
    source, _ = allot(size * SOURCE_BYTES[elements], offset * SOURCE_BYTES[elements])
    destination, _ = allot(size * DESTINATION_BYTES[elements], 0)
    place = source if in_place else destination
    listed = [Weight(source.data_ptr(), place.data_ptr(), *weight, elements)]
    counts = Counts()
    assert gpu_model.run(listed, counts=counts) == 1
    assert counts.store_bytes % (size * DESTINATION_BYTES[elements]) == 0
    assert counts.load_bytes % (size * SOURCE_BYTES[elements]) == 0
    ((filters,),) = [launch.filters for launch in planned(*listed)]
    return filters.way, counts


def weights_with(channels: int, elements: int, back: bool, taps: Sequence[int] = TAPS) -> list[tuple[int, int, int]]:
    sizes = [(channels, tap) for tap in taps]
    filters = [max(2, (64 << 10) // (channels * tap * SOURCE_BYTES[elements])) for tap in taps]
    return [(count, *(size[::-1] if back else size)) for count, size in zip(filters, sizes)]


@both_ways
@all_kinds
def test_channels_in_whole_sectors_meet_the_bars(kind, back):
    """Use at least 95 % of the sectors that are read and written, and lose at most a quarter to conflicts."""
    elements = number_of(kind)
    sector = 32 // min(kind[0].itemsize, kind[1].itemsize)
    for multiple in (1, 2, 3, 5, 12, 40):
        for weight in weights_with(multiple * sector, elements, back):
            for in_place in {False, kind[0] == kind[1]}:
                _, counts = costs(weight, elements, in_place=in_place)
                assert counts.load_efficiency >= 0.95, weight
                assert counts.store_efficiency >= 0.95, weight
                assert counts.conflict_degree <= 1.25, weight


# Of what is not in whole sectors, by its way: the least efficiency, and the worst conflicts. Element by element, which
# is the way of rectangles, the efficiency depends on the bytes of an element.
LINEAR_BARS = {"gather": (0.9, 1.25), "scatter": (0.9, 1.25), "filters": (0.95, 4.7)}
RECTANGLE_BARS = {1: 0.45, 2: 0.5, 4: 0.7, 8: 0.8}


@both_ways
@all_kinds
@pytest.mark.parametrize("channels", [3, 4, 5, 7, 33])
def test_odd_numbers_of_channels_are_read_and_written_linearly(kind, back, channels):
    elements = number_of(kind)
    for weight in weights_with(channels, elements, back):
        way, counts = costs(weight, elements)
        if way == "rectangle":
            assert channels == 33, weight  # and the taps are many
            continue
        efficiency, conflicts = LINEAR_BARS[way]
        assert counts.load_efficiency >= efficiency, weight
        assert counts.store_efficiency >= efficiency, weight
        assert counts.conflict_degree <= conflicts, weight


@both_ways
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0].itemsize < 16], ids=str)
def test_misaligned_weights_go_element_by_element(kind, back):
    elements = number_of(kind)
    for channels in (33, 64, 256):
        for weight in weights_with(channels, elements, back, (4, 9, 49, 125)):
            way, counts = costs(weight, elements, offset=1)
            assert way == "rectangle", weight
            assert counts.load_efficiency >= RECTANGLE_BARS[kind[0].itemsize], weight
            assert counts.store_efficiency >= RECTANGLE_BARS[kind[1].itemsize], weight
            assert counts.conflict_degree <= 4, weight
