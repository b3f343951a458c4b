"""The example in the docstring of every public name runs, and says what it says."""

import dataclasses
import doctest
import inspect
import pathlib
import tempfile

import pytest
import torch

import torch_nhwc as nhwc
from torch_nhwc.integrations import accelerate, diffusers, lightning, transformers

INTEGRATIONS = [
    accelerate.contiguous_broadcasts_,
    diffusers.PipelineReport,
    diffusers.convert_pipeline_,
    lightning.ChannelsLast,
    transformers.ChannelsLastTrainer,
]
PUBLIC = [
    getattr(module, name)
    for module in (nhwc, nhwc.functional)
    for name in module.__all__
    if callable(getattr(module, name))
] + INTEGRATIONS


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_the_example_runs(public):
    known = {each.__name__: each for each in (torch, nhwc, pathlib, dataclasses, tempfile, *INTEGRATIONS)}
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
