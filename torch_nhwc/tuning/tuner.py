"""`tune`: which plan makes a model fastest, found by measuring it."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torch_nhwc.rendering import first_line
from torch_nhwc.running.copying import copy_of_inputs
from torch_nhwc.running.inputs import arguments_of
from torch_nhwc.running.modes import modes_of
from torch_nhwc.running.outputs import tensors_of
from torch_nhwc.tuning.conditions import machine
from torch_nhwc.tuning.policies import fixed_policies
from torch_nhwc.tuning.progress import Progress
from torch_nhwc.tuning.standing_in import StandIn, optimizer_for, stand_in_for
from torch_nhwc.tuning.trials import Trials
from torch_nhwc.tuning.tunings import Tuning
from torch_nhwc.tuning.workload import Loss, Mode, Workload, loss_of


def tune(
    model: nn.Module,
    example_inputs: Any,
    *,
    mode: Literal["inference", "training"] = "inference",
    budget_seconds: float = 60.0,
    preserve: bool = True,
    autocast: torch.dtype | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
) -> Tuning:
    """Finds by measurement which plan makes a model fastest on this machine.

    `convert_(model, plan=tuning.plan)` applies it. The contiguous model, its weights alone in channels-last, its inputs
    too, and with layers exchanged that would lose the format are timed in turns; then what a search finds: weights that
    are better left contiguous, and parts of the model in one format and parts in the other. The ones that lose drop
    out, and what is left is compared in pairs of one round. A plan that is not faster with its whole interval is not
    the answer: in doubt it is the contiguous model, which changes nothing. Neither is one with which the model computes
    something else.

    A deep copy of the model is tuned. Where memory does not allow one, it is the model itself, which is brought back
    afterwards; only weights that something else holds, such as a state dict, lie in new storage then. Ctrl-C ends the
    tuning, with the best so far.

    Args:
        model: any module that `convert_` takes, on its device and in its dtype.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones, as the model is called in
            earnest: their shapes decide.
        mode: `"inference"` times calls without gradients, `"training"` forward, backward and a step of the optimizer.
            Modules that are in another mode are put into it; where the model itself is in that mode, all of them stay
            as they are.
        budget_seconds: how long it may take, roughly: the first call under each plan is never left out.
        preserve: whether layers that lose on channels-last may be exchanged.
        autocast: the dtype of the autocast region in which the model is called; `None` is that of the region around
            this call, or none.
        optimizer: for training, one whose kind and groups are taken, or its class, or what makes one of parameters. It
            takes its steps on the copy, with a learning rate of zero; `None` leaves them out.
        loss: for training, what makes a loss of the model's output; `None` takes the output's `loss`, or the mean of
            its squares. Weights that it holds itself get gradients.

    Raises:
        ValueError: an argument is none of those; a layer is lazy, or on the meta device.
        TypeError: `model` is not a module, or a shape was given where tensors are wanted.
        Exception: what the contiguous model raises on these inputs.

    Example:
        >>> model, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)
        >>> tuning = torch_nhwc.tune(model, x, budget_seconds=0.1)
        >>> tuning.table[0].name, tuning.choice in [row.name for row in tuning.table]
        ('contiguous', True)
    """
    _expect(mode, budget_seconds, autocast, optimizer, loss)
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune: expected a torch.nn.Module, got {type(model).__name__}")
    arguments_of(model, example_inputs)
    device = _device_of(model, example_inputs)
    if device.type == "meta":
        raise ValueError("tune: expected a model whose weights have values, which are on the meta device")
    if autocast is None and torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(budget_seconds))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        inputs = copy_of_inputs(example_inputs)
        trial = stand_in_for(stack, model)
        if modes_of(trial.model) and trial.model.training != (mode == "training"):
            trial.model.train(mode == "training")
        notes = _notes_on(trial, optimizer)
        steps = None if optimizer is None or trial.why_itself else optimizer_for(trial, model, optimizer)
        given = list(zip(tensors_of(inputs), tensors_of(example_inputs)))
        workload = Workload(trial.model, inputs, given, mode, device, autocast, loss or loss_of, steps)
        stack.callback(workload.put_back)
        with workload.region():
            fixed = fixed_policies(trial.model, inputs, preserve)
        trials = Trials(workload, progress, fixed)
        try:
            trials.run()
        except KeyboardInterrupt:
            if not trials.race.measured:
                raise
            notes.append("It was interrupted: this is the best so far.")
        choice = trials.race.winner(trials.fixed)
        table = trials.rows()
        stack.close()
        return Tuning(
            plan=trials.plans[choice],
            choice=choice,
            table=table,
            notes=(*trials.remarks(choice), *trials.notes, *notes),
            seconds=progress.seconds,
            workload=_describe(workload, model, optimizer),
            machine=machine(device),
            device=str(device),
        )


def _expect(mode: Any, budget: Any, autocast: Any, optimizer: Any, loss: Any) -> None:
    """Raises a ValueError for an argument that is of no use."""
    if mode not in get_args(Mode):
        raise ValueError(f"tune: expected mode to be 'inference' or 'training', got {mode!r}")
    if not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise ValueError(f"tune: expected budget_seconds to be a positive number, got {budget!r}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise ValueError(f"tune: expected autocast to be a floating dtype or None, got {autocast!r}")
    if mode == "inference" and (optimizer is not None or loss is not None):
        raise ValueError("tune: an optimizer and a loss are for mode='training'")
    if optimizer is not None and not (callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise ValueError(f"tune: expected an optimizer, its class, or what makes one, got {optimizer!r}")


def _notes_on(trial: StandIn, optimizer: Any) -> list[str]:
    if trial.why_itself is None:
        return []
    text = f"The model itself was tuned, and brought back: {first_line(trial.why_itself)}."
    left_out = " The steps of the optimizer were left out, since they would change its weights."
    return [text + (left_out if optimizer is not None else "")]


def _device_of(model: nn.Module, inputs: Any) -> torch.device:
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers(), *tensors_of(inputs)]
    return tensors[0].device if tensors else torch.device("cpu")


def _describe(workload: Workload, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What was timed, as plain data."""
    name: Callable[[Any], str] = lambda each: getattr(each, "__name__", type(each).__name__)  # noqa: E731
    dtypes = {str(each.dtype).removeprefix("torch.") for each in model.parameters()}
    return {
        "model": type(model).__name__,
        "mode": workload.mode,
        "dtype": ", ".join(sorted(dtypes)),
        "autocast": str(workload.autocast).removeprefix("torch.") if workload.autocast else None,
        "shapes": ["x".join(map(str, each.shape)) for _, each in workload.given],
        "optimizer": name(optimizer) if workload.optimizer is not None else None,
    }
