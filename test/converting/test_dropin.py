"""The drop-ins compared with the converters of torch.nn.utils, from arguments to gradients."""

import copy
import itertools
import operator
import random

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrize
from user_code import Locked, not_a_leaf

import torch_nhwc as nhwc

STOCK = {4: nn.utils.convert_conv2d_weight_memory_format, 5: nn.utils.convert_conv3d_weight_memory_format}
OURS = {4: nhwc.convert_conv2d_weight_memory_format, 5: nhwc.convert_conv3d_weight_memory_format}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYERS = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}
BOTH = pytest.mark.parametrize("rank", [4, 5])


def outcome(converter, model, memory_format):
    """Return the strides and values of all tensors after a call, or what it raised."""
    try:
        assert converter(model, memory_format) is model
    except Exception as error:
        return type(error)
    return {name: (tensor.stride(), tensor.tolist()) for name, tensor in model.state_dict().items()}


def assert_alike(rank, make, memory_format):
    model = make()
    expected = outcome(STOCK[rank], copy.deepcopy(model), memory_format)
    assert outcome(OURS[rank], model, memory_format) == expected
    return expected


@BOTH
@pytest.mark.parametrize("memory_format", [0, 2, 3.0, "nhwc", "preserve_format", torch.float32, [1]], ids=repr)
def test_a_format_that_is_not_one_is_a_type_error(rank, memory_format):
    model = LAYERS[rank][0](3, 4, 3)
    assert assert_alike(rank, lambda: model, memory_format) is TypeError
    with pytest.raises(TypeError, match=rf"conv{rank - 2}d.*must be torch.memory_format or its name, not"):
        OURS[rank](nn.Linear(3, 4), memory_format)


@BOTH
@pytest.mark.parametrize("name_of", [str, lambda memory_format: str(memory_format).removeprefix("torch.")])
def test_a_name_means_its_format(rank, name_of):
    model = LAYERS[rank][0](3, 4, 3)
    for memory_format in (LAST[rank], torch.contiguous_format):
        assert OURS[rank](model, name_of(memory_format)) is model
        assert model.weight.is_contiguous(memory_format=memory_format)


@BOTH
@pytest.mark.parametrize("memory_format", [torch.preserve_format, None], ids=repr)
def test_no_format_for_weights_is_a_runtime_error(rank, memory_format):
    with pytest.raises(RuntimeError, match=f"conv{rank - 2}d.*expected torch.contiguous_format or {LAST[rank]}"):
        OURS[rank](LAYERS[rank][0](3, 4, 3), memory_format)


@BOTH
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_format_of_the_other_rank_raises_where_there_is_a_weight_and_is_nothing_elsewhere(rank, depth):
    def nested(*layers):
        for _ in range(depth):
            layers = [nn.Sequential(nn.ReLU(), *layers)]
        return nn.ModuleList(layers)

    other = 9 - rank
    for layer in LAYERS[rank]:
        assert assert_alike(rank, lambda layer=layer: nested(layer(3, 4, 3)), LAST[other]) is RuntimeError
        model = nested(nn.Linear(2, 2), LAYERS[other][0](3, 4, 3), layer(3, 4, 3))
        before = [parameter.stride() for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match=rf"required rank {other} tensor to use {str(LAST[other])[6:]} format"):
            OURS[rank](model, LAST[other])
        assert [parameter.stride() for parameter in model.parameters()] == before
    assert isinstance(assert_alike(rank, lambda: nested(nn.Linear(2, 2), LAYERS[other][0](3, 4, 3)), LAST[other]), dict)
    assert isinstance(assert_alike(rank, lambda: nested(nn.Conv1d(3, 4, 3)), torch.preserve_format), dict)


def random_layer(draw, rank):
    layer, groups = draw.choice(LAYERS[rank]), draw.choice([1, 1, 2, 4])
    kernel = tuple(draw.choice([1, 1, 2, 3]) for _ in range(rank - 2))
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    channels = [groups * draw.randint(2 if groups == 1 else 1, 3) for _ in range(2)]  # filters of one channel differ
    made = layer(*channels, kernel, groups=groups, bias=draw.random() < 0.5, dtype=dtype)
    order = draw.sample(range(rank), rank)
    inverse = [order.index(dimension) for dimension in range(rank)]
    made.weight.data = made.weight.data.permute(order).contiguous().permute(inverse)
    return made.requires_grad_(draw.random() < 0.7)


