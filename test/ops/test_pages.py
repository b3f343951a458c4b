"""Huge pages are requested for large outputs and gradients of our operators, and nothing depends on them.

What is requested is read from the system's list of the memory, in a process of its own: this file is also that program.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_nhwc import functional

HUGE, PAGE = 2 << 20, os.sysconf("SC_PAGE_SIZE")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(not SETTING.exists(), reason="the system has no huge pages")
# Pages that come at once, slower than any, or not at all.
PRELOADED = """
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int madvise(void *start, size_t size, int advice) {
  if (advice == 14 && getenv("NO_HUGE_PAGES")) return errno = EINVAL, -1;
  return syscall(SYS_madvise, start, size, advice);
}
int clock_gettime(clockid_t clock, struct timespec *time) {
  static long calls = 0;
  if (clock != CLOCK_THREAD_CPUTIME_ID) return syscall(SYS_clock_gettime, clock, time);
  time->tv_sec = getenv("SLOW_HUGE_PAGES") ? ++calls : 0;
  return time->tv_nsec = 0;
}
"""


def activation(*shape):
    format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.randn(shape).to(memory_format=format)


def results():
    """Yield names and outputs or gradients of 35 MB; each is computed when the one before is gone."""
    x = activation(1, 32, 48, 84, 68)
    large, halved = x.requires_grad_(), x.detach()[:, :, ::2, ::2, ::2].contiguous(memory_format=torch.channels_last_3d)
    ones = torch.ones(32)
    yield "convolution", functional.conv3d(x, torch.ones(32, 32, 3, 3, 3) / 864, padding=1)
    yield "convolution of PyTorch", functional.conv_transpose3d(halved, torch.ones(32, 32, 2, 2, 2), stride=2)
    yield "norm", functional.instance_norm(x, weight=ones)
    yield (
        "its gradient",
        *torch.autograd.grad(functional.instance_norm(large, weight=ones), large, torch.ones_like(large)),
    )
    yield "softmax", functional.softmax(x, 1)
    yield "gelu", functional.gelu(x)
    yield "padding", functional.pad(halved, (34, 34, 42, 42, 24, 24), "circular")
    yield "pool", functional.avg_pool3d(activation(1, 32, 96, 84, 68), (3, 3, 3), (2, 1, 1), (1, 1, 1))


def requested(tensor):
    """Return the pages of a tensor's memory, and those among them that were requested to be huge."""
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    pages, huge, area = set(range(first // PAGE, -(-end // PAGE))), set(), range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            area = range(*(int(address, 16) // PAGE for address in name.split("-")))
        elif name == "VmFlags:" and "hg" in values:
            huge |= pages.intersection(area)
    whole = range(-(-first // HUGE) * HUGE // PAGE, end // HUGE * HUGE // PAGE)
    return huge, set(whole)


def report():
    """Print of each result how many huge pages were requested, whether all were, and whether no others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    for name, result in results():
        huge, whole = requested(result)
        digest = hashlib.sha256(result.detach().contiguous().numpy().tobytes()).hexdigest()
        found[name] = [len(huge) * PAGE // HUGE, huge == whole, huge <= whole, digest]
    for name, width in (("8 MB", 256), ("less", 255)):
        huge, whole = requested(functional.instance_norm(activation(1, 32, 256, width)))
        found[name] = [len(huge) * PAGE // HUGE, huge == whole, huge <= whole, ""]
    outside = functional.instance_norm(activation(1, 32, 256, 256)) + activation(1, 32, 256, 256)
    found["PyTorch's"] = [len(requested(outside)[0]), False, True, ""]
    print(json.dumps(found))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    library = tmp_path_factory.mktemp("preloaded") / "pages.so"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(compiler, input=PRELOADED, text=True, check=True)

    def run(**environment):
        # Each tensor has memory of its own, which had no advice before.
        of_its_own = {"MALLOC_MMAP_THRESHOLD_": "1000000", "TORCH_NHWC_KEPT_MEMORY": "0"}
        environment = os.environ | environment | of_its_own | {"LD_PRELOAD": str(library)}
        done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def usual(run):
    return run()


def test_whole_huge_pages_within_large_results_are_requested(usual):
    large = {name: row for name, row in usual.items() if name not in ("less", "PyTorch's")}
    assert all(are_all for _, are_all, *_ in large.values()), large
    assert {name for name, (count, *_) in large.items() if count >= 15} == large.keys() - {"8 MB"}
    assert large["8 MB"][0] >= 3


def test_none_are_requested_for_less_than_8_mb_or_by_what_is_not_ours(usual):
    assert usual["less"][0] == usual["PyTorch's"][0] == 0


@pytest.mark.parametrize("variable", ["NO_HUGE_PAGES", pytest.param("SLOW_HUGE_PAGES", marks=pytest.mark.exhaustive)])
def test_results_are_the_same_where_huge_pages_cannot_be_had_or_are_slow(variable, run, usual):
    found = run(**{variable: "1"})
    # The first one shows that they are slow, after which results are skipped.
    most = 0 if variable == "NO_HUGE_PAGES" else 1
    assert all(count <= most and are_within for count, _, are_within, _ in found.values()), found
    assert {name: row[3] for name, row in found.items()} == {name: row[3] for name, row in usual.items()}


if __name__ == "__main__":
    report()
