"""The exchange of a layer's class: what stays, which layers are exchanged, and the way back."""

import copy
import importlib
import io
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torch_nhwc as nhwc
from torch_nhwc import Action, Reason
from torch_nhwc.preserving.exchange import bring_back, exchange, is_exchanged
from torch_nhwc.preserving.losing import KNOWN_SUBCLASSES, loss_of

CL, CL3D = torch.channels_last, torch.channels_last_3d


def known_subclass():
    transformers = importlib.import_module("transformers.models.poolformer.modeling_poolformer")
    return transformers.PoolFormerGroupNorm(6)


def reasons(model, **options):
    return {row.path: row.reason for row in nhwc.plan(model, preserve=True, **options).layers}


def test_the_object_stays_and_all_that_it_holds():
    norm = nn.GroupNorm(2, 6)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    called = []
    norm.register_forward_hook(lambda *_: called.append(1))
    before = {name: id(tensor) for name, tensor in norm.named_parameters()}
    names = list(norm.state_dict())
    report = nhwc.convert_(nn.Sequential(norm), preserve=True)
    assert type(norm).__name__ == "PreservingGroupNorm"
    assert isinstance(norm, nn.GroupNorm)
    assert {name: id(tensor) for name, tensor in norm.named_parameters()} == before
    assert list(norm.state_dict()) == names
    norm(torch.randn(2, 6, 4, 4).to(memory_format=CL)).sum().backward()
    assert called
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(before.values())
    assert all(p.grad is not None for p in norm.parameters())
    del report


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 6), known_subclass], ids=["stock", "subclass"])
def test_copies_and_pickles_are_exchanged_too(make, copied):
    layer = make()
    exchange(layer)
    other = copied(layer)
    assert type(other) is type(layer)
    x = torch.randn(2, 6, 4, 4).to(memory_format=CL)
    assert torch.equal(other(x), layer(x))
    bring_back(other)
    assert type(other) is type(make())


def test_a_whole_model_is_saved_and_loaded_and_its_state_dict_by_any_other():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), known_subclass(), nn.GELU())
    report = nhwc.convert_(model, preserve=True)
    assert Reason.SAVED_WHOLE.value in report.remarks
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 3, 8, 8).to(memory_format=CL)
    assert torch.equal(loaded(x), model(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(1, 6), nn.GELU()).load_state_dict(torch.load(file))


class Own(nn.GroupNorm):
    """A user's, which may do anything in its forward."""


def test_what_is_not_known_is_kept_with_a_reason():
    replaced = nn.GroupNorm(2, 6)
    replaced.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "own": Own(2, 6),
            "replaced": replaced,
            "other_dim": nn.Softmax(-1),
            "padded": nn.Conv3d(2, 2, 1, padding=1),
            "ordinary": nn.Conv3d(2, 2, 3),
            "bilinear": nn.Upsample(scale_factor=2, mode="trilinear"),
        }
    )
    assert reasons(model) == {
        "own": Reason.OTHER_CLASS,
        "replaced": Reason.FORWARD_REPLACED,
        "other_dim": Reason.OTHER_ARGUMENTS,
        "padded": Reason.OTHER_ARGUMENTS,
    }
    assert reasons(nn.ModuleDict({"norm": nn.GroupNorm(2, 6)}), filter_fn=lambda module, path: path != "norm") == {
        "norm": Reason.FILTERED
    }
    assert reasons(nn.Sequential(nn.GroupNorm(2, 6).to("meta"))) == {"0": None}
    before = {name: type(module) for name, module in model.named_modules()}
    nhwc.convert_(model, preserve=True)
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda: nn.GroupNorm(2, 6), "forward"),
        (known_subclass, "forward"),
        (lambda: nn.Conv3d(2, 2, 1), "_conv_forward"),
        (lambda: nn.InstanceNorm2d(2), "_apply_instance_norm"),
    ],
)
def test_layers_of_a_class_whose_method_was_replaced_are_kept(make, method, monkeypatch):
    layer = make()
    stock, _ = loss_of(type(layer))
    assert reasons(layer) == {"": None}
    monkeypatch.setattr(stock, method, lambda self, *args: args[0])
    assert reasons(layer) == {"": Reason.FORWARD_REPLACED}


