"""Transformers: a `Trainer` whose models are channels-last before it wraps them."""

from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

try:
    from accelerate.data_loader import DataLoaderAdapter
    from transformers import Trainer
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'torch_nhwc[transformers]'") from error

from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.integrations.accelerate import contiguous_broadcasts_
from torch_nhwc.planning.plans import EachForward, Plan
from torch_nhwc.saving.state_dicts import contiguous_checkpoints_
from torch_nhwc.stepping.loading import align_when_loaded, loading_optimizer


class ChannelsLastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that converts its model, and each one that `model_init` makes, before it is wrapped and compiled.

    Checkpoints are contiguous, the optimizer's too: they resume here and in a `Trainer` of transformers' own, which
    steps wrong on a CPU by a fused optimizer whose state is channels-last. Batches that one process reads for all are
    broadcast as `contiguous_broadcasts_` does. The model stays converted when training ends, by an exception as well;
    `conversion.revert(trainer.optimizer)` undoes that.

    Other trainers combine with it: `class Mine(ChannelsLastTrainer, Seq2SeqTrainer)`.

    Args:
        args: positional and keyword ones are the `Trainer`'s.
        memory_format: this and the others as `convert_` takes them.
        plan: such as `tune` decides on; it fits every model that `model_init` makes.
        input_format: `"channels_last"` brings batches into the format at the model's entry.
        preserve: whether layers that lose on channels-last are exchanged.
        each_forward: what FSDP and DeepSpeed need.
        strict: whether a weight that is refused raises.
        kwargs: see `args`.

    Attributes:
        conversion: the `Report` on the model that is there.

    Raises:
        ValueError: FSDP or DeepSpeed is to wrap the model, and weights are not to be converted in each forward.
        RuntimeError: as `convert_` raises it.

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

    def __init__(
        self,
        *args: Any,
        memory_format: torch.memory_format | str | None = None,
        plan: Plan | None = None,
        input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
        preserve: bool = False,
        each_forward: EachForward = False,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        self._converting: dict[str, Any] = {
            "memory_format": memory_format,
            "plan": plan,
            "input_format": input_format,
            "preserve": preserve,
            "each_forward": each_forward,
            "strict": strict,
        }
        super().__init__(*args, **kwargs)
        if self.model_init is None:
            self._convert(self.model, self.optimizer or ())

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Converts what `model_init` makes."""
        model: nn.Module = super().call_model_init(*args, **kwargs)
        self._convert(model, ())
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Has the optimizer's state follow the parameters when it is loaded, and be contiguous when it is saved."""
        optimizer = super().create_optimizer(*args, **kwargs)
        inside = loading_optimizer(optimizer)
        if inside is not None:
            align_when_loaded(inside)
            contiguous_checkpoints_(inside)
        return optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The `Trainer`'s, by `contiguous_broadcasts_`."""
        return _broadcasting(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """The `Trainer`'s, by `contiguous_broadcasts_`."""
        return _broadcasting(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """The `Trainer`'s, by `contiguous_broadcasts_`."""
        return _broadcasting(super().get_test_dataloader(*args, **kwargs))

    def _convert(self, model: nn.Module, optimizer: Any) -> None:
        each_forward = getattr(self._converting["plan"], "each_forward", self._converting["each_forward"])
        if (self.is_fsdp_enabled or self.is_deepspeed_enabled) and not each_forward:
            raise ValueError("FSDP and DeepSpeed need contiguous parameters: give the trainer each_forward=True")
        self.conversion = convert_(model, optimizer=optimizer, **self._converting)
        contiguous_checkpoints_(model)


def _broadcasting(loader: DataLoader[Any]) -> DataLoader[Any]:
    # A trainer that this one is combined with may have its own loaders, which nobody broadcasts.
    return contiguous_broadcasts_(loader) if isinstance(loader, DataLoaderAdapter) else loader
