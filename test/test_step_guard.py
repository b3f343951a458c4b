"""The step guard: fused CPU optimizers step right, whatever was loaded; other optimizers are left alone."""

import copy
import gc
import pickle
import re
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from guarding import hooks, load_contiguous, unguarded
from selection import exhaustive
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.converting import step_guard
from torch_nhwc.training import set_step_guard

CL = torch.channels_last
FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
ignore_warnings = pytest.mark.filterwarnings("ignore:torch_nhwc")


@pytest.fixture
def no_converted_models(monkeypatch):
    gc.collect()
    monkeypatch.setattr(step_guard, "_count", 0)
    monkeypatch.setattr(step_guard, "_watched", {})
    step_guard._install_or_remove()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()


def train(model, optimizer, steps, seed=0, before_step=lambda: None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.double)).square().mean().backward()
        before_step()
        optimizer.step()


def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def contiguous_gradients(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad.contiguous()


def run(make, convert, load=lambda *_: None, before_step=lambda *_: None):
    """Values after training, with a conversion and a loading in the middle."""
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    convert(model, optimizer)
    load(model, optimizer)
    train(model, optimizer, 3, seed=1, before_step=lambda: before_step(model))
    return values(model)


WAYS = {
    "state is loaded": {"load": load_contiguous},
    "gradients are assigned": {"before_step": contiguous_gradients},
}


@ignore_warnings
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUSED)
def test_h45_a_fused_step_is_right_whatever_is_loaded_or_assigned(name, way):
    make = FUSED[name]
    expected = run(make, lambda *_: None)
    with unguarded():
        wrong = run(make, lambda model, optimizer: nhwc.convert_(model, optimizer=()), **WAYS[way])
    has_nothing_to_load = name == "SGD" and way == "state is loaded"
    assert torch.allclose(wrong, expected) == has_nothing_to_load  # what PyTorch does by itself
    torch.testing.assert_close(run(make, lambda model, _: nhwc.convert_(model, optimizer=()), **WAYS[way]), expected)


CONVERSIONS = {
    "named": lambda model, optimizer: nhwc.convert_(model, optimizer=optimizer),
    "drop-in": lambda model, _: nhwc.convert_conv2d_weight_memory_format(model, CL),
    "restore_": lambda model, _: nhwc.training.restore_(model, nhwc.plan(model), optimizer=()),
    "revert": lambda model, _: nhwc.convert_(model, optimizer=()).revert(),
}


@ignore_warnings
@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Adagrad"])
def test_h06_fused_optimizers_step_right_after_every_conversion_whether_they_were_given_or_not(name, kind):
    expected = run(FUSED[name], lambda *_: None)
    with unguarded():
        stock = run(FUSED[name], lambda model, _: nn.utils.convert_conv2d_weight_memory_format(model, CL))
    assert not torch.allclose(stock, expected)  # what PyTorch does by itself
    torch.testing.assert_close(run(FUSED[name], CONVERSIONS[kind]), expected)


def test_it_warns_once_for_each_optimizer_and_says_what_and_how_many():
    model = network()
    optimizer = FUSED["AdamW"](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    said = r"AdamW: exp_avg and exp_avg_sq had other strides than the parameters \(2 of them\).*align_optimizer_"
    with pytest.warns(UserWarning, match=said) as caught:
        train(model, optimizer, 1)
    assert caught[0].filename == __file__
    load_contiguous(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].stride() == (27, 1, 9, 3)


def test_nothing_is_said_or_changed_if_all_is_in_order():
    model = network()
    optimizer = FUSED["AdamW"](model.parameters())
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
        pointers = [tensor.data_ptr() for tensor in optimizer.state[model[0].weight].values()]
        train(model, optimizer, 2)
    assert [tensor.data_ptr() for tensor in optimizer.state[model[0].weight].values()] == pointers


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {}], ids=["foreach", "loop", "default"])
def test_optimizers_that_are_not_fused_are_left_alone(options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()


def assigned(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


OTHERS = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), assigned]


@ignore_warnings
@pytest.mark.usefixtures("no_converted_models")
@pytest.mark.parametrize("way", OTHERS, ids=["deepcopy", "pickle", "assign"])
def test_h45_parameters_that_replace_those_of_a_converted_model_step_right(way):
    expected, model = network(), network()
    nhwc.convert_(model)
    other = way(model)
    del model
    gc.collect()
    assert other[0].weight.stride() == (27, 1, 9, 3)
    for each in (expected, other):
        optimizer = FUSED["AdamW"](each.parameters())
        train(each, optimizer, 2, before_step=lambda each=each: contiguous_gradients(each))
        load_contiguous(each, optimizer)
        train(each, optimizer, 2)
    torch.testing.assert_close(values(other), values(expected))


