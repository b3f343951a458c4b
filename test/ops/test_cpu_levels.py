"""Every instruction set of this CPU gives the bits of plain torch; the best one is chosen, or the requested one.

The choice is made once in a process, so each level is checked in a process of its own: this file is also that program.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from activations import assert_like
from exactness import check, every_value
from selection import some_of

import torch_nhwc as nhwc

pytestmark = pytest.mark.levels
VARIABLES = ("TORCH_NHWC_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY")
CASTS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float32, torch.float8_e5m2)]
CASTS += [(torch.float64, torch.float32), *((to, of) for of, to in CASTS)]
# Networks of every short side, paths for long and for short ones, pitches that collide in a cache, one large weight.
SHAPES = [(3, channels, 1, taps) for taps in range(2, 31) for channels in (2, 5, 17, 33, 70)]
SHAPES += [(2, 512, 3, 3), (2, 1024, 3, 3), (2, 2048, 2, 2), (1, 256, 3, 3, 3), (2, 64, 7, 7), (1, 40, 5, 5, 5)]
SHAPES += [
    (1, 3, 18, 19),
    (70, 3, 7, 7),
    (200, 4, 3, 3),
    (600, 2, 2, 2),
    (90, 7, 3, 3),
    (33, 29, 31, 1),
    (256, 130, 5, 5),
]


def run(program, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    return subprocess.run([sys.executable, *program], env=clean | environment, capture_output=True, text=True)


def check_program_at(level, file):
    """Run a file of tests as the program that it also is, at an instruction set."""
    done = run([file], TORCH_NHWC_CPU_CAPABILITY=level)
    assert done.returncode == 0, done.stderr


def capability(**environment):
    done = run(["-c", "import torch_nhwc; print(torch_nhwc.ops.cpu_capability())"], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def supported_levels():
    done = run(["-c", "import torch_nhwc; torch_nhwc.ops.cpu_capability()"], TORCH_NHWC_CPU_CAPABILITY="none")
    found = re.search(r"ValueError: TORCH_NHWC_CPU_CAPABILITY: expected one of .* \((.*)\), got 'none'", done.stderr)
    assert found, done.stderr
    return found[1].split(", ")


LEVELS = supported_levels()


def check_this_level():
    torch.manual_seed(0)
    for shape in SHAPES:
        for dtypes in reference.DTYPES.values():
            check(shape, dtypes[0])
        for of, to in CASTS:
            check(shape, of, to)
    for of, to in CASTS:
        if of.itemsize <= 4 and to.itemsize <= 4 and 1 not in (of.itemsize, to.itemsize):
            weight = every_value(of, to)
            reference.assert_same(nhwc.convert_weight(weight, dtype=to), reference.convert_weight(weight, None, to))
    # Zeros take the way of subnormals, and must not lose their sign.
    zeros = torch.zeros(64, 64, 3, 3).neg_()
    zeros[0, 0, 0, 0] = 1e-40
    assert torch.equal(
        reference.bits(nhwc.convert_weight(zeros, dtype=torch.bfloat16)), reference.bits(zeros.bfloat16())
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for channels in (2, 3, 4, 8, 16, 17, 32, 40, 72):
            for groups in {1, channels}:
                check_group_norm(groups, channels, dtype)


def check_group_norm(groups, channels, dtype):
    values = 3 + torch.randn(2, channels, 5, 7)
    ours, stock = torch.ops.nhwc.group_norm, torch.nn.functional.group_norm
    assert_like(lambda x: ours(x, groups), lambda x: stock(x, groups), values, dtype)


@pytest.mark.parametrize("level", some_of(LEVELS, LEVELS[-1]))
def test_each_level_gives_the_bits_of_plain_torch(level):
    done = run([__file__], TORCH_NHWC_CPU_CAPABILITY=level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == level


def test_the_best_level_is_chosen():
    assert capability() == LEVELS[-1]


@pytest.mark.exhaustive
def test_atens_variable_is_an_upper_bound_and_ours_takes_precedence():
    assert capability(ATEN_CPU_CAPABILITY="default") == LEVELS[0]
    for bound in {"avx2", "avx512"} & set(LEVELS):
        best = [level for level in LEVELS if level.startswith(bound)][-1]
        assert capability(ATEN_CPU_CAPABILITY=bound) == best
        assert capability(ATEN_CPU_CAPABILITY=bound, TORCH_NHWC_CPU_CAPABILITY=LEVELS[-1]) == LEVELS[-1]
    assert capability(ATEN_CPU_CAPABILITY="unknown to us") == LEVELS[-1]


if __name__ == "__main__":
    check_this_level()
    print(nhwc.ops.cpu_capability())
