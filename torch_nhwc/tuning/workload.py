"""What is timed: a call of a model, or a step of its training, converted by one plan or another."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_nhwc.converting import Report, convert_
from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.planning import Plan
from torch_nhwc.rendering import first_line
from torch_nhwc.running.calls import Job, call, copy_inputs, copy_model, evaluation_mode, preserved_state, seconds
from torch_nhwc.running.comparison import Difference, compare
from torch_nhwc.running.containers import tensors_in
from torch_nhwc.running.page_faults import page_fault_share

Mode = Literal["inference", "training"]
Loss = Callable[[Any], Tensor]

# A call that takes this many seconds does not depend on what the turn before has left in the caches: one is a turn.
LONG = 0.2
# Shorter calls are repeated for about this time in each turn, within limits. The fastest one counts, because whatever
# disturbs a call makes it longer.
_TURN = 0.05
_CALLS = range(3, 50)


@dataclass
class Workload:
    """A copy of a model, what it is called with, and how; without an optimizer, steps are left out.

    Each call gets a fresh copy of the inputs, to which a model may write. A compiled model keeps the plan that it was
    compiled with.
    """

    model: nn.Module
    inputs: Any
    mode: Mode
    device: torch.device
    autocast: torch.dtype | None
    loss: Loss
    optimizer: Any = None
    is_compiled: bool = False
    _durations: dict[int, float] = field(default_factory=dict)

    def compile(self, plan: Plan) -> float:
        """Convert the model by a plan, compile it, and return the seconds of its first call or step."""
        self._convert(plan)
        compiled: Any = torch.compile(self.model)
        self.model, self.is_compiled = compiled, True
        return self.warm_up(plan)

    def warm_up(self, plan: Plan) -> float:
        """Return the seconds of a call or a step under a plan, before any sample. Buffers are restored."""
        with preserved_state(self.model), self._converted(plan):
            self._durations[id(plan)] = taken = self._measure()
        return taken

    def sample(self, plan: Plan) -> float:
        """Return the seconds of a call or a step under a plan, a short one after another. Buffers are restored."""
        with preserved_state(self.model), self._converted(plan):
            taken = self._durations.get(id(plan), 0.0)
            if taken < LONG:
                taken = self._measure()  # loads the caches
            calls = 1 if taken >= LONG else min(max(_CALLS.start, math.ceil(_TURN / taken)), _CALLS.stop)
            taken = min(self._measure() for _ in range(calls))
        self._durations[id(plan)] = taken
        return taken

    def page_fault_share(self, plan: Plan) -> float:
        """Return the share of a call or a step under a plan that page faults take. Buffers are restored."""
        with preserved_state(self.model), self._converted(plan):
            return page_fault_share(self._job())

    def output(self, plan: Plan, seed: int = 0) -> Any:
        """Return the model's output in evaluation mode under a plan."""
        with preserved_state(self.model), evaluation_mode(self.model), self._converted(plan):
            torch.manual_seed(seed)
            return self._infer(copy_inputs(self.inputs))

    def gradients(self, plan: Plan, seed: int = 0) -> list[Tensor | None]:
        """Return the parameters' gradients after a step under a plan. Buffers are restored."""
        with preserved_state(self.model), self._converted(plan), self._stopped_before_a_crash():
            torch.manual_seed(seed)
            self._step(copy_inputs(self.inputs))
            return [parameter.grad for parameter in self.model.parameters()]

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that the model computes in."""
        dtypes = [each.dtype for each in self.model.parameters()] + ([self.autocast] if self.autocast else [])
        if self.device.type == "cuda":  # which may compute products with fewer bits than their dtype has
            dtypes.append(torch.float16)
        return dtypes

    def compare(self, output: Any, reference: Any) -> Difference:
        """Return how far an output is from another one, with the tolerance of the dtypes that the model computes in."""
        return compare(output, reference, *self.dtypes())

    def region(self) -> torch.autocast:
        """Return the autocast region of a call."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    @contextmanager
    def _converted(self, plan: Plan) -> Iterator[None]:
        report = None if self.is_compiled else self._convert(plan)
        try:
            yield
        finally:
            self.model.zero_grad(set_to_none=True)
            if report is not None:
                report.revert()

    @contextmanager
    def _stopped_before_a_crash(self) -> Iterator[None]:
        """Raise where PyTorch's group norm would end the process in the backward (h76), which 2.14 mended."""
        if self.is_compiled or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
            yield
            return
        handle = nn.modules.module.register_module_forward_pre_hook(_raise_where_group_norm_crashes)
        try:
            yield
        finally:
            handle.remove()

    def _convert(self, plan: Plan) -> Report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `convert_` will warn the caller of what is refused
            return convert_(self.model, plan=plan, optimizer=self.optimizer)

    def _job(self) -> Job:
        return partial(self._infer if self.mode == "inference" else self._step, copy_inputs(self.inputs))

    def _measure(self) -> float:
        return seconds(self._job(), str(self.device))

    def _infer(self, inputs: Any) -> Any:
        with torch.no_grad(), self.region():
            output = call(self.model, inputs)
        torch.clear_autocast_cache()  # as the end of the outermost region does
        return output

    def _step(self, inputs: Any) -> Tensor:
        with torch.enable_grad():
            self.model.zero_grad(set_to_none=True)
            with self.region():
                loss = self.loss(call(self.model, inputs))
            torch.clear_autocast_cache()
            with torch.autocast(self.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                if self.optimizer is not None:
                    self.optimizer.step()
        return loss.detach()


def _raise_where_group_norm_crashes(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    x = arguments[0] if arguments else None
    if type(module) is not nn.GroupNorm or not isinstance(x, Tensor) or x.device.type != "cpu" or x.requires_grad:
        return
    is_channels_last = x.dim() in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    is_at_risk = is_channels_last and not x.is_contiguous() and x[0, 0].numel() < 2048  # larger images: another kernel
    if is_at_risk and any(each.requires_grad for each in module.parameters()):
        raise RuntimeError("PyTorch's group norm ends the process: its channels-last input needs no gradient (h76)")


def loss_of(output: Any) -> Tensor:
    """Return the output's own `loss`, or the mean of the squares of all tensors in it that have a gradient.

    Raises:
        ValueError: There is no such tensor.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [each for _, each in tensors_in(output) if each.requires_grad]
    if not tensors:
        raise ValueError("tune: in training mode the model has to return a tensor with a gradient, or give loss=")
    return torch.stack([each.float().square().mean() for each in tensors]).sum()


def tuning_copy(model: nn.Module, mode: Mode) -> nn.Module:
    """Return a deep copy in a mode, without gradients.

    Modules keep modes of their own if the model itself is in that mode.

    Raises:
        RuntimeError: The model cannot be copied.
    """
    try:
        copied = copy_model(model)
    except Exception as error:  # the code of any module may raise
        raise RuntimeError(
            f"tune: expected a model that can be copied, because a copy is tuned, got {type(error).__name__}: "
            f"{first_line(str(error))}"
        ) from error
    copied.zero_grad(set_to_none=True)
    is_training = mode == "training"
    if getattr(copied, "training", is_training) != is_training:  # a frozen TorchScript module has no mode
        copied.train(is_training)
    return copied


def optimizer_named(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the class of `torch.optim` with a name, in any case, such as `adamw` or `torch.optim.AdamW`."""
    base = torch.optim.Optimizer
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, base)]
    return {kind.__name__.lower(): kind for kind in kinds if kind is not base}.get(
        name.lower().removeprefix("torch.optim.")
    )


def optimizer_for(copied: nn.Module, model: nn.Module, optimizer: Any) -> Any:
    """Return an optimizer for a copy of a model. Its steps do all their work, with a learning rate of zero.

    Raises:
        ValueError: The optimizer holds none of the model's parameters, or is LBFGS.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        twins = {id(parameter): twin for parameter, twin in zip(model.parameters(), copied.parameters())}
        groups = [
            {**group, "params": [twins[id(each)] for each in group["params"] if id(each) in twins]}
            for group in optimizer.param_groups
        ]
        if not any(group["params"] for group in groups):
            raise ValueError(f"tune: the {type(optimizer).__name__} holds none of the model's parameters")
        kind: Any = type(optimizer)
        made = kind(groups)
    else:
        made = optimizer([parameter for parameter in copied.parameters() if parameter.requires_grad])
    if isinstance(made, torch.optim.LBFGS):
        raise ValueError("tune: LBFGS calls the model several times in a step: tune without an optimizer")
    for group in made.param_groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0
    return made
