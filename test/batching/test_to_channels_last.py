"""`nhwc.to_channels_last` over containers, and `nhwc.collating` around functions that collate."""

import dataclasses
from collections import UserDict, namedtuple

import pytest
import torch
from reference import FORMATS, in_channels_last

import torch_nhwc as nhwc

Pair = namedtuple("Pair", "image label")
SHAPES = [
    (2, 3, 4, 5),
    (2, 3, 4, 5, 6),
    (2, 1, 4, 5),
    (1, 3, 1, 1),
    (2, 1, 4, 5, 6),
    (0, 3, 4, 5),
    (2, 3, 0, 5),
    (1, 1, 0, 5),
]


@dataclasses.dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    name: str


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_get_canonical_strides(shape, dtype, in_worker):
    contiguous = torch.randint(0, 255, shape).to(dtype)
    for batch in (contiguous, contiguous.transpose(0, 1).contiguous().transpose(0, 1)):
        brought = nhwc.to_channels_last(batch)
        assert in_channels_last(brought)
        assert brought.dtype == dtype
        assert torch.equal(brought, batch)
        assert nhwc.to_channels_last(brought) is brought
        if shape == (2, 3, 4, 5):
            assert brought.is_shared() == in_worker
        if shape[1] == 1 and batch.is_contiguous():
            assert brought.data_ptr() == batch.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 4, 5),
        torch.ones(1, 2, 3, 4, 5, 6),
        torch.ones(2, 3, 4, 5, dtype=torch.int64),
        torch.ones(2, 3, 4, 5, dtype=torch.bool),
        torch.ones(1, 3, 4, 5).expand(2, 3, 4, 5),
        torch.ones(2, 3, 4, 5).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3, 4, 5)], layout=torch.jagged),
        "text",
        None,
        [1, "a", {"b": torch.Size((2, 3, 4, 5))}],
    ],
    ids=lambda other: str(getattr(other, "shape", other)),
)
def test_others_stay_the_objects_that_they_are(other):
    assert nhwc.to_channels_last(other) is other


@pytest.mark.parametrize(
    ("contain", "image_of"),
    [
        (lambda image: [image, 1], lambda batch: batch[0]),
        (lambda image: ("a", (image,)), lambda batch: batch[1][0]),
        (lambda image: Pair({"x": image}, 1), lambda batch: batch.image["x"]),
        (lambda image: UserDict(image=image), lambda batch: batch["image"]),
        (lambda image: Batch(image, "a"), lambda batch: batch.image),
    ],
    ids=["list", "tuple", "namedtuple", "mapping", "dataclass"],
)
def test_containers_are_made_anew(contain, image_of):
    image = torch.rand(2, 3, 4, 5)
    given = contain(image)
    batch = nhwc.to_channels_last(given)
    assert type(batch) is type(given)
    assert in_channels_last(image_of(batch))
    assert torch.equal(image_of(batch), image)
    assert image_of(given) is image


def test_gradients_flow_back(in_worker):
    image = torch.rand(2, 3, 4, 5, requires_grad=True)
    brought = nhwc.to_channels_last(image)
    assert in_channels_last(brought)
    brought.square().sum().backward()
    assert torch.equal(image.grad, 2 * image)


@pytest.mark.parametrize("rank", FORMATS)
def test_a_format_means_the_batches_of_its_rank_alone(rank):
    batches = {4: torch.rand(2, 3, 4, 5), 5: torch.rand(2, 3, 4, 5, 6)}
    for memory_format in (FORMATS[rank], str(FORMATS[rank]).removeprefix("torch.")):
        brought = nhwc.to_channels_last(batches, memory_format=memory_format)
        assert {each: in_channels_last(brought[each]) for each in brought} == {4: rank == 4, 5: rank == 5}


def test_a_function_that_collates_gives_channels_last(in_worker):
    def stacked(samples):
        return {"images": torch.stack([image for image, _ in samples]), "labels": [label for _, label in samples]}

    samples = [(torch.rand(3, 4, 5), "a"), (torch.rand(3, 4, 5), "b")]
    batch = nhwc.collating(stacked)(samples)
    assert in_channels_last(batch["images"])
    assert torch.equal(batch["images"], stacked(samples)["images"])
    assert batch["labels"] == ["a", "b"]
    volumes_alone = nhwc.collating(stacked, memory_format=torch.channels_last_3d)
    assert volumes_alone(samples)["images"].is_contiguous()


@pytest.mark.parametrize("make", [lambda data: data, torch.utils.data.DataLoader], ids=["data set", "loader"])
def test_what_has_ways_of_its_own_is_refused(make):
    data = make(torch.utils.data.TensorDataset(torch.zeros(4, 3, 2, 2)))
    with pytest.raises(TypeError, match=r"to_channels_last: .* give the loader collate_fn=nhwc\.collate"):
        nhwc.to_channels_last(data)
    with pytest.raises(TypeError, match=r"to_channels_last: .* got Conv2d: convert_ takes models"):
        nhwc.to_channels_last(torch.nn.Conv2d(3, 4, 3))
    with pytest.raises(TypeError, match="collating: expected a function that makes a batch of samples, got "):
        nhwc.collating(data)
