"""The guard at the step: fused optimizers on a CPU step right, whatever was loaded; others are left alone."""

import copy
import gc
import pickle
import threading
import warnings

import pytest
import torch
from guarding import hooks, unguarded
from selection import exhaustive
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.stepping import guard, records

CL = torch.channels_last
FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
TOLD = r"did not lie as the parameters do \(2 of them\), by which a fused optimizer on a CPU steps wrong"


@pytest.fixture
def no_models_of_other_tests(monkeypatch):
    gc.collect()
    monkeypatch.setattr(guard, "_is_for_good", False)  # by convert_state_dict
    monkeypatch.setattr(guard, "_layers", {})
    guard._install_or_remove()


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


def load_contiguous(model, optimizer):
    """As a trainer does that resumes: a converted model, and the state of a contiguous one."""
    optimizer.load_state_dict(nhwc.contiguous_state_dict(optimizer.state_dict()))


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


@pytest.mark.filterwarnings("ignore:torch_nhwc")
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
    "convert_": lambda model: nhwc.convert_(model, optimizer=()),
    "drop-in": lambda model: nhwc.convert_conv2d_weight_memory_format(model, CL),
    "restore_": lambda model: nhwc.restore_(model, nhwc.plan(model), optimizer=()),
    "revert": lambda model: nhwc.convert_(model, optimizer=()).revert(),
    "back": lambda model: [nhwc.convert_(model, each, optimizer=()) for each in (None, "contiguous_format")],
}


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_state_of_an_optimizer_that_nobody_has_named_follows_at_its_step(kind):
    make = FUSED["AdamW"]
    expected = run(make, lambda *_: None)
    torch.testing.assert_close(run(make, lambda model, _: CONVERSIONS[kind](model)), expected)


def test_an_optimizer_that_was_made_after_the_conversion_goes_back_with_the_model():
    expected = run(FUSED["AdamW"], lambda *_: None)
    torch.manual_seed(0)
    model = network()
    with nhwc.channels_last(model):
        optimizer = FUSED["AdamW"](model.parameters())
        train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()
    train(model, optimizer, 3, seed=1)
    torch.testing.assert_close(values(model), expected)


def test_it_warns_once_for_each_optimizer_and_says_what_and_how_many():
    model = network()
    optimizer = FUSED["AdamW"](model.parameters())
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    with pytest.warns(UserWarning, match=f"AdamW: exp_avg and exp_avg_sq {TOLD}.*align_") as told:
        train(model, optimizer, 1)
    assert told[0].filename == __file__
    load_contiguous(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].stride() == (27, 1, 9, 3)


