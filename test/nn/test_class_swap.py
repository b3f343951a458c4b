"""Swapping a layer's class and back: what stays, copies and pickles, and classes that PyTorch makes around a layer."""

import copy
import gc
import importlib
import pickle
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from losing_layers import known_subclass
from reference import FORMATS
from saved_files import saved_and_loaded
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import original_class, restore_class, swap_class
from torch_nhwc.nn.each_forward import EachForward
from torch_nhwc.nn.replacements import Preserving


def known_convolution():
    diffusers = importlib.import_module("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
    return diffusers.CogVideoXSafeConv3d(6, 4, 1)


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight * 2, self.bias)


# A layer, the kinds of swaps, and the name of the class that comes of them.
SWAPS = {
    "norm": (lambda: nn.GroupNorm(2, 6), [Preserving], "PreservingGroupNorm"),
    "known_subclass": (known_subclass, [Preserving], "PreservingPoolFormerGroupNorm"),
    "convolution": (lambda: nn.Conv2d(6, 4, 3), [EachForward], "EachForwardConv2d"),
    "own_forward": (lambda: OwnForward(6, 4, 3), [EachForward], "EachForwardOwnForward"),
    "both": (lambda: nn.Conv3d(6, 4, 1), [EachForward, Preserving], "EachForwardPreservingConv3d"),
    "both_known": (known_convolution, [Preserving, EachForward], "EachForwardPreservingCogVideoXSafeConv3d"),
}


def swapped(name):
    make, kinds, _ = SWAPS[name]
    layer = make()
    for kind in kinds:
        swap_class(layer, kind)
    rank = 5 if isinstance(layer, nn.Conv3d) else 4
    return layer, torch.randn((2, 6, 4, 4, 4)[:rank]).to(memory_format=FORMATS[rank])


@pytest.mark.parametrize("name", SWAPS)
def test_the_object_stays_and_all_that_it_holds(name):
    make, kinds, class_name = SWAPS[name]
    layer = make()
    original, attributes = type(layer), dict(vars(layer))
    for kind in kinds * 2:  # the second time nothing changes
        swap_class(layer, kind)
    assert type(layer).__name__ == class_name
    assert isinstance(layer, original)
    assert original_class(type(layer)) is original
    assert vars(layer) == attributes
    first, *others = kinds
    restore_class(layer, first)
    assert not isinstance(layer, first)
    assert all(isinstance(layer, kind) for kind in others)
    for kind in kinds * 2:
        restore_class(layer, kind)
    assert type(layer) is original


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer)), saved_and_loaded]
)
@pytest.mark.parametrize("name", SWAPS)
def test_copies_and_pickles_have_the_class_and_go_back(name, copied):
    layer, x = swapped(name)
    other = copied(layer)
    assert type(other) is type(layer)
    assert torch.equal(other(x), layer(x))
    for kind in (Preserving, EachForward):
        restore_class(other, kind)
    assert type(other) is original_class(type(layer))


