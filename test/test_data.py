"""Batches in channels-last: collated, by a wrapped function, or converted afterwards."""

import collections
import copy
import dataclasses
import functools
import pickle
import types

import numpy as np
import pytest
import torch
from reference import FORMATS, in_channels_last
from selection import some_of
from torch.utils.data import DataLoader, Dataset, _utils, default_collate

from torch_nhwc.data import collate, to_channels_last, wrap_collate_fn

SHAPES = [(3, 5, 7), (3, 4, 5, 6), (1, 5, 7), (1, 4, 5, 6), (3, 1, 1), (3, 1, 5, 1), (1, 1, 1), (4, 64, 80), (0, 4, 5)]
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
Pair = collections.namedtuple("Pair", "image label")


@pytest.fixture(params=[False, True], ids=["main", "worker"])
def in_worker(request, monkeypatch):
    """Make the process look like a loader's worker, or not; return which."""
    if request.param:
        info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
        monkeypatch.setattr(_utils.worker, "_worker_info", info)
    return request.param


def noise(shape, dtype=torch.float32):
    return torch.randint(0, 255, shape).to(dtype)


def interleaved(shape, dtype):
    """Return `[C, *spatial]`, a view of `[*spatial, C]`."""
    return noise((*shape[1:], shape[0]), dtype).movedim(-1, 0)


