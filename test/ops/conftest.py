"""The operators are for every number of threads."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As many threads as there are."""
