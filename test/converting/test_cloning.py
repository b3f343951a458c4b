"""Weights of wrapper subclasses in the drop-ins: taken with all that is inside, or refused with nothing touched."""

import contextlib
import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import torch_nhwc as nhwc
from torch_nhwc.converting import edits as commit

CONVERT = {4: nhwc.convert_conv2d_weight_memory_format, 5: nhwc.convert_conv3d_weight_memory_format}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(4, 3, 3, 3), (4, 3, 1, 1), (4, 1, 3, 3), (4, 3, 3, 3, 3), (2, 1, 1, 2, 2)]


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


class Deaf(when_cloned(dropping)):
    """Its clone says that it is in the format, and what is inside of it is not."""

    outer_strides = staticmethod(lambda inner: (27, 1, 9, 3))


REFUSED = {
    "raises": when_cloned(raising),
    "drops the format": when_cloned(dropping),
    "changes values": when_cloned(lambda inner, memory_format=None: inner.clone(memory_format=memory_format) * 2),
    "changes the dtype": when_cloned(
        lambda inner, memory_format=None: inner.double().contiguous(memory_format=memory_format)
    ),
    "says so": Deaf,
}


def layer_with(weight):
    groups = 2 if weight.shape[1] == 1 else 1  # filters of one channel and one group would stay contiguous
    layer = {4: nn.Conv2d, 5: nn.Conv3d}[weight.dim()](
        groups * weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), groups=groups
    )
    layer.weight = nn.Parameter(weight)
    return layer


def canonical(shape, memory_format):
    return torch.empty(shape, memory_format=memory_format).stride()


def two(shape):
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def assert_lies(weight, inner, values, memory_format):
    """Outside and inside alike, with the values."""
    for each, expected in zip([weight, *inner], [None, *values]):
        assert each.stride() == canonical(each.shape, memory_format)
        assert expected is None or torch.equal(each, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [two, lambda shape: Wrapper(torch.randn(shape))], ids=["TwoTensor", "Wrapper"])
def test_a_wrapper_subclass_is_converted_with_what_is_inside(shape, make):
    inside = lambda: [getattr(layer.weight, name) for name in layer.weight.__tensor_flatten__()[0]]  # noqa: E731
    layer = layer_with(make(shape))
    values, parameter = [each.detach().clone() for each in inside()], layer.weight
    parameter.note = "the user's own"
    for memory_format in (LAST[len(shape)], torch.contiguous_format):
        assert CONVERT[len(shape)](layer, memory_format) is layer
        assert layer.weight is parameter
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.is_leaf, parameter.requires_grad, parameter.note) == (True, True, "the user's own")
        assert_lies(parameter, inside(), values, memory_format)
        held = inside()
        CONVERT[len(shape)](layer, memory_format)
        assert all(before is after for before, after in zip(held, inside()))


def test_the_stock_converter_leaves_the_inner_tensors_and_ours_repairs_that():
    layer = layer_with(two((4, 3, 3, 3)))
    nn.utils.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert layer.weight.stride() == (27, 1, 9, 3)
    assert layer.weight.a.stride() == (27, 9, 3, 1)
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert layer.weight.a.stride() == layer.weight.b.stride() == (27, 1, 9, 3)


def test_a_converted_wrapper_trains_and_its_gradient_and_hooks_go_with_it():
    torch.manual_seed(0)
    layer, plain = (nn.Conv2d(3, 4, 3, bias=False) for _ in range(2))
    layer.weight = nn.Parameter(TwoTensor(*(plain.weight.detach().clone() for _ in range(2))))
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.stride()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (layer, plain)]
    for step in range(4):
        x = torch.randn(2, 3, 8, 8)
        for each, optimizer in zip((layer, plain), optimizers):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            if each is layer and step == 1:
                nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
                gradient = layer.weight.grad
                assert gradient.stride() == gradient.a.stride() == (27, 1, 9, 3)
            optimizer.step()
    assert len(seen) == 4
    torch.testing.assert_close(layer.weight.a, plain.weight)


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


def inside_of(weight):
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


OWNED = [
    held_by_a_view,
    part_of_a_larger_storage,
    held_by_another_weight,
    shared_between_processes,
]


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