def test_nothing_is_said_or_changed_where_all_is_in_order():
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
def test_other_optimizers_are_left_alone(options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()


def swapped(model):
    for future in ("set_swap_module_params_on_conversion", "set_overwrite_module_params_on_conversion"):
        getattr(torch.__future__, future)(True)
        try:
            model.float().double()
            model.load_state_dict(model.state_dict())
        finally:
            getattr(torch.__future__, future)(False)
    return model


def loaded(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def emptied(model):
    values = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu").load_state_dict(values)
    return model


OTHERS = {
    "a copy": copy.deepcopy,
    "saved and loaded": lambda model: pickle.loads(pickle.dumps(model)),
    "swapped and overwritten": swapped,
    "assigned": loaded,
    "emptied": emptied,
}


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.usefixtures("no_models_of_other_tests")
@pytest.mark.parametrize("way", OTHERS)
def test_h45_parameters_that_are_other_objects_step_right_as_well(way):
    """And `swap_tensors`, which takes no tensor that is referred to weakly, takes those of a converted model."""
    expected, model = network(), network()
    nhwc.convert_(model)
    other = OTHERS[way](model)
    del model
    gc.collect()
    assert other[0].weight.stride() == (27, 1, 9, 3)
    for each in (expected, other):
        optimizer = FUSED["AdamW"](each.parameters())
        train(each, optimizer, 2, before_step=lambda each=each: contiguous_gradients(each))
        load_contiguous(each, optimizer)
        train(each, optimizer, 2)
    torch.testing.assert_close(values(other), values(expected))


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.usefixtures("no_models_of_other_tests")
def test_h45_a_converted_state_dict_that_is_assigned_steps_right():
    expected, model = network(), network()
    model.load_state_dict(nhwc.convert_state_dict(model.state_dict(), nhwc.plan(model)), assign=True)
    assert len(hooks()) == 2
    for each in (expected, model):
        train(each, FUSED["AdamW"](each.parameters()), 2, before_step=lambda each=each: contiguous_gradients(each))
    torch.testing.assert_close(values(model), values(expected))


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_it_is_there_until_the_last_revert_and_for_good_where_a_converted_model_dies():
    assert hooks() == []
    model, other = network(), network()
    report = nhwc.convert_(model)
    assert len(hooks()) == 2
    again = nhwc.convert_(model)
    second = nhwc.convert_(other)
    assert len(hooks()) == 2
    second.revert()
    again.revert()  # changed nothing, and so undoes nothing
    assert len(hooks()) == 2
    report.revert()
    assert hooks() == []
    nhwc.convert_conv2d_weight_memory_format(model, CL)
    optimizer = FUSED["AdamW"](model.parameters())
    train(model, optimizer, 1)
    assert len(hooks()) == 2
    del model
    gc.collect()
    nhwc.convert_(other).revert()
    assert len(hooks()) == 2  # the other may have copies


REVERTED = {
    "one channel": lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)),
    "channels-last before": lambda: nn.Sequential(nn.Conv2d(4, 8, 3).to(memory_format=CL), nn.Conv2d(8, 8, 3)),
    "all channels-last before": lambda: nn.Conv2d(4, 8, 3).to(memory_format=CL),
    "lazy": lambda: nn.LazyConv2d(8, 3),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Conv2d(4, 8, 3))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_reverted", [True, False], ids=["revert", "contiguous_format"])
@pytest.mark.parametrize("kind", REVERTED)
@pytest.mark.usefixtures("no_models_of_other_tests")
def test_it_goes_with_the_last_revert(kind, is_reverted):
    model = REVERTED[kind]()
    report = nhwc.convert_(model)
    assert len(hooks()) == 2
    report.revert() if is_reverted else nhwc.convert_(model, torch.contiguous_format)
    assert hooks() == []


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_nothing_is_installed_by_what_converts_no_parameter():
    model = network()
    nhwc.convert_(model, dry_run=True)
    nhwc.plan(model)
    nhwc.convert_(model, each_forward=True)
    frozen = network().requires_grad_(False)
    nhwc.convert_(frozen)
    nhwc.convert_weights_([torch.randn(2, 3, 3, 3)])
    assert hooks() == []


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_it_can_be_turned_off_and_on():
    model = network()
    report = nhwc.convert_(model)
    nhwc.set_step_guard(False)
    assert hooks() == []
    nhwc.convert_(network())
    assert hooks() == []
    nhwc.set_step_guard(True)
    assert len(hooks()) == 2
    report.revert()


def flat_gradients(model):
    buffer = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), buffer.split([each.numel() for each in model.parameters()])):
        parameter.grad = part.view(parameter.shape)
    return buffer


@pytest.mark.filterwarnings("ignore:torch_nhwc")
def test_gradients_whose_memory_something_else_sees_stay_what_they_are():
    """Training goes on in the buffer, which others reduce and set to zero."""

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


@pytest.mark.filterwarnings("ignore:torch_nhwc")
def test_a_gradient_is_given_back_after_a_step_that_raised():
    model = network()
    nhwc.convert_(model)
    optimizer = FUSED["SGD"](model.parameters())
    model(torch.randn(2, 3, 8, 8, dtype=torch.double)).sum().backward()
    flat_gradients(model)
    own = model[0].weight.grad

    def closure():
        raise ValueError("the closure's own")

    with pytest.raises(ValueError, match="own"):
        optimizer.step(closure)
    optimizer.step()
    assert model[0].weight.grad is own