def random_model(draw, depth=0):
    layers = [random_layer(draw, draw.choice([4, 5])) for _ in range(draw.randint(1, 3))]
    layers += [nn.BatchNorm2d(2), nn.Linear(2, 2), nn.Parameter(torch.randn(2, 3, 2, 2))][: draw.randint(0, 2)]
    if depth < 2:
        layers += [random_model(draw, depth + 1) for _ in range(draw.randint(0, 2))]
    draw.shuffle(layers)
    return nn.ModuleList(layers)


@pytest.mark.parametrize("seed", range(20))
def test_random_models_are_alike_after_every_call(seed):
    draw = random.Random(seed)
    ours = random_model(draw)
    stock = copy.deepcopy(ours)
    held = dict(ours.named_parameters())
    for _ in range(6):
        rank = draw.choice([4, 5])
        memory_format = draw.choice([LAST[rank], torch.contiguous_format])
        assert outcome(OURS[rank], ours, memory_format) == outcome(STOCK[rank], stock, memory_format)
        for name, parameter in ours.named_parameters():
            assert parameter is held[name]
            assert parameter.requires_grad == stock.get_parameter(name).requires_grad


class PlainTensor(nn.Conv2d):
    """Its weight is a plain attribute, as in functional or distilled code."""

    def __init__(self):
        super().__init__(3, 4, 3)
        weight = self.weight.detach().clone()
        del self.weight
        self.weight = weight


class Property(nn.Conv2d):
    """Its weight is kept under another name."""

    def __init__(self):
        super().__init__(3, 4, 3)
        self.kernel = self._parameters.pop("weight")

    def __getattr__(self, name):
        return super().__getattr__("kernel" if name == "weight" and "kernel" in self._parameters else name)


def shared():
    layer = nn.Conv2d(3, 3, 3)
    return nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()))


def expanded():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.data = layer.weight.data[:1].clone().expand(layer.weight.shape)
    return layer


@pytest.mark.parametrize("make", [PlainTensor, Property, shared, expanded, lambda: nn.Conv2d(3, 4, 3, device="meta")])
def test_odd_layers_are_alike_after_every_call_and_keep_their_weights(make, recwarn):
    def weights(model):
        return [layer.weight for layer in model.modules() if hasattr(layer, "weight")]

    ours = make()
    stock, held = copy.deepcopy(ours), weights(ours)
    for memory_format in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        OURS[4](ours, memory_format), STOCK[4](stock, memory_format)
        assert all(map(operator.is_, weights(ours), held))
        for weight, expected in zip(held, weights(stock), strict=True):
            assert weight.stride() == expected.stride()
            assert weight.is_meta or torch.equal(weight, expected)
    assert not recwarn.list


@BOTH
@pytest.mark.parametrize("inside", [False, True])
def test_the_strides_of_fake_tensors_change_without_a_word(rank, inside, recwarn):
    mode = FakeTensorMode()
    with mode:
        ours = nn.Sequential(LAYERS[rank][0](3, 4, 3), LAYERS[rank][1](4, 1, 1))
        stock = nn.Sequential(LAYERS[rank][0](3, 4, 3), LAYERS[rank][1](4, 1, 1))
    ours[1].weight = ours[0].weight  # tied
    stock[1].weight = stock[0].weight
    weight = ours[0].weight
    with mode:
        weight.grad = torch.zeros_like(weight)
    for memory_format in (LAST[rank], LAST[rank], torch.contiguous_format):
        if inside:
            with mode:
                OURS[rank](ours, memory_format), STOCK[rank](stock, memory_format)
        else:
            OURS[rank](ours, memory_format), STOCK[rank](stock, memory_format)
        assert ours[0].weight is ours[1].weight is weight
        assert weight.stride() == stock[0].weight.stride()
        assert weight.grad.stride() == weight.stride()  # stock's stays
        assert weight.requires_grad
        assert weight.is_leaf
    assert not recwarn.list


@BOTH
@pytest.mark.parametrize("shape", [(3, 4, 3), (3, 3, 3), (2, 4, 1)], ids=str)
def test_the_strides_of_fake_tensors_of_symbolic_sizes_are_alike(rank, shape):
    for layer, memory_format in itertools.product(LAYERS[rank], [LAST[rank], torch.contiguous_format]):
        models = layer(*shape), layer(*shape)
        for converter, model in zip((OURS[rank], STOCK[rank]), models):
            fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(model.weight.data)
            model.weight = nn.Parameter(fake)
            assert any(isinstance(size, torch.SymInt) for size in model.weight.shape)
            converter(model, memory_format)
        ours, stock = (str(model.weight.stride()) for model in models)
        assert ours == stock


