"""Lightning's trainer with the callback: the losses are those without it, and the module is restored afterwards."""

import json
import os
import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy
from selection import some_of
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import torch_nhwc as nhwc
from torch_nhwc.integrations.lightning import ChannelsLast

# Lightning's own, on how small all is; ours come from a line of Lightning's.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:(pytorch_)?lightning"),
    pytest.mark.filterwarnings("error:torch_nhwc"),
]
exhaustive = pytest.mark.exhaustive
STRIDES = [(27, 9, 3, 1), (72, 9, 3, 1)]
CHANNELS_LAST = [(27, 1, 9, 3), (72, 1, 24, 8)]


def layers():
    torch.manual_seed(1)
    first = nn.Conv2d(3, 8, 3, bias=False)  # before the norm, Adam would train a bias by noise
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))


class Steps:
    """Notes its losses, and the strides of its weights at each step."""

    def __init__(self, built_in="__init__"):
        super().__init__()
        self.built_in = built_in
        self.losses, self.seen = [], []
        self.net = layers() if built_in == "__init__" else None

    def setup(self, stage):
        self._build("setup")

    def configure_model(self):
        self._build("configure_model")

    def _build(self, where):
        if self.built_in == where and self.net is None:
            self.net = layers()

    def forward(self, images):
        return self.net(images).flatten(1)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.seen.append(strides(self))
        return loss

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.seen.append(strides(self))
        self.log("val_loss", loss, on_step=False, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch, _):
        self.seen.append(strides(self))
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, fused=True)


class Module(Steps, LightningModule):
    pass


def strides(module):
    return [module.net[0].weight.stride(), module.net[3].weight.stride()]


def loader():
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(8, 3, 8, 8), torch.randint(4, (8,))), batch_size=4)