def test_state_that_cannot_follow_is_said_and_the_step_goes_on():
    model = network()
    optimizer = FUSED["SGD with momentum"](model.parameters())
    train(model, optimizer, 1)
    nhwc.convert_(model, optimizer=())
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = (torch.zeros(8, 3, 3, 3, dtype=torch.double, requires_grad=True) * 2).requires_grad_()
    with pytest.warns(UserWarning, match="SGD: what it holds .* cannot be laid out as they are.*not a leaf"):
        train(model, optimizer, 1)
    assert optimizer.state[model[2].weight]["momentum_buffer"].stride() == (72, 1, 24, 8)  # the others are


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, AttributeError])
def test_whatever_fails_inside_the_step_goes_on(error, monkeypatch):
    def fails(*_):
        raise error("inside")

    model = network()
    nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    before = values(model)
    monkeypatch.setattr(guard, "differing_layouts", fails)
    with pytest.warns(UserWarning, match="AdamW: what it holds of its parameters cannot be laid out.*: inside"):
        train(model, optimizer, 1)
    assert not torch.equal(values(model), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, FUSED["AdamW"](model.parameters()), 1)  # a warning that is an error is not raised either


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_an_interrupt_passes(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    model = network()
    report = nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(guard, "differing_layouts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1)
    train(model, optimizer, 1)
    report.revert()
    assert hooks() == []


@pytest.mark.filterwarnings("ignore:torch_nhwc", "ignore:Dynamo")
@pytest.mark.parametrize("fused", [True, exhaustive(False)])
def test_compiled_steps_are_looked_at_and_make_the_graphs_that_they_made(fused):
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

        step = torch.compile(optimizer.step, backend=backend)
        optimizer.step = step
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


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_threads_step_while_others_convert_and_revert():
    errors = []

    def work(index):
        try:
            for _ in range(20):
                model = network()
                optimizer = FUSED["AdamW"](model.parameters())
                report = nhwc.convert_(model)
                model[0].weight.grad = torch.zeros(8, 3, 3, 3, dtype=torch.double)
                optimizer.step()
                report.revert()
        except Exception as error:
            errors.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    gc.collect()
    model = network()
    nhwc.convert_(model).revert()
    assert hooks() == []


@pytest.mark.usefixtures("no_models_of_other_tests")
def test_nothing_is_kept_alive_and_an_optimizer_pickles():
    model = network()
    report = nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    load_contiguous(model, optimizer)
    train(model, optimizer, 2)
    copied = pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer)
    assert len(copied.param_groups) == 1
    kept = [guard._layers, records._records]
    assert any(map(len, kept))
    del model, optimizer, copied
    gc.collect()
    assert report is not None
    assert not any(map(len, kept))


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("by_name", [True, False])
def test_h45_gradients_that_a_closure_assigns_are_laid_out(by_name):
    def trained(model):
        optimizer = FUSED["AdamW"](model.parameters())
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)

        def closure():
            gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient.contiguous()
            return 3

        for _ in range(3):
            assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) == 3
        return values(model)

    model = network()
    nhwc.convert_(model)
    torch.testing.assert_close(trained(model), trained(network()))


@pytest.mark.filterwarnings("ignore:torch_nhwc")
def test_h45_gradients_that_hooks_of_the_optimizer_assign_are_laid_out():
    def trained(model):
        optimizer = FUSED["AdamW"](model.parameters())

        def assign(*_):
            contiguous_gradients(model)

        def fail(*_):
            raise RuntimeError("a hook fails")

        optimizer.register_step_pre_hook(assign)
        failing = optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a hook fails"):
            train(model, optimizer, 1)
        failing.remove()
        train(model, optimizer, 3)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        return values(model)

    model = network()
    nhwc.convert_(model)
    torch.testing.assert_close(trained(model), trained(network()))


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.usefixtures("no_models_of_other_tests")
def test_hooks_that_another_thread_goes_through_stay_do_nothing_and_go_the_next_time():
    model = network()
    report = nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    is_stepping, is_reverted = threading.Event(), threading.Event()

    def wait(*_):
        is_stepping.set()
        is_reverted.wait(60)

    optimizer.register_step_pre_hook(wait)
    thread = threading.Thread(target=train, args=(model, optimizer, 1))
    thread.start()
    is_stepping.wait(60)
    report.revert()
    assert len(hooks()) == 2
    is_reverted.set()
    thread.join()
    train(model, optimizer, 1)
    nhwc.convert_(model).revert()
    assert hooks() == []


