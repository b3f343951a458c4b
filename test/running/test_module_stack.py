"""The innermost module whose forward runs in a thread is known."""

import threading
from contextlib import suppress

import torch
from torch import nn

from torch_nhwc.running import ModuleStack

X = torch.zeros(1)


class Calling(nn.Module):
    """Calls a module, if it has one, and a function."""

    def __init__(self, function, inner=None):
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x):
        if self.inner is not None:
            with suppress(ValueError, KeyboardInterrupt):
                self.inner(x)
        self.function(self)
        return x


def test_the_innermost_module_is_known_and_one_from_elsewhere_has_the_path_of_its_caller():
    seen = []
    elsewhere = Calling(lambda module: seen.append((stack.path, stack.module is module)))

    def note(module):
        elsewhere.function(module)
        elsewhere(X)

    model = nn.Sequential(Calling(note, Calling(note)))
    with ModuleStack(model) as stack:
        assert (stack.path, stack.module) == ("", model)
        model(X)
        assert stack.running == []
    assert seen == [("0.inner", True), ("0.inner", True), ("0", True), ("0", True)]


def test_a_module_that_raised_does_not_run():
    def fail(_):
        raise errors.pop()

    seen, errors = [], [ValueError(), KeyboardInterrupt()]
    model = nn.Sequential(*(Calling(lambda _: seen.append(stack.path), Calling(fail)) for _ in range(2)))
    with ModuleStack(model) as stack:
        model(X)
        assert stack.running == []
    assert seen[1] == "1"


def test_threads_have_stacks_of_their_own():
    entered, leave = threading.Event(), threading.Event()
    model = nn.Sequential(Calling(lambda _: entered.set() or leave.wait(60)))
    with ModuleStack(model) as stack:
        other = threading.Thread(target=model, args=(X,))
        other.start()
        assert entered.wait(60)
        assert stack.running == []
        leave.set()
        other.join()
