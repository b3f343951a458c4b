"""Reverting to the strides from before, by a report or at the end of a block."""

import copy
import gc

import pytest
import torch
from snapshots import assert_unchanged, in_format, network, snapshot, strides
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc.planning import Action

ODD = {
    "contiguous": lambda t: t.contiguous(),
    "permuted": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "padded": lambda t: torch.empty_strided(t.shape, (200, 50, 10, 2)).copy_(t),
    "channels_last": lambda t: t.contiguous(memory_format=CL),
    "ambiguous": lambda t: t.as_strided(t.shape, (27, 9, 3, 1)),
}

CL = torch.channels_last


class TestRevert:
    """Restores the strides, and never the values."""

    @pytest.mark.parametrize("of_gradient", ODD)
    @pytest.mark.parametrize("of_weight", ODD)
    def test_restores_odd_strides_exactly(self, of_weight, of_gradient):
        layer = nn.Conv2d(3, 4, 3)
        layer.weight.data = ODD[of_weight](layer.weight.detach())
        layer.weight.grad = torch.randn(4, 3, 3, 3)
        optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
        optimizer.step()
        state = optimizer.state[layer.weight]
        state["exp_avg"] = ODD[of_gradient](state["exp_avg"])
        layer.weight.grad = ODD[of_gradient](layer.weight.grad)
        tensors = [layer.weight, layer.weight.grad, state["exp_avg"], state["exp_avg_sq"]]
        before = [tensor.stride() for tensor in tensors]
        values = [tensor.detach().clone() for tensor in tensors]
        report = nhwc.convert_(layer, optimizer=optimizer)
        assert {tensor.stride() for tensor in tensors} == {(27, 1, 9, 3)}
        report.revert()
        assert [tensor.stride() for tensor in tensors] == before
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values))
        report.revert()
        assert [tensor.stride() for tensor in tensors] == before

    def test_keeps_the_values_that_training_has_made_since(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        model[0].weight.data = ODD["permuted"](model[0].weight.detach())
        before = strides(model)
        report = nhwc.convert_(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        trained = [p.detach().clone() for p in model.parameters()]
        report.revert()
        assert strides(model) == before
        assert model[0].weight.grad.stride() == before["0.weight"]
        assert all(torch.equal(p, values) for p, values in zip(model.parameters(), trained))

    @pytest.mark.parametrize("what", ["weights", "hooks"])
    def test_raises_if_the_model_no_longer_exists(self, what):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), *([nn.LazyConv2d(3, 3)] if what == "hooks" else []))
        model.append(parametrizations.weight_norm(nn.Conv2d(3, 3, 3)))
        averaged = copy.deepcopy(model)
        report = nhwc.convert_(model, ema=averaged, input_format="channels_last")
        del model, averaged
        gc.collect()
        with pytest.raises(RuntimeError, match="the model no longer exists"):
            report.revert()
        assert " weights to channels-last" in str(report)

    def test_that_cannot_be_changes_nothing(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        report = nhwc.convert_(model, input_format="channels_last")
        model[1].weight.grad = torch.randn(4, 4, 3, 3) * torch.ones(1, requires_grad=True)  # part of a graph
        before = snapshot(model)
        with pytest.raises(RuntimeError, match="set_strides_"):
            report.revert()
        assert_unchanged(model, before)
        assert len(model._forward_pre_hooks) == 1


class TestContextManager:
    """channels_last converts, and reverts on the way out."""

    def test_reverts_at_the_end(self):
        model = network()
        before = strides(model)
        with nhwc.channels_last(model, memory_format=CL, input_format="channels_last") as report:
            assert [row.action is Action.KEEP for row in report.plan.rows] == [False, False, False, True]
            assert in_format(model)["first.weight"]
            assert model._forward_pre_hooks
        assert strides(model) == before
        assert not model._forward_pre_hooks

    def test_reverts_after_an_exception(self):
        model = network()
        before = strides(model)
        with pytest.raises(RuntimeError, match="channels"), nhwc.channels_last(model):
            model["first"](torch.randn(1, 2, 8, 8))
        assert strides(model) == before


def test_a_layer_that_was_exchanged_since_is_named_with_what_undoes_the_others():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3))
    report = nhwc.convert_(model, input_format="channels_last")
    model[0] = nn.Conv2d(1, 4, 3)
    with pytest.raises(
        ValueError, match=r"'0\.weight' is \(4, 1, 3, 3\).*convert_\(model, torch\.contiguous_format\) undoes"
    ):
        report.revert()
    nhwc.convert_(model, torch.contiguous_format)
    assert model[2].weight.is_contiguous()
    assert type(model[1]) is nn.GroupNorm
    assert not model._forward_pre_hooks


def test_a_model_that_was_compiled_since_is_not_reverted():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    report = nhwc.convert_(model)
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"Report.revert: '0.weight': it is compiled"):
        report.revert()
    assert model[0].weight.stride() == (27, 1, 9, 3)
