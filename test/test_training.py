"""What has lost its format since a conversion is listed, and one call restores it."""

import copy
import io

import pytest
import torch
from guarding import load_contiguous, unguarded
from tied_network import LAST, SITES, Net, converted, network, said, strides, train
from torch import nn
from torch.nn.utils import vector_to_parameters

import torch_nhwc as nhwc
from torch_nhwc import Reason, check
from torch_nhwc.training import align_optimizer_, restore_

# check


def test_check_lists_every_companion_that_has_lost_the_format():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    averaged = copy.deepcopy(model)
    plan = nhwc.convert_(model, optimizer=optimizer, ema=averaged).plan
    model.block.weight.grad = torch.randn(4, 4, 3, 3)
    state = optimizer.state[model.volume.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
    averaged.block.weight.data = averaged.block.weight.data.contiguous()
    found = check(model, plan, optimizer=optimizer, ema=averaged)
    assert {(each.site, each.what) for each in found} == {
        ("block.weight", "grad"),
        ("tied.weight", "grad"),  # the same tensor
        ("volume.weight", "exp_avg_sq"),
        ("block.weight", "ema"),
        ("tied.weight", "ema"),
    }
    assert "grad of 'block.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said(found)
    assert "exp_avg_sq of 'volume.weight' has strides (18, 9, 9, 3, 1), expected (18, 1, 18, 6, 2)" in said(found)
    restore_(model, plan, optimizer=optimizer, ema=averaged)
    assert check(model, plan, optimizer=optimizer, ema=averaged) == []


def test_check_expects_canonical_strides_even_where_a_format_is_ambiguous():
    model, plan = converted()
    model.pointwise.weight.data = model.pointwise.weight.data.as_strided((4, 6, 1, 1), (6, 1, 1, 1))
    assert model.pointwise.weight.is_contiguous(memory_format=torch.channels_last)
    assert said(check(model, plan)) == ["'pointwise.weight' has strides (6, 1, 1, 1), expected (6, 1, 6, 6)"]


@pytest.mark.parametrize(
    ("memory_format", "named"),
    [
        (None, {"depthwise", "pointwise", "block", "tied", "volume"}),
        (torch.channels_last, {"depthwise", "pointwise", "block", "tied"}),
        (torch.channels_last_3d, {"volume"}),
        (torch.contiguous_format, set()),
    ],
)
def test_check_expects_what_the_plan_says_and_nothing_else(memory_format, named):
    model = network()
    plan = nhwc.plan(model, memory_format, filter_fn=lambda module, path: path != "stem", preserve=False)
    nhwc.convert_(model, plan=plan)
    assert check(model, plan) == []
    assert {each.site for each in check(network(1), plan)} == {f"{name}.weight" for name in named}


def test_check_looks_inside_of_wrappers():
    model, plan = converted()
    compiled = torch.compile(model, backend="eager")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert check(compiled, plan) == check(averaged, plan) == []
    assert check(averaged, nhwc.plan(averaged)) == []  # a plan of the wrapper is one as well
    averaged.module.volume.weight.data = averaged.module.volume.weight.data.contiguous()
    assert said(check(averaged, plan)) == said(check(averaged.module, plan)) != []


@pytest.mark.parametrize("call", [check, restore_], ids=lambda function: function.__name__)
def test_a_model_that_differs_from_the_plan_is_an_error_that_names_the_site(call):
    _, plan = converted()
    model = network()
    model.stem = nn.Identity()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"it has no 'stem\.weight'"):
        call(model, plan)
    assert [p.data_ptr() for p in model.parameters()] == before
    report = nhwc.convert_(network())
    with pytest.raises(TypeError, match=r"^expected a Plan, got Report: pass report.plan$"):
        call(network(), report)


# restore_


def load_assigned(model):
    model.load_state_dict(network(1).state_dict(), assign=True)


def vectorised(model):
    with torch.no_grad():
        vector = torch.cat([p.reshape(-1) for p in model.parameters()])
    vector_to_parameters(vector, model.parameters())


def to_contiguous(model):
    model.to(memory_format=torch.contiguous_format)


def to_double(model):
    to_contiguous(model)
    model.to(torch.float64)


@pytest.mark.parametrize(
    "lose", [load_assigned, vectorised, to_contiguous, to_double], ids=lambda function: function.__name__
)
def test_h25_what_loses_the_format_is_listed_and_restored(lose):
    model, plan = converted()
    plan = nhwc.Plan.from_json(plan.to_json())
    lose(model)
    values = copy.deepcopy(model.state_dict())
    found = check(model, plan)
    assert [deviation.site for deviation in found] == [f"{name}.weight" for name in SITES]
    assert {deviation.what for deviation in found} == {"weight"}
    assert "'block.weight' has strides (36, 9, 3, 1), expected (36, 1, 12, 4)" in said(found)
    restore_(model, plan)
    assert check(model, plan) == []
    assert strides(model) == LAST
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name])
        assert tensor.dtype == values[name].dtype


