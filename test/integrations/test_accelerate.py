"""Training by accelerate: a converted model computes what a contiguous one does."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from two_ranks import on_two_ranks

import torch_nhwc as nhwc
from torch_nhwc.checkpoint import contiguous_checkpoints_
from torch_nhwc.data import collate
from torch_nhwc.integrations.accelerate import contiguous_broadcasts_


@pytest.fixture(autouse=True)
def fresh_state():
    """Reset what accelerate keeps of the first `Accelerator` of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Streamed(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        return iter([torch.randn(3, 6, 6, generator=generator) for _ in range(16)])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


class Training:
    """A model, converted or not, that accelerate has prepared together with its optimizer and loader."""

    def __init__(
        self, converted, dataset=None, collate_fn=default_collate, wrap=lambda loader: loader, num_workers=0, **options
    ):
        self.accelerator = Accelerator(cpu=True, **options)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if converted:
            nhwc.convert_(model, optimizer=optimizer, input_format="channels_last", strict=True)
            contiguous_checkpoints_(model)
            contiguous_checkpoints_(optimizer)
        workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(dataset or list(Streamed()), batch_size=2, collate_fn=collate_fn, **workers)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.loader = wrap(loader)

    def run(self, steps):
        """Return the losses of some steps."""
        losses = []
        for batch in itertools.islice(itertools.cycle(self.loader), steps):
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).float().square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @property
    def weight(self):
        return self.accelerator.unwrap_model(self.model)[0].weight


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 1e-5), ({"gradient_accumulation_steps": 2}, 1e-5), ({"mixed_precision": "bf16"}, 2e-2)],
    ids=["plain", "accumulating", "bf16"],
)
def test_a_converted_model_trains_as_a_contiguous_one(options, tolerance):
    plain, ours = Training(False, **options), Training(True, **options)
    torch.testing.assert_close(ours.run(5), plain.run(5), rtol=tolerance, atol=tolerance)
    assert plain.weight.stride() == (27, 9, 3, 1)
    assert ours.weight.stride() == ours.optimizer.state[ours.weight]["exp_avg"].stride() == (27, 1, 9, 3)


@pytest.mark.usefixtures("no_guard")
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch.save"])
@pytest.mark.parametrize("converted_first", [True, False])
def test_a_state_loads_across_the_conversion(converted_first, safe, tmp_path):
    first, then = Training(converted_first), Training(not converted_first)
    first.run(2)
    first.accelerator.save_state(tmp_path, safe_serialization=safe)
    expected = first.run(3)
    weights = load_file(tmp_path / "model.safetensors") if safe else torch.load(tmp_path / "pytorch_model.bin")
    states = torch.load(tmp_path / "optimizer.bin")["state"].values()
    saved = [*weights.values(), *(tensor for state in states for tensor in state.values())]
    assert all(tensor.is_contiguous() for tensor in saved)

    then.run(1)
    then.accelerator.load_state(tmp_path)
    torch.testing.assert_close(then.run(3), expected, rtol=1e-5, atol=1e-6)
    assert then.optimizer.state[then.weight]["exp_avg"].stride() == then.weight.stride()


def test_the_batches_of_one_process_stay_as_they_are():
    for dataset in (Streamed(), list(Streamed())):
        loader = Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=2, collate_fn=collate))
        assert contiguous_broadcasts_(loader) is loader
        assert next(iter(loader)).stride() == (108, 1, 18, 3)


def test_other_objects_raise():
    with pytest.raises(TypeError, match="expected a DataLoader, got Streamed"):
        contiguous_broadcasts_(Streamed())


def test_a_loader_that_is_not_prepared_raises():
    loader = DataLoader(Streamed(), batch_size=2, collate_fn=collate)
    with pytest.raises(ValueError, match="this loader is not prepared: give what"):
        contiguous_broadcasts_(loader)
    assert loader.collate_fn is collate


def nested(samples):
    return {"images": [collate(samples)], "count": torch.tensor([len(samples)] * len(samples))}


def compare_on_two_ranks():
    contiguous = Training(False, Streamed())
    batches = list(contiguous.loader)

    # What accelerate does by itself: the other process has the first one's memory, read in another order.
    permuted = Training(False, Streamed(), collate)
    assert issubclass(type(permuted.loader), DataLoaderDispatcher)
    for batch, expected in zip(permuted.loader, batches, strict=True):
        assert torch.equal(batch, expected) == contiguous.accelerator.is_main_process

    kept = Training(True, Streamed(), collate, contiguous_broadcasts_)
    inside = contiguous_broadcasts_(kept.loader).base_dataloader.collate_fn
    assert inside.args == (collate,)  # twice is once
    for batch, expected in zip(kept.loader, batches, strict=True):
        assert torch.equal(batch, expected)
        assert batch.is_contiguous()
    for batch, expected in zip(Training(True, Streamed(), nested, contiguous_broadcasts_).loader, batches, strict=True):
        assert torch.equal(batch["images"][0], expected)
    working = Training(True, Streamed(), collate, num_workers=1)
    assert len(list(working.loader)) == len(batches)  # starts workers that stay
    for batch, expected in zip(contiguous_broadcasts_(working.loader), batches, strict=True):
        assert torch.equal(batch, expected)
    shared = Training(True, None, collate, contiguous_broadcasts_)  # each process reads its own batches
    assert next(iter(shared.loader)).stride() == (108, 1, 18, 3)

    mine = batches[0].to(memory_format=torch.channels_last)
    assert torch.equal(kept.accelerator.gather(mine), kept.accelerator.gather(batches[0]))

    torch.testing.assert_close(kept.run(4), contiguous.run(4), rtol=1e-5, atol=1e-6)
    everywhere = [None, None]
    torch.distributed.all_gather_object(everywhere, (kept.weight.stride(), kept.weight.tolist()))
    assert everywhere[0] == everywhere[1]
    torch.testing.assert_close(kept.weight, contiguous.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_two_processes_train_as_without_us_on_equal_batches():
    on_two_ranks(compare_on_two_ranks)
