"""Weights of wrapper subclasses in the drop-ins: taken with all that is inside, or refused with nothing touched."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from reference import canonical_strides
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import torch_nhwc as nhwc
from torch_nhwc.converting import edits as commit

CONVERT = {4: nhwc.convert_conv2d_weight_memory_format, 5: nhwc.convert_conv3d_weight_memory_format}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(4, 3, 3, 3), (4, 3, 1, 1), (4, 3, 3, 3, 3)]


class Wrapper(torch.Tensor):
    """Holds another tensor, and does with it whatever is done."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, cls.outer_shape(inner), strides=cls.outer_strides(inner), dtype=torch.float32, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    outer_shape = staticmethod(lambda inner: inner.shape)
    outer_strides = staticmethod(lambda inner: inner.stride())

    def __repr__(self):
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrap = lambda tree: tree_map_only(Wrapper, lambda each: each.inner, tree)  # noqa: E731
        return tree_map_only(torch.Tensor, cls, cls.call(function, unwrap(args), unwrap(kwargs or {})))

    @classmethod
    def call(cls, function, args, kwargs):
        return function(*args, **kwargs)


def when_cloned(change):
    """Return a class whose clone is wrong: `change` gets the inner tensor and the arguments of the clone."""

    class Changed(Wrapper):
        @classmethod
        def call(cls, function, args, kwargs):
            if function is torch.ops.aten.clone.default:
                return change(*args, **kwargs)
            return function(*args, **kwargs)

    return Changed


def raising(inner, memory_format=None):
    raise AttributeError("this class cannot be cloned")


def dropping(inner, memory_format=None):
    return inner.clone()


REFUSED = {
    "raises": when_cloned(raising),
    "drops the format": when_cloned(dropping),
    "changes values": when_cloned(lambda inner, memory_format=None: inner.clone(memory_format=memory_format) * 2),
}


def layer_with(weight):
    layer = {4: nn.Conv2d, 5: nn.Conv3d}[weight.dim()](3, 4, tuple(weight.shape[2:]))
    layer.weight = nn.Parameter(weight)
    return layer


def two(shape):
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def inside_of(weight):
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def assert_lies(weight, inner, values, memory_format):
    """Outside and inside alike, with the values."""
    for each, expected in zip([weight, *inner], [None, *values]):
        assert each.stride() == canonical_strides(each.shape, memory_format)
        assert expected is None or torch.equal(each, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [two, lambda shape: Wrapper(torch.randn(shape))], ids=["TwoTensor", "Wrapper"])
def test_a_wrapper_subclass_is_converted_with_what_is_inside(shape, make):
    layer = layer_with(make(shape))
    values, parameter = [each.detach().clone() for each in inside_of(layer.weight)], layer.weight
    parameter.note = "the user's own"
    for memory_format in (LAST[len(shape)], torch.contiguous_format):
        assert CONVERT[len(shape)](layer, memory_format) is layer
        assert layer.weight is parameter
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.is_leaf, parameter.requires_grad, parameter.note) == (True, True, "the user's own")
        assert_lies(parameter, inside_of(layer.weight), values, memory_format)
        held = inside_of(layer.weight)
        CONVERT[len(shape)](layer, memory_format)
        assert all(before is after for before, after in zip(held, inside_of(layer.weight)))


def held_by_a_view(shape):
    weight = nn.Parameter(Wrapper(torch.randn(shape)))
    return weight, weight.inner.view(-1)


def part_of_a_larger_storage(shape):
    return nn.Parameter(Wrapper(torch.randn(8, *shape)[4])), None


def held_by_another_weight(shape):
    inner = torch.randn(shape)
    return [nn.Parameter(TwoTensor(inner, inner.clone())) for _ in range(2)]


def shared_between_processes(shape):
    return nn.Parameter(Wrapper(torch.randn(shape).share_memory_())), None


OWNED = [held_by_a_view, part_of_a_larger_storage, held_by_another_weight, shared_between_processes]