def test_a_lost_hook_for_the_inputs_is_listed_and_restored():
    model, other = (nn.Sequential(nn.Conv2d(3, 4, 3)) for _ in range(2))
    plan = nhwc.convert_(model, input_format="channels_last", preserve=False).plan
    other.load_state_dict(model.state_dict(), assign=True)
    assert said(check(other, plan)) == [
        "the model has lost its hook that converts inputs to channels_last: restore_ registers it again"
    ]
    report = restore_(other, plan)
    assert check(other, plan) == []
    before = list(other._forward_pre_hooks)
    assert len(before) == 1
    restore_(other, plan)
    assert list(other._forward_pre_hooks) == before
    report.revert()
    assert not other._forward_pre_hooks


def test_a_parametrized_layer_that_lost_its_last_step_is_listed_and_restored():
    def make():
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))

    model, other = make(), make()
    plan = nhwc.convert_(model).plan
    assert plan.rows[0].reason is Reason.COPIED_EACH_FORWARD
    assert check(model, plan) == []
    other.load_state_dict(model.state_dict(), assign=True)  # every tensor is in format, the computed weight is not
    assert other[0].weight.stride() != (27, 1, 9, 3)
    assert any("has lost the step that copies it" in text for text in said(check(other, plan)))
    restore_(other, plan)
    assert check(other, plan) == []
    assert other[0].weight.stride() == (27, 1, 9, 3)


def test_a_plan_of_a_fake_or_lazy_model_checks_and_restores_the_real_one():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        plan = nhwc.plan(Net(), preserve=False)
    model = network()
    assert [deviation.site for deviation in check(model, plan)] == [f"{name}.weight" for name in SITES]
    restore_(model, plan)
    assert check(model, plan) == []

    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 3))
    plan = nhwc.convert_(model).plan
    assert check(model, plan) == []
    model(torch.randn(1, 3, 8, 8))
    assert check(model, plan) == []
    to_contiguous(model)
    assert said(check(model, plan))[0] == "'0.weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)"
    restore_(model, plan)
    assert check(model, plan) == []


# align_optimizer_

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


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
    make, buffer = OPTIMIZERS[name], io.BytesIO()
    model = network()
    if saves_converted:
        nhwc.convert_(model)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    expected = train(model, optimizer, 10, seed=1)

    # What plain PyTorch does: state keeps the layout of the checkpoint, and fused optimizers read it in memory order.
    plain, plan, plain_optimizer = resumed(buffer, make, loads_converted)
    apart = saves_converted != loads_converted
    assert bool(check(plain, plan, optimizer=plain_optimizer)) == apart
    with unguarded():
        losses = train(plain, plain_optimizer, 10, seed=1)
    equal = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4)
    assert equal == (not apart or not name.startswith("fused"))

    ours, plan, our_optimizer = resumed(buffer, make, loads_converted)
    aligned = align_optimizer_(ours, our_optimizer)
    assert bool(aligned) == apart
    assert {row.label for row in aligned} <= {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
    assert check(ours, plan, optimizer=our_optimizer) == []
    assert align_optimizer_(ours, our_optimizer) == []
    torch.testing.assert_close(train(ours, our_optimizer, 10, seed=1), expected, rtol=1e-4, atol=1e-6)


def test_align_names_what_it_has_changed_in_several_optimizers_and_takes_every_parameter():
    model, _ = converted()
    by_name = dict(model.named_parameters())
    first = torch.optim.Adam([each for name, each in by_name.items() if "volume" not in name])
    second = torch.optim.SGD(model.volume.parameters(), momentum=0.9, fused=True)
    train(model, first, 1)
    second.step()
    for optimizer in (first, second):
        load_contiguous(model, optimizer)
    assert {(row.site, row.label) for row in align_optimizer_(model, [first, second])} == {
        ("volume.weight", "momentum_buffer"),
        *(
            (f"{name}.weight", label)
            for name in ("stem", "block", "head")  # in depthwise and pointwise, both layouts are one
            for label in ("exp_avg", "exp_avg_sq")
        ),
    }
    for parameter in first.param_groups[0]["params"]:
        state = first.state[parameter]
        assert all(a == b for n, a, b in zip(parameter.shape, state["exp_avg"].stride(), parameter.stride()) if n > 1)


def test_align_leaves_sparse_gradients_and_state_of_other_shapes():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "layer": nn.Conv2d(3, 4, 3)})
    nhwc.convert_(model)
    model["table"](torch.tensor([1, 2])).sum().backward()
    assert align_optimizer_(model, torch.optim.SGD(model.parameters(), lr=0.1)) == []
    factored = torch.optim.Adafactor(model["layer"].parameters())
    model["layer"](torch.randn(1, 3, 5, 5)).sum().backward()
    factored.step()
    assert align_optimizer_(model, factored) == []
