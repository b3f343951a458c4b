"""Operators are tested with all threads, unless a test says otherwise."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Leave the number of threads as it is."""


@pytest.fixture(autouse=True)
def same_threads():
    """Restore the number of threads that a test may change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def on_one_thread(same_threads):
    """Run on one thread, where the result or its error depends on their number."""
    torch.set_num_threads(1)
