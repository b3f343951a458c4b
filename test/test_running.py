"""Running a model so that nothing remains of it, and what of a call is page faults."""

import mmap
import platform
import threading

import torch
import torch._dynamo  # otherwise nothing is compiled, and there is no stance
from torch import nn

from torch_nhwc.running.calls import run_once
from torch_nhwc.running.page_faults import advice, page_fault_share


def test_runs_in_several_threads_leave_the_compiler_as_it_was():
    """PyTorch has one stance for the process: whoever restores it first must not leave it to the others."""

    class Waits(nn.Module):
        def forward(self, x):
            entered[int(x)].set()
            assert leave[int(x)].wait(10)
            return x

    entered, leave = ([threading.Event(), threading.Event()] for _ in range(2))
    calls = []

    @torch.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    def compiled(x):
        return x + 1

    threads = [threading.Thread(target=run_once, args=(Waits(), torch.tensor(index))) for index in range(2)]
    for thread, event in zip(threads, entered):
        thread.start()
        assert event.wait(10)
    for thread, event in zip(threads, leave):
        event.set()
        thread.join()
    compiled(torch.ones(2))
    assert calls


def test_the_share_of_page_faults_is_that_of_memory_that_is_new_in_each_call():
    resident = torch.zeros(16 << 20)
    assert advice(page_fault_share(resident.zero_)) == []
    # Not torch.zeros, which may get memory that the process has.
    share = page_fault_share(lambda: torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8).zero_())
    if platform.libc_ver()[0] == "glibc":
        assert 0.1 < share <= 1
        assert "start Python with MALLOC_MMAP_MAX_=0" in advice(share)[0]
    else:
        assert share == 0