@pytest.mark.usefixtures("no_converted_models")
def test_it_is_installed_until_the_last_revert_and_for_good_if_a_converted_model_dies():
    assert hooks() == []
    model, other = network(), network()
    report = nhwc.convert_(model)
    assert len(hooks()) == 2
    again = nhwc.convert_(model)
    nhwc.convert_(other).revert()
    again.revert()  # changed nothing, and so undoes nothing
    assert len(hooks()) == 2
    report.revert()
    assert hooks() == []
    nhwc.convert_(model)
    nhwc.convert_(model, torch.contiguous_format)
    assert hooks() == []
    nhwc.convert_conv2d_weight_memory_format(model, CL)
    del model, report, again
    gc.collect()
    assert len(hooks()) == 2  # there may be copies


@pytest.mark.usefixtures("no_converted_models")
def test_it_stays_after_a_fused_step_for_the_state_that_follows_no_revert():
    expected, model = network(), network()
    optimizers = [FUSED["AdamW"](each.parameters()) for each in (expected, model)]
    report = nhwc.convert_(model, optimizer=())
    for each, optimizer in zip((expected, model), optimizers, strict=True):
        train(each, optimizer, 1)
    report.revert()
    assert len(hooks()) == 2
    with pytest.warns(UserWarning, match="had other strides than the parameters"):
        train(model, optimizers[1], 1, seed=1)
    train(expected, optimizers[0], 1, seed=1)
    torch.testing.assert_close(values(model), values(expected))


@pytest.mark.usefixtures("no_converted_models")
def test_threads_that_convert_at_once_install_one(monkeypatch):
    def slowly(hook, register=step_guard.register_optimizer_step_pre_hook):
        time.sleep(0.05)
        return register(hook)

    monkeypatch.setattr(step_guard, "register_optimizer_step_pre_hook", slowly)
    models = [network() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        reports = [*threads.map(nhwc.convert_, models)]
        assert len(hooks()) == 2
        [*threads.map(nhwc.Report.revert, reports)]
    assert hooks() == []


@pytest.mark.usefixtures("no_converted_models")
def test_nothing_is_installed_for_what_converts_no_parameter_that_trains():
    nhwc.plan(network())
    nhwc.convert_(network(), each_forward=True)
    nhwc.convert_(network().requires_grad_(False))
    nhwc.convert_weights_([torch.randn(2, 3, 3, 3)])
    assert hooks() == []


@pytest.mark.usefixtures("no_converted_models")
def test_it_can_be_turned_off_and_on():
    model = network()
    nhwc.convert_(model)
    with unguarded():
        assert hooks() == []
        nhwc.convert_(network())
        assert hooks() == []
    assert len(hooks()) == 2
    for enabled in ("off", 0, None):
        with pytest.raises(TypeError, match=r"set_step_guard: expected True or False, got"):
            set_step_guard(enabled)
    assert step_guard.is_guarded()


def flat_gradients(model):
    buffer = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), buffer.split([each.numel() for each in model.parameters()])):
        parameter.grad = part.view(parameter.shape)
    return buffer


@ignore_warnings
def test_gradients_in_memory_that_others_hold_are_the_same_after_the_step():
    """Training goes on in the buffer, which others reduce and set to zero, as DDP does."""

    def trained(is_converted):
        model = network()
        if is_converted:
            nhwc.convert_(model)
        optimizer = FUSED["AdamW"](model.parameters())
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        model(x).square().mean().backward()
        buffer = flat_gradients(model)
        gradients = [parameter.grad for parameter in model.parameters()]
        for _ in range(3):
            buffer.zero_()
            model(x).square().mean().backward()
            optimizer.step()
            assert all(parameter.grad is each for parameter, each in zip(model.parameters(), gradients))
            assert gradients[0].data_ptr() == buffer.data_ptr()
        return values(model)

    torch.testing.assert_close(trained(True), trained(False))


