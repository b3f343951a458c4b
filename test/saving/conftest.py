"""What the tests of saved models share: archives that are not trusted are rehearsed in a fork, without delay."""

import os

import pytest

from torch_nhwc.saving import archives


def load_in_a_fork(path):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            archives.load_archive(path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.fixture(autouse=True)
def rehearsals_in_forks(request, monkeypatch):
    """A process of its own takes two seconds or three to import torch; one test has it."""
    if "rehearsed_for_real" not in request.fixturenames:
        monkeypatch.setattr(archives, "_load_elsewhere", load_in_a_fork)


@pytest.fixture
def rehearsed_for_real():
    """Rehearsals as users have them."""
