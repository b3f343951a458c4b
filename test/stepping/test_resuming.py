"""Training that goes on from a checkpoint in the other layout, by the tools that people resume with."""

import copy
import importlib

import pytest
import torch
from guarding import unguarded
from selection import some_of
from torch import nn
from torch.optim import swa_utils

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore:torch_nhwc")


class Net(nn.Module):
    """As a Trainer takes it: images and labels in, a loss and logits out."""

    def __init__(self, is_lazy=False):
        super().__init__()
        torch.manual_seed(0)
        first = nn.LazyConv2d(8, 3) if is_lazy else nn.Conv2d(3, 8, 3)
        self.layers = nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


GENERATOR = torch.Generator().manual_seed(0)
DATA = [{"pixels": torch.randn(3, 8, 8, generator=GENERATOR), "labels": index % 4} for index in range(12)]


def batches(start, stop):
    for index in range(start, stop):
        rows = DATA[index * 2 % 12 : index * 2 % 12 + 2]
        yield torch.stack([row["pixels"] for row in rows]), torch.tensor([row["labels"] for row in rows])


def train(model, optimizer, start, stop, backward=torch.Tensor.backward):
    losses = []
    for pixels, labels in batches(start, stop):
        optimizer.zero_grad()
        loss = model(pixels, labels)["loss"]
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def by_trainer(folder, converts):
    """Losses behind a resume, of a model that was converted since it was saved."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()

    def trainer(model, steps, saves):  # safetensors takes no channels-last tensors
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, save_strategy=saves, save_steps=3, per_device_train_batch_size=2, use_cpu=True,
            lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_steps=1, optim="adamw_torch_fused",
            seed=0, learning_rate=0.05,
        )  # fmt: skip
        return transformers.Trainer(model, arguments, train_dataset=DATA)

    trainer(Net(), 3, "steps").train()
    model = Net()
    converts(model)
    resumed = trainer(model, 8, "no")
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return [entry["loss"] for entry in resumed.state.log_history if "loss" in entry][3:]


def by_accelerate(folder, converts):
    accelerate = importlib.import_module("accelerate")

    def prepared(converts):
        accelerator, model = accelerate.Accelerator(cpu=True), Net()
        converts(model)
        model, optimizer = accelerator.prepare(model, fused(model))
        return accelerator, model, optimizer

    accelerator, model, optimizer = prepared(lambda _: None)
    train(model, optimizer, 0, 3, accelerator.backward)
    accelerator.save_state(folder)
    accelerator, model, optimizer = prepared(converts)
    accelerator.load_state(folder)
    return train(model, optimizer, 3, 8, accelerator.backward)


def by_load_state_dict(_, converts):
    model = Net()
    optimizer = fused(model)
    train(model, optimizer, 0, 3)
    resumed = Net()
    converts(resumed)
    resumed.load_state_dict(model.state_dict())
    other = fused(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return train(resumed, other, 3, 8)


def with_lazy_layers(_, converts):
    model = Net(is_lazy=True)
    next(batches(0, 1))
    model(*next(batches(0, 1)))
    optimizer = fused(model)
    train(model, optimizer, 0, 3)
    resumed = Net(is_lazy=True)
    converts(resumed)
    other = fused(resumed)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return train(resumed, other, 3, 8)


def with_averaged_weights(_, converts):
    """Training goes on from the average, whose layout is that of before."""
    model = Net()
    optimizer = fused(model)
    averaged = swa_utils.AveragedModel(model)
    train(model, optimizer, 0, 3)
    averaged.update_parameters(model)
    converts(model)
    for parameter, mean in zip(model.parameters(), averaged.module.parameters()):
        parameter.grad = mean.detach() - parameter.detach() + 0.1
        parameter.grad = parameter.grad.contiguous()
    optimizer.step()
    averaged.update_parameters(model)
    return train(model, optimizer, 3, 8) + [mean.sum().item() for mean in averaged.parameters()]


SCENARIOS = [by_trainer, by_accelerate, by_load_state_dict, with_lazy_layers, with_averaged_weights]


@pytest.mark.parametrize("resume", some_of(SCENARIOS, *SCENARIOS[1:]))
def test_h45_losses_are_those_of_a_contiguous_run(resume, tmp_path):
    expected = torch.tensor(resume(tmp_path / "contiguous", lambda _: None))
    with unguarded():
        wrong = torch.tensor(resume(tmp_path / "unguarded", lambda model: nhwc.convert_(model, optimizer=())))
    assert (wrong - expected).abs().max() > 1e-3  # what plain PyTorch does
    ours = torch.tensor(resume(tmp_path / "guarded", lambda model: nhwc.convert_(model, optimizer=())))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