def trainer(folder, *callbacks, kind=Trainer, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    return kind(default_root_dir=folder, callbacks=list(callbacks), **quiet | options)


def fitted(folder, *callbacks, module=None, ckpt_path=None, **options):
    module = module or Module()
    trainer(folder, *callbacks, **options).fit(module, loader(), ckpt_path=ckpt_path)
    return module


def assert_same_training(module, reference):
    """Both orders of summation are right."""
    assert len(module.losses) == len(reference.losses) > 0
    torch.testing.assert_close(module.losses, reference.losses, rtol=1e-4, atol=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def tensors_in(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_as_before(module, optimizers=()):
    assert strides(module) == STRIDES
    assert not module._forward_pre_hooks
    assert not module._state_dict_hooks
    for optimizer in optimizers:
        assert not optimizer._optimizer_state_dict_post_hooks
        for parameter, state in optimizer.state.items():
            assert all(each.stride() == parameter.stride() for each in tensors_in(state) if each.dim())


@pytest.mark.parametrize("built_in", some_of(["__init__", "setup", "configure_model"], "configure_model"))
def test_training_is_that_without_it_wherever_the_layers_are_built(tmp_path, built_in):
    callback = ChannelsLast()
    runner = trainer(tmp_path, callback)
    runner.fit(module := Module(built_in), loader())
    assert module.seen == [CHANNELS_LAST] * 4
    assert_same_training(module, fitted(tmp_path, module=Module(built_in)))
    assert_as_before(module, runner.optimizers)
    assert len(runner.optimizers[0].state) == 5
    assert [row.full_name for row in callback.report.rows] == ["net.0.weight", "net.3.weight"]


@exhaustive
def test_one_callback_serves_every_run(tmp_path):
    callback = ChannelsLast()
    runner = trainer(tmp_path, callback, check_val_every_n_epoch=1)
    module = Module()
    for run in (runner.fit, runner.validate, runner.test, runner.predict, runner.fit):
        module.seen.clear()
        runner.fit_loop.max_epochs = (runner.fit_loop.max_epochs or 0) + 2
        run(module, loader())
        assert module.seen
        assert module.seen == [CHANNELS_LAST] * len(module.seen)
        assert_as_before(module, runner.optimizers)
    other = Module()
    runner.validate(other, loader())  # the optimizers of the last fit are another module's
    assert_as_before(other)


class Helped(Module):
    """Has a helper outside of it, with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.helpers = [nn.Linear(2, 2)]

    def configure_optimizers(self):
        return super().configure_optimizers(), torch.optim.SGD(self.helpers[0].parameters())

    def training_step(self, *arguments):
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(*arguments))
        optimizer.step()


@exhaustive
def test_an_optimizer_without_parameters_of_the_module_is_left_alone(tmp_path):
    module = fitted(tmp_path, ChannelsLast(), module=Helped())
    assert module.seen == [CHANNELS_LAST] * 4
    assert_same_training(module, fitted(tmp_path, module=Helped()))
    assert_as_before(module)


class Companions(Callback):
    """Notes whether state and gradients have the strides of their weights, at each batch and at each step."""

    def __init__(self):
        self.seen = set()

    def on_train_batch_start(self, trainer, *_):
        for parameter, state in trainer.optimizers[0].state.items():
            self.seen |= {each.stride() == parameter.stride() for each in tensors_in(state) if each.dim()}

    def on_before_optimizer_step(self, _, pl_module, __):
        self.seen |= {each.grad.stride() == each.stride() for each in pl_module.parameters()}


@exhaustive
@pytest.mark.parametrize("saved_with", [True, False])
def test_a_checkpoint_resumes_with_or_without_the_callback_that_wrote_it(tmp_path, saved_with):
    saving = trainer(tmp_path, *[ChannelsLast()] * saved_with, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    saving.fit(Module(), loader())
    (path,) = tmp_path.glob("*.ckpt")
    resumed = fitted(tmp_path, ChannelsLast(), companions := Companions(), ckpt_path=path, max_epochs=4)
    assert companions.seen == {True}
    assert resumed.seen == [CHANNELS_LAST] * 4
    assert_same_training(resumed, fitted(tmp_path, ckpt_path=path, max_epochs=4))
    plain = fitted(tmp_path, max_epochs=4)
    torch.testing.assert_close(resumed.losses, plain.losses[4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights_only", some_of([True, False], True))
def test_checkpoints_are_contiguous(tmp_path, weights_only):
    saving = ModelCheckpoint(tmp_path, save_weights_only=weights_only)
    module = fitted(tmp_path, ChannelsLast(), saving, enable_checkpointing=True, max_epochs=1)
    checkpoint = torch.load(saving.best_model_path, weights_only=True)
    assert ("optimizer_states" in checkpoint) is not weights_only
    assert all(tensor.is_contiguous() for tensor in tensors_in(checkpoint))
    loaded = Module.load_from_checkpoint(saving.best_model_path)
    assert strides(loaded) == STRIDES
    assert torch.equal(loaded.net[3].weight, module.net[3].weight)


class Failing(Module):
    def __init__(self, error, where):
        super().__init__()
        self.error, self.where = error, where

    def _fail(self, where):
        if self.where == where:
            raise self.error

    def setup(self, stage):
        self._fail("setup")

    def configure_optimizers(self):
        self._fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, *arguments):
        self._fail("forward")
        return super().training_step(*arguments)

    def on_train_batch_end(self, *_):
        self._fail("training")


@pytest.mark.parametrize("where", some_of(["setup", "configure_optimizers", "forward", "training"], "training"))
@pytest.mark.parametrize("error", some_of([ValueError("mine"), KeyboardInterrupt()]))
def test_after_exceptions_the_module_is_as_before(tmp_path, monkeypatch, error, where):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning has interrupts ignored from then on
    module, runner = Failing(error, where), trainer(tmp_path, ChannelsLast())
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else ValueError):
        runner.fit(module, loader())
    assert_as_before(module, runner.optimizers)
    assert not vars(runner.strategy).keys() & {"setup", "teardown"}
    module.where = None
    runner.fit(module, loader())
    assert module.seen[-1] == CHANNELS_LAST


@exhaustive
@pytest.mark.parametrize("kind", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)])
def test_averaged_copies_follow_and_are_saved_contiguous(tmp_path, kind):
    averaging, saving, seen = kind(), ModelCheckpoint(tmp_path), []

    class Looking(Callback):
        def on_train_batch_end(self, *_):
            seen.append(strides(getattr(averaging._average_model, "module", averaging._average_model)))

    callbacks = [averaging, Looking(), ChannelsLast(), saving]
    module = fitted(tmp_path, *callbacks, max_epochs=4, enable_checkpointing=True)
    assert seen == [CHANNELS_LAST] * len(module.losses)
    assert all(tensor.is_contiguous() for tensor in tensors_in(torch.load(saving.best_model_path, weights_only=True)))
    assert_same_training(module, fitted(tmp_path, kind(), max_epochs=4))
    assert_as_before(module)


class Losing(Module):
    def __init__(self):
        super().__init__()
        self.net[2] = nn.Softmax(1)


def test_a_plan_with_a_filter_and_the_options_of_convert_apply(tmp_path):
    example = torch.randn(2, 3, 8, 8)
    plan = nhwc.plan(Module(), preserve=True, example_inputs=example, filter_fn=lambda _, path: path != "net.3")
    module = fitted(tmp_path, ChannelsLast(plan=plan), max_epochs=1)
    assert module.seen == [[CHANNELS_LAST[0], STRIDES[1]]] * 2
    fitted(tmp_path, callback := ChannelsLast(preserve=True, input_format="channels_last"), module=(losing := Losing()))
    assert [row.path for row in callback.report.plan.layers] == ["net.0", "net.1", "net.2", "net.3"]
    assert callback.report.plan.input_format == "channels_last"
    with pytest.raises(ValueError, match="expected memory_format to be None or one of contiguous_format"):
        ChannelsLast(memory_format="nhwc")
    assert_as_before(losing)
    assert type(losing.net[2]) is nn.Softmax


@pytest.mark.parametrize("memory_format", [torch.channels_last, "channels_last"], ids=repr)
def test_a_memory_format_and_its_name_are_taken(tmp_path, memory_format):
    callback = pickle.loads(pickle.dumps(ChannelsLast(memory_format=memory_format, input_format=memory_format)))
    assert fitted(tmp_path, callback, max_epochs=1).seen == [CHANNELS_LAST] * 2


def test_plans_are_applied(tmp_path):
    (tmp_path / "plan.json").write_text(nhwc.plan(Module(), each_forward=True).to_json())
    fitted(tmp_path, ChannelsLast(plan=tmp_path / "plan.json"), module=(module := Module()))
    assert module.seen == [STRIDES] * 4
    assert_same_training(module, fitted(tmp_path))
    assert_as_before(module)
    assert type(module.net[0]) is nn.Conv2d
    contiguous = ChannelsLast(plan=nhwc.plan(Module(), torch.contiguous_format))  # as tune may decide
    assert fitted(tmp_path, contiguous).seen == [STRIDES] * 4
    with pytest.raises(ValueError, match="the model differs from the plan"):
        fitted(tmp_path, ChannelsLast(plan=nhwc.plan(layers())))


def test_a_module_without_anything_to_convert_raises_and_is_restored(tmp_path):
    callback, module = ChannelsLast(filter_fn=lambda *_: False, input_format="channels_last"), Module()
    said = pytest.warns(UserWarning, match="filter_fn returns false for all 2 of its convolutions: 'net.0', 'net.3'")
    with said, pytest.raises(RuntimeError, match="ChannelsLast: nothing was converted in the Module"):
        fitted(tmp_path, callback, module=module)
    assert_as_before(module)
    assert callback.report is None


class Contiguous(Module):
    """Takes the format away."""

    def configure_optimizers(self):
        self.to(memory_format=torch.contiguous_format)
        return super().configure_optimizers()


def test_weights_that_lose_the_format_before_training_raise(tmp_path):
    lost = r"after the setup of SingleDeviceStrategy: 'net.0.weight' has strides \(27, 9, 3, 1\), expected \(27, 1"
    with pytest.raises(RuntimeError, match=lost):
        fitted(tmp_path, ChannelsLast(), module=(module := Contiguous()))
    assert_as_before(module)


def test_strategies_that_shard_are_refused():
    runner = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(RuntimeError, match="FSDPStrategy shards parameters, which have to be contiguous"):
        ChannelsLast().setup(runner, Module(), "fit")
    assert not vars(runner.strategy).keys() & {"setup", "teardown"}


@exhaustive
def test_the_other_package(tmp_path):
    class Other(Steps, pytorch_lightning.LightningModule):
        pass

    module = Other()
    trainer(tmp_path, ChannelsLast(), kind=pytorch_lightning.Trainer).fit(module, loader())
    assert module.seen == [CHANNELS_LAST] * 4
    assert_same_training(module, fitted(tmp_path))
    assert_as_before(module)


def test_the_callback_goes_to_processes_that_a_strategy_starts():
    plan = nhwc.plan(Module(), preserve=True)
    assert pickle.loads(pickle.dumps(ChannelsLast(plan=plan))).options["plan"] == plan


def failed(folder, where, **ddp):
    """Return the strides after an exception, and those after a revert by hand."""
    module, callback = Failing(ValueError("mine"), where), ChannelsLast()
    with pytest.raises(ValueError, match="mine") as raised:
        fitted(folder, callback, module=module, **ddp)
    left = strides(module)
    del raised, module.error  # it has the frames, and they have DDP
    callback.report.revert()
    return left, strides(module)


def rank(folder):
    """Train in one of two processes; the first one prints what it has seen."""
    ddp = {"strategy": "ddp", "devices": 2}
    plain = fitted(folder, **ddp)
    runner = trainer(folder, ChannelsLast(), companions := Companions(), **ddp)
    runner.fit(module := Module(), loader())
    after_fit = strides(module)
    runner.validate(module, loader())
    left, _ = failed(folder, "training", **ddp)
    # From there, the exception keeps DDP alive.
    with pytest.warns(UserWarning, match="stays in channels-last: .* has post hooks"):
        left_inside, reverted = failed(folder, "forward", **ddp)
    if runner.global_rank == 0:
        seen = {"plain": plain.losses, "losses": module.losses, "seen": module.seen, "after fit": after_fit}
        seen |= {"after": strides(module), "companions": [*companions.seen], "left": left}
        seen |= {"left inside": left_inside, "reverted": reverted}
        print(json.dumps(seen))


@exhaustive
def test_two_processes_train_as_without_it(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # test/support is in it
    command = [sys.executable, __file__, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    in_format, before = [[list(each) for each in both] for both in (CHANNELS_LAST, STRIDES)]
    assert len(seen["plain"]) == 2
    torch.testing.assert_close(seen["losses"][:2], seen["plain"], rtol=1e-4, atol=1e-5)
    assert seen["seen"] == [in_format] * 3  # two epochs of half of the batches, and one of validation
    assert seen["after fit"] == seen["after"] == before
    assert seen["companions"] == [True]
    assert seen["left"] == seen["reverted"] == before
    assert seen["left inside"] == in_format


if __name__ == "__main__":
    rank(sys.argv[1])
