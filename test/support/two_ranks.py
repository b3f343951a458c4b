"""Two processes on a CPU, with the environment that `torchrun` gives accelerate and transformers."""

import os
import socket

import torch


def on_two_ranks(function, *arguments):
    """Call a module's function in each of two fresh processes, and raise the error of either."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, function, arguments), nprocs=2)


def _rank(index, port, function, arguments):
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    function(*arguments)
    torch.distributed.destroy_process_group()
