"""The drop-ins compared with torch.nn.utils: never worse, and better where PyTorch's converters are silent."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from user_code import Locked

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


def non_leaf():
    layer = PlainTensor(3, 4, 3)
    layer.weight = layer.weight.requires_grad_() * 2
    return layer


def computed_in_an_unknown_way():
    layer = nn.Conv2d(3, 4, 3)
    parametrize.register_parametrization(layer, "weight", Locked())
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


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("no_module", [[nn.Conv2d(3, 3, 3)], torch.randn(4, 3, 3, 3), None], ids=type)
def test_what_is_no_module_raises(rank, no_module):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (list|Tensor|NoneType)"):
        OURS[rank](no_module, FORMATS[rank])
