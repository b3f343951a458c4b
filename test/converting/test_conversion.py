"""The interface: plans, reports, reverting, and what is said to whom."""

import copy
import gc
import json
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Action, Outcome, Plan, Reason

CL, CL3D = torch.channels_last, torch.channels_last_3d


def network():
    """2D and 3D, one layer whose bytes move and one whose do not, and tensors that are no weights."""
    return nn.ModuleDict(
        {
            "first": nn.Conv2d(3, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "blocks": nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 4, 3, groups=2)),
            "volume": nn.Conv3d(2, 3, (1, 3, 3)),
            "linear": nn.Linear(3, 3),
        }
    )


def strides(model):
    return {name: p.stride() for name, p in model.named_parameters() if p.dim() > 3}


def in_format(model):
    return {
        name: p.stride() == torch.empty(p.shape, memory_format=CL if p.dim() == 4 else CL3D, device="meta").stride()
        for name, p in model.named_parameters()
        if p.dim() > 3
    }


def snapshot(model):
    return [(name, id(t), t.data_ptr(), t.stride(), t.detach().clone()) for name, t in model.state_dict().items()]


def assert_unchanged(model, before):
    after = snapshot(model)
    assert [each[0:1] + each[2:4] for each in after] == [each[0:1] + each[2:4] for each in before]
    assert all(torch.equal(a[4], b[4]) for a, b in zip(after, before))


class TestPlan:
    """A plan is a frozen value that writes nothing."""

    def test_has_a_row_for_every_site_and_changes_nothing(self):
        model = network()
        before = snapshot(model)
        plan = nhwc.plan(model)
        assert_unchanged(model, before)
        assert plan.memory_format is None
        first, pointwise, transposed, volume = plan.rows
        assert first == nhwc.PlanRow(
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
        with pytest.raises(AttributeError):
            plan.memory_format = "channels_last"

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

    @pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"rows": [3], "memory_format": null, "digest": ""}'])
    def test_of_text_that_is_no_plan_raises(self, text):
        with pytest.raises(ValueError, match=r"expected what Plan\.to_json writes"):
            Plan.from_json(text)

    def test_of_text_that_was_changed_raises(self):
        text = nhwc.plan(network()).to_json()
        with pytest.raises(ValueError, match="the text was changed"):
            Plan.from_json(text.replace('"path": "first"', '"path": "second"'))

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
        report = plan.apply(model)
        assert all(in_format(model).values())
        assert how == "meta" or all(torch.equal(p, values[name]) for name, p in model.named_parameters())
        assert report.plan.digest == plan.digest
        if how == "converted":
            assert set(report.outcomes) == {Outcome.KEPT}

    def test_decides_what_changes_and_applying_looks_at_nothing_else(self):
        plan = nhwc.plan(network(), filter_fn=lambda module, path: path == "first")
        model = network()
        plan.apply(model)
        assert in_format(model) == {
            "first.weight": True,
            "blocks.0.weight": False,
            "blocks.1.weight": False,
            "volume.weight": False,
        }

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
            plan.apply(model)
        assert_unchanged(model, before)

    def test_with_arguments_that_it_has_itself_raises(self):
        plan = nhwc.plan(network())
        for options in ({"memory_format": CL}, {"filter_fn": lambda *_: True}, {"example_inputs": torch.zeros(1)}):
            with pytest.raises(ValueError, match="a plan has its own memory format, filter and example inputs"):
                nhwc.convert_(network(), plan=plan, **options)


