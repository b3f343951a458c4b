"""Whatever takes the format away, one call brings it back."""

import copy

import pytest
import torch
from tied_network import LAST, SITES, Net, converted, network, said, strides, train
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torch_nhwc as nhwc
from torch_nhwc import Reason


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


def test_a_plan_of_a_fake_model_checks_and_restores_the_real_one():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        plan = nhwc.plan(Net())
    model = network()
    assert [deviation.site for deviation in nhwc.check(model, plan)] == [f"{name}.weight" for name in SITES]
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_a_plan_that_was_written_to_a_file_checks_and_restores():
    model, plan = converted()
    plan = nhwc.Plan.from_json(plan.to_json())
    assert nhwc.check(model, plan) == []
    to_contiguous(model)
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_h07_parameters_to_vector_raises_in_plain_pytorch_and_a_restored_model_takes_a_vector_back():
    model, plan = converted()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        parameters_to_vector(model.parameters())
    vectorised(model)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1  # all are slices of one vector
    nhwc.restore_(model, plan)
    assert nhwc.check(model, plan) == []


def test_what_was_refused_for_an_optimizer_stays_refused_when_the_plan_is_applied_again():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.warns(UserWarning, match="takes a view"):
        report = nhwc.convert_(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.warns(UserWarning, match="takes a view"):
        again = nhwc.restore_(model, report.plan)
    assert again.plan.rows[0].reason is Reason.FLATTENING_OPTIMIZER
    assert model[0].weight.stride() == (27, 9, 3, 1)


def test_h42_a_plan_that_has_channels_last_for_one_channel_is_read_as_contiguous():
    """As an older version wrote it."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3))
    plan = nhwc.plan(model)
    row = plan.rows[0]._replace(target_strides=(9, 1, 3, 1), action=nhwc.Action.RESTRIDE, reason=None)
    old = nhwc.Plan.from_json(nhwc.Plan((row, plan.rows[1]), plan.memory_format).to_json())
    converted = nhwc.convert_state_dict(model.state_dict(), old)
    assert [converted[f"{index}.weight"].stride() for index in (0, 1)] == [(9, 9, 3, 1), (72, 1, 24, 8)]
    nhwc.convert_(model, plan=old)
    assert not nhwc.check(model, old)
    nhwc.restore_(model, old)
    assert not nhwc.check(model, old)
    assert model[0].weight.stride() == (9, 9, 3, 1)
