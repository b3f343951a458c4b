"""A machine on which calls of a model take as long as a test says, with a clock that agrees."""

import random
from functools import partial

import torch

from torch_nhwc.tuning import tuner, workload


def policy_of(model):
    """Return the name of the policy by which a model is converted, and whether it is compiled."""
    if hasattr(model, "_orig_mod"):
        return f"{policy_of(model._orig_mod)}, compiled"
    weights = [p for p in model.parameters() if p.dim() in (4, 5) and p.shape[1] > 1 and p[0, 0].numel() > 1]
    if all(weight.is_contiguous() for weight in weights):
        return "contiguous"
    if not model._forward_pre_hooks:
        return "weights only"
    is_replaced = any(type(module).__module__.startswith("torch_nhwc") for module in model.modules())
    return "full, preserved" if is_replaced else "full"


class Machine:
    """Replaces the stopwatch and the clock. The first call of a compiled model takes `compile_seconds`."""

    compile_seconds = 100.0

    def __init__(self, monkeypatch, seconds, noise=0.02):
        self.seconds, self.noise = seconds, noise
        self.now, self.calls, self.chance = 0.0, [], random.Random(0)
        self.interrupt_at = None
        monkeypatch.setattr(workload, "seconds", self.measure)
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        monkeypatch.setattr(tuner.time, "monotonic", lambda: self.now)

    def measure(self, job, device):
        timed = job.func.__self__
        policy = policy_of(timed.model)
        is_compiling = policy.endswith("compiled") and policy not in self.calls
        self.calls.append(policy)
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        if timed.mode == "training" and len(self.calls) < 6:
            job()  # for what steps leave behind
        taken = self.seconds[policy] * (1 + abs(self.chance.gauss(0, self.noise)))
        if is_compiling:
            taken = self.compile_seconds
        self.now += taken + 0.01
        return taken
