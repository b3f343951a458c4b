"""Lightning: a callback that keeps a module in channels-last while a trainer runs it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same, under its older name
    except ImportError as error:
        raise ImportError("lightning is missing: pip install 'torch_nhwc[lightning]'") from error

from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.hooks import state_dict_hook_key
from torch_nhwc.planning.companions import held_by
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.request import FilterFunction
from torch_nhwc.planning.rows import Action
from torch_nhwc.rendering import warn
from torch_nhwc.saving.state_dicts import contiguous_checkpoints_
from torch_nhwc.upkeep.checking import check
from torch_nhwc.upkeep.restoring import align_


class ChannelsLast(Callback):  # type: ignore[misc]
    """A callback that has a module in channels-last while a trainer fits, validates, tests or predicts with it.

    The weights convert once all layers are there and a checkpoint is loaded, right before the strategy moves and wraps
    the module; averaged copies of Lightning's own callbacks convert with them, and optimizer state that is restored
    follows. Checkpoints come out contiguous. When the trainer is done with the module, after exceptions too, weights
    and optimizer state go back to the strides that they had. Trainers of `lightning` and of `pytorch_lightning` take
    it.

    Args:
        plan: a plan to apply, such as a tuned one or one with `each_forward=True`, made of the whole LightningModule.
        preserve: as `convert_` takes it.
        input_format: as `convert_` takes it; the model's entry is the LightningModule's own `forward`.
        filter_fn: as `convert_` takes it; paths start at the LightningModule.

    Attributes:
        report: on the last conversion; `None` before there was one.

    Raises:
        RuntimeError: from the trainer: the module has nothing to convert, or nothing that can be; what was converted
            does not stay so when the strategy wraps it; or the strategy shards parameters.
        ValueError: from the trainer: the plan is that of another model.

    Warns:
        UserWarning: as `convert_` does; and where the module cannot go back, since an exception in its forward still
            holds the DDP around it, or layers have come since.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from torch_nhwc.integrations.lightning import ChannelsLast
        >>> trainer = Trainer(callbacks=[ChannelsLast(preserve=True)], accelerator="cpu", logger=False)
    """

    report: Report | None = None

    def __init__(
        self,
        *,
        plan: Plan | None = None,
        preserve: bool = False,
        input_format: Literal["channels_last", "channels_last_3d"] | None = None,
        filter_fn: FilterFunction | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "plan": plan,
            "preserve": preserve,
            "input_format": input_format,
            "filter_fn": filter_fn,
        }

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Has the strategy convert the module when it is set up, and revert it when it is torn down.

        No hook of callbacks comes between `configure_model` and the strategy's wrapping, and none after its unwrapping
        when there was an exception.
        """
        strategy = trainer.strategy
        if strategy.restore_checkpoint_after_setup:  # of all strategies that shard
            raise RuntimeError(
                f"ChannelsLast: {type(strategy).__name__} shards parameters, which have to be contiguous for it: take "
                "the callback away, and in configure_model call convert_(self, each_forward=True)"
            )
        set_up, tear_down, undo = strategy.setup, strategy.teardown, ExitStack()

        def set_up_converted(trainer: Any) -> None:
            vars(strategy).pop("setup", None)
            # As WeightAveraging and StochasticWeightAveraging name it.
            copies = [getattr(each, "_average_model", None) for each in trainer.callbacks] if stage == "fit" else []
            averaged = [each for each in copies if each is not None]
            report = self.report = self._convert(pl_module, averaged)
            undo.callback(_revert, report, pl_module, trainer)
            for each in (pl_module, *averaged):
                if state_dict_hook_key(each) is None:
                    undo.callback(contiguous_checkpoints_(each).remove)
            set_up(trainer)
            optimizers = _optimizers_of(pl_module, trainer) if stage == "fit" else []
            align_(pl_module, optimizers)
            for optimizer in optimizers:
                undo.callback(contiguous_checkpoints_(optimizer).remove)
            if deviations := check(strategy.model, report.plan, optimizers, averaged):
                raise RuntimeError(f"ChannelsLast: {type(strategy).__name__} leaves {'; '.join(map(str, deviations))}")

        def tear_down_and_revert() -> None:
            for name in ("setup", "teardown"):
                vars(strategy).pop(name, None)
            with undo:
                tear_down()

        strategy.setup, strategy.teardown = set_up_converted, tear_down_and_revert

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Has optimizer state that was restored follow its parameters."""
        align_(pl_module, _optimizers_of(pl_module, trainer))

    def _convert(self, module: Any, averaged: Sequence[Any]) -> Report:
        report = convert_(module, optimizer=(), ema=averaged, **self.options)
        wanted = [row for row in report.rows if row.is_wanted and row.action is not Action.REFUSE]
        rows = wanted or [row for row in report.rows if row.is_in_each_forward]
        if not rows and not any(layer.is_wanted for layer in report.plan.layers):
            report.revert()  # a hook for inputs goes
            raise RuntimeError(f"ChannelsLast: nothing was converted in the {type(module).__name__}: {report}")
        return report


def _optimizers_of(module: Any, trainer: Any) -> list[Any]:
    """Those that hold a parameter of the module: Lightning makes one that holds none, and a helper may have its own."""
    parameters = {id(parameter) for parameter in module.parameters()}
    return [each for each in trainer.optimizers if not held_by(each).isdisjoint(parameters)]


def _revert(report: Report, module: Any, trainer: Any) -> None:
    failures: list[str] = []  # as text: exceptions would keep their frames, and these DDP
    undo = "convert_(module, torch.contiguous_format)"
    # The trainer's are read now, since they may have been replaced. Rather none of them than that the module stays.
    for optimizers in (_optimizers_of(module, trainer), []):
        try:
            report.revert(optimizers)
            break
        except (RuntimeError, ValueError) as error:  # as of DDP, which frames in an exception's traceback still have
            failures.append(str(error))
            # A ValueError is of sites that are not those of then, as behind structured pruning.
            later = undo if isinstance(error, ValueError) else f"callback.report.revert() or {undo}"
    if len(failures) == 1:
        warn(f"torch_nhwc: ChannelsLast: state of the optimizers stays in channels-last: {failures[0]}")
    elif failures:
        warn(f"torch_nhwc: ChannelsLast: the module stays in channels-last: {failures[1]}; later, {later} undoes it")
