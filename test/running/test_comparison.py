"""Outputs are compared by position, within tolerances of their dtypes; jobs are timed in turns."""

import math

import pytest
import torch

from torch_nhwc.running import compare, in_turns, seconds, seconds_in_turns, tolerance_of

Y = torch.tensor([1.0, -4.0])


@pytest.mark.parametrize(
    ("output", "largest"),
    [
        (Y, 0.0),
        (Y + 1e-3, 1e-3),
        (Y.flip(0), 5.0),
        (Y[:1], math.inf),
        (torch.tensor([1.0, math.nan]), math.inf),
        ((Y,), math.inf),
    ],
    ids=["equal", "off", "permuted", "other shape", "NaN", "other structure"],
)
def test_outputs_are_compared_by_position(output, largest):
    difference = compare(output, Y, torch.float32)
    assert difference.largest == pytest.approx(largest, rel=1e-3)
    assert difference.is_within == (largest == 0.0)


def test_the_worst_tensor_of_an_output_decides_in_units_of_its_own_tolerance():
    large, small = torch.tensor([1e6]), torch.tensor([1e-3])
    difference = compare({"a": large + 1, "b": small + 1e-4}, {"a": large, "b": small}, torch.float32)
    assert difference.of == pytest.approx(1e-3)
    assert not difference.is_within


def test_equal_infinities_and_nans_do_not_differ():
    y = torch.tensor([math.inf, -math.inf, math.nan, 2.0])
    assert compare(y, y.clone(), torch.float32) == (0.0, 2.0, pytest.approx(2e-4))


def test_the_coarsest_dtype_decides_the_tolerance():
    assert tolerance_of([torch.float32, torch.bfloat16, torch.int64]) == tolerance_of([torch.bfloat16])
    assert tolerance_of([torch.complex64]) == tolerance_of([torch.float32])
    assert tolerance_of([torch.int64]) == (0, 0, 0, 0)
    assert compare(Y * 1.1, Y, torch.float32, torch.bfloat16).is_within


def test_measurements_take_turns_after_a_round_that_does_not_count():
    calls = []
    taken = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert taken == {"a": [3, 5], "b": [4, 6]}


def test_each_sample_has_a_preparation_that_is_not_timed():
    assert seconds(lambda: None) < 1
    prepared = []
    taken = seconds_in_turns({"job": lambda: prepared.append(None) or (lambda: None)}, samples=3)
    assert (len(taken["job"]), len(prepared)) == (3, 4)