# Where PyTorch's converters are silent.


def test_h14_tied_weights_are_converted_once_and_stay_tied():
    first, second, alias = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    second.weight = first.weight
    alias.weight = nn.Parameter(first.weight.data)
    model = nn.Sequential(first, second, alias)
    OURS[4](model, torch.channels_last)
    assert first.weight is second.weight
    assert first.weight.data_ptr() == alias.weight.data_ptr()
    assert alias.weight.stride() == (27, 1, 9, 3)

    STOCK[4](model, torch.contiguous_format)
    assert first.weight.data_ptr() != alias.weight.data_ptr()  # what plain PyTorch does


def computed_in_an_unknown_way():
    layer = nn.Conv2d(3, 4, 3)
    parametrize.register_parametrization(layer, "weight", Locked())
    return layer


LEFT = {"computed": computed_in_an_unknown_way, "non_leaf": not_a_leaf}


def test_leaving_shared_memory_is_warned_about():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).share_memory()
    with pytest.warns(UserWarning, match=r"the weight of '0' \(Conv2d\) leaves the shared memory that it was in"):
        OURS[4](model, torch.channels_last)
    assert not model[0].weight.is_shared()


@pytest.mark.parametrize("kind", LEFT)
def test_a_layer_that_stays_as_it_is_is_named_once_and_the_rest_converts(kind):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(nn.ReLU(), LEFT[kind]()))
    with pytest.warns(UserWarning, match=r"left '1\.1' \(.*\) as it is: .*computed from other tensors") as caught:
        OURS[4](model, torch.channels_last)
    assert len([w for w in caught if issubclass(w.category, UserWarning)]) == 1
    assert caught[0].filename == __file__
    assert model[0].weight.stride() == (27, 1, 9, 3)


def test_a_weight_in_a_larger_storage_gets_fresh_storage_and_a_warning():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))
    flat = torch.randn(1000)
    model[1].weight = nn.Parameter(flat[100:208].view(4, 3, 3, 3))
    values = flat.clone()
    with pytest.warns(UserWarning, match=r"the weight of '1' \(Conv2d\) leaves the larger storage that it was part of"):
        OURS[4](model, torch.channels_last)
    assert [layer.weight.stride() for layer in model] == [(27, 1, 9, 3)] * 2
    assert torch.equal(model[1].weight, values[100:208].view(4, 3, 3, 3))
    assert torch.equal(flat, values)
    assert model[1].weight.untyped_storage().nbytes() == 108 * 4


def snapshot(model):
    dense = [p for p in model.parameters() if p.layout == torch.strided]
    return [(p, p.data_ptr(), p.stride(), p.detach().clone()) for p in dense]


def assert_unchanged(before):
    for parameter, pointer, stride, values in before:
        assert (pointer, stride) == (parameter.data_ptr(), parameter.stride())
        assert torch.equal(values, parameter)


def with_non_leaf_gradient():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.grad = torch.randn(8, 3, 3, 3)[:4]
    return layer


def without_weight():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = None
    return layer


def with_sparse_weight():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    return layer


BROKEN = {
    "no_weight": (without_weight, "its weight is not a tensor"),
    "gradient": (with_non_leaf_gradient, r".*set .grad"),
    "sparse": (with_sparse_weight, r"the operators do not support it \(sparse"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_h16_an_error_in_the_middle_of_the_tree_changes_nothing(kind):
    make, message = BROKEN[kind]
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(make()), nn.Conv2d(3, 3, 3))
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=rf"nothing was changed, because of '1.0' \(Conv2d\): {message}"):
        OURS[4](model, torch.channels_last)
    assert_unchanged(before)


@pytest.mark.parametrize("converter", [OURS[4], OURS[5]])
@pytest.mark.parametrize("no_module", [[nn.Conv2d(3, 3, 3)], torch.randn(4, 3, 3, 3), None], ids=type)
def test_what_is_no_module_raises(converter, no_module):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (list|Tensor|NoneType)"):
        converter(no_module, torch.channels_last)
