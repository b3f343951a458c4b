"""Every instruction set that this CPU has gives the bits of plain torch; the best one is chosen, or the one asked for.

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
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import torch_nhwc as nhwc

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
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    return subprocess.run([sys.executable, *program], env=clean | environment, capture_output=True, text=True)


def capability(**environment):
    done = run(["-c", "import torch_nhwc; print(torch_nhwc.cpu_capability())"], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def supported_levels():
    done = run(["-c", "import torch_nhwc; torch_nhwc.cpu_capability()"], TORCH_NHWC_CPU_CAPABILITY="none")
    found = re.search(r"ValueError: TORCH_NHWC_CPU_CAPABILITY: expected one of .* \((.*)\), got 'none'", done.stderr)
    assert found, done.stderr
    return found[1].split(", ")


LEVELS = supported_levels()


def unaligned(weight):
    """The same weight at an address that is aligned to its elements and to nothing else."""
    memory = torch.empty(weight.numel() + 1, dtype=weight.dtype)
    return memory[1:].as_strided(weight.shape, weight.stride()).copy_(weight)


def check(shape, dtype, to=None):
    """Both directions, fresh, preallocated and in place, aligned and not, with guards around what is written."""
    weight = reference.random_weight(shape, dtype)
    for memory_format in (None, torch.contiguous_format):
        other = reference.channels_last_of(weight) if memory_format else torch.contiguous_format
        source = weight.clone(memory_format=other)
        expected = reference.convert_weight(source, memory_format, to)
        for each in (source, unaligned(source)):
            reference.assert_same(nhwc.convert_weight(each, memory_format, dtype=to), expected)
            guarded = reference.random_weight((expected.numel() + 34,), expected.dtype)
            before = guarded.clone()
            nhwc.copy_weight_(guarded[17:-17].as_strided(shape, expected.stride()), each)
            reference.assert_same(guarded[17:-17].as_strided(shape, expected.stride()), expected)
            for part in (slice(17), slice(-17, None)):
                assert torch.equal(reference.bits(guarded[part]), reference.bits(before[part]))
        if to is None:
            in_place = source.clone()
            assert nhwc.convert_weight_(in_place, memory_format, storage="reuse") in (0, 1, 2)
            reference.assert_same(in_place, expected)


def every_value(of, to):
    """Every number of 16 bits, or floats of every exponent with all kinds of low bits."""
    if of.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(of).view(256, 16, 4, 4)
    high = torch.arange(1 << 16, dtype=torch.int64).view(-1, 1) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x2000, 0x2FFF, 0x3000, 0x5555])
    values = torch.cat([high + low, high + torch.randint(0, 1 << 16, (1 << 16, 3))], dim=1)
    return values.to(torch.int32).view(torch.float32).view(1024, 64, 4, 4)


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


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_gives_the_bits_of_plain_torch(level):
    done = run([__file__], TORCH_NHWC_CPU_CAPABILITY=level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == level


@seed(0)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    filters=st.integers(1, 70),
    channels=st.one_of(st.integers(1, 40), st.sampled_from([63, 65, 127, 130, 257])),
    kernel=st.lists(st.integers(1, 8), min_size=2, max_size=3),
    dtype=st.sampled_from(reference.ALL_DTYPES),
)
def test_generated_shapes_give_the_bits_of_plain_torch(filters, channels, kernel, dtype):
    check((filters, channels, *kernel), dtype)


def test_the_best_level_is_chosen():
    assert capability() == LEVELS[-1]


def test_atens_variable_is_an_upper_bound_and_ours_goes_before_it():
    assert capability(ATEN_CPU_CAPABILITY="default") == LEVELS[0]
    for bound in {"avx2", "avx512"} & set(LEVELS):
        best = [level for level in LEVELS if level.startswith(bound)][-1]
        assert capability(ATEN_CPU_CAPABILITY=bound) == best
        assert capability(ATEN_CPU_CAPABILITY=bound, TORCH_NHWC_CPU_CAPABILITY=LEVELS[-1]) == LEVELS[-1]
    assert capability(ATEN_CPU_CAPABILITY="unknown to us") == LEVELS[-1]


def test_a_level_that_this_cpu_lacks_is_one_clear_error_at_the_first_use():
    program = "import torch, torch_nhwc; torch_nhwc.convert_weight(torch.randn(4, 3, 3, 3))"
    done = run(["-c", program], TORCH_NHWC_CPU_CAPABILITY="avx9")
    assert "ValueError: TORCH_NHWC_CPU_CAPABILITY: expected one of those that this CPU has" in done.stderr


if __name__ == "__main__":
    check_this_level()
    print(nhwc.cpu_capability())
