"""Which parameters of a test are for `make test`, and which for `make test-all` alone."""

import pytest


def some_of(parameters, *fast):
    """All of the parameters, of which those that are not among `fast` are exhaustive."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.exhaustive) for each in parameters]
