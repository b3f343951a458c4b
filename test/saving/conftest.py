"""What the tests of saved models share: archives that are not trusted are rehearsed in a fork, without delay."""

import os
import signal

import pytest

from torch_nhwc.saving import archives


def load_in_a_fork(path):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            archives.load_archive(path)
        except Exception as error:
            os.write(writes, (str(error) or type(error).__name__).encode()[:10_000])
        finally:
            os._exit(0)
    os.close(writes)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reads, errors="replace") as pipe:
        said = pipe.read()
    if os.WIFSIGNALED(status):
        return "ended", f"it ends the process that loads it, by {signal.Signals(os.WTERMSIG(status)).name}"
    return ("refused", said) if said else ("loaded", "")


@pytest.fixture(autouse=True)
def rehearsals_in_forks(request, monkeypatch):
    """A process of its own takes two seconds or three to import torch; few tests have it."""
    if "rehearsed_for_real" not in request.fixturenames:
        monkeypatch.setattr(archives, "_load_elsewhere", load_in_a_fork)


@pytest.fixture
def rehearsed_for_real():
    """Rehearsals as users have them."""