@pytest.mark.parametrize("make", OWNED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (4, 1, 3, 3)], ids=str)
def test_inner_tensors_that_need_not_move_stay_in_their_memory_whoever_holds_it(shape, make):
    groups = 4 if shape[1] == 1 else 1
    layer = nn.Conv2d(groups * shape[1], shape[0], shape[2:], groups=groups)
    layer.weight, _other = make(shape)
    before = [(each.data_ptr(), each.clone()) for each in inside_of(layer.weight)]
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert_lies(layer.weight, inside_of(layer.weight), [values for _, values in before], torch.channels_last)
    assert [each.data_ptr() for each in inside_of(layer.weight)] == [place for place, _ in before]


def test_the_gradient_of_a_wrapper_may_be_held_and_not_be_part_of_a_larger_storage():
    layer = layer_with(two((4, 3, 3, 3)))
    gradient = layer.weight.grad = two((4, 3, 3, 3))
    also = gradient.a.view(-1)
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert_lies(gradient, [gradient.a], [also.view(4, 3, 3, 3)], torch.channels_last)
    nhwc.convert_conv2d_weight_memory_format(layer, torch.contiguous_format)
    gradient = layer.weight.grad = TwoTensor(*(torch.randn(8, 4, 3, 3, 3)[4] for _ in range(2)))
    with pytest.raises(RuntimeError, match=r"nothing was changed, .* its gradient cannot follow"):
        nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    assert layer.weight.a.stride() == gradient.a.stride() == (27, 9, 3, 1)
    layer.weight.grad = None
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)
    layer.weight.grad = gradient
    nhwc.convert_conv2d_weight_memory_format(layer, torch.channels_last)  # as it does for plain weights in format
    assert gradient.a.stride() == (27, 9, 3, 1)


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_exception_while_the_others_convert_brings_the_wrappers_back(error, monkeypatch):
    def fail(*_, **__):
        raise error

    layer = layer_with(Wrapper(torch.randn(3, 3, 3, 3)))
    layer.weight.grad = Wrapper(torch.randn(3, 3, 3, 3))
    model = nn.Sequential(layer, nn.Conv2d(3, 3, 3))
    before = [*inner_state(layer.weight), *inner_state(layer.weight.grad)]
    monkeypatch.setattr(commit, "set_strides_", fail)
    with pytest.raises(error):
        nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    after = [*inner_state(layer.weight), *inner_state(layer.weight.grad)]
    for old, new in zip(before, after):
        assert old is new or (torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new)
    assert layer.weight.inner is before[0]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", store=dist.FileStore(os.fspath(tmp_path_factory.mktemp("store") / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [None, 0, 1])
@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[3:4], ids=str)
def test_a_dtensor_is_converted_with_its_local_tensor_and_trains(sharded, shape, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    placement = Replicate() if sharded is None else Shard(sharded)
    layer = layer_with(torch.randn(shape))
    distribute_module(layer, mesh)
    # Not distributed by a collective, whose threads hold the tensor for a moment after it ends.
    layer.weight = nn.Parameter(DTensor.from_local(torch.randn(shape), mesh, [placement]))
    weight, values = layer.weight, layer.weight.to_local().detach().clone()
    for memory_format in (torch.contiguous_format, LAST[len(shape)]):
        CONVERT[len(shape)](layer, memory_format)
        assert layer.weight is weight
        assert isinstance(weight, DTensor)
        assert tuple(weight.placements) == (placement,)
        assert_lies(weight, [weight.to_local()], [values], memory_format)
        assert weight._spec.tensor_meta.stride == weight.stride()
    x = distribute_tensor(torch.randn(2, 3, *[4] * (len(shape) - 2)), mesh, [Replicate()])
    layer(x).sum().backward()
    assert weight.grad.stride() == weight.grad.to_local().stride() == weight.stride()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    torch.testing.assert_close(weight.to_local(), values - 0.1 * weight.grad.to_local())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_layer_below_one_that_fsdp2_has_sharded_trains_on_as_before(kernel, trained, mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, kernel), nn.ReLU(), nn.Conv2d(8, 4, kernel))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for step in range(4):
        if step == int(trained):
            sharded.reshard()
            with contextlib.nullcontext() if kernel == 1 else pytest.raises(RuntimeError, match="FSDP2"):
                nhwc.convert_conv2d_weight_memory_format(sharded[0], torch.channels_last)
        x = torch.randn(2, 3, 8, 8)
        for model, optimizer in zip((plain, sharded), optimizers):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for expected, actual in zip(plain.parameters(), sharded.parameters()):
        torch.testing.assert_close(actual.to_local(), expected)
