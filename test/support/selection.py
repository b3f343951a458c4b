"""Select parameters of a test for `make test`, and leave the others to `make test-all`."""

import pytest


def exhaustive(*values):
    """Return a set of parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def some_of(parameters, *fast):
    """Return sets of one parameter each; `make test` leaves out those that are not among `fast`."""
    return [each if each in fast else exhaustive(each) for each in parameters]
