"""What is timed: one call of a model, or one step of its training, under one plan or another."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.planning.plans import Plan
from torch_nhwc.running.inputs import call
from torch_nhwc.running.modes import in_evaluation
from torch_nhwc.running.outputs import first_tensor, tensors_of
from torch_nhwc.running.rehearsal import restore_afterwards
from torch_nhwc.running.timing import seconds

Mode = Literal["inference", "training"]
Loss = Callable[[Any], Tensor]

# A call that takes this long, in seconds, does not depend on what the caches have from the turn before, and makes a
# turn by itself. Of shorter ones a turn has some, of which the least time counts: what disturbs a call only adds to it.
_LONG = 0.2
_TURN = 0.05
_CALLS = range(3, 50)


@dataclass
class Workload:
    """A model with what it is called with, and how."""

    model: nn.Module
    inputs: Any
    given: list[tuple[Tensor, Tensor]]
    """The tensors among the inputs, each with the caller's, whose values it has before each call."""
    mode: Mode
    device: torch.device
    autocast: torch.dtype | None
    """The dtype that an autocast region computes in."""
    loss: Loss
    optimizer: Any
    """`None` where no step is taken."""
    report: Report | None = None
    """Of the plan under which the model is."""
    seconds_of: dict[int, float] = field(default_factory=dict)
    """Of a call, by the identity of its plan, for those that have been measured."""
    versions: dict[int, int] = field(default_factory=dict)
    """Of the tensors among the inputs, by identity, since they last had their values."""

    def __call__(self) -> object:
        """One call or one step."""
        return self.run() if self.mode == "inference" else self._step()

    def run(self) -> Any:
        """One call, without gradients."""
        self._bring_inputs_back()
        with torch.no_grad(), self.region():
            output = call(self.model, self.inputs)
        torch.clear_autocast_cache()  # as the end of the outermost region would
        return output

    def region(self) -> torch.autocast:
        """The autocast region of a call."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    @contextmanager
    def under(self, plan: Plan) -> Iterator[None]:
        """Has the model converted as a plan says."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused, `convert_` will tell the caller
            self.report = convert_(self.model, plan=plan, optimizer=self.optimizer)
        try:
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Ends what a plan has changed; to be called again where an interrupt ended it."""
        if self.report is not None:
            for parameter in self.model.parameters():
                parameter.grad = None
            self.report.revert()
            self.report = None

    def sample(self, plan: Plan) -> float:
        """The seconds of a call under a plan: the least of some calls. Buffers are brought back."""
        with ExitStack() as stack:
            restore_afterwards(stack, self.model)
            stack.enter_context(self.under(plan))
            before = self.seconds_of.get(id(plan))
            if before is None or before < _LONG:
                before = self._measure()  # what it needs gets into the caches
            calls = 1 if before >= _LONG else min(max(_CALLS.start, math.ceil(_TURN / before)), _CALLS.stop)
            taken = min(self._measure() for _ in range(calls))
        self.seconds_of[id(plan)] = taken
        return taken

    def output(self, plan: Plan, seed: int = 0) -> Tensor:
        """The first tensor that the model returns in evaluation, under a plan; an empty one where there is none."""
        with ExitStack() as stack:
            restore_afterwards(stack, self.model)
            stack.enter_context(in_evaluation(self.model))
            stack.enter_context(self.under(plan))
            torch.manual_seed(seed)
            return _comparable(self.run())

    def _measure(self) -> float:
        return seconds(self, str(self.device))

    def _bring_inputs_back(self) -> None:
        for tensor, values in self.given:
            if tensor._version != self.versions.get(id(tensor), 0):  # the model has written to it
                tensor.detach().copy_(values)
                self.versions[id(tensor)] = tensor._version

    def _step(self) -> Tensor:
        self._bring_inputs_back()
        with torch.enable_grad():
            self.model.zero_grad(set_to_none=True)
            with self.region():
                loss = self.loss(call(self.model, self.inputs))
            torch.clear_autocast_cache()
            with torch.autocast(self.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                if self.optimizer is not None:
                    self.optimizer.step()
        return loss.detach()


def _comparable(output: Any) -> Tensor:
    try:
        found = first_tensor(output)
    except ValueError:  # there is none
        return torch.empty(0)
    return found.detach().to("cpu", torch.float64, memory_format=torch.contiguous_format)


def loss_of(output: Any) -> Tensor:
    """The output's own `loss`, or the mean of the squares of all that it has a gradient for.

    Raises:
        ValueError: there is no such tensor.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [each for each in tensors_of(output) if each.requires_grad]
    if not tensors:
        raise ValueError("tune: in training mode the model has to return a tensor with a gradient, or give loss=")
    return torch.stack([each.float().square().mean() for each in tensors]).sum()