def test_layers_of_another_device_are_kept():
    """The device of a layer without tensors is that of the model."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.GroupNorm(1, 2))
    for module in (model[0], model[2]):
        for name, parameter in module._parameters.items():
            module._parameters[name] = parameter.detach().as_subclass(Elsewhere)
    assert reasons(model) == {"1": Reason.OTHER_DEVICE, "2": Reason.OTHER_DEVICE}


def test_layers_inside_of_a_wrapper_are_kept_with_its_reason():
    model = nn.Sequential(nn.Sequential(nn.GELU()))
    model[0].compile(backend="eager")
    assert reasons(model) == {"0.0": Reason.COMPILED}


def test_layers_inside_of_torchscript_are_a_remark():
    model = nn.Sequential(torch.jit.script(nn.GELU()), nn.GELU())
    report = nhwc.convert_(model, preserve=True)
    assert Reason.SCRIPTED_LAYERS.value in report.remarks
    assert [row.path for row in report.plan.layers] == ["1"]


def test_known_subclasses_are_where_they_are_said_to_be_and_keep_the_method():
    """Those whose package is installed: each ends in the forward of PyTorch, by which it calls what is overridden."""
    import importlib

    tried = 0
    for name in KNOWN_SUBCLASSES:
        module, _, cls = name.rpartition(".")
        try:
            subclass = getattr(importlib.import_module(module), cls)
        except (ImportError, AttributeError):
            continue
        tried += 1
        stock, loss = loss_of(subclass)
        overridden = {each for each in vars(loss.preserving) if callable(getattr(loss.preserving, each))}
        between = subclass.__mro__[: subclass.__mro__.index(stock)]
        assert not any(method in vars(base) for base in between for method in overridden), name
    if "diffusers" in sys.modules and "transformers" in sys.modules:
        assert tried


def test_a_subclass_that_ends_in_the_forward_of_pytorch_convolves_by_ours():
    diffusers = importlib.import_module("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
    layer = diffusers.CogVideoXSafeConv3d(6, 4, 1)
    x = torch.randn(2, 6, 3, 4, 5).to(memory_format=CL3D)
    expected = layer(x)
    nhwc.convert_(nn.Sequential(layer), preserve=True)
    assert type(layer).__name__ == "PreservingCogVideoXSafeConv3d"
    assert isinstance(layer, diffusers.CogVideoXSafeConv3d)
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert "nhwc::conv3d" in str(traced.inlined_graph)
    torch.testing.assert_close(layer(x), expected)


class TestParametrized:
    """A parametrized layer has a class of its own, which its copies share."""

    def test_the_parametrization_stays_and_can_be_removed(self):
        layer = parametrizations.weight_norm(nn.Conv3d(6, 4, 1))
        other = copy.deepcopy(layer)
        shared = type(other)
        x = torch.randn(2, 6, 3, 4, 5).to(memory_format=CL3D)
        expected = layer(x)
        report = nhwc.convert_(nn.Sequential(layer), preserve=True)
        assert [row.layer for row in report.plan.layers] == ["Conv3d"]
        assert is_exchanged(type(layer))
        assert type(other) is shared is not type(layer)
        torch.testing.assert_close(layer(x), expected)
        parametrize.remove_parametrizations(layer, "weight")
        assert type(layer).__name__ == "PreservingConv3d"
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(other(x), expected)  # its class has its property still
        report_again = nhwc.convert_(nn.Sequential(layer), preserve=True)
        assert report_again.plan.layers[0].reason is Reason.EXCHANGED

    def test_one_that_was_added_later_stays_when_the_class_comes_back(self):
        layer = nn.GroupNorm(2, 6)
        model = nn.Sequential(layer)
        report = nhwc.convert_(model, preserve=True)

        class Doubled(nn.Module):
            def forward(self, weight):
                return 2 * weight

        parametrize.register_parametrization(layer, "weight", Doubled())
        report.revert()
        assert not is_exchanged(type(layer))
        assert isinstance(layer, nn.GroupNorm)
        assert layer.weight.eq(2).all()
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        assert type(layer) is nn.GroupNorm

    def test_what_an_exchanged_layer_is_called_is_what_its_package_calls_it(self):
        layer = nn.GroupNorm(2, 6)
        exchange(layer)
        parametrize.register_parametrization(layer, "weight", nn.Identity())
        (row,) = nhwc.plan(layer, preserve=True).layers
        assert (row.layer, row.action, row.reason) == ("GroupNorm", Action.KEEP, Reason.EXCHANGED)


def test_a_class_of_the_same_name_elsewhere_is_not_known():
    module = types.ModuleType("somewhere")
    module.PoolFormerGroupNorm = type("PoolFormerGroupNorm", (nn.GroupNorm,), {"__module__": "somewhere"})
    assert reasons(nn.Sequential(module.PoolFormerGroupNorm(1, 2))) == {"0": Reason.OTHER_CLASS}


def test_a_tracer_of_fx_can_take_exchanged_layers_as_leaves():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return is_exchanged(type(module)) or super().is_leaf_module(module, name)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.Softmax2d(), nn.CircularPad2d(1))
    nhwc.convert_(model, preserve=True)
    graph = Tracer().trace(model)
    assert [node.op for node in graph.nodes] == ["placeholder", *["call_module"] * 4, "output"]
    x = torch.randn(2, 3, 5, 5).to(memory_format=CL)
    assert torch.equal(torch.fx.GraphModule(model, graph)(x), model(x))
