"""Operators are tested with all threads."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Leave the number of threads as it is."""
