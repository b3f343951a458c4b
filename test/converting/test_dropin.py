"""The drop-ins compared with torch.nn.utils: never worse, and better where PyTorch's converters are silent."""

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize

import torch_nhwc as nhwc

CL, CL3D = torch.channels_last, torch.channels_last_3d
STOCK = {2: nn.utils.convert_conv2d_weight_memory_format, 3: nn.utils.convert_conv3d_weight_memory_format}
OURS = {2: nhwc.convert_conv2d_weight_memory_format, 3: nhwc.convert_conv3d_weight_memory_format}
FORMATS = {2: CL, 3: CL3D}


class Subclassed(nn.Conv2d):
    """A layer of the user's own."""


class PlainTensor(nn.Conv2d):
    """Its weight is a plain attribute, as in functional or distilled code."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        weight = self.weight.detach().clone()
        del self.weight
        self.weight = weight


class Property(nn.Conv2d):
    """Its weight is kept under another name."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kernel = self._parameters.pop("weight")

    def __getattr__(self, name):
        return super().__getattr__("kernel" if name == "weight" and "kernel" in self._parameters else name)


def shared():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()))


MODELS = {
    "grouped": (2, lambda: nn.Conv2d(8, 8, 3, groups=4)),
    "mixed3d": (3, lambda: nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "b": nn.Conv3d(3, 4, 3), "c": nn.Linear(3, 4)})),
    "conv3d": (3, lambda: nn.Conv3d(3, 4, (1, 3, 5))),
    "subclass": (2, lambda: Subclassed(3, 4, 3)),
    "plain_tensor": (2, lambda: PlainTensor(3, 4, 3)),
    "property": (2, lambda: Property(3, 4, 3)),
    "meta": (2, lambda: nn.Conv2d(3, 4, 3, device="meta")),
    "shared": (2, shared),
}


def tensors(module):
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return named | {path: m.weight for path, m in module.named_modules() if isinstance(m, PlainTensor)}


