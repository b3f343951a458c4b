"""The example in the docstring of every public name runs, and shows what it says."""

import dataclasses
import doctest
import importlib
import inspect
import pathlib
import tempfile

import pytest
import torch
from public_names import public_names

import torch_nhwc


def public():
    """Return the public functions and classes, as parameters of a test, in the order of their modules."""
    found = []
    for module, names in public_names().items():
        # Importing frameworks takes seconds.
        marks = [pytest.mark.exhaustive] if "integrations" in module else []
        for name in names:
            is_documented = marks or callable(getattr(importlib.import_module(module), name))
            if is_documented and name not in ("Storage", "Phase"):  # types of arguments
                found.append(pytest.param(module, name, marks=marks, id=f"{module}.{name}"))
    return found


# Rows that only a tool makes: their attributes have docstrings, and the tool has an example.
ROWS = {"Layout", "OperatorRow", "Reorder", "Unseen", "BuildInfo"}


@pytest.mark.parametrize(("module", "name"), public())
def test_the_docstring_is_a_sentence_and_its_example_runs(module, name):
    module = importlib.import_module(module)
    text = inspect.getdoc(getattr(module, name))
    first, *_ = text.split("\n\n")
    assert first[0].isupper(), first
    assert first.endswith((".", ":")), first
    known = {each.__name__: each for each in (torch, torch_nhwc, pathlib, dataclasses, tempfile)}
    examples = doctest.DocTestParser().get_doctest(text, known | {name: getattr(module, name)}, name, None, 0)
    assert examples.examples or name in ROWS, "a public name has an example"
    failures = []
    doctest.DocTestRunner(verbose=False).run(examples, out=failures.append)
    assert not failures, "".join(failures)
