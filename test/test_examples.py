"""The example in the docstring of every public name runs, and says what it says."""

import doctest
import inspect
import pathlib

import pytest
import torch

import torch_nhwc as nhwc

PUBLIC = [
    getattr(module, name)
    for module in (nhwc, nhwc.functional)
    for name in module.__all__
    if callable(getattr(module, name))
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_the_example_runs(public):
    known = {"torch": torch, "torch_nhwc": nhwc, "pathlib": pathlib}
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(public), known, public.__name__, None, 0)
    assert examples.examples, "a public name has an example"
    failures = []
    doctest.DocTestRunner(verbose=False).run(examples, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_the_docstring_starts_with_a_whole_sentence(public):
    first, *_ = inspect.getdoc(public).split("\n\n")
    assert first[0].isupper(), first
    assert first.endswith("."), first
