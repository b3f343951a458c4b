"""Which parameters of a test are for `make test`, and which for `make test-all` alone."""

import pytest


def exhaustive(*values):
    """One set of parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def some_of(parameters, *fast):
    """All of the parameters, each of one value, of which those that are not among `fast` are exhaustive."""
    return [each if each in fast else exhaustive(each) for each in parameters]
