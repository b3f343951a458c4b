"""A weight on its way to the convolution: its strides and dtype, and for how long the result is kept."""

import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torch_nhwc as nhwc
from torch_nhwc.each_forward.weights import in_channels_last

CL, CL3D = torch.channels_last, torch.channels_last_3d
LAYERS = {
    "2d": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 6, 6)),
    "3d": (lambda: nn.Conv3d(3, 8, 3), (2, 3, 6, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 6, 6)),
    "transposed_3d": (lambda: nn.ConvTranspose3d(3, 8, 3), (2, 3, 6, 6, 6)),
}


class Conversions(TorchDispatchMode):
    """How many weights the operator has converted."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.nhwc.convert_weight.default
        return func(*args, **(kwargs or {}))


def conversions(function):
    with Conversions() as seen:
        function()
    return seen.count


def layer_and_input(name, each_forward=True):
    make, shape = LAYERS[name]
    layer = make()
    nhwc.convert_(layer, each_forward=each_forward)
    return layer, torch.randn(shape)


@pytest.mark.parametrize(
    "shape", [(8, 3, 3, 3), (1, 1, 3, 3), (8, 4, 1, 1), (6, 1, 3, 3), (2, 3, 1, 3, 1), (0, 3, 2, 2)]
)
@pytest.mark.parametrize("start", [torch.contiguous_format, None])
def test_it_has_canonical_strides_and_no_bytes_move_where_they_need_not(shape, start):
    weight = nn.Parameter(nhwc.convert_weight(torch.randn(shape), start))
    last = torch.empty(shape, memory_format=CL if len(shape) == 4 else CL3D)
    moves = start is not None and not weight.is_contiguous(memory_format=CL if len(shape) == 4 else CL3D)
    with Conversions() as seen:
        result = in_channels_last(weight, groups=2)
    assert result.stride() == last.stride()
    assert torch.equal(result, weight)
    assert seen.count == moves
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    assert torch.equal(gradient, torch.ones(shape))
    assert gradient.stride() == weight.stride() or not moves


def test_other_ranks_are_left_alone():
    weight = torch.randn(3, 4, 5)
    assert in_channels_last(weight, groups=1) is weight


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_casts_in_the_same_pass_and_once_in_a_region(name):
    layer, x = layer_and_input(name)
    plain = LAYERS[name][0]()
    plain.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        with Conversions() as seen:
            first, second = layer(x), layer(x)
    assert seen.count == 1
    assert first.dtype == torch.bfloat16
    torch.testing.assert_close(first, expected, rtol=0.02, atol=0.02)
    (first.sum() + second.sum()).backward()
    expected.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.is_contiguous()
    torch.testing.assert_close(layer.weight.grad, 2 * plain.weight.grad, rtol=0.02, atol=0.2)


def test_the_result_ends_with_the_casts_of_autocast():
    layer, x = layer_and_input("2d")
    weight = layer.weight

    def region(*between, **options):
        with torch.autocast("cpu", torch.bfloat16, **options), Conversions() as seen:
            layer(x)
            for each in between:
                each()
            layer(x)
        return seen.count

    def change():
        with torch.no_grad():
            weight.mul_(1.5)

    assert region() == 1
    assert region(torch.clear_autocast_cache) == 2
    assert region(gc.collect) == 1
    assert region(change) == 2  # where autocast itself would go on with the old values
    assert region(cache_enabled=False) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert [region(), region()] == [1, 0]  # the outermost one counts
    with torch.inference_mode():
        assert region() == 1
    weight.requires_grad_(False)
    assert region() == 2


def test_a_forward_without_gradients_does_not_take_them_from_the_next_in_its_region():
    layer, x = layer_and_input("2d")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_several_steps_in_one_region():
    layer, x = layer_and_input("2d")
    plain = nn.Conv2d(3, 8, 3)
    plain.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        for each in (layer, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
            for _ in range(2):
                each(x).sum().backward()
            optimizer.step()
            each(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("each_forward", [True, "keep"])
def test_what_a_transform_or_a_fake_mode_has_seen_is_not_for_others(each_forward):
    layer, x = layer_and_input("2d", each_forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=each_forward is True), torch.no_grad():
        expected = layer(x)
    layer, x = layer_and_input("2d", each_forward)
    layer.requires_grad_(each_forward is True)
    layer.bias = None  # of which autocast itself would remember a fake cast
    with torch.autocast("cpu", torch.bfloat16, enabled=each_forward is True):
        gradient = torch.func.grad(lambda x: layer(x).float().sum())(x)
        torch.vmap(layer)(torch.stack([x, x]))
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(x)
        output = layer(x)
    assert gradient.shape == x.shape
    assert type(output) is type(expected)
    assert output.isfinite().all()


def test_nothing_is_held_behind_a_region():
    from torch_nhwc.each_forward import weights

    layer, x = layer_and_input("2d")
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        assert list(weights._of_region) == ["cpu"]
    assert weights._of_region == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_kept_is_converted_again_only_after_a_change(mode):
    layer, x = layer_and_input("2d", each_forward="keep")
    plain = nn.Conv2d(3, 8, 3)

    def forward(*, autocast=False):
        plain.load_state_dict(layer.state_dict())
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), Conversions() as seen:
            output = layer(x)
        tolerance = 0.05 if autocast else 1e-5
        torch.testing.assert_close(output.float(), plain(x), rtol=tolerance, atol=tolerance)
        return seen.count

    assert [forward(), forward(), forward()] == [1, 0, 0]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).sum().backward()
    assert forward() == 0
    optimizer.step()
    assert [forward(), forward()] == [1, 0]
    layer.load_state_dict(nn.Conv2d(3, 8, 3).state_dict())
    assert [forward(), forward()] == [1, 0]
    layer.weight.data = torch.randn(8, 3, 3, 3)
    assert [forward(), forward()] == [1, 0]
    assert [forward(autocast=True), forward(autocast=True), forward()] == [1, 0, 1]
    layer.load_state_dict(nn.Conv2d(3, 8, 3).state_dict(), assign=True)  # another parameter: kept no longer, and right
    assert [forward(), forward()] == [1, 1]


def test_what_is_kept_does_not_stand_in_the_way_of_training():
    layer, x = layer_and_input("2d", each_forward="keep")
    layer.weight.requires_grad_(False)
    with torch.inference_mode():
        layer(x)
    x.requires_grad_()
    assert conversions(lambda: layer(x).sum().backward()) == 0
    layer.weight.requires_grad_()
    assert conversions(lambda: layer(x).sum().backward()) == 2  # the weight, and its gradient
    assert layer.weight.grad is not None


def test_what_is_kept_goes_with_its_weight_and_by_reverting_and_copies_do_not_have_it():
    from torch_nhwc.each_forward import weights

    gc.collect()  # what other tests have left
    before = len(weights._kept)
    layer = nn.Conv2d(3, 8, 3)
    report = nhwc.convert_(layer, each_forward="keep")
    assert any("864 bytes are kept beside them" in each for each in report.remarks), report.remarks
    x = torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        layer(x)
        assert len(weights._kept) == before + 1
        other = copy.deepcopy(layer)
        assert conversions(partial(other, x)) == 1
    report.revert()
    assert len(weights._kept) == before
    nhwc.convert_(layer, each_forward=True)
    report = nhwc.convert_(layer, each_forward="keep")  # of what is converted in each forward already
    assert len(weights._kept) == before + 1
    report.revert()
    assert len(weights._kept) == before
    nhwc.convert_(layer, each_forward="keep")
    del layer, report
    gc.collect()
    assert len(weights._kept) == before


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def test_a_region_in_which_hooks_are_switched_off_remembers_nothing():
    layer, x = layer_and_input("2d")
    with bfloat16(), torch.autograd.graph.disable_saved_tensors_hooks("no"):
        layer(x)
    layer.weight.data.normal_()
    with bfloat16():
        assert torch.equal(layer(x), torch.nn.functional.conv2d(x, layer.weight, layer.bias))


def test_selective_checkpointing_under_autocast():
    stem, x = layer_and_input("2d")
    block = nn.Sequential(nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3), nn.Linear(2, 2, bias=False))
    nhwc.convert_(block, each_forward=True)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    gradients = []
    for is_checkpointed in (False, True):
        with bfloat16():
            inner = stem(x)
            output = (
                checkpoint(block, inner, use_reentrant=False, context_fn=contexts) if is_checkpointed else block(inner)
            )
        gradients.append(torch.autograd.grad(output.float().square().sum(), list(block.parameters())))
    for each, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(each, expected)


def test_a_weight_in_other_memory_at_the_same_address_is_converted_again():
    for _ in range(8):
        layer, x = layer_and_input("2d", "keep")
        with torch.no_grad():
            layer(x)
            layer.half().float()
            expected = torch.nn.functional.conv2d(x, nhwc.convert_weight(layer.weight), layer.bias)
            assert torch.equal(layer(x), expected)


def test_a_graph_that_is_traced_converts_what_is_kept_too():
    layer, x = layer_and_input("2d", "keep")
    with torch.no_grad():
        layer(x)
        graph = make_fx(layer)(x)
        layer.weight.mul_(2)
        assert torch.equal(graph(x), layer(x))


def test_another_default_dtype_does_not_end_a_region():
    layer, x = layer_and_input("2d")

    def run():
        with bfloat16():
            layer(x)
            layer(x)

    torch.set_default_dtype(torch.float64)
    try:
        assert conversions(run) == 1
    finally:
        torch.set_default_dtype(torch.float32)