def assert_equal_but_strides(actual, expected):
    """Compare all that two batches hold, types included."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
        assert torch.equal(*(batch.double() if batch.is_floating_point() else batch for batch in (actual, expected)))
        assert actual.is_shared() == expected.is_shared()
    elif isinstance(expected, collections.abc.Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal_but_strides(actual[key], expected[key])
    elif isinstance(expected, collections.abc.Sequence) and not isinstance(expected, (str, bytes)):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected):
            assert_equal_but_strides(*pair)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", some_of(DTYPES, torch.uint8))
@pytest.mark.parametrize("sample", [noise, interleaved])
@pytest.mark.parametrize("shape", some_of(SHAPES, (3, 5, 7), (1, 4, 5, 6), (4, 64, 80), (0, 4, 5)))
def test_batches_of_tensors_have_canonical_strides(shape, sample, dtype, in_worker):
    for count in (1, 5, 30):
        samples = [sample(shape, dtype) for _ in range(count)]
        batch = collate(samples)
        assert_equal_but_strides(batch, default_collate(samples))
        assert in_channels_last(batch)
        assert batch.is_shared() == in_worker


def test_samples_may_have_several_layouts(in_worker):
    samples = [noise((3, 4, 5)), interleaved((3, 4, 5), torch.float32), noise((3, 5, 4)).transpose(1, 2)]
    samples.append(noise((1, 4, 5)).expand(3, 4, 5))
    batch = collate(samples)
    assert_equal_but_strides(batch, default_collate(samples))
    assert in_channels_last(batch)


SAMPLES = [
    *(3, 2.5, True, "text", b"bytes", np.float32(2), np.int64(3), np.array([1, 2]), np.array(1.5), [1, [2.0, "a"]]),
    *((1, "a"), [], (), {}, range(3), collections.deque([1, 2]), collections.UserDict(a=1)),
    *(torch.tensor(3), torch.ones(2), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int32)),
    *(torch.ones(1, 4, 4, dtype=torch.int64), torch.ones(1, 4, 4, dtype=torch.bool), torch.ones(2, 2, 2, 2, 2)),
    *(np.ones((4, 4, 3), np.uint8), np.ones((3, 4, 4), np.float32), torch.ones(2, 2, 2, dtype=torch.complex64)),
    *(collections.OrderedDict(b=1, a=[2]), types.MappingProxyType({"a": 1}), Pair(1, {"x": np.ones(2)})),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_everything_else_is_as_default_collate_has_it(sample, in_worker):
    actual, expected = collate([sample, sample]), default_collate([sample, sample])
    assert_equal_but_strides(actual, expected)
    if isinstance(expected, torch.Tensor):
        assert actual.stride() == expected.stride()


def test_images_are_found_in_nested_containers(in_worker):
    sample = {"image": noise((3, 4, 5)), "extra": Pair([noise((2, 3, 4, 5))], "label")}
    samples = [sample, copy.deepcopy(sample)]
    batch = collate(samples)
    assert_equal_but_strides(batch, default_collate(samples))
    assert in_channels_last(batch["image"])
    assert in_channels_last(batch["extra"].image[0])


@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5, 6, 3)])
def test_arrays_in_channels_last_are_images(shape, in_worker):
    arrays = [np.moveaxis(noise(shape, torch.uint8).numpy(), -1, 0) for _ in range(2)]
    batch = collate([{"image": array} for array in arrays])["image"]
    assert_equal_but_strides(batch, default_collate(arrays))
    assert in_channels_last(batch)


BAD = {
    "none": [None, None],
    "empty": [],
    "lengths": [[1, 2], [1]],
    "keys": [{"a": 1}, {"b": 1}],
    "shapes": [torch.ones(3, 4, 4), torch.ones(3, 4, 5)],
    "objects": [np.array([object()]), np.array([object()])],
    "on two devices": [torch.ones(3, 4, 4), torch.ones(3, 4, 4, device="meta")],
    "sparse": [torch.ones(3, 4, 4).to_sparse()] * 2,
    "a class": [object(), object()],
}


@pytest.mark.parametrize("samples", BAD.values(), ids=BAD)
def test_it_raises_what_default_collate_raises(samples, in_worker):
    with pytest.raises(Exception) as expected:  # noqa: PT011
        default_collate(samples)
    with pytest.raises(expected.type) as raised:
        collate(samples)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("rank", FORMATS)
def test_a_format_means_the_batches_of_its_rank_alone(rank):
    images, volumes = collate([(noise((3, 4, 5)), noise((2, 3, 4, 5)))] * 2, memory_format=FORMATS[rank])
    assert in_channels_last(images if rank == 4 else volumes)
    assert (volumes if rank == 4 else images).is_contiguous()


def test_a_contiguous_format_is_refused():
    for call in (collate, wrap_collate_fn, to_channels_last):
        with pytest.raises(ValueError, match="expected memory_format to be None or a channels-last format"):
            call([], memory_format=torch.contiguous_format)


@pytest.mark.parametrize("in_worker", [True], indirect=True)
def test_a_worker_cannot_pin(in_worker):
    with pytest.raises(RuntimeError, match="a worker process cannot pin memory: give the DataLoader pin_memory=True"):
        collate([1], pin_memory=True)


@pytest.mark.cuda
@pytest.mark.parametrize("pins", [{"collate_fn": functools.partial(collate, pin_memory=True)}, {"pin_memory": True}])
def test_pinned_batches_keep_their_strides(pins):
    samples = [{"image": noise((3, 4, 5)), "label": number} for number in range(2)]
    (batch,) = DataLoader(samples, batch_size=2, **{"collate_fn": collate, **pins})
    assert batch["image"].is_pinned()
    assert batch["label"].is_pinned()
    assert in_channels_last(batch["image"])
    assert torch.equal(batch["image"], torch.stack([sample["image"] for sample in samples]))


class Decoded(Dataset):
    """Images as decoders give them, with what comes along."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        image = torch.arange(4 * 5 * 3, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1) + index
        return {"image": image, "volume": torch.full((2, 3, 4, 5), index / 2), "label": index, "name": str(index)}


@pytest.mark.parametrize("collate_fn", [collate, wrap_collate_fn(default_collate)], ids=["collate", "wrap_collate_fn"])
def test_workers_hand_batches_over_in_shared_memory(collate_fn):
    loader = DataLoader(Decoded(), batch_size=3, num_workers=2, persistent_workers=True, collate_fn=collate_fn)
    expected = list(DataLoader(Decoded(), batch_size=3))
    for _ in range(2):
        batches = list(loader)
        for batch, other in zip(batches, expected):
            for key in other:
                assert key in ("label", "name") or in_channels_last(batch[key])
                assert batch[key] == other[key] if key == "name" else torch.equal(batch[key], other[key])
            assert batch["image"].is_shared()
        assert len(batches) == len(expected)


# Batches that exist already.


@dataclasses.dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    name: str


