"""Lightning: a callback that keeps a module in channels-last while a trainer runs it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same package under its older name
    except ImportError as error:
        raise ImportError("lightning is missing: pip install 'torch_nhwc[lightning]'") from error

from torch_nhwc.checkpoint import contiguous_checkpoints_
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.nn.hooks import state_dict_hook_key
from torch_nhwc.planning.companions import held_by
from torch_nhwc.planning.plans import Action, FilterFunction, Options, PlanOrPath, Preserve, plan_from
from torch_nhwc.rendering import warn
from torch_nhwc.training import align_optimizer_, check


class ChannelsLast(Callback):  # type: ignore[misc]
    """A callback that keeps a module in channels-last while a trainer fits, validates, tests or predicts with it.

    The weights are converted when all layers exist and a checkpoint is loaded, right before the strategy moves and
    wraps the module; averaged copies of Lightning's own callbacks are converted with them, and restored optimizer state
    follows. Checkpoints are contiguous. When the trainer has finished, also after an exception, weights and optimizer
    state get their former strides back. Trainers of `lightning` and of `pytorch_lightning` accept it.

    Args:
        memory_format: As in `convert_`.
        plan: A plan to apply, such as a tuned one or one with `each_forward=True`, made of the whole LightningModule;
            or the path of its file.
        preserve: As in `convert_`.
        input_format: As in `convert_`; the model's entry is the LightningModule's own `forward`.
        filter_fn: As in `convert_`; paths start at the LightningModule.

    Attributes:
        report: The report on the last conversion; `None` before the first one.

    Raises:
        RuntimeError: From the trainer: the module has nothing that can be converted; converted weights lose the format
            when the strategy wraps the module; or the strategy shards parameters.
        ValueError: An argument is not valid; or from the trainer: the plan is that of another model.

    Warns:
        UserWarning: As in `convert_`; and if the module cannot be reverted, since an exception in its forward still
            holds the DDP around it, or since layers were added.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from torch_nhwc.integrations.lightning import ChannelsLast
        >>> trainer = Trainer(callbacks=[ChannelsLast()], accelerator="cpu", logger=False)
    """

    report: Report | None = None

    def __init__(
        self,
        *,
        memory_format: torch.memory_format | str | None = None,
        plan: PlanOrPath | None = None,
        preserve: Preserve = True,
        input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
        filter_fn: FilterFunction | None = None,
    ) -> None:
        # Names, since a callback is copied and pickled, which a torch.memory_format cannot be.
        chosen = Options.of(memory_format, None, filter_fn, input_format, preserve)
        self.options: dict[str, Any] = {
            "memory_format": chosen.format.name,
            "plan": None if plan is None else plan_from(plan),
            "preserve": preserve,
            "input_format": chosen.input_format,
            "filter_fn": filter_fn,
        }

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy convert the module when it is set up, and revert it when it is torn down.

        No callback hook runs between `configure_model` and the strategy's wrapping, and none after its unwrapping if
        there was an exception.
        """
        strategy = trainer.strategy
        if strategy.restore_checkpoint_after_setup:  # true for all strategies that shard
            raise RuntimeError(
                f"ChannelsLast: {type(strategy).__name__} shards parameters, which have to be contiguous for it: "
                "remove the callback, and in configure_model call convert_(self, each_forward=True)"
            )
        set_up, tear_down, undo = strategy.setup, strategy.teardown, ExitStack()

        def set_up_converted(trainer: Any) -> None:
            vars(strategy).pop("setup", None)
            # The attribute of WeightAveraging and StochasticWeightAveraging.
            copies = [getattr(each, "_average_model", None) for each in trainer.callbacks] if stage == "fit" else []
            averaged = [each for each in copies if each is not None]
            report = self.report = self._convert(pl_module, averaged)
            undo.callback(_revert, report, pl_module, trainer)
            for each in (pl_module, *averaged):
                if state_dict_hook_key(each) is None:  # a hook of the user's stays
                    undo.callback(contiguous_checkpoints_(each).remove)
            set_up(trainer)
            optimizers = _optimizers_of(pl_module, trainer) if stage == "fit" else []
            align_optimizer_(pl_module, optimizers)
            for optimizer in optimizers:
                undo.callback(contiguous_checkpoints_(optimizer).remove)
            if deviations := check(strategy.model, report.plan, optimizers, averaged):
                found = "; ".join(map(str, deviations))
                raise RuntimeError(f"ChannelsLast: after the setup of {type(strategy).__name__}: {found}")

        def tear_down_and_revert() -> None:
            for name in ("setup", "teardown"):
                vars(strategy).pop(name, None)
            with undo:
                tear_down()

        strategy.setup, strategy.teardown = set_up_converted, tear_down_and_revert

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make restored optimizer state follow its parameters."""
        align_optimizer_(pl_module, _optimizers_of(pl_module, trainer))

    def _convert(self, module: Any, averaged: Sequence[Any]) -> Report:
        report = convert_(module, optimizer=(), ema=averaged, **self.options)
        wanted = [row for row in report.rows if row.is_wanted and row.action is not Action.REFUSE]
        rows = wanted or [row for row in report.rows if row.is_in_each_forward]
        if not rows and not any(layer.is_wanted for layer in report.plan.layers):
            report.revert()  # removes the hook for inputs
            raise RuntimeError(f"ChannelsLast: nothing was converted in the {type(module).__name__}: {report}")
        return report


def _optimizers_of(module: Any, trainer: Any) -> list[Any]:
    """Return the optimizers that hold a parameter of the module; one may have none, or be that of a helper."""
    own = {id(parameter) for parameter in module.parameters()}
    return [optimizer for optimizer in trainer.optimizers if not held_by(optimizer).isdisjoint(own)]


def _revert(report: Report, module: Any, trainer: Any) -> None:
    try:
        report.revert(_optimizers_of(module, trainer))
    except (RuntimeError, ValueError) as error:  # such as DDP, which the frames of an exception still hold
        undo = "convert_(module, torch.contiguous_format)"
        # A ValueError says that the model has other layers by now, as after structured pruning.
        later = undo if isinstance(error, ValueError) else f"callback.report.revert() or {undo}"
        warn(f"torch_nhwc: ChannelsLast: the module stays in channels-last: {error}; later, {later} undoes it")
