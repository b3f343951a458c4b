"""Report the tests that are left out because there is no GPU."""

import pytest


def test_a_gpu_runs_the_tests_that_need_one(left_out):
    if left_out:
        pytest.skip(f"no GPU here: {len(left_out)} tests that need one are left out (`make test-cuda` runs them)")
