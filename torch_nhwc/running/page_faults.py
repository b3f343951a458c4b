"""Say how much of a call is page faults, which the process' allocator causes, and what to start Python with."""

import mmap
import platform
import sys
import time
from collections.abc import Callable
from operator import itemgetter

KEEP_MEMORY = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000"  # of glibc
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE=1"  # of PyTorch
_WORTH_SAYING = 0.1  # of a call's time


def advice(share: float, what: str = "a call") -> list[str]:
    """Return a sentence on a share of page faults, as `page_fault_share` returns it; none where it is small.

    Example:
        >>> from torch_nhwc.running.page_faults import advice
        >>> advice(0.05), len(advice(0.2))
        ([], 1)
    """
    if share <= _WORTH_SAYING:
        return []
    return [
        f"Page faults are {share:.0%} of the time of {what}: start Python with {KEEP_MEMORY}, which keeps freed "
        f"memory, or with {HUGE_PAGES}, which requests huge pages."
    ]


def page_fault_share(job: Callable[[], object]) -> float:
    """Run a job twice, and return the share of its processor time that page faults take: 0 without glibc.

    The lesser one counts: in a first run, the process grows.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return 0.0
    runs = [_counted(job) for _ in range(2)]
    return min(1.0, _seconds_of_a_fault() * min(faults / seconds if seconds else 0.0 for faults, seconds in runs))


def _seconds_of_a_fault() -> float:
    """Return what a page takes to come and to go, by a byte in each page of new memory, from one thread."""
    once = bytes((8 << 20) // mmap.PAGESIZE)

    def touch_new_memory() -> None:
        with mmap.mmap(-1, len(once) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory[:: mmap.PAGESIZE] = once

    faults, seconds = min((_counted(touch_new_memory) for _ in range(5)), key=itemgetter(1))
    return seconds / max(1, faults)


def _counted(job: Callable[[], object]) -> tuple[int, float]:
    """Return the page faults of a job that read nothing from a disk, and its processor time in all threads."""
    import resource  # Windows has none

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    result = job()
    taken = time.process_time() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del result
    return faults, taken
