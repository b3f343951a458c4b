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
    assert set(REPLACEMENTS) <= set(loaded("layers").GENERATORS)


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