class TestArguments:
    """What convert_ and plan take."""

    @pytest.mark.parametrize(
        ("memory_format", "ranks"),
        [
            (None, {4, 5}),
            (CL, {4}),
            ("channels_last", {4}),
            ("torch.channels_last", {4}),
            (CL3D, {5}),
            ("channels_last_3d", {5}),
        ],
        ids=str,
    )
    def test_a_memory_format_means_the_sites_of_its_rank(self, memory_format, ranks):
        model = network()
        report = nhwc.convert_(model, memory_format)
        for row in report.plan.rows:
            assert (row.reason is Reason.OTHER_RANK) == (row.rank not in ranks)
        for name, is_in_format in in_format(model).items():
            assert is_in_format == (model.get_parameter(name).dim() in ranks)

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, "contiguous_format"])
    def test_contiguous_format_is_the_way_back_for_both_ranks(self, memory_format):
        model = network()
        before = strides(model)
        nhwc.convert_(model)
        nhwc.convert_(model, memory_format)
        assert strides(model) == before

    @pytest.mark.parametrize("memory_format", [torch.preserve_format, "nhwc", 3, ""])
    def test_another_memory_format_raises(self, memory_format):
        for verb in (nhwc.plan, nhwc.convert_):
            with pytest.raises(ValueError, match="expected memory_format to be None or one of contiguous_format, ch"):
                verb(network(), memory_format)

    @pytest.mark.parametrize("model", [None, torch.zeros(3), [nn.Conv2d(3, 3, 3)]], ids=["None", "tensor", "list"])
    def test_what_is_no_module_raises(self, model):
        for verb in (nhwc.plan, nhwc.convert_, nhwc.plan(network()).apply):
            with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (NoneType|Tensor|list)"):
                verb(model)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"input_format": torch.contiguous_format},
                "expected input_format to be None or 'channels_last', got torch",
            ),
            ({"storage": "inplace"}, "expected storage to be one of auto, fresh, reuse, detach, got 'inplace'"),
            ({"memory_format": torch.optim.SGD([torch.zeros(1)])}, r"got SGD \(give optimizers and others by name\)"),
            ({"storage": "new"}, "storage"),
        ],
    )
    def test_other_arguments_raise_before_anything_changes(self, options, message):
        model = network()
        before = snapshot(model)
        with pytest.raises(ValueError, match=message):
            nhwc.convert_(model, **options)
        assert_unchanged(model, before)

    def test_a_filter_sees_every_layer_with_its_path(self):
        model = network()
        seen = {}
        report = nhwc.convert_(model, filter_fn=lambda module, path: seen.setdefault(path, module) is model["first"])
        assert seen == {path: model.get_submodule(path) for path in ("first", "blocks.0", "blocks.1", "volume")}
        assert [row.reason for row in report.plan.rows] == [None, *[Reason.FILTERED] * 3]
        assert sum(in_format(model).values()) == 1

    def test_a_filter_that_raises_changes_nothing(self):
        model = network()
        before = snapshot(model)
        with pytest.raises(ZeroDivisionError):
            nhwc.convert_(model, filter_fn=lambda module, path: path != "volume" or 1 // 0)
        assert_unchanged(model, before)

    def test_the_root_may_be_the_layer(self):
        layer = nn.Conv2d(3, 4, 3)
        report = nhwc.convert_(layer, filter_fn=lambda module, path: path == "")
        assert (report.plan.rows[0].path, report.plan.rows[0].full_name) == ("", "weight")
        assert layer.weight.stride() == (27, 1, 9, 3)

    def test_a_dry_run_reports_and_does_nothing(self):
        model = network()
        before = snapshot(model)
        report = nhwc.convert_(model, dry_run=True, input_format="channels_last")
        assert_unchanged(model, before)
        assert not model._forward_pre_hooks
        assert report.dry_run
        assert set(report.outcomes) == {None}
        assert report.plan == nhwc.plan(model)
        report.revert()
        assert_unchanged(model, before)

    @pytest.mark.parametrize("storage", ["auto", "fresh", "reuse", "detach"])
    def test_storage_is_that_of_the_operators(self, storage):
        model = network()
        pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
        report = nhwc.convert_(model, storage=storage)
        moved = {name for name, p in model.named_parameters() if p.data_ptr() != pointers[name]}
        assert moved == (set(in_format(model)) if storage == "fresh" else set())
        assert (report.new_bytes > 0) == (storage == "fresh")


class Recorder(nn.Module):
    """Keeps the strides of what comes in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)

    def forward(self, x, *, volume=None, rest=()):
        self.seen = [tuple(t.stride()) for t in (x, volume, *rest) if t is not None]
        return self.layer(x)


class TestInputFormat:
    """A forward pre-hook brings activations into channels-last at the model's entry."""

    def test_reaches_positional_keyword_and_nested_inputs(self):
        model = Recorder()
        nhwc.convert_(model, input_format="channels_last")
        x, volume = torch.randn(1, 3, 8, 8), torch.randn(1, 2, 4, 4, 4)
        expected = model.layer(x)
        actual = model(x, volume=volume, rest=[x, torch.randn(3, 3)])
        assert model.seen == [(192, 1, 24, 3), (128, 1, 32, 8, 2), (192, 1, 24, 3), (3, 1)]
        assert actual.is_contiguous(memory_format=CL)
        torch.testing.assert_close(actual, expected)

    def test_survives_deepcopy_and_pickle_and_is_added_once(self):
        model = Recorder()
        report = nhwc.convert_(model, input_format="channels_last")
        nhwc.convert_(model, input_format="channels_last")
        for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert len(copied._forward_pre_hooks) == 1
            nhwc.convert_(copied, input_format="channels_last")
            assert len(copied._forward_pre_hooks) == 1
            copied(torch.randn(1, 3, 8, 8))
            assert copied.seen == [(192, 1, 24, 3)]
        report.revert()
        assert not model._forward_pre_hooks
        assert not model._forward_pre_hooks_with_kwargs
        model(torch.randn(1, 3, 8, 8))
        assert model.seen == [(192, 64, 8, 1)]


def refused_view():
    """A layer whose weight is a slice of a buffer."""
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.data = torch.randn(216)[108:].view(4, 3, 3, 3)
    return layer


class TestRefusals:
    """A refused site does not stop the others, and is told about once."""

    @pytest.mark.parametrize("verb", ["convert_", "apply", "channels_last"])
    def test_warn_once_at_the_callers_line(self, verb):
        model = nn.Sequential(nn.Conv2d(3, 3, 3), refused_view(), refused_view())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if verb == "convert_":
                nhwc.convert_(model)
            elif verb == "apply":
                nhwc.plan(model).apply(model)
            else:
                with nhwc.channels_last(model):
                    pass
        assert [str(each.filename) for each in caught] == [__file__]
        text = str(caught[0].message)
        assert text.startswith(
            "torch_nhwc: 2 of 3 sites stay as they are: '1.weight' (Conv2d), '2.weight' (Conv2d): it"
        )

    def test_name_three_sites_and_count_the_others(self):
        model = nn.Sequential(*(refused_view() for _ in range(5)))
        with pytest.warns(
            UserWarning, match=r"5 of 5 sites .*'0.weight'.*'1.weight'.*'2.weight' \(Conv2d\) and 2 more: it is"
        ):
            nhwc.convert_(model)

    @pytest.mark.parametrize("verb", ["convert_", "apply"])
    def test_raise_before_any_write_if_strict(self, verb):
        model = nn.Sequential(nn.Conv2d(3, 3, 3), refused_view())
        before = snapshot(model)
        call = nhwc.plan(model).apply if verb == "apply" else nhwc.convert_
        with pytest.raises(RuntimeError, match=r"'1.weight' \(Conv2d\): .* \(nothing was changed, since strict=True\)"):
            call(model, strict=True)
        assert_unchanged(model, before)

    def test_that_are_errors_change_nothing(self):
        model = nn.Sequential(nn.Conv2d(3, 3, 3), refused_view())
        before = snapshot(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="1 of 2 sites"):
                nhwc.convert_(model)
        assert_unchanged(model, before)

    def test_every_reason_has_one_sentence(self):
        sentences = [reason.value for reason in Reason]
        assert len(set(sentences)) == len(Reason.__members__)
        assert not any(sentence.endswith(".") or "\n" in sentence for sentence in sentences)


class TestReport:
    """What was done, and why."""

    def test_has_the_outcome_of_every_site(self):
        model = network()
        held = model["volume"].weight.detach()
        model["blocks"].share_memory()
        report = nhwc.convert_(model)
        assert report.outcomes == (
            Outcome.REUSED,
            Outcome.RESTRIDED,
            Outcome.FRESH_SHARED,
            Outcome.FRESH_HELD,
        )
        assert report.new_bytes == model["blocks"][1].weight.nbytes + held.nbytes
        assert report.seconds > 0
        assert held.stride() == (18, 9, 9, 3, 1)
        assert set(nhwc.convert_(model).outcomes) == {Outcome.KEPT}

    def test_becomes_json(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        report = nhwc.convert_(model, optimizer=optimizer)
        read = json.loads(report.to_json())
        assert read["digest"] == report.plan.digest
        assert [(row["path"], row["action"], row["outcome"]) for row in read["rows"]] == [
            ("0", "convert", "REUSED"),
            ("1", "restride", "RESTRIDED"),
        ]
        assert read["companions"][0] == {"site": "0.weight", "label": "grad", "outcome": "REUSED", "reason": None}
        assert {each["label"] for each in read["companions"]} == {"grad", "momentum_buffer"}
        assert (read["new_bytes"], read["dry_run"], read["remarks"]) == (0, False, [])

    def test_reads_well(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        model = nn.ModuleDict(
            {"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1)), "view": refused_view()}
        )
        with pytest.warns(UserWarning, match="1 of 3"):
            report = nhwc.convert_(model)
        lines = str(report).splitlines()
        assert lines[:5] == [
            "Report: 3 sites of float32 to channels-last: 1 convert, 1 restride, 1 refuse; 37.6 kB moved",
            "site     layer   shape      action    storage   reason",
            "stem     Conv2d  64x3x7x7   convert   in place",
            "block.0  Conv2d  64x64x1x1  restride",
            "view     Conv2d  4x3x3x3    refuse              PART_OF_LARGER_STORAGE",
        ]
        assert " ".join(lines[5:]).startswith("PART_OF_LARGER_STORAGE: it is part of a larger storage (a view,")
        assert "weights: 1 restrided, 1 permuted in place" in lines
        assert lines[-1].startswith("0.0 kB of new storage, ")

    @pytest.mark.parametrize("columns", [60, 80, 120])
    def test_fits_the_terminal(self, columns, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        model = nn.Sequential()
        part = model
        for name in ("encoder", "stages_of_the_encoder", "0", "shortcut_of_the_residual_block"):
            part.add_module(name, nn.Sequential(nn.Conv2d(512, 512, 1, device="meta"), refused_view()))
            part = part.get_submodule(name)
        part.add_module("norm", parametrizations.weight_norm(nn.Conv2d(3, 4, 3).half()))
        part.add_module("lazy", nn.LazyConvTranspose3d(4, 3))
        plan = nhwc.plan(model)
        with pytest.warns(UserWarning, match="stay as they are"):
            report = nhwc.convert_(model, optimizer=torch.optim.SGD([part.norm.bias], lr=0.1))
        for text in (str(plan), str(report)):
            assert max(map(len, text.splitlines())) <= columns

    def test_shows_what_deserves_a_look_first_where_there_are_many_sites(self):
        model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(99)), refused_view())
        lines = str(nhwc.plan(model)).splitlines()
        assert len(lines) < 50
        assert any(line.startswith("99 ") and "PART_OF" in line for line in lines)
        assert "... and 60 more, in .rows" in lines

    def test_of_a_model_without_convolutions(self):
        model = nn.Linear(3, 3)
        report = nhwc.convert_(model)
        assert str(report).startswith("Report: no convolution was found. Layers that call torch.nn.functional.conv2d")
        report.revert()


ODD = {
    "contiguous": lambda t: t.contiguous(),
    "permuted": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "padded": lambda t: torch.empty_strided(t.shape, (200, 50, 10, 2)).copy_(t),
    "channels_last": lambda t: t.contiguous(memory_format=CL),
    "ambiguous": lambda t: t.as_strided(t.shape, (27, 9, 3, 1)),
}


class TestRevert:
    """Brings back the strides, and never the values."""

    @pytest.mark.parametrize("of_gradient", ODD)
    @pytest.mark.parametrize("of_weight", ODD)
    def test_brings_back_odd_strides_exactly(self, of_weight, of_gradient):
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

    def test_goes_by_strides_alone_where_the_dtype_is_another_one_since(self):
        model = network()
        before = strides(model)
        report = nhwc.convert_(model)
        model.double()
        report.revert()
        assert strides(model) == before
        assert model["first"].weight.dtype == torch.float64

    def test_gives_a_gradient_that_has_come_since_the_strides_of_its_weight(self):
        layer = nn.Conv2d(3, 4, 3)
        layer.weight.grad = ODD["padded"](torch.randn(4, 3, 3, 3))
        report = nhwc.convert_(layer)
        layer.weight.grad = torch.randn(4, 3, 3, 3).to(memory_format=CL)
        report.revert()
        assert layer.weight.grad.stride() == (27, 9, 3, 1)

    def test_of_expanded_tensors_is_contiguous(self):
        layer = nn.Conv2d(3, 4, 3)
        layer.weight.grad = torch.ones(1).expand(4, 3, 3, 3)
        report = nhwc.convert_(layer)
        assert layer.weight.grad.stride() == (27, 1, 9, 3)
        report.revert()
        assert layer.weight.grad.stride() == (27, 9, 3, 1)

    def test_of_lazy_layers_takes_the_waiting_conversion_away_or_back(self):
        for materialised in (False, True):
            model = nn.Sequential(nn.LazyConv2d(4, 3))
            hooks = list(model[0]._forward_pre_hooks.values())
            report = nhwc.convert_(model)
            if materialised:
                model(torch.randn(1, 3, 8, 8))
                assert model[0].weight.stride() == (27, 1, 9, 3)
            report.revert()
            assert list(model[0]._forward_pre_hooks.values()) == ([] if materialised else hooks)
            model(torch.randn(1, 3, 8, 8))
            assert model[0].weight.stride() == (27, 9, 3, 1)

    def test_refuses_another_model_in_the_place_of_the_old_one(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        report = nhwc.convert_(model)
        model[0] = nn.Conv2d(3, 5, 3)
        with pytest.raises(ValueError, match=r"'0.weight' is \(5, 3, 3, 3\)"):
            report.revert()

    @pytest.mark.parametrize("what", ["weights", "hooks"])
    def test_says_that_the_model_is_gone(self, what):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), *([nn.LazyConv2d(3, 3)] if what == "hooks" else []))
        model.append(parametrizations.weight_norm(nn.Conv2d(3, 3, 3)))
        averaged = copy.deepcopy(model)
        report = nhwc.convert_(model, ema=averaged, input_format="channels_last")
        del model, averaged
        gc.collect()
        with pytest.raises(RuntimeError, match="the model is gone"):
            report.revert()
        assert "sites" in str(report)

    def test_that_cannot_be_changes_nothing(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        report = nhwc.convert_(model, input_format="channels_last")
        model[1].weight.grad = torch.randn(4, 4, 3, 3) * torch.ones(1, requires_grad=True)  # part of a graph
        before = snapshot(model)
        with pytest.raises(RuntimeError, match="lay_out_weights_"):
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

    def test_takes_an_optimizer_along_that_was_made_inside(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        with nhwc.channels_last(model) as report:
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            model(torch.randn(1, 3, 8, 8)).sum().backward()
            optimizer.step()
            report.revert(optimizer)
        assert optimizer.state[model[0].weight]["exp_avg"].stride() == model[0].weight.stride() == (27, 9, 3, 1)

    def test_reverts_after_an_exception(self):
        model = network()
        before = strides(model)
        with pytest.raises(RuntimeError, match="channels"), nhwc.channels_last(model):
            model["first"](torch.randn(1, 2, 8, 8))
        assert strides(model) == before


class TestAfterwards:
    def test_what_was_refused_for_an_optimizer_stays_refused_when_the_plan_is_applied_again(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        with pytest.warns(UserWarning, match="takes a view"):
            report = nhwc.convert_(model, optimizer=torch.optim.LBFGS(model.parameters()))
        with pytest.warns(UserWarning, match="takes a view"):
            again = nhwc.restore_(model, report.plan)
        assert again.plan.rows[0].reason is Reason.FLATTENING_OPTIMIZER
        assert model[0].weight.stride() == (27, 9, 3, 1)

    def test_a_filtered_row_shows_the_strides_of_the_model_that_it_is_applied_to(self):
        plan = nhwc.plan(nn.Sequential(nn.Conv2d(3, 4, 3)), filter_fn=lambda module, path: False)
        other = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        (row,) = plan.apply(other).plan.rows
        assert (row.strides, row.reason, row.target_strides) == ((27, 1, 9, 3), Reason.FILTERED, None)

    def test_a_model_that_was_compiled_since_is_not_reverted(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        report = nhwc.convert_(model)
        model.compile(backend="eager")
        with pytest.raises(RuntimeError, match=r"Report.revert: '0.weight': it is compiled"):
            report.revert()
        assert model[0].weight.stride() == (27, 1, 9, 3)

    @pytest.mark.parametrize("call", ["convert_", "revert", "check"])
    def test_the_optimizer_of_another_model_is_refused(self, call):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        other = torch.optim.Adam(nn.Conv2d(3, 4, 3).parameters())
        report = nhwc.convert_(model)
        calls = {
            "convert_": lambda: nhwc.convert_(model, optimizer=other),
            "revert": lambda: report.revert(optimizer=other),
            "check": lambda: nhwc.check(model, report.plan, optimizer=other),
        }
        with pytest.raises(ValueError, match="the Adam holds none of the model's parameters"):
            calls[call]()
        assert model[0].weight.stride() == (27, 1, 9, 3)
