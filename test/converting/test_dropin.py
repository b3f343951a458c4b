"""The drop-ins compared with torch.nn.utils: never worse, and better where PyTorch's converters are silent."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from user_code import Locked

import torch_nhwc as nhwc

CL = torch.channels_last


def test_h14_tied_weights_are_converted_once_and_stay_tied():
    first, second, alias = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    second.weight = first.weight
    alias.weight = nn.Parameter(first.weight.data)
    model = nn.Sequential(first, second, alias)
    nhwc.convert_conv2d_weight_memory_format(model, CL)
    assert first.weight is second.weight
    assert first.weight.data_ptr() == alias.weight.data_ptr()
    assert alias.weight.stride() == (27, 1, 9, 3)

    nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    assert first.weight.data_ptr() != alias.weight.data_ptr()  # what plain PyTorch does


def non_leaf():
    layer = nn.Conv2d(3, 4, 3)
    weight = layer.weight * 2
    del layer.weight
    layer.weight = weight
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


@pytest.mark.parametrize(
    "converter", [nhwc.convert_conv2d_weight_memory_format, nhwc.convert_conv3d_weight_memory_format]
)
@pytest.mark.parametrize("no_module", [[nn.Conv2d(3, 3, 3)], torch.randn(4, 3, 3, 3), None], ids=type)
def test_what_is_no_module_raises(converter, no_module):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (list|Tensor|NoneType)"):
        converter(no_module, CL)
