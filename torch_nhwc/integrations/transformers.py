"""Transformers: a `Trainer` that converts its models before it wraps them."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

try:
    from accelerate.data_loader import DataLoaderAdapter
    from transformers import Trainer
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'torch_nhwc[transformers]'") from error

from torch_nhwc.checkpoint import contiguous_checkpoints_
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.converting.step_guard import align_when_loaded
from torch_nhwc.integrations.accelerate import contiguous_broadcasts_
from torch_nhwc.planning.plans import plan_from

_OPTIONS = ("memory_format", "plan", "input_format", "preserve", "each_forward", "strict")


class ChannelsLastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that converts its model, and each one that `model_init` makes, before it is wrapped and compiled.

    Checkpoints are contiguous, including the optimizer's: they resume here and in a `Trainer` of transformers, which
    would make wrong steps by a fused CPU optimizer with channels-last state. Batches that one process reads for all are
    broadcast by `contiguous_broadcasts_`. The model stays converted when training ends;
    `conversion.revert(trainer.optimizer)` undoes that.

    Other trainers combine with it: `class Mine(ChannelsLastTrainer, Seq2SeqTrainer)`.

    Args:
        args: Positional and keyword arguments of the `Trainer`, and these of `convert_`: `memory_format`, `plan`,
            `input_format`, `preserve`, `each_forward`, which FSDP and DeepSpeed need, and `strict`.
        kwargs: See `args`.

    Attributes:
        conversion: The `Report` on the present model.

    Raises:
        ValueError: FSDP or DeepSpeed is to wrap the model, and weights are not converted in each forward.
        RuntimeError: As in `convert_`.

    Example:
        >>> from torch_nhwc.integrations.transformers import ChannelsLastTrainer
        >>> from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments
        >>> model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(folder, use_cpu=True)
        ...     trainer = ChannelsLastTrainer(model, arguments, input_format="channels_last", strict=True)
        >>> trainer.conversion.rows[0].full_name, model.resnet.embedder.embedder.convolution.weight.stride()
        ('resnet.embedder.embedder.convolution.weight', (147, 1, 21, 3))
    """

    conversion: Report

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        if self._options.get("plan") is not None:
            self._options["plan"] = plan_from(self._options["plan"])
        super().__init__(*args, **kwargs)
        if self.model_init is None:
            self._convert(self.model, self.optimizer or ())

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert the model that `model_init` makes."""
        model: nn.Module = super().call_model_init(*args, **kwargs)
        self._convert(model, ())
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer's state follow the parameters when it is loaded, and contiguous when it is saved."""
        created = super().create_optimizer(*args, **kwargs)
        optimizer = getattr(created, "optimizer", created)  # accelerate's wrapper takes no hooks
        if isinstance(optimizer, Optimizer):
            contiguous_checkpoints_(optimizer)
            align_when_loaded(optimizer)
        return created

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the `Trainer`'s loader, with `contiguous_broadcasts_`."""
        return _broadcasting(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return the `Trainer`'s loader, with `contiguous_broadcasts_`."""
        return _broadcasting(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return the `Trainer`'s loader, with `contiguous_broadcasts_`."""
        return _broadcasting(super().get_test_dataloader(*args, **kwargs))

    def _convert(self, model: nn.Module, optimizer: Any) -> None:
        each_forward = getattr(self._options.get("plan"), "each_forward", self._options.get("each_forward"))
        if (self.is_fsdp_enabled or self.is_deepspeed_enabled) and not each_forward:
            raise ValueError("FSDP and DeepSpeed need contiguous parameters: give the trainer each_forward=True")
        self.conversion = convert_(model, optimizer=optimizer, **self._options)
        contiguous_checkpoints_(model)


def _broadcasting(loader: DataLoader[Any]) -> DataLoader[Any]:
    # A trainer that is combined with this one may have loaders of its own, which are not broadcast.
    return contiguous_broadcasts_(loader) if isinstance(loader, DataLoaderAdapter) else loader