@pytest.mark.parametrize("source", ["contiguous", "channels_last", "permuted", "expanded"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_stock_converter_in_values_strides_and_identity(name, source):
    rank, make = MODELS[name]
    ours = make()
    for module in ours.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == rank + 2:
            if source == "channels_last":
                weight.data = weight.data.to(memory_format=FORMATS[rank])
            elif source == "permuted":
                weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)
            elif source == "expanded":
                weight.data = weight.data[:1].clone().expand(weight.shape)
    stock = copy.deepcopy(ours)
    identity = {path: id(tensor) for path, tensor in tensors(ours).items()}
    for memory_format in (FORMATS[rank], torch.contiguous_format, FORMATS[rank]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert OURS[rank](ours, memory_format) is ours
        STOCK[rank](stock, memory_format)
        assert {path: id(tensor) for path, tensor in tensors(ours).items()} == identity
        for path, expected in tensors(stock).items():
            actual = tensors(ours)[path]
            assert actual.stride() == expected.stride(), path
            assert actual.dtype == expected.dtype
            assert actual.requires_grad == expected.requires_grad
            assert actual.is_meta or torch.equal(actual, expected), path


def test_h14_tied_weights_are_converted_once_and_stay_tied():
    first, second, alias = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    second.weight = first.weight
    alias.weight = nn.Parameter(first.weight.data)
    model = nn.Sequential(first, second, alias)
    nhwc.convert_conv2d_weight_memory_format(model, CL)
    assert first.weight is second.weight
    assert first.weight.data_ptr() == alias.weight.data_ptr()
    assert alias.weight.stride() == (27, 1, 9, 3)

    STOCK[2](model, torch.contiguous_format)
    assert first.weight.data_ptr() != alias.weight.data_ptr()  # what plain PyTorch does


class Locked(nn.Module):
    """A parametrization that cannot be copied, and so not evaluated on copies."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, weight):
        return weight * 2


def computed_in_an_unknown_way():
    layer = nn.Conv2d(3, 4, 3)
    parametrize.register_parametrization(layer, "weight", Locked())
    return layer


def non_leaf():
    layer = PlainTensor(3, 4, 3)
    layer.weight = layer.weight.requires_grad_() * 2
    return layer


LEFT = {"computed": computed_in_an_unknown_way, "non_leaf": non_leaf}


def test_leaving_shared_memory_is_warned_about():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).share_memory()
    with pytest.warns(UserWarning, match=r"the weight of '0' \(Conv2d\) leaves the shared memory that it was in"):
        nhwc.convert_conv2d_weight_memory_format(model, CL)
    assert not model[0].weight.is_shared()


@pytest.mark.parametrize("kind", LEFT)
def test_a_layer_that_stays_as_it_is_is_named_once_and_the_rest_converts(kind):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(nn.ReLU(), LEFT[kind]()))
    with pytest.warns(UserWarning, match=r"left '1\.1' \(.*\) as it is: .*computed from other tensors") as caught:
        nhwc.convert_conv2d_weight_memory_format(model, CL)
    assert len([w for w in caught if issubclass(w.category, UserWarning)]) == 1
    assert caught[0].filename == __file__
    assert model[0].weight.stride() == (27, 1, 9, 3)


def test_a_weight_in_a_larger_storage_gets_fresh_storage_and_a_warning():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))
    flat = torch.randn(1000)
    model[1].weight = nn.Parameter(flat[100:208].view(4, 3, 3, 3))
    values = flat.clone()
    with pytest.warns(UserWarning, match=r"the weight of '1' \(Conv2d\) leaves the larger storage that it was part of"):
        nhwc.convert_conv2d_weight_memory_format(model, CL)
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
        nhwc.convert_conv2d_weight_memory_format(model, CL)
    assert_unchanged(before)


BOTH = pytest.mark.parametrize("rank", [2, 3])
LAYERS = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}


@BOTH
@pytest.mark.parametrize(
    ("memory_format", "error"),
    [(memory_format, TypeError) for memory_format in (0, 3.0, "channels_last", torch.float32, [1])]
    + [(memory_format, RuntimeError) for memory_format in (torch.preserve_format, None)],
    ids=repr,
)
def test_a_format_that_is_not_one_raises(rank, memory_format, error):
    layer = LAYERS[rank][0](3, 4, 3)
    said = f"expected torch.contiguous_format or {FORMATS[rank]}"
    said = said if error is RuntimeError else "must be torch.memory_format, not"
    with pytest.raises(error, match=f"convert_conv{rank}d.*{said}"):
        OURS[rank](layer, memory_format)
    assert layer.weight.is_contiguous()


@BOTH
@pytest.mark.parametrize("no_module", [[nn.Conv2d(3, 3, 3)], torch.randn(4, 3, 3, 3), None], ids=type)
def test_what_is_no_module_raises(rank, no_module):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (list|Tensor|NoneType)"):
        OURS[rank](no_module, FORMATS[rank])


@BOTH
def test_a_format_of_the_other_rank_raises_where_there_is_a_weight_and_is_nothing_elsewhere(rank):
    other = 5 - rank
    for layer in LAYERS[rank]:
        model = nn.Sequential(nn.Linear(2, 2), LAYERS[other][0](3, 4, 3), nn.Sequential(layer(3, 4, 3)))
        before = snapshot(model)
        for converter in (STOCK[rank], OURS[rank]):
            said = f"required rank {other + 2} tensor to use {str(FORMATS[other])[6:]}"
            with pytest.raises(RuntimeError, match=said):
                converter(model, FORMATS[other])
        assert_unchanged(before)
    others = nn.Sequential(nn.Linear(2, 2), LAYERS[other][0](3, 4, 3), nn.Conv1d(3, 4, 3))
    before = snapshot(others)
    for memory_format in (FORMATS[other], torch.preserve_format):
        assert OURS[rank](others, memory_format) is STOCK[rank](others, memory_format) is others
    assert_unchanged(before)


@BOTH
@pytest.mark.parametrize("is_inside", [False, True])
def test_the_strides_of_fake_tensors_change_without_a_word(rank, is_inside, recwarn):
    mode = FakeTensorMode()
    with mode:
        model, stock = (nn.Sequential(LAYERS[rank][0](3, 4, 3), LAYERS[rank][1](4, 1, 1)) for _ in range(2))
        for each in (model, stock):
            each[1].weight = each[0].weight  # tied
        weight = model[0].weight
        weight.grad = torch.zeros_like(weight)
    for memory_format in (FORMATS[rank], FORMATS[rank], torch.contiguous_format):
        with mode if is_inside else contextlib.nullcontext():
            OURS[rank](model, memory_format), STOCK[rank](stock, memory_format)
        assert model[0].weight is model[1].weight is weight
        assert weight.grad.stride() == weight.stride() == stock[0].weight.stride()
    assert not recwarn.list
