"""Memory that freed results leave is kept for the next ones in inference, up to a limit, and nothing depends on it."""

import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from torch_nhwc import functional

MB = 1 << 20
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the library stands before PyTorch's allocator on Linux"
)


def activation(megabytes):
    return torch.randn(1, 16, megabytes * 8, 2048).contiguous(memory_format=torch.channels_last)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@torch.no_grad()
def report():
    """Print the page faults of a call whose result takes 24 MB, and what stays resident of results of 400 MB.

    The last number is what stays resident after a result that may be derived.
    """
    torch.set_num_threads(1)
    x = activation(24)
    for _ in range(2):
        functional.group_norm(x, 4)
    before = faults()
    functional.group_norm(x, 4)
    count, smaller = faults() - before, activation(10)
    before = resident()
    results = [functional.group_norm(smaller, 4) for _ in range(40)]
    del results
    gc.collect()
    kept = (resident() - before) // MB
    with torch.enable_grad():
        functional.group_norm(smaller, 4)
    print(count, kept, (resident() - before) // MB)


@torch.no_grad()
def report_order():
    """Print, for results of several sizes, which of the kept ones' memory each of them has."""
    x = activation(12)
    functional.group_norm(x, 4)  # the first of a size is the system's again
    results = [functional.group_norm(x, 4) for _ in range(3)]
    addresses = [each.data_ptr() for each in results]
    while results:
        results.pop()
    again = [functional.group_norm(x, 4) for _ in range(3)]
    same = [addresses.index(each.data_ptr()) for each in again]
    again.clear()
    others = [functional.group_norm(activation(size), 4).data_ptr() in addresses for size in (10, 16)]
    print(*same, *others)


def run(report, **environment):
    # Large memory is the system's as soon as it is freed.
    environment = os.environ | environment | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, __file__, report.__name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_call_finds_the_memory_of_the_one_before_and_128_mb_are_kept_at_most():
    count, kept, kept_in_a_step = map(int, run(report))
    assert count < 100
    assert 90 <= kept <= 130
    assert kept_in_a_step < 10, "a step needs no more memory than without"
    count, kept, _ = map(int, run(report, TORCH_NHWC_KEPT_MEMORY="0"))
    assert count > 100
    assert kept < 10


def test_the_last_memory_of_about_a_size_is_taken_first_and_no_other():
    assert run(report_order) == ["0", "1", "2", "False", "False"]


@torch.no_grad()
def test_what_holds_memory_keeps_it():
    x = activation(9)
    expected = functional.group_norm(x, 4).clone()
    array = functional.group_norm(x, 4).numpy()
    shared = functional.group_norm(x, 4).share_memory_()
    grown = functional.group_norm(x, 4).contiguous(memory_format=torch.channels_last)
    grown.untyped_storage().resize_(2 * grown.nbytes)
    for _ in range(5):
        functional.group_norm(torch.ones_like(x), 4)
    for each in (torch.from_numpy(array), shared, grown):
        assert torch.equal(each, expected)


@torch.no_grad()
def test_threads_do_not_share_results():
    inputs = [torch.full_like(activation(9), each) for each in range(4)]
    expected = [functional.gelu(each).clone() for each in inputs]
    wrong = []

    @torch.no_grad()
    def work(x, expected):
        for _ in range(6):
            results = [functional.gelu(x) for _ in range(3)]
            wrong.extend(each for each in results if not torch.equal(each, expected))

    threads = [threading.Thread(target=work, args=each) for each in zip(inputs, expected)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@torch.no_grad()
def test_a_profiler_of_memory_sees_what_is_allocated():
    x = activation(9)
    functional.group_norm(x, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        functional.group_norm(x, 4)
    assert max(each.self_cpu_memory_usage for each in profile.key_averages()) >= x.nbytes


if __name__ == "__main__":
    globals()[sys.argv[1]]()
