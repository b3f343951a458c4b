"""The example in the docstring of every public name runs, and shows what it says; so does `examples/demo.py`."""

import dataclasses
import doctest
import importlib
import inspect
import pathlib
import re
import runpy
import tempfile
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from public_names import public_names

import torch_nhwc
from torch_nhwc.running.machine import machine


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


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Return the demo, with small models and little time."""
    path = pathlib.Path(__file__).parent.parent / "examples/demo.py"
    run = runpy.run_path(str(path))["main"]
    names = run.__globals__

    def model():
        return torch.nn.Sequential(torch.nn.Conv3d(1, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv3d(8, 2, 3))

    def missing():
        raise ModuleNotFoundError("", name="monai")

    case = names["Case"]
    small = case("Small, inference", model, (1, 1, 8, 8, 8))
    cases = [small, small._replace(name="Small, training", trains=True), small._replace(autocast=True)]
    names["CASES"] = (*cases, case("Absent, inference", missing, ()), case("Absent, training", missing, ()))
    names["SECONDS"] = 0.5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return SimpleNamespace(run=run, names=names)


def test_the_demo_has_a_row_for_each_way_and_ends_with_an_answer(demo, capsys):
    demo.run()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Absent is left out: monai is missing, type `pip install 'torch-nhwc[models]'`."
    rows = [line for line in lines if line.endswith(tuple(f"e-{digits:02}" for digits in range(1, 20)))]
    assert len(rows) == 9
    assert re.findall(r"(\S+) +\d+ ms", "\n".join(rows)) == [*demo.names["WAYS"]] * 3
    assert "Replaced in Small: 2 Conv3d, right for every shape" in "\n".join(lines)
    assert "Reverted: strides, weights and results are as before." in lines
    last = " ".join(" ".join(lines).split())
    assert last.endswith("`torch-nhwc tune --factory my_model:build` asks the same of your model.")


def raced(names, contiguous, by_torch, ours):
    """Return the result of a race in which the ways took these seconds."""
    race = names["Race"](names["WAYS"])
    for times in zip(contiguous, by_torch, ours):
        race.running = list(names["WAYS"])
        race.run_round(dict(zip(names["WAYS"], times)).__getitem__)
    return names["Result"](names["CASES"][0], None, race, {}, {}, 0.0)


def test_the_demo_draws_its_table(demo, tmp_path):
    pytest.importorskip("matplotlib")
    demo.run()
    assert "torch_nhwc" in (tmp_path / "demo.svg").read_text()


@pytest.mark.parametrize(
    ("ours", "by_torch", "words", "bars", "bands"),
    [
        ([0.5] * 5, [2.0] * 5, ["1000 ms", "2000 ms, 0.50x", "500 ms, 2.00x"], 3, 0),
        ([0.5] * 5, [0.9, 1.1, 0.9, 1.1, 1.0], ["1000 ms", r"99\d ms, not told apart", "500 ms, 2.00x"], 3, 1),
        ([0.5] * 5, [0.1, 9.0, 0.1, 9.0, 1.0], ["1000 ms", "too noisy to say", "500 ms, 2.00x"], 2, 0),
        ([0.1, 9.0], [0.1, 9.0], ["too noisy to say"] * 3, 0, 0),
    ],
    ids=["certain", "equal", "one is noisy", "noisy"],
)
def test_the_demo_s_picture_has_times_and_no_bars_of_noise(demo, tmp_path, ours, by_torch, words, bars, bands):
    pytest.importorskip("matplotlib")
    assert demo.names["draw"]([raced(demo.names, [1.0] * 5, by_torch, ours)], "demo.svg")
    image = (tmp_path / "demo.svg").read_text()
    here = machine()
    for text in (here["processor"], f"{here['threads']} thread", "Small, inference", "Grey band"):
        assert text in image
    told = re.findall(r">(\d+ ms[^<]*|too noisy to say)<", image)
    assert all(map(re.fullmatch, words, told)), told
    assert len(told) == len(words)
    colors = Counter(re.findall(r"fill: (#\w{6})", image))
    assert sum(colors[color] for color in demo.names["COLORS"].values()) == bars
    assert colors["#dcdcdc"] == bands  # the grey bands


@pytest.mark.parametrize(
    ("ours", "by_torch", "answer"),
    [
        ([1.0] * 5, [1.1] * 5, "leave it contiguous"),
        ([0.5] * 5, [1.1] * 5, "convert it"),
        ([0.8] * 5, [0.7] * 5, "use preserve=False"),
        ([0.8] * 5, [0.9, 0.7, 0.8, 0.6, 0.9], "convert it"),
        ([0.9, 9.0], [0.9, 9.0], "too noisy to say"),
        ([0.5, 0.7, 1.5], [1.1] * 3, "too noisy to say"),
    ],
)
def test_the_demo_s_advice_is_what_is_certain(demo, ours, by_torch, answer):
    result = raced(demo.names, [1.0] * 5, by_torch, ours)
    assert result.advice == answer
    says = {"leave it contiguous": "makes none of these faster", "too noisy to say": "times vary too much to say"}
    assert says.get(answer, "makes 1 of 1 faster") in demo.names["conclusion"]([result])