@pytest.mark.parametrize("make", OWNED, ids=lambda make: make.__name__)
def test_a_wrapper_whose_inner_memory_something_else_holds_is_refused_and_nothing_is_touched(make):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 4, 3))
    model[1].weight, _other = make((4, 3, 3, 3))
    held = inside_of(model[1].weight)
    before = [(each.stride(), each.data_ptr()) for each in held]
    with pytest.raises(RuntimeError, match=r"nothing was changed, because of '1' .*something else holds the memory"):
        nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    assert all(new is old for new, old in zip(inside_of(model[1].weight), held))
    assert [(each.stride(), each.data_ptr()) for each in held] == before
    assert model[0].weight.stride() == model[1].weight.stride() == (27, 9, 3, 1)
    nhwc.convert_conv2d_weight_memory_format(model, torch.contiguous_format)  # there is nothing to do


def inner_state(weight):
    return weight.inner, weight.inner.stride(), weight.inner.clone(), weight.stride()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_subclass_whose_clone_is_not_right_is_refused_and_nothing_is_touched(kind):
    inner = torch.randn(4, 3, 3, 3)
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(REFUSED[kind](inner))
    model = nn.Sequential(nn.Conv2d(3, 3, 3), layer_with(two((3, 3, 3, 3))), layer)
    held, strides, values, outer = inner_state(layer.weight)
    with pytest.raises(RuntimeError, match=r"nothing was changed, because of '2' \(Conv2d\): .* tensor subclass"):
        nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    assert layer.weight.inner is held
    assert (held.stride(), layer.weight.stride()) == (strides, outer)
    assert torch.equal(held, values)
    assert [each.weight.stride() for each in model[:2]] == [(27, 9, 3, 1)] * 2
    assert model[1].weight.a.stride() == (27, 9, 3, 1)


def test_an_exception_while_the_others_convert_brings_the_wrappers_back(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    layer = layer_with(Wrapper(torch.randn(4, 3, 3, 3)))
    layer.weight.grad = Wrapper(torch.randn(4, 3, 3, 3))
    model = nn.Sequential(layer, nn.Conv2d(4, 3, 3))
    held = layer.weight.inner, layer.weight.grad.inner
    values = [each.clone() for each in held]
    monkeypatch.setattr(commit, "set_strides_", fail)
    with pytest.raises(MemoryError):
        nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    assert layer.weight.inner is held[0]
    assert layer.weight.grad.inner is held[1]
    assert {each.stride() for each in (layer.weight, layer.weight.grad, *held)} == {(27, 9, 3, 1)}
    assert all(map(torch.equal, held, values))


@pytest.fixture
def mesh(process_group):
    return dist.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("sharded", [None, 0])
def test_a_dtensor_is_converted_with_its_local_tensor_and_trains(sharded, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    placement = Replicate() if sharded is None else Shard(sharded)
    layer = nn.Conv2d(3, 4, 3)
    distribute_module(layer, mesh)
    # Not distributed by a collective, whose threads hold the tensor for a moment after it ends.
    layer.weight = nn.Parameter(DTensor.from_local(torch.randn(4, 3, 3, 3), mesh, [placement]))
    weight, values = layer.weight, layer.weight.to_local().detach().clone()
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert layer.weight is weight
    assert tuple(weight.placements) == (placement,)
    assert_lies(weight, [weight.to_local()], [values], torch.channels_last)
    assert weight._spec.tensor_meta.stride == weight.stride()
    x = distribute_tensor(torch.randn(2, 3, 4, 4), mesh, [Replicate()])
    layer(x).sum().backward()
    assert weight.grad.stride() == weight.grad.to_local().stride() == weight.stride()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    torch.testing.assert_close(weight.to_local(), values - 0.1 * weight.grad.to_local())


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_layer_below_one_that_fsdp2_has_sharded_trains_on_as_before(kernel, mesh):
    from torch.distributed.fsdp import fully_shard

    plain = nn.Sequential(nn.Conv2d(3, 8, kernel), nn.ReLU(), nn.Conv2d(8, 4, kernel))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    with contextlib.nullcontext() if kernel == 1 else pytest.raises(RuntimeError, match="FSDP2"):
        nhwc.convert_conv2d_weight_memory_format(sharded[0], torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    for model in (plain, sharded):
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for expected, actual in zip(plain.parameters(), sharded.parameters()):
        torch.testing.assert_close(actual.to_local(), expected)