@pytest.mark.parametrize("kinds", [[EachForward], [Preserving], [EachForward, Preserving]], ids=str)
def test_a_parametrized_class_stays_the_outermost_and_copies_keep_theirs(kinds):
    layer = parametrizations.weight_norm(nn.Conv3d(6, 4, 1))
    other = copy.deepcopy(layer)
    shared = type(other)
    x = torch.randn(2, 6, 3, 4, 5).to(memory_format=torch.channels_last_3d)
    expected = layer(x)
    for kind in kinds:
        swap_class(layer, kind)
    assert type(other) is shared is not type(layer)
    assert original_class(type(layer)) is nn.Conv3d
    torch.testing.assert_close(layer(x), expected)
    assert type(copy.deepcopy(layer)) is type(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert all(isinstance(layer, kind) for kind in kinds)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(other(x), expected)  # its class still has the property
    for kind in kinds:
        restore_class(layer, kind)
    assert type(layer) is nn.Conv3d


def test_a_parametrization_that_was_added_after_the_swap_stays_when_the_class_comes_back():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer, _ = swapped("norm")
    parametrize.register_parametrization(layer, "weight", Doubled())
    restore_class(layer, Preserving)
    assert type(layer).__mro__[1] is nn.GroupNorm
    assert layer.weight.eq(2).all()
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert type(layer) is nn.GroupNorm


def test_the_originals_of_all_replacements_are_known_before_any_layer_is_swapped():
    """As in a process that loads a pickled model, which names them."""
    code = "from torch_nhwc.nn import class_swap as c, replacements as r; "
    code += "assert all(c.original_class(row.preserving) is stock for stock, row in r.REPLACEMENTS.items())"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_class_that_somebody_made_around_a_swapped_one_stays_the_outermost():
    layer, _ = swapped("norm")
    layer.__class__ = type("Wrapped" + type(layer).__name__, (type(layer),), {})
    assert original_class(type(layer)) is nn.GroupNorm
    restore_class(layer, Preserving)
    assert [each.__name__ for each in type(layer).__mro__[:2]] == ["WrappedGroupNorm", "GroupNorm"]


@pytest.mark.parametrize("kind", [EachForward, Preserving])
def test_a_lazy_layer_has_the_swapped_class_once_it_is_materialised(kind):
    layer = nn.LazyConv2d(4, 3)
    swap_class(layer, kind)
    layer(torch.randn(1, 3, 4, 4)).sum().backward()
    assert type(layer).__name__ == f"{kind.__name__}Conv2d"
    restore_class(layer, kind)
    assert type(layer) is nn.Conv2d


def test_reports_revert_in_any_order_and_contiguous_takes_all_swaps_back():
    model = nn.Sequential(nn.Conv3d(4, 4, 1), nn.GroupNorm(2, 4))
    first = nhwc.convert_(model, each_forward=True, preserve=False)
    second = nhwc.convert_(model, preserve=True)
    assert [row.layer for row in second.plan.layers] == ["Conv3d", "GroupNorm"]
    first.revert()
    assert type(model[0]).__name__ == "PreservingConv3d"
    second.revert()
    assert [type(layer) for layer in model] == [nn.Conv3d, nn.GroupNorm]
    report = nhwc.convert_(model, preserve=True, each_forward=True)
    assert nhwc.Reason.SAVED_WHOLE.value in report.remarks
    nhwc.convert_(model, torch.contiguous_format)
    assert [type(layer) for layer in model] == [nn.Conv3d, nn.GroupNorm]


def test_threads_that_swap_one_class_at_once_make_one(monkeypatch):
    def slowly(layer_type, make=Preserving.mixin_for):
        time.sleep(0.05)
        return make(layer_type)

    monkeypatch.setattr(Preserving, "mixin_for", slowly)
    own = type("Own", (nn.Conv2d,), {})
    layers = [own(3, 4, 3) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda layer: swap_class(layer, Preserving), layers))
    assert len({type(layer) for layer in layers}) == 1


def convert_and_run(**options):
    def use(model, x):
        nhwc.convert_(model, **options)
        model(x).sum().backward()

    return use


def copy_and_revert(model, x):
    report = nhwc.convert_(model)
    assert type(copy.deepcopy(model)[0]) is type(model[0])
    report.revert()


def watch_and_convert_again(model, x):
    convert_and_run()(model, x)
    with nhwc.trace(model):
        model(x)
    nhwc.convert_(model, torch.contiguous_format, optimizer=())


USES = {
    "preserve": convert_and_run(),
    "each_forward": convert_and_run(each_forward=True),
    "example": convert_and_run(example_inputs=torch.ones(1, 3, 4, 4)),
    "copied": copy_and_revert,
    "watched": watch_and_convert_again,
}


@pytest.mark.parametrize("is_parametrized", [False, True])
@pytest.mark.parametrize("name", USES)
def test_classes_that_a_factory_defines_are_gone_with_their_models(name, is_parametrized):
    def make():
        own = type("Own", (nn.Conv2d,), {})
        norm = type(
            "PoolFormerGroupNorm", (nn.GroupNorm,), {"__module__": "transformers.models.poolformer.modeling_poolformer"}
        )
        model = nn.Sequential(own(3, 4, 3), norm(2, 4), type("Activation", (nn.ReLU,), {})())
        if is_parametrized:
            parametrizations.weight_norm(model[0])
        before = {type(module) for module in model}
        USES[name](model, torch.ones(1, 3, 4, 4))
        return [weakref.ref(each) for each in before | {type(module) for module in model}]

    classes = [each for _ in range(3) for each in make()]
    gc.collect()
    assert not any(each() for each in classes)


def test_two_models_of_one_class_get_one_swapped_class():
    own = type("Own", (nn.Conv2d,), {})
    first, second = own(3, 4, 3), own(3, 4, 3)
    nhwc.convert_(first)
    gc.collect()
    nhwc.convert_(second)
    assert type(first) is type(second) is not own
    assert original_class(type(first)) is own
