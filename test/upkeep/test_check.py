"""Saving, loading, bringing the format back, and saying what has left it."""

import copy
import io
import itertools
import pickle
import types

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")


class Net(nn.Module):
    """2D and 3D, depthwise, 1x1 and one channel; a tie; a batch norm; a linear layer whose weight is transposed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv2d(6, 4, 1)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.block.weight
        self.volume = nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1))
        self.head = nn.Linear(3, 2)
        self.head.weight = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, x):
        x = self.tied(self.block(self.pointwise(self.depthwise(self.norm(self.stem(x))).relu()))).relu()
        return self.head(self.volume(x.unflatten(1, (2, 2))).mean((2, 3, 4)))


SITES = ["stem", "depthwise", "pointwise", "block", "tied", "volume"]
LAST = {
    "stem": (9, 1, 3, 1),
    "depthwise": (9, 1, 3, 1),
    "pointwise": (6, 1, 6, 6),
    "block": (36, 1, 12, 4),
    "tied": (36, 1, 12, 4),
    "volume": (18, 1, 18, 6, 2),
}


def network(seed=0):
    torch.manual_seed(seed)
    return Net()


def converted(seed=0, **options):
    model = network(seed)
    return model, nhwc.convert_(model, **options).plan


def strides(model):
    return {name: model.get_submodule(name).weight.stride() for name in SITES}


def assert_equal_values(actual, expected):
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def said(deviations):
    return [str(deviation) for deviation in deviations]


# Contiguous state dicts.


@pytest.mark.parametrize("source", ["module", "state dict"])
def test_h03_safetensors_refuses_a_converted_model_and_takes_the_contiguous_state_dict(source, tmp_path):
    model, plan = converted()
    del model.tied.weight  # safetensors refuses ties, too, contiguous or not
    model.tied.weight = nn.Parameter(model.block.weight.detach().clone())
    with pytest.raises(ValueError, match="non contiguous tensor"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = nhwc.contiguous_state_dict(model if source == "module" else model.state_dict())
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].is_contiguous()
    assert nhwc.check(model, plan) == []


def test_a_contiguous_state_dict_leaves_the_model_as_it_is():
    model, plan = converted()
    before = [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()]
    weights = [model.get_submodule(name).weight for name in SITES]
    nhwc.contiguous_state_dict(model)
    assert [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()] == before
    assert nhwc.check(model, plan) == []
    # Nothing holds the storages any more: they may be permuted in place.
    assert nhwc.Outcome.REUSED in nhwc.plan_weights(weights, torch.contiguous_format)
    assert not any(outcome >= nhwc.Outcome.FRESH for outcome in nhwc.plan_weights(weights, torch.contiguous_format))


def test_a_contiguous_state_dict_copies_only_what_is_not_contiguous_and_keeps_aliases_and_metadata():
    model, _ = converted()
    state, plain = nhwc.contiguous_state_dict(model), model.state_dict()
    assert list(state) == list(plain)
    assert state._metadata == plain._metadata
    for name, tensor in plain.items():
        assert state[name].is_contiguous(), name
        assert torch.equal(state[name], tensor), name
        assert (state[name].data_ptr() == tensor.data_ptr()) == tensor.is_contiguous(), name
    assert not plain["head.weight"].is_contiguous()  # whatever the layer
    assert state["tied.weight"].data_ptr() == state["block.weight"].data_ptr() != state["stem.weight"].data_ptr()


def test_nested_state_dicts_of_optimizers_become_contiguous_and_still_load():
    model, _ = converted()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, 2)
    plain = optimizer.state_dict()
    state = nhwc.contiguous_state_dict({"optimizer": plain, "model": model.state_dict(), "more": [(plain, 3), None]})
    assert state["optimizer"]["param_groups"] == plain["param_groups"]
    assert state["more"][0][1] == 3
    assert state["more"][1] is None
    for index, entry in plain["state"].items():
        for key, tensor in entry.items():
            ours = state["optimizer"]["state"][index][key]
            assert ours.is_contiguous(), (index, key)
            assert torch.equal(ours, tensor)
    assert any(not tensor.is_contiguous() for entry in plain["state"].values() for tensor in entry.values())
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("kind", ["dict", "mapping proxy", "meta", "sparse", "expanded", "parameters"])
def test_any_mapping_and_any_tensor_goes_into_a_contiguous_state_dict(kind):
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    state = {
        "dict": {"a": weight},
        "mapping proxy": types.MappingProxyType({"a": weight}),
        "meta": {"a": weight.to("meta"), "b": weight.to("meta")},
        "sparse": {"a": torch.eye(3).to_sparse()},
        "expanded": {"a": torch.randn(3, 1).expand(3, 4)},
        "parameters": {"a": nn.Parameter(weight)},
    }[kind]
    ours = nhwc.contiguous_state_dict(state)
    assert len({id(tensor) for tensor in ours.values()}) == len(state)
    for name, tensor in state.items():
        assert ours[name].layout != torch.strided or ours[name].is_contiguous()
        assert ours[name].shape == tensor.shape
        assert tensor.is_meta or torch.equal(ours[name].to_dense(), tensor.to_dense())


# Round trips.


def by_torch_save(model, path):
    torch.save(model.state_dict(), path / "model.pt")
    other = network(1)
    other.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    return other


def by_torch_save_assigned(model, path):
    torch.save(model.state_dict(), path / "model.pt")
    other = network(1)
    other.load_state_dict(torch.load(path / "model.pt", weights_only=True, mmap=True), assign=True)
    return other


def by_torch_save_whole(model, path):
    torch.save(model, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=False)


def by_safetensors_file(model, path):
    state = nhwc.contiguous_state_dict(model)
    del state["tied.weight"]
    safetensors.torch.save_file(state, path / "model.safetensors")
    loaded = safetensors.torch.load_file(path / "model.safetensors")
    other = network(1)
    other.load_state_dict({**loaded, "tied.weight": loaded["block.weight"]})
    return other


def by_safetensors_model(model, path):
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # its search for ties takes a view(-1)
        safetensors.torch.save_model(model, path / "model.safetensors")
    untied, other = copy.deepcopy(model), network(1)
    for each in untied, other:
        each.tied.weight = nn.Parameter(each.block.weight.detach().clone())
    safetensors.torch.save_model(untied, path / "model.safetensors")
    safetensors.torch.load_model(other, path / "model.safetensors")
    return other


def by_distributed_checkpoint(model, path):
    dcp.save({"model": nhwc.contiguous_state_dict(model)}, checkpoint_id=path / "checkpoint", no_dist=True)
    other = network(1)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path / "checkpoint", no_dist=True)
    other.load_state_dict(state["model"])
    return other


def by_distributed_checkpoint_as_it_is(model, path):
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "checkpoint", no_dist=True)
    other, _ = converted(1)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path / "checkpoint", no_dist=True)
    return other


def by_deepcopy(model, path):
    return copy.deepcopy(model)


def by_pickle(model, path):
    return pickle.loads(pickle.dumps(model))


# How a model gets through, and whether it is in format by that alone.
ROUND_TRIPS = {
    by_torch_save: False,
    by_torch_save_assigned: True,
    by_torch_save_whole: True,
    by_safetensors_file: False,
    by_safetensors_model: False,
    by_distributed_checkpoint: False,
    by_distributed_checkpoint_as_it_is: True,
    by_deepcopy: True,
    by_pickle: True,
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_converted_model_comes_back_and_is_in_format_or_can_be_brought_there(round_trip, tmp_path):
    model, plan = converted()
    model(torch.randn(2, 1, 6, 6))  # running statistics
    other = round_trip(model, tmp_path)
    assert_equal_values(other, model)
    assert (nhwc.check(other, plan) == []) == ROUND_TRIPS[round_trip]
    nhwc.restore_(other, plan)
    assert nhwc.check(other, plan) == []
    assert strides(other) == strides(model) == LAST
    assert_equal_values(other, model)
    x = torch.randn(2, 1, 6, 6)
    torch.testing.assert_close(other(x), model(x))
    again = [p.data_ptr() for p in other.parameters()]
    nhwc.restore_(other, plan)
    assert [p.data_ptr() for p in other.parameters()] == again


# Training on from a checkpoint.

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(2, 1, 6, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(model, optimizer):
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    return buffer


def resumed(buffer, make, is_converted):
    buffer.seek(0)
    state, optimizer_state = torch.load(buffer, weights_only=True)
    model = network(1)
    plan = nhwc.convert_(model).plan if is_converted else nhwc.plan(model, torch.contiguous_format)
    optimizer = make(model.parameters())
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    return model, plan, optimizer


@pytest.mark.parametrize("loads_converted", [False, True], ids=["into contiguous", "into converted"])
@pytest.mark.parametrize("saves_converted", [False, True], ids=["from contiguous", "from converted"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_h06_training_goes_on_from_a_checkpoint_in_the_other_layout(name, saves_converted, loads_converted):
    make = OPTIMIZERS[name]
    model = network()
    if saves_converted:
        nhwc.convert_(model)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    buffer = saved(model, optimizer)
    expected = train(model, optimizer, 10, seed=1)

    # What plain PyTorch does: state comes in the layout that it was saved in, and fused optimizers read it by place.
    plain, plan, plain_optimizer = resumed(buffer, make, loads_converted)
    apart = saves_converted != loads_converted
    assert bool(nhwc.check(plain, plan, optimizer=plain_optimizer)) == apart
    losses = train(plain, plain_optimizer, 10, seed=1)
    equal = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4)
    assert equal == (not apart or not name.startswith("fused"))

    ours, plan, our_optimizer = resumed(buffer, make, loads_converted)
    aligned = nhwc.align_(ours, our_optimizer)
    assert bool(aligned) == apart
    assert {row.label for row in aligned} <= {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
    assert nhwc.check(ours, plan, optimizer=our_optimizer) == []
    assert nhwc.align_(ours, our_optimizer) == []
    torch.testing.assert_close(train(ours, our_optimizer, 10, seed=1), expected, rtol=1e-4, atol=1e-6)


def test_align_names_what_it_has_laid_out_and_looks_at_every_parameter():
    model, _ = converted()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    optimizer.load_state_dict(nhwc.contiguous_state_dict(optimizer.state_dict()))
    rows = nhwc.align_(model, optimizer)
    assert {(row.site, row.label) for row in rows} == {
        (name, label)
        for name in ("block.weight", "depthwise.weight", "volume.weight", "head.weight")
        for label in ("exp_avg", "exp_avg_sq")
        if name != "depthwise.weight"  # one channel: every element is at its place in both layouts
    }
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert all(a == b for n, a, b in zip(parameter.shape, state["exp_avg"].stride(), parameter.stride()) if n > 1)


def test_align_repairs_gradients_of_another_layout():
    model, _ = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model.block.weight.grad = torch.randn(4, 4, 3, 3)
    expected = model.block.weight.detach() - 0.1 * model.block.weight.grad
    [row] = nhwc.align_(model, optimizer)
    assert (row.site, row.label) == ("block.weight", "grad")
    optimizer.step()
    torch.testing.assert_close(model.block.weight.detach(), expected)


def test_align_leaves_sparse_gradients_and_state_of_other_shapes():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "layer": nn.Conv2d(3, 4, 3)})
    nhwc.convert_(model)
    model["table"](torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert nhwc.align_(model, optimizer) == []
    factored = torch.optim.Adafactor(model["layer"].parameters())
    model["layer"](torch.randn(1, 3, 5, 5)).sum().backward()
    factored.step()
    assert nhwc.align_(model, factored) == []


def test_align_takes_several_optimizers():
    model, plan = converted()
    first = torch.optim.AdamW(model.block.parameters(), fused=True)
    second = torch.optim.SGD(model.volume.parameters(), momentum=0.9, fused=True)
    model(torch.randn(2, 1, 6, 6)).sum().backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.load_state_dict(nhwc.contiguous_state_dict(optimizer.state_dict()))
    assert nhwc.check(model, plan, optimizer=[first, second]) != []
    aligned = nhwc.align_(model, [first, second])
    assert [(row.site, row.label) for row in aligned] == [
        ("block.weight", "exp_avg"),
        ("block.weight", "exp_avg_sq"),
        ("volume.weight", "momentum_buffer"),
    ]
    assert nhwc.check(model, plan, optimizer=[first, second]) == []


def test_align_refuses_an_optimizer_of_another_model():
    model, _ = converted()
    with pytest.raises(ValueError, match="the SGD holds none of the model's parameters"):
        nhwc.align_(model, torch.optim.SGD(network().parameters()))


# Bringing the format back.


def load_assigned(model):
    model.load_state_dict(network(1).state_dict(), assign=True)


def vectorised(model):
    with torch.no_grad():
        vector = torch.cat([p.reshape(-1) for p in model.parameters()])
    vector_to_parameters(vector, model.parameters())


def to_contiguous(model):
    nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    nn.utils.convert_conv3d_weight_memory_format(model, torch.contiguous_format)


def to_double(model):
    to_contiguous(model)
    model.to(torch.float64)


def data_replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


LOSSES = [load_assigned, vectorised, to_contiguous, to_double, data_replaced]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda function: function.__name__)
def test_h25_what_takes_the_format_away_is_listed_and_undone(lose):
    model, plan = converted()
    lose(model)
    values = copy.deepcopy(model.state_dict())
    found = nhwc.check(model, plan)
    assert [deviation.site for deviation in found] == [f"{name}.weight" for name in SITES]
    assert {deviation.what for deviation in found} == {"weight"}
    assert "'block.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said(found)
    with pytest.raises(AssertionError):
        assert not nhwc.check(model, plan)
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []
    assert strides(model) == LAST
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name])
        assert tensor.dtype == values[name].dtype


@pytest.mark.parametrize("lose", [vectorised, to_contiguous, data_replaced], ids=lambda function: function.__name__)
def test_h25_gradients_and_optimizer_state_are_checked_and_follow(lose):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, 2)
    averaged.update_parameters(model)
    unconverted = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    plan = nhwc.convert_(model, optimizer=optimizer, ema=averaged).plan
    assert nhwc.check(model, plan, optimizer=optimizer, ema=averaged) == []
    lose(model)
    assert {each.what for each in nhwc.check(model, plan, optimizer=optimizer, ema=averaged)} == {"weight"}
    nhwc.restore_(model, plan, optimizer=optimizer, ema=averaged)
    assert nhwc.check(model, plan, optimizer=optimizer, ema=averaged) == []
    assert {row.site for row in nhwc.align_(model, optimizer)} <= {"head.weight"}  # no site of a plan

    reference, state = unconverted
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    reference_optimizer.load_state_dict(state)
    ours, theirs = (train(m, o, 5) for m, o in ((model, optimizer), (reference, reference_optimizer)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_check_names_every_companion_that_has_left_the_format():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    averaged = copy.deepcopy(model)
    plan = nhwc.convert_(model, optimizer=optimizer, ema=averaged).plan
    model.block.weight.grad = torch.randn(4, 4, 3, 3)
    state = optimizer.state[model.volume.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
    averaged.block.weight.data = averaged.block.weight.data.contiguous()
    found = nhwc.check(model, plan, optimizer=optimizer, ema=averaged)
    assert {(each.site, each.what) for each in found} == {
        ("block.weight", "grad"),
        ("tied.weight", "grad"),  # which is the same tensor
        ("volume.weight", "exp_avg_sq"),
        ("block.weight", "ema"),
        ("tied.weight", "ema"),
    }
    assert "grad of 'block.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said(found)
    assert "exp_avg_sq of 'volume.weight' has strides (18, 9, 9, 3, 1), expected (18, 1, 18, 6, 2)" in said(found)
    nhwc.restore_(model, plan, optimizer=optimizer, ema=averaged)
    assert nhwc.check(model, plan, optimizer=optimizer, ema=averaged) == []


def test_one_site_that_has_left_is_the_only_one_named():
    model, plan = converted()
    model.volume.weight.data = model.volume.weight.data.contiguous()
    assert said(nhwc.check(model, plan)) == [
        "'volume.weight' has strides (18, 9, 9, 3, 1), expected (18, 1, 18, 6, 2)",
    ]


def test_canonical_strides_are_asked_for_even_where_a_format_is_ambiguous():
    model, plan = converted()
    model.pointwise.weight.data = model.pointwise.weight.data.as_strided((4, 6, 1, 1), (6, 1, 1, 1))
    assert model.pointwise.weight.is_contiguous(memory_format=torch.channels_last)
    assert said(nhwc.check(model, plan)) == ["'pointwise.weight' has strides (6, 1, 1, 1), expected (6, 1, 6, 6)"]


@pytest.mark.parametrize("memory_format", [None, torch.channels_last, torch.channels_last_3d, torch.contiguous_format])
def test_check_asks_for_what_the_plan_says_and_for_nothing_else(memory_format):
    model = network()
    plan = nhwc.plan(model, memory_format, filter_fn=lambda module, path: path != "stem")
    nhwc.convert_(model, plan=plan)
    assert nhwc.check(model, plan) == []
    other = network(1)
    named = {each.site for each in nhwc.check(other, plan)}
    wanted = {
        name for name in SITES if name != "stem" and (name == "volume" or memory_format != torch.channels_last_3d)
    }
    wanted -= {"volume"} if memory_format == torch.channels_last else set()
    assert named == (set() if memory_format == torch.contiguous_format else {f"{name}.weight" for name in wanted})


def test_a_plan_of_a_fake_model_checks_and_restores_the_real_one():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        plan = nhwc.plan(Net())
    model = network()
    assert [deviation.site for deviation in nhwc.check(model, plan)] == [f"{name}.weight" for name in SITES]
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_check_looks_inside_of_what_was_wrapped_since():
    model, plan = converted()
    compiled = torch.compile(model, backend="eager")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert nhwc.check(compiled, plan) == nhwc.check(averaged, plan) == []
    assert nhwc.check(averaged, nhwc.plan(averaged)) == []  # a plan of the wrapper is one as well
    averaged.module.volume.weight.data = averaged.module.volume.weight.data.contiguous()
    assert said(nhwc.check(averaged, plan)) == said(nhwc.check(averaged.module, plan)) != []


def test_a_plan_that_was_written_to_a_file_checks_and_restores():
    model, plan = converted()
    plan = nhwc.Plan.from_json(plan.to_json())
    assert nhwc.check(model, plan) == []
    to_contiguous(model)
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


@pytest.mark.parametrize("call", [nhwc.check, nhwc.restore_], ids=lambda function: function.__name__)
def test_a_model_that_differs_from_the_plan_is_an_error_that_names_the_site(call):
    _, plan = converted()
    larger, missing, more = network(), network(), network()
    larger.block = nn.Conv2d(4, 8, 3)
    missing.stem = nn.Identity()
    more.extra = nn.Conv2d(3, 4, 3)
    for model, message in (
        (larger, r"'block.weight' is \(8, 4, 3, 3\) of torch.float32, the plan has \(4, 4, 3, 3\)"),
        (missing, "it has no 'stem.weight'"),
        (more, "the plan does not know 'extra.weight'"),
    ):
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ValueError, match=message):
            call(model, plan)
        assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize("call", [nhwc.check, nhwc.restore_], ids=lambda function: function.__name__)
def test_what_is_no_plan_is_an_error_that_says_what_to_pass(call):
    model = network()
    report = nhwc.convert_(model)
    with pytest.raises(TypeError, match=r"^expected a Plan, got Report: pass report.plan$"):
        call(model, report)
    with pytest.raises(TypeError, match=r"^expected a Plan, got str$"):
        call(model, report.plan.to_json())


def test_lazy_layers_are_checked_once_they_have_a_shape():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 3))
    plan = nhwc.convert_(model).plan
    assert nhwc.check(model, plan) == []
    model(torch.randn(1, 3, 8, 8))
    assert nhwc.check(model, plan) == []
    nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    assert said(nhwc.check(model, plan))[0] == "'0.weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)"
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_a_parametrized_layer_that_lost_its_last_step_is_named():
    def make():
        return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Conv2d(3, 4, 3)))

    model = make()
    plan = nhwc.convert_(model).plan
    assert plan.rows[0].reason is nhwc.Reason.COPIED_EACH_FORWARD
    assert nhwc.check(model, plan) == []
    other = make()
    other.load_state_dict(model.state_dict(), assign=True)  # every tensor is in format, the effective weight is not
    assert other[0].weight.stride() != (27, 1, 9, 3)
    assert any("has lost the step that copies it" in text for text in said(nhwc.check(other, plan)))
    nhwc.restore_(other, plan)
    assert nhwc.check(other, plan) == []
    assert other[0].weight.stride() == (27, 1, 9, 3)


def test_h07_parameters_to_vector_raises_in_plain_pytorch_and_a_restored_model_takes_a_vector_back():
    model, plan = converted()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        parameters_to_vector(model.parameters())
    vectorised(model)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1  # all are slices of one vector
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_every_pair_of_formats_loads_each_others_state_dict():
    for source, target in itertools.product([None, torch.contiguous_format, torch.channels_last], repeat=2):
        first, second = network(0), network(1)
        nhwc.convert_(first, source)
        plan = nhwc.convert_(second, target).plan
        second.load_state_dict(first.state_dict())
        assert_equal_values(second, first)
        assert nhwc.check(second, plan) == []