@pytest.mark.filterwarnings("ignore:torch_nhwc")
def test_a_gradient_that_was_lent_has_the_values_that_the_step_left():
    """A GradScaler has a fused optimizer divide gradients by their scale."""

    def gradients(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = FUSED["AdamW"](model.parameters())
        scaler.scale(model(torch.ones(2, 3, 8, 8)).square().mean()).backward()
        buffer = flat_gradients(model)
        scaler.step(optimizer)
        return buffer

    model = network().float()
    nhwc.convert_(model)
    torch.testing.assert_close(gradients(model), gradients(network().float()))


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("is_named", [True, False])
def test_h45_a_checkpoint_from_before_a_revert_is_aligned_after_it(is_named):
    expected, model = network(), network()
    plain, optimizer = (FUSED["AdamW"](each.parameters()) for each in (expected, model))
    report = nhwc.convert_(model, optimizer=optimizer if is_named else ())
    train(expected, plain, 2)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    report.revert()
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()
    train(expected, plain, 2)
    train(model, optimizer, 2)
    torch.testing.assert_close(values(model), values(expected))


def test_an_optimizer_with_an_equality_of_its_own_steps():
    class Equal(torch.optim.AdamW):
        def __eq__(self, other):
            return True

    model = network()
    nhwc.convert_(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, Equal(model.parameters(), fused=True), 2)


def test_where_warnings_are_errors_it_is_logged(caplog):
    model = network()
    nhwc.convert_(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, FUSED["AdamW"](model.parameters()), 1, before_step=lambda: contiguous_gradients(model))
    assert "AdamW: grad did not lie" in caplog.text


def test_a_warning_is_for_the_line_that_steps_under_a_scheduler_too():
    model = network()
    nhwc.convert_(model)
    optimizer = FUSED["AdamW"](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="did not lie") as told:
        train(model, optimizer, 1, before_step=lambda: contiguous_gradients(model))
    assert told[0].filename == __file__


@pytest.mark.parametrize("fused", [True, False])
def test_h48_gradients_of_each_sample_are_told_of_once(fused):
    model = network()
    nhwc.convert_(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    train(model, optimizer, 1)
    model[0].weight.grad_sample = torch.zeros(2, 8, 3, 3, 3)
    with pytest.warns(UserWarning, match="Opacus") as told:
        train(model, optimizer, 2)
    assert len(told) == 1


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8, dtype=torch.double)).square().mean()
        loss.backward()
        return loss

    return closure


class NormalisesByChannel(torch.optim.SGD):
    """Like AdamP: takes a view of each filter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.view(parameter.shape[0], -1).norm())
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NormalisesByChannel])
def test_h07_an_optimizer_that_is_about_to_raise_is_told_what_to_do(kind):
    model = network()
    report = nhwc.convert_(model)
    optimizer = kind(model.parameters(), lr=0.1)
    closure = closure_of(model, optimizer)
    closure()
    said = f"{kind.__name__}: it takes views that channels-last parameters do not have, and raises: .*each_forward=True"
    with pytest.warns(UserWarning, match=said), pytest.raises(RuntimeError, match="view"):
        optimizer.step(closure)
    report.revert()
    nhwc.convert_(model, each_forward=True)
    closure()
    optimizer.step(closure)


def test_steps_of_many_optimizers_cost_a_little_each():
    """One optimizer for each parameter: looking at one takes no longer where there are many."""
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3, bias=False) for _ in range(300)))
    nhwc.convert_(model)
    optimizers = [torch.optim.SGD([each.weight], lr=0.1, fused=True) for each in model]
    looked_at = []
    original = guard.differing_layouts
    guard.differing_layouts = lambda *lists: looked_at.append(len(lists[0])) or original(*lists)
    try:
        for layer, optimizer in zip(model, optimizers):
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
    finally:
        guard.differing_layouts = original
    assert looked_at == [1] * 300


@pytest.mark.parametrize("enabled", ["off", 0, None])
def test_only_true_and_false_are_taken(enabled):
    with pytest.raises(TypeError, match=r"set_step_guard: expected True or False, got"):
        nhwc.set_step_guard(enabled)
    assert guard.is_guarded()
