"""A machine on which calls of a model take as long as a test says, and a clock that goes by them."""

import random

from torch_nhwc.entries import input_hook
from torch_nhwc.preserving.exchange import is_exchanged
from torch_nhwc.tuning import progress, trials, workload


def policy_of(model):
    """The name of the fixed policy under which a model is, or `"mixed"`."""
    weights = [p for p in model.parameters() if p.dim() in (4, 5) and p.shape[1] > 1 and p[0, 0].numel() > 1]
    converted = [not weight.is_contiguous() for weight in weights]
    if any(input_hook(module) for module in model.modules() if module is not model) or len(set(converted)) > 1:
        return "mixed"
    if not all(converted):
        return "contiguous"
    if not input_hook(model):
        return "weights only"
    return "full, preserved" if any(is_exchanged(type(module)) for module in model.modules()) else "full"


class Machine:
    """Stands in for the stopwatch and for the clock."""

    def __init__(self, monkeypatch, seconds, noise=0.02, overhead=0.01):
        self.seconds, self.noise, self.overhead = seconds, noise, overhead
        self.now, self.calls, self.chance = 0.0, [], random.Random(0)
        self.interrupt_at = None
        monkeypatch.setattr(workload, "seconds", self.measure)
        monkeypatch.setattr(trials, "search", lambda *_: {})
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def measure(self, job, device):
        policy = policy_of(job.model)
        self.calls.append(policy)
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        if job.mode == "training" and len(self.calls) < 6:
            job()  # for what steps leave behind
        taken = self.seconds[policy] * (1 + abs(self.chance.gauss(0, self.noise)))
        self.now += taken + self.overhead
        return taken
