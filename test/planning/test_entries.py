"""Entries: modules whose inputs a plan has brought into a format, with the hook that does it."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.entries import InputFormat, input_hook

LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


def model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def plan_with(model, *entries):
    return dataclasses.replace(nhwc.plan(model), entries=tuple(nhwc.EntryRow(*each) for each in entries))


def hooks(model):
    return [len(module._forward_pre_hooks) for module in model.modules()]


def seen(model, path):
    """The inputs of a module."""
    found = []
    model.get_submodule(path).register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
    return found


def test_a_module_is_given_its_inputs_in_the_format_of_its_entry():
    m, x = model(), torch.randn(2, 3, 8, 8)
    expected = m(x)
    nhwc.convert_(m, plan=plan_with(m, ("", "channels_last", False), ("1", "contiguous_format", False)))
    first, second = seen(m, "0"), seen(m, "1")
    assert torch.allclose(m(x), expected, atol=1e-5)
    assert first[0].is_contiguous(memory_format=LAST)
    assert second[0].is_contiguous()


def test_gradients_go_back_through_an_entry():
    m, x = model(), torch.randn(2, 3, 8, 8)
    m(x).square().sum().backward()
    expected = [each.grad for each in m.parameters()]
    m.zero_grad()
    nhwc.convert_(m, plan=plan_with(m, ("1", "contiguous_format", True), ("2", "channels_last", False)))
    m(x).square().sum().backward()
    for parameter, gradient in zip(m.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_plan_s_entries_take_the_place_of_others_and_go_with_revert_and_with_contiguous():
    m = model()
    nothing = hooks(m)
    plan = plan_with(m, ("0", "channels_last", False), ("2", "contiguous_format", False))
    report = nhwc.convert_(m, plan=plan)
    assert report.plan == plan
    assert "forward pre-hooks bring the inputs of 2 modules into a format: plan.entries" in report.remarks
    assert hooks(m) == [0, 1, 0, 1]
    assert nhwc.convert_(m, plan=plan).outcomes == (nhwc.Outcome.KEPT,) * 2
    assert hooks(m) == [0, 1, 0, 1]
    other = nhwc.convert_(m, plan=plan_with(m, ("1", "channels_last", False)))
    assert hooks(m) == [0, 0, 1, 0]
    other.revert()
    assert hooks(m) == [0, 1, 0, 1]
    nhwc.convert_(m)  # says nothing of entries
    assert hooks(m) == [0, 1, 0, 1]
    report.revert()
    assert hooks(m) == nothing
    nhwc.convert_(m, plan=plan)
    nhwc.convert_(m, torch.contiguous_format)
    assert hooks(m) == nothing


def test_entries_are_in_json_and_in_the_digest():
    m = model()
    plan = plan_with(m, ("1", "contiguous_format", True))
    assert nhwc.Plan.from_json(plan.to_json()) == plan != nhwc.plan(m)
    assert plan.digest != nhwc.plan(m).digest
    with pytest.raises(ValueError, match="the digest does not fit"):
        nhwc.Plan.from_json(plan.to_json().replace('"is_shared": true', '"is_shared": false'))
    old = nhwc.plan(m).to_json().replace('"entries": []', '"other": []')
    assert nhwc.Plan.from_json(old) == nhwc.plan(m)
    with pytest.raises(ValueError, match=r"expected what Plan.to_json writes"):
        nhwc.Plan.from_json(plan.to_json().replace("contiguous_format", "some_format"))


def test_a_module_that_is_not_there_raises_before_anything_changes():
    m = model()
    with pytest.raises(ValueError, match="the model differs from the plan: it has no module at '7'"):
        nhwc.convert_(m, plan=plan_with(m, ("1", "channels_last", False), ("7", "channels_last", False)))
    assert m[0].weight.is_contiguous()
    assert hooks(m) == [0, 0, 0, 0]


def test_loading_takes_no_entry_away_and_restoring_brings_weights_back():
    m = model()
    plan = nhwc.convert_(m, plan=plan_with(m, ("1", "contiguous_format", False))).plan
    m.load_state_dict(model().state_dict(), assign=True)
    assert nhwc.restore_(m, plan).plan == plan
    assert hooks(m) == [0, 0, 1, 0]
    assert not nhwc.check(m, plan)


def test_check_names_a_hook_that_was_lost_and_the_plan_brings_it_back():
    m = model()
    plan = plan_with(m, ("1", "contiguous_format", True), ("2", "channels_last", False))
    nhwc.convert_(m, plan=plan)
    assert nhwc.check(m, plan) == []
    m[1]._forward_pre_hooks.clear()
    (lost,) = nhwc.check(m, plan)
    assert (lost.site, lost.what) == ("1", "entry")
    text = "'1' no longer brings its inputs into contiguous_format: convert_(model, plan=plan) puts the hook back"
    assert str(lost) == text
    nhwc.convert_(m, plan=plan)
    assert nhwc.check(m, plan) == []

    m = model()
    plan = nhwc.convert_(m, input_format="channels_last").plan
    assert nhwc.check(m, plan) == []
    m._forward_pre_hooks.clear()
    assert [str(each)[:40] for each in nhwc.check(m, plan)] == ["the model no longer brings its inputs in"]
    volumes = nhwc.convert_(model(), input_format="channels_last_3d").plan
    assert nhwc.check(nhwc.convert_(model(), plan=volumes).model, volumes) == []  # which had nothing to bring


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_model_with_entries_is_scripted():
    m, x = model(), torch.randn(2, 3, 8, 8)
    nhwc.convert_(m, plan=plan_with(m, ("1", "contiguous_format", True), ("2", "channels_last", False)))
    scripted = torch.jit.script(m)
    torch.testing.assert_close(scripted(x), m(x))


def test_a_scripted_module_takes_no_entry():
    m = nn.Sequential(nn.Conv2d(3, 8, 3), torch.jit.script(nn.ReLU()))
    with pytest.raises(RuntimeError, match="a TorchScript module takes no hook"):
        nhwc.convert_(m, plan=plan_with(m, ("1", "contiguous_format", False)))
    assert m[0].weight.is_contiguous()


def test_the_hook_is_plain_data():
    m, x = model(), torch.randn(2, 3, 8, 8)
    nhwc.convert_(m, plan=plan_with(m, ("1", "contiguous_format", True)))
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x), m(x))
        assert input_hook(other[1]) == InputFormat(memory_format="contiguous_format", is_shared=True)


def test_what_is_no_activation_stays_the_object_that_it_is():
    hook = InputFormat()
    values = (
        torch.ones(2, 3),
        torch.ones(1, 2, 3, 4, dtype=torch.long),
        torch.ones(1, 1, 1, 1).expand(2, 3, 4, 4),
        "x",
    )
    assert hook.bring(values) is values
    named = {"mask": values[0]}
    assert hook.bring(named) is named


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 1, 1), (1, 3, 1, 1, 1), (1, 3, 1, 4, 5)])
def test_strides_are_canonical_also_where_a_size_is_one(shape):
    last = LAST if len(shape) == 4 else torch.channels_last_3d
    for start in (CONTIGUOUS, last):
        x = torch.empty(shape, memory_format=start)
        for name, expected in (("channels_last", last), ("contiguous_format", CONTIGUOUS)):
            given = InputFormat(memory_format=name).bring(x)
            assert given.stride() == torch.empty(shape, memory_format=expected).stride()


def test_one_channel_stays_as_it_is_where_pytorch_may_compute_wrong_in_channels_last():
    x = torch.randn(2, 1, 4, 4)
    assert InputFormat(is_shared=True).bring(x) is x
    assert InputFormat(memory_format="contiguous_format").bring(x.to(memory_format=LAST)).stride() == x.stride()


class TwoUsers(nn.Module):
    def __init__(self, between=lambda x: None):
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.between = between

    def forward(self, x):
        x = self.first(x)
        left = self.left(x)
        self.between(x)
        return left + self.right(x)


ENTRIES = [("left", "channels_last", True), ("right", "channels_last", True)]


def contiguous_with(m, entries):
    return dataclasses.replace(nhwc.plan(m, CONTIGUOUS), entries=plan_with(m, *entries).entries)


@pytest.mark.parametrize("grad", [True, False])
def test_two_modules_share_a_copy(grad):
    m, x = TwoUsers(), torch.randn(2, 3, 4, 4)
    with torch.set_grad_enabled(grad):
        expected = m(x)
        nhwc.convert_(m, plan=contiguous_with(m, ENTRIES))
        left, right = seen(m, "left"), seen(m, "right")
        assert torch.allclose(m(x), expected, atol=1e-6)
    assert left[0] is right[0]
    assert left[0].is_contiguous(memory_format=LAST)
    with torch.inference_mode():
        assert torch.allclose(m(x), expected, atol=1e-6)
    assert left[1] is not right[1]  # which has no version to see writes by


def test_what_was_written_to_in_between_is_copied_again():
    m, x = TwoUsers(between=lambda x: x.mul_(2)), torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        expected = m(x)
        nhwc.convert_(m, plan=contiguous_with(m, ENTRIES))
        assert torch.allclose(m(x), expected, atol=1e-6)


def test_a_copy_without_gradients_is_not_given_to_one_with():
    m, x = TwoUsers(), torch.randn(2, 4, 4, 4, requires_grad=True)
    nhwc.convert_(m, plan=contiguous_with(m, ENTRIES))
    with torch.no_grad():
        m.left(x)
    m.right(x).sum().backward()
    assert x.grad is not None


def test_transforms_of_functions_go_through_an_entry():
    m, x = TwoUsers(), torch.randn(2, 5, 3, 4, 4)
    expected = torch.vmap(m)(x)
    nhwc.convert_(m, plan=contiguous_with(m, [*ENTRIES, ("first", "contiguous_format", False)]))
    assert torch.allclose(torch.vmap(m)(x), expected, atol=1e-6)


@pytest.mark.exhaustive
def test_a_compiled_model_has_its_entries():
    m, x = TwoUsers(), torch.randn(2, 3, 4, 4)
    expected = m(x)
    nhwc.convert_(m, plan=contiguous_with(m, ENTRIES))
    assert torch.allclose(torch.compile(m, backend="aot_eager")(x), expected, atol=1e-6)
