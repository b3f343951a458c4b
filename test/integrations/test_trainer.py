"""ChannelsLastTrainer computes what the Trainer of transformers does."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from two_ranks import on_two_ranks

import torch_nhwc as nhwc
from torch_nhwc.data import wrap_collate_fn
from torch_nhwc.integrations.transformers import ChannelsLastTrainer

STEM = (147, 1, 21, 3)
"""The strides of the ResNet's first weight, in channels-last."""
OPTIONS = {"input_format": "channels_last", "strict": True}


def resnet(trial=None):
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))


def convnext():
    return ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2))


def samples(count=16):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return [{"pixel_values": image, "labels": index % 2} for index, image in enumerate(images)]


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples(32))


def trainer_of(kind, folder, model=resnet, dataset=None, arguments=None, **options):
    """Return a trainer of a kind, on a model with equal weights each time."""
    given = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    given |= {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **(arguments or {}),
    }
    if "model_init" not in options:
        torch.manual_seed(0)
        options["model"] = model()
    dataset = dataset or samples()
    return kind(args=TrainingArguments(str(folder), **given), train_dataset=dataset, eval_dataset=dataset, **options)


def trained(*arguments, resume=None, **options):
    """Return a trainer after its training, and the loss of each step."""
    trainer = trainer_of(*arguments, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses_of(trainer)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def stem(trainer):
    return trainer.model.resnet.embedder.embedder.convolution.weight


def assert_equal_losses(losses, expected):
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_it_trains_as_transformers_own_and_saves_contiguous_checkpoints(tmp_path):
    _, expected = trained(Trainer, tmp_path / "plain")
    trainer, losses = trained(ChannelsLastTrainer, tmp_path / "ours", **OPTIONS)
    assert_equal_losses(losses, expected)
    assert stem(trainer).stride() == STEM
    assert trainer.conversion.model is trainer.model
    assert not nhwc.check(trainer.model, trainer.conversion.plan, optimizer=trainer.optimizer)

    weights = load_file(tmp_path / "ours" / "checkpoint-4" / "model.safetensors")
    states = torch.load(tmp_path / "ours" / "checkpoint-4" / "optimizer.pt")["state"].values()
    saved = [*weights.values(), *(tensor for state in states for tensor in state.values())]
    assert all(tensor.is_contiguous() for tensor in saved)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({"gradient_accumulation_steps": 2, "optim": "sgd", "lr_scheduler_type": "constant"}, 1e-4),
        ({"bf16": True}, 3e-2),
    ],
    ids=["SGD", "bf16"],
)
@pytest.mark.parametrize("model", [resnet, convnext])
def test_it_trains_as_transformers_own_in_other_ways(model, arguments, tolerance, tmp_path):
    arguments = {"save_strategy": "no", **arguments}
    _, expected = trained(Trainer, tmp_path, model, arguments=arguments)
    _, losses = trained(ChannelsLastTrainer, tmp_path, model, arguments=arguments, preserve=True, **OPTIONS)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_guard")
@pytest.mark.parametrize(("first", "then"), [(Trainer, ChannelsLastTrainer), (ChannelsLastTrainer, Trainer)])
def test_a_checkpoint_resumes_across_the_conversion(first, then, tmp_path):
    _, expected = trained(first, tmp_path / "first")
    resumed, losses = trained(then, tmp_path / "then", resume=str(tmp_path / "first" / "checkpoint-2"))
    assert_equal_losses(losses, expected)
    assert resumed.optimizer.param_groups[0]["fused"]
    assert resumed.optimizer.state[stem(resumed)]["exp_avg"].stride() == stem(resumed).stride()


@pytest.mark.exhaustive
def test_every_model_of_model_init_converts(tmp_path):
    arguments = {"save_strategy": "no"}
    trainer = trainer_of(ChannelsLastTrainer, tmp_path, arguments=arguments, model_init=resnet, **OPTIONS)
    made_first = trainer.model
    assert stem(trainer).stride() == STEM
    _, expected = trained(Trainer, tmp_path, arguments=arguments, model_init=resnet)
    for _ in range(2):
        trainer.train()
        assert_equal_losses(losses_of(trainer), expected)
        assert trainer.conversion.model is trainer.model is not made_first
        assert stem(trainer).stride() == STEM
    trainer.conversion.revert(trainer.optimizer)
    assert stem(trainer).is_contiguous()
    assert trainer.optimizer.state[stem(trainer)]["exp_avg"].is_contiguous()
    trainer.model = trainer.call_model_init("a trial")  # as in a search for hyperparameters
    assert stem(trainer).stride() == STEM


@pytest.mark.exhaustive
def test_a_model_in_evaluation_mode_is_converted_for_training(tmp_path):
    """As `from_pretrained` returns it."""
    model = resnet().eval()
    trainer = ChannelsLastTrainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to=[]), **OPTIONS)
    assert not any(module.training for module in model.modules())
    of_training = {row[:2] for row in nhwc.plan(resnet().train()).layers}
    assert {row[:2] for row in trainer.conversion.plan.layers} == of_training
    assert ("resnet.embedder.embedder.convolution", "Conv2d") in of_training
    assert ("resnet.embedder.embedder.normalization", "BatchNorm2d") in of_training