@ignore_warnings
def test_such_a_gradient_has_the_values_that_the_step_left_and_is_restored_after_a_step_that_raised():
    """A GradScaler has a fused optimizer divide gradients by their scale."""

    def gradients(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = FUSED["AdamW"](model.parameters())
        scaler.scale(model(torch.ones(2, 3, 8, 8)).square().mean()).backward()
        buffer = flat_gradients(model)
        own = model[0].weight.grad
        with pytest.raises(ValueError, match="own"):
            optimizer.step(raises)
        scaler.step(optimizer)
        assert model[0].weight.grad is own
        return buffer

    def raises():
        raise ValueError("the closure's own")

    model = network().float()
    nhwc.convert_(model)
    torch.testing.assert_close(gradients(model), gradients(network().float()))


def test_state_that_cannot_follow_is_a_warning_and_the_step_goes_on():
    model = network()
    optimizer = FUSED["SGD with momentum"](model.parameters())
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = (torch.zeros(8, 3, 3, 3, dtype=torch.double, requires_grad=True) * 2).requires_grad_()
    with pytest.warns(UserWarning, match="torch_nhwc: SGD") as caught:
        train(model, optimizer, 1)
    failed, moved = (str(each.message) for each in caught)
    assert re.search("SGD: its state or gradients cannot get the strides.*not a leaf.*not fused", failed)
    assert "momentum_buffer had other strides than the parameters (1 of them)" in moved
    assert optimizer.state[model[2].weight]["momentum_buffer"].stride() == (72, 1, 24, 8)  # the others follow


@pytest.mark.filterwarnings("ignore:torch_nhwc", "ignore:Dynamo")
@pytest.mark.parametrize("fused", [True, exhaustive(False)])
def test_compiled_steps_are_guarded_and_their_graphs_are_the_same(fused):
    def compiled(convert):
        torch._dynamo.reset()
        graphs = []
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=fused)
        train(model, optimizer, 2)
        convert(model)

        def backend(graph, _):
            graphs.append(len(graph.graph.nodes))
            return graph.forward

        optimizer.step = torch.compile(optimizer.step, backend=backend)
        train(model, optimizer, 3, seed=1)
        return values(model), graphs

    expected, graphs = compiled(lambda _: None)
    with unguarded():
        without = compiled(lambda model: nhwc.convert_(model, optimizer=()))
    assert without[1] == graphs
    assert torch.allclose(without[0], expected) != fused
    ours = compiled(lambda model: nhwc.convert_(model, optimizer=()))
    assert ours[1] == graphs
    torch.testing.assert_close(ours[0], expected)


@ignore_warnings
def test_nothing_is_kept_alive_and_an_optimizer_pickles():
    model = network()
    report = nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    train(model, optimizer, 1)
    load_contiguous(model, optimizer)
    train(model, optimizer, 1)
    assert len(pickle.loads(pickle.dumps(optimizer)).param_groups) == len(copy.deepcopy(optimizer).param_groups) == 1
    kept = [weakref.ref(each) for each in (model, optimizer)]
    del model, optimizer
    gc.collect()
    assert report is not None
    assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize("fused", [True, False])
def test_h48_gradients_of_each_sample_are_a_warning_once(fused):
    model = network()
    nhwc.convert_(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    train(model, optimizer, 1)
    model[0].weight.grad_sample = torch.zeros(2, 8, 3, 3, 3)
    with pytest.warns(UserWarning, match="Opacus") as caught:
        train(model, optimizer, 2)
    assert len(caught) == 1


# Optimizers that a conversion was given: their state follows after each load_state_dict.

KINDS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def strides(model, optimizer):
    return {value.stride() for value in optimizer.state[model[0].weight].values() if value.dim()}


@pytest.mark.parametrize("kind", KINDS)
def test_h45_loaded_state_gets_the_strides_of_the_parameters_also_after_a_revert(kind):
    model = network()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, 1)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    report = nhwc.convert_(model, optimizer=optimizer)
    with unguarded(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
    assert strides(model, optimizer) == {(27, 1, 9, 3)}
    for key, value in checkpoint["state"][0].items():
        assert torch.equal(optimizer.state[model[0].weight][key], value)
    in_format = copy.deepcopy(optimizer.state_dict())
    nhwc.convert_(model, optimizer=optimizer).revert()  # adds no hook and removes none
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    report.revert()
    optimizer.load_state_dict(in_format)
    assert strides(model, optimizer) == {(27, 9, 3, 1)}


def test_loaded_state_follows_parameters_of_every_rank():
    """A contiguous checkpoint holds contiguous state, for the transposed weight of a linear layer too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    optimizer = FUSED["AdamW"](model.parameters())
    nhwc.convert_(model, optimizer=optimizer)
    nhwc.checkpoint.contiguous_checkpoints_(optimizer)
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for weight in (model[0].weight, model[2].weight):
        assert not weight.is_contiguous()
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