BATCHES = [(2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 1, 4, 5), (1, 3, 1, 1), (2, 1, 4, 5, 6), (0, 3, 4, 5), (2, 3, 0, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", BATCHES)
def test_batches_get_canonical_strides(shape, dtype, in_worker):
    contiguous = torch.randint(0, 255, shape).to(dtype)
    for batch in (contiguous, contiguous.transpose(0, 1).contiguous().transpose(0, 1)):
        converted = to_channels_last(batch)
        assert in_channels_last(converted)
        assert converted.dtype == dtype
        assert torch.equal(converted, batch)
        assert to_channels_last(converted) is converted
        if shape == (2, 3, 4, 5):
            assert converted.is_shared() == in_worker
        if shape[1] == 1 and batch.is_contiguous():
            assert converted.data_ptr() == batch.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 4, 5),
        torch.ones(1, 2, 3, 4, 5, 6),
        torch.ones(2, 3, 4, 5, dtype=torch.int64),
        torch.ones(1, 3, 4, 5).expand(2, 3, 4, 5),
        torch.ones(2, 3, 4, 5).to_sparse(),
        "text",
        None,
    ],
    ids=lambda other: str(getattr(other, "shape", other)),
)
def test_everything_else_is_the_same_object(other):
    assert to_channels_last(other) is other
    assert to_channels_last([other])[0] is other


@pytest.mark.parametrize(
    ("contain", "image_of"),
    [
        (lambda image: [image, 1], lambda batch: batch[0]),
        (lambda image: ("a", (image,)), lambda batch: batch[1][0]),
        (lambda image: Pair({"x": image}, 1), lambda batch: batch.image["x"]),
        (lambda image: collections.UserDict(image=image), lambda batch: batch["image"]),
        (lambda image: Batch(image, "a"), lambda batch: batch.image),
    ],
    ids=["list", "tuple", "namedtuple", "mapping", "dataclass"],
)
def test_containers_are_copied(contain, image_of):
    image = torch.rand(2, 3, 4, 5, requires_grad=True)
    given = contain(image)
    batch = to_channels_last(given)
    assert type(batch) is type(given)
    assert in_channels_last(image_of(batch))
    assert torch.equal(image_of(batch), image)
    assert image_of(given) is image
    image_of(batch).square().sum().backward()
    assert torch.equal(image.grad, 2 * image)


def test_a_wrapped_function_gives_channels_last():
    def stacked(samples):
        return {"images": torch.stack([image for image, _ in samples]), "labels": [label for _, label in samples]}

    samples = [(torch.rand(3, 4, 5), "a"), (torch.rand(3, 4, 5), "b")]
    batch = wrap_collate_fn(stacked)(samples)
    assert in_channels_last(batch["images"])
    assert torch.equal(batch["images"], stacked(samples)["images"])
    assert batch["labels"] == ["a", "b"]
    volumes_alone = wrap_collate_fn(stacked, memory_format="channels_last_3d")
    assert volumes_alone(samples)["images"].is_contiguous()


@pytest.mark.parametrize("make", [lambda data: data, DataLoader], ids=["data set", "loader"])
def test_data_sets_loaders_and_models_are_refused(make):
    data = make(torch.utils.data.TensorDataset(torch.zeros(4, 3, 2, 2)))
    with pytest.raises(TypeError, match=r"to_channels_last: .* give the loader collate_fn=collate"):
        to_channels_last(data)
    with pytest.raises(TypeError, match=r"to_channels_last: .* got Conv2d: convert_ takes models"):
        to_channels_last(torch.nn.Conv2d(3, 4, 3))
    with pytest.raises(TypeError, match="wrap_collate_fn: expected a function that makes a batch of samples, got "):
        wrap_collate_fn(data)


def test_functions_for_loaders_can_be_copied_and_pickled():
    for function in (collate, wrap_collate_fn(default_collate, memory_format=torch.channels_last)):
        image = noise((3, 4, 5)).requires_grad_()
        batch = pickle.loads(pickle.dumps(copy.deepcopy(function)))([image])
        assert in_channels_last(batch)
        batch.square().sum().backward()
        assert torch.equal(image.grad, 2 * image.detach())
