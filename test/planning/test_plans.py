"""Plans: what they hold, how they are written down, what they apply to, and that `convert_` does what they say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from snapshots import assert_unchanged, in_format, network, snapshot
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Plan, Reason
from torch_nhwc.planning import Action

CL = torch.channels_last


class TestPlan:
    """A plan is a frozen value that writes nothing."""

    def test_has_a_row_for_every_site_and_changes_nothing(self):
        model = network()
        before = snapshot(model)
        plan = nhwc.plan(model)
        assert_unchanged(model, before)
        assert plan.memory_format is None
        first, pointwise, transposed, volume = plan.rows
        assert first == nhwc.planning.PlanRow(
            path="first",
            name="weight",
            layer="Conv2d",
            rank=4,
            shape=(4, 3, 3, 3),
            groups=1,
            dtype="torch.float32",
            device="cpu",
            strides=(27, 9, 3, 1),
            target_strides=(27, 1, 9, 3),
            bytes_to_move=4 * 27 * 4,
            action=Action.CONVERT,
            reason=None,
        )
        assert (pointwise.full_name, pointwise.action, pointwise.bytes_to_move) == (
            "blocks.0.weight",
            Action.RESTRIDE,
            0,
        )
        assert (transposed.layer, transposed.groups, transposed.shape) == ("ConvTranspose2d", 2, (8, 2, 3, 3))
        assert (volume.rank, volume.target_strides) == (5, (18, 1, 18, 6, 2))
        assert plan.bytes_to_move == sum(row.bytes_to_move for row in plan.rows)
        assert {row.outcome for row in plan.rows} == {None}
        with pytest.raises(AttributeError):
            plan.memory_format = "channels_last"

    @pytest.mark.filterwarnings("ignore:torch_nhwc. nothing to convert")  # the filter leaves the only volume out
    @pytest.mark.parametrize("memory_format", [None, CL, "channels_last_3d", "torch.contiguous_format"])
    def test_survives_json(self, memory_format):
        model = network()
        model["lazy"] = nn.LazyConv2d(3, 3)
        model["computed"] = parametrizations.weight_norm(nn.Conv2d(3, 3, 3))
        plan = nhwc.plan(model, memory_format, filter_fn=lambda module, path: path != "volume")
        read = Plan.from_json(plan.to_json())
        assert read == plan
        assert read.digest == plan.digest
        assert str(read) == str(plan)

    def test_of_text_that_was_changed_raises(self):
        text = nhwc.plan(network()).to_json()
        with pytest.raises(ValueError, match="the text was changed"):
            Plan.from_json(text.replace('"path": "first"', '"path": "second"'))

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                '"input_format": "channels_last"',
                '"input_format": "nonsense"',
                "expected input_format to be 'channels_last'",
            ),
            ('"storage": "auto"', '"storage": "somewhere"', "expected one of 'auto', 'fresh'"),
            ('"memory_format": null', '"memory_format": "nhwc"', "expected memory_format to be None or one of"),
            ('"action": "CONVERT"', '"action": "BURN"', "'BURN'"),
            ('"rank": 4', '"rank": "4"', "expected int, got '4'"),
        ],
    )
    def test_of_text_with_a_value_that_is_not_valid_raises(self, old, new, message):
        text = nhwc.plan(network(), input_format="channels_last").to_json()
        assert old in text
        with pytest.raises(ValueError, match=rf"expected what Plan\.to_json writes: {message}"):
            Plan.from_json(text.replace(old, new))

    @pytest.mark.parametrize(
        "options", [{"input_format": "channels_last"}, {"each_forward": True}, {"preserve": False}]
    )
    def test_differs_from_one_with_other_options_also_in_its_digest(self, options):
        def model():
            return nn.Sequential(network(), nn.GELU())

        plan, other = nhwc.plan(model()), nhwc.plan(model(), **options)
        assert plan != other
        assert plan.digest != other.digest
        assert other == nhwc.plan(model(), **options)
        assert hash(other) == hash(nhwc.plan(model(), **options))

    def test_digest_is_that_of_the_architecture_and_not_of_the_layout(self):
        model, other = network(), network()
        nhwc.convert_(other["blocks"])
        digest = nhwc.plan(model).digest
        assert nhwc.plan(other).digest == digest
        nhwc.convert_(other)
        assert nhwc.plan(other).digest == digest
        with torch.device("meta"):
            assert nhwc.plan(network()).digest == digest

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: nhwc.plan(model.double()),
            lambda model: nhwc.plan(model, "contiguous_format"),
            lambda model: nhwc.plan(model, CL),
            lambda model: nhwc.plan(model, filter_fn=lambda module, path: path != "first"),
            lambda model: model.update({"first": nn.Conv2d(3, 4, (3, 1))}) or nhwc.plan(model),
            lambda model: nhwc.plan(nn.Sequential(model)),
        ],
        ids=["dtype", "format", "rank", "filter", "shape", "path"],
    )
    def test_digest_changes_with_shapes_dtypes_targets_and_names(self, change):
        assert change(network()).digest != nhwc.plan(network()).digest

    @pytest.mark.parametrize("how", ["the same", "converted", "half converted", "odd strides", "meta"])
    def test_applies_to_another_instance(self, how):
        plan = Plan.from_json(nhwc.plan(network()).to_json())
        model = network()
        if how == "converted":
            nhwc.convert_(model)
        elif how == "half converted":
            nhwc.convert_(model["blocks"])
        elif how == "odd strides":
            model["first"].weight.data = torch.randn(3, 4, 3, 3).transpose(0, 1)
        elif how == "meta":
            model = model.to("meta")
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        report = nhwc.convert_(model, plan=plan)
        assert all(in_format(model).values())
        assert how == "meta" or all(torch.equal(p, values[name]) for name, p in model.named_parameters())
        assert report.plan.digest == plan.digest
        if how == "converted":
            assert set(report.outcomes) == {Outcome.UNCHANGED}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda model: model.pop("volume"), r"it has no 'volume.weight' \(Conv3d\)"),
            (
                lambda model: model.update({"more": nn.Conv2d(3, 3, 3)}),
                r"the plan does not know 'more.weight' \(Conv2d\)",
            ),
            (
                lambda model: model.update({"first": nn.Conv2d(3, 5, 3), "volume": nn.Conv3d(3, 3, 3)}),
                r"'first.weight' is \(5, 3, 3, 3\) of torch.float32, the plan has \(4, 3, 3, 3\) of torch.float32",
            ),
            (lambda model: model.double(), r"'first.weight' is \(4, 3, 3, 3\) of torch.float64"),
        ],
        ids=["missing", "more", "shape", "dtype"],
    )
    def test_of_another_architecture_raises_naming_the_first_site_that_differs(self, change, message):
        plan, model = nhwc.plan(network()), network()
        change(model)
        before = snapshot(model)
        with pytest.raises(ValueError, match=f"the model differs from the plan: {message}"):
            nhwc.convert_(model, plan=plan)
        assert_unchanged(model, before)

    @pytest.mark.parametrize("kind", [str, Path], ids=["str", "Path"])
    @pytest.mark.parametrize("holder", ["plan", "tuning"])
    def test_applies_by_the_path_of_its_file(self, kind, holder, tmp_path):
        model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), torch.randn(1, 3, 8, 8)
        plan = nhwc.plan(model, input_format="channels_last")
        tuning = nhwc.tune(model, x, budget_seconds=0.01)
        file = tmp_path / "kept.json"
        file.write_text((plan if holder == "plan" else replace(tuning, plan=plan)).to_json())
        path = kind(file)
        report = nhwc.convert_(model, plan=path)
        assert report.plan == plan
        assert nhwc.check(model, path) == []
        assert nhwc.checkpoint.convert_state_dict(model.state_dict(), path)["0.weight"].stride() == (27, 1, 9, 3)
        nhwc.training.restore_(model, path)

    def test_of_a_tuning_under_other_conditions_is_a_warning(self, tmp_path):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        tuning = nhwc.tune(model, torch.randn(1, 3, 8, 8), budget_seconds=0.01)
        file = tmp_path / "tuning.json"
        file.write_text(replace(tuning, machine=tuning.machine | {"device": "another"}).to_json())
        with pytest.warns(UserWarning, match="this was tuned under other conditions, tune again: device: another"):
            nhwc.convert_(model, plan=file)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (None, "No such file or directory"),
            ("import torch", "Expecting value"),
            ("3", "int"),
            ('{"choice": "full"}', "'plan'"),
            ('{"rows": []}', "'digest'"),
        ],
    )
    def test_by_a_path_of_another_file_raises(self, text, why, tmp_path):
        file = tmp_path / "other.json"
        if text is not None:
            file.write_text(text)
        message = f"^plan: expected a file that Plan.to_json or Tuning.to_json wrote, got '{file}': .*{why}"
        with pytest.raises(ValueError, match=message):
            nhwc.convert_(network(), plan=str(file))

    def test_with_arguments_that_it_has_itself_raises(self):
        plan = nhwc.plan(network())
        own = {"memory_format": CL, "filter_fn": lambda *_: True, "example_inputs": torch.zeros(1), "preserve": False}
        for options in ({name: value} for name, value in own.items()):
            with pytest.raises(ValueError, match="a plan has its own memory format, filter and example inputs"):
                nhwc.convert_(network(), plan=plan, **options)


def trained(make_optimizer):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    optimizer = make_optimizer(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


def coded(model, optimizer):
    """State in codes of a byte, which no layout can be given."""
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(4, 3, 3, 3, dtype=torch.int8)


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("storage", ["auto", "fresh", "reuse", "detach"])
@pytest.mark.parametrize("scene", ["plain", "flattening", "coded", "held gradient"])
def test_the_rows_are_those_of_the_conversion(scene, storage):
    model, optimizer = trained(torch.optim.LBFGS if scene == "flattening" else torch.optim.Adam)
    if scene == "coded":
        coded(model, optimizer)
    held = model[0].weight.grad.detach() if scene == "held gradient" else None
    plan = nhwc.plan(model, optimizer=optimizer, storage=storage)
    refused = {"flattening": Reason.FLATTENING_OPTIMIZER, "coded": Reason.STATE_IN_THE_WAY}.get(scene)
    assert refused is None or plan.rows[0].reason is refused
    report = nhwc.convert_(model, optimizer=optimizer, storage=storage)
    assert report.plan == plan
    report.revert()
    report = nhwc.convert_(model, plan=plan, optimizer=optimizer)
    assert (report.plan, report.plan.digest, report.plan.storage) == (plan, plan.digest, storage)
    del held


def test_storage_and_the_format_of_the_inputs_are_the_plans_unless_the_call_says_otherwise():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    plan = nhwc.plan(model, storage="fresh", input_format="channels_last")
    read = Plan.from_json(plan.to_json())
    assert (read.storage, read.input_format) == ("fresh", "channels_last")
    report = nhwc.convert_(model, plan=read)
    assert report.outcomes == (Outcome.COPIED,)
    assert len(model._forward_pre_hooks) == 1
    other = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert nhwc.convert_(other, plan=read, storage="auto").outcomes == (Outcome.IN_PLACE,)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("verb", [nhwc.plan, nhwc.convert_])
def test_a_torchscript_module_takes_no_hook_for_its_inputs(verb):
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(RuntimeError, match="takes no hook that converts its inputs to channels-last"):
        verb(scripted, input_format="channels_last")
    assert scripted.state_dict()["0.weight"].is_contiguous()
