"""tools/fuzz: cases repeat by their seed, and a failure or a crash of one is reported with a command."""

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from torch_nhwc.nn.replacements import REPLACEMENTS

FOLDER = Path(__file__).parent.parent / "tools/fuzz"
sys.path.append(str(FOLDER))


def loaded(name):
    """Import a file of the folder under a name of its own: the benchmarks have one of the same."""
    spec = spec_from_file_location(f"fuzz_{name}", FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = loaded("__main__")


@pytest.mark.parametrize("part", fuzz.PARTS)
def test_a_case_is_drawn_again_by_its_seed_and_number(part):
    module = loaded(part)
    cases = [repr(module.draw(fuzz.generator(3, part, number))) for number in (0, 1, 2, 0)]
    assert cases[0] == cases[3]
    assert len(set(cases)) == 3
    assert cases[0] != repr(module.draw(fuzz.generator(4, part, 0)))


def test_every_class_that_is_replaced_has_a_generator():
    assert {each for each, row in REPLACEMENTS.items() if row.on_cpu} <= set(loaded("layers").GENERATORS)


BROKEN = """
import os, signal

def draw(random):
    return {"number": random.random()}

def check(case):
    global calls
    calls = globals().get("calls", 0) + 1
    assert calls != 2, "the second one"
    if calls == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"calls": 1}
"""


def test_failures_and_crashes_are_reported_and_the_rest_runs(tmp_path):
    shutil.copy(FOLDER / "__main__.py", tmp_path)
    (tmp_path / "operators.py").write_text(BROKEN)
    command = [sys.executable, str(tmp_path), "--operators", "6", "--first", "10", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 1, done.stderr
    assert "FAILED operators 11: AssertionError at operators.py:10: the second one" in done.stdout
    assert "FAILED operators 13: the process died of SIGSEGV" in done.stdout
    assert "python tools/fuzz --operators 1 --first 11 --seed 5 --child" in done.stdout
    assert "python tools/fuzz --operators 4 --first 10 --seed 5 --child" in done.stdout  # as it came to the crash
    assert "operators: 6 cases, 3 failed" in done.stdout  # the second process has a second call, too


def test_a_drawn_convolution_reaches_every_known_fault():
    convolutions = loaded("convolutions")
    drawn = [convolutions.draw(fuzz.generator(0, "convolutions", number)) for number in range(2000)]
    assert {each["dtype"] for each in drawn} == {*convolutions.LIMITS}
    for is_drawn in (
        lambda each: any(stride > kernel for stride, kernel in zip(each.stride, each.kernel)),
        lambda each: each.padding[-1] > each.output[-1] and each.stride[-1] > 1,
        lambda each: "2D depthwise" in each.kind and max(each.dilation) > 1 and each.size[-1] >= 29,
        lambda each: each.groups == 1 and each.kernel[-1] % 4 == each.stride[-1] % 4 == each.padding[-1] == 0,
        lambda each: len(each.size) == 3 and any(more > p for more, p in zip(each.output_padding, each.padding)),
    ):
        assert any(is_drawn(each["convolution"]) for each in drawn)


def wrong(convolutions, when):
    """Return what takes the place of `errors`: PyTorch's are wrong, or end the process, in one format."""

    def errors(case, layout, functions):
        if functions is convolutions.F and layout == "channels-last":
            when()
            return {"output": float("nan")}
        return {"output": 0.0}

    return errors


@pytest.mark.parametrize(("when", "also"), [(lambda: None, ""), (lambda: os.kill(os.getpid(), 9), "PyTorch died")])
def test_what_pytorch_computes_wrong_fails_unless_it_is_mended(monkeypatch, when, also):
    convolutions = loaded("convolutions")
    case = convolutions.draw(fuzz.generator(0, "convolutions", 0))
    monkeypatch.setattr(convolutions, "errors", wrong(convolutions, when))
    monkeypatch.setattr(convolutions, "warm_up", lambda: None)
    for kind in ("pytorchs", "faster"):
        monkeypatch.setattr(convolutions, "way_of", lambda case, layout, kind=kind: ("a way", kind))
        with pytest.raises(AssertionError, match="channels-last, a way: PyTorch is wrong"):
            convolutions.check(case)
    monkeypatch.setattr(convolutions, "way_of", lambda case, layout: ("another", "mended"))
    figures = convolutions.check(case)
    assert figures["channels-last: flagged"] == figures["contiguous: cases"] == 1
    (what,) = [each.rpartition(": ")[2] for each in figures if "another: PyTorch died" in each] or [""]
    assert what == also
    assert sum("another: PyTorch wrong" in each for each in figures) == 1
    monkeypatch.setattr(convolutions, "errors", lambda case, layout, functions: {"output": 1.0})
    with pytest.raises(AssertionError, match="contiguous, another: ours is wrong"):
        convolutions.check(case)