def test_the_best_model_is_loaded_into_the_format(tmp_path):
    arguments = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    plain, _ = trained(Trainer, tmp_path / "plain", arguments=arguments)
    trainer, _ = trained(ChannelsLastTrainer, tmp_path / "ours", arguments=arguments, **OPTIONS)
    assert trainer.state.best_global_step == plain.state.best_global_step
    assert not nhwc.check(trainer.model, trainer.conversion.plan)
    assert_equal_losses(trainer.evaluate()["eval_loss"], plain.evaluate()["eval_loss"])


@pytest.mark.exhaustive
def test_a_plan_applies_to_every_model(tmp_path):
    plan = nhwc.plan(convnext(), preserve=True, input_format="channels_last")
    arguments = {"save_strategy": "no"}
    _, expected = trained(Trainer, tmp_path, arguments=arguments, model_init=convnext)
    trainer, losses = trained(ChannelsLastTrainer, tmp_path, arguments=arguments, model_init=convnext, plan=plan)
    assert_equal_losses(losses, expected)
    assert trainer.conversion.plan.digest == plan.digest
    with pytest.raises(ValueError, match="plan"):
        trainer_of(ChannelsLastTrainer, tmp_path, resnet, plan=plan)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)

    def forward(self, pixel_values, labels=None):
        logits = self.layer(pixel_values).mean((2, 3))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_of_your_own_is_saved(tmp_path):
    trainer = trainer_of(ChannelsLastTrainer, tmp_path, Plain, **OPTIONS)
    trainer.save_model()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["layer.weight"], trainer.model.layer.weight)
    by_hand = trainer_of(Trainer, tmp_path, Plain)
    nhwc.convert_(by_hand.model)
    with pytest.raises(ValueError, match="non contiguous"):
        by_hand.save_model()


class Shared(ChannelsLastTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = True


@pytest.mark.exhaustive
def test_a_refused_model_is_unchanged(tmp_path):
    torch.manual_seed(0)
    model = Plain()
    layer = torch.nn.utils.parametrizations.orthogonal(model.layer)
    with pytest.raises(RuntimeError, match="an orthogonal weight"):
        trainer_of(ChannelsLastTrainer, tmp_path, lambda: model, strict=True)
    with pytest.raises(ValueError, match="FSDP and DeepSpeed need contiguous parameters"):
        trainer_of(Shared, tmp_path, lambda: model)
    assert layer.parametrizations.weight.original.is_contiguous()
    assert not model._state_dict_hooks
    assert trainer_of(Shared, tmp_path, each_forward=True).conversion.plan.each_forward


@pytest.mark.exhaustive
def test_it_combines_with_other_trainers(tmp_path):
    class Own(Seq2SeqTrainer):
        def get_test_dataloader(self, dataset):
            return torch.utils.data.DataLoader(dataset)

    class Combined(ChannelsLastTrainer, Own):
        pass

    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Combined(resnet(), arguments, **OPTIONS)
    assert stem(trainer).stride() == STEM
    assert type(trainer.get_test_dataloader(samples())) is torch.utils.data.DataLoader


@pytest.mark.exhaustive
def test_an_optimizer_that_is_given_follows(tmp_path):
    trainers = []
    for kind in (Trainer, ChannelsLastTrainer):
        torch.manual_seed(0)
        model = resnet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model(torch.randn(2, 3, 32, 32)).logits.square().sum().backward()
        optimizer.step()
        trainers.append(trainer_of(kind, tmp_path, lambda made=model: made, optimizers=(optimizer, None)))
    plain, ours = trainers
    assert ours.optimizer.state[stem(ours)]["exp_avg"].stride() == STEM
    for trainer in (*trainers, *trainers):  # each twice
        trainer.train()
    assert_equal_losses(losses_of(ours), losses_of(plain))


def compare_on_two_ranks(folder):
    collate = wrap_collate_fn(default_data_collator)
    arguments = {"save_strategy": "no", "ddp_backend": "gloo"}
    for dataset in (Streamed(), samples()):
        _, expected = trained(Trainer, folder, dataset=dataset, arguments=arguments)
        ours = {"dataset": dataset, "arguments": arguments, "data_collator": collate}
        trainer, losses = trained(ChannelsLastTrainer, folder, **ours, **OPTIONS)
        assert type(trainer.model_wrapped) is nn.parallel.DistributedDataParallel
        assert_equal_losses(losses, expected)
        group = torch.distributed.group.WORLD
        assert not nhwc.check(trainer.model, trainer.conversion.plan, trainer.optimizer, process_group=group)
        assert len(trainer.predict(dataset).predictions) == len(list(dataset))
        with pytest.raises(RuntimeError, match="as DDP and FSDP leave there"):
            trainer.conversion.revert(trainer.optimizer)


@pytest.mark.exhaustive
def test_two_processes_train_as_without_us(tmp_path):
    on_two_ranks(compare_on_two_ranks, str(tmp_path))
