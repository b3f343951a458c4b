"""`tune`: which plan is the answer, what it leaves behind, and what it says.

Times are simulated but where real ones are the point.
"""

import json
import random
import warnings
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from simulated_machine import Machine
from snapshots import assert_unchanged, snapshot
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tuning import progress, standing_in, trials
from torch_nhwc.tuning.variants import without

TIMES = {"contiguous": 0.1, "weights only": 0.1, "full": 0.1, "full, preserved": 0.1, "mixed": 0.2}
PLANS = {
    "contiguous": lambda model: nhwc.plan(model, torch.contiguous_format),
    "weights only": nhwc.plan,
    "full": lambda model: nhwc.plan(model, input_format="channels_last"),
    "full, preserved": lambda model: nhwc.plan(model, input_format="channels_last", preserve=True),
}


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)
    )


@pytest.fixture
def x():
    return torch.randn(2, 3, 12, 12)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("fastest", PLANS)
def test_the_fastest_plan_is_the_answer_and_applies(fastest, mode, model, x, monkeypatch):
    Machine(monkeypatch, TIMES | {fastest: 0.08})
    tuning = nhwc.tune(model, x, mode=mode)
    assert tuning.choice == fastest
    assert tuning.plan == PLANS[fastest](model)
    expected = model.eval()(x)
    assert nhwc.convert_(model, plan=tuning.plan).plan == tuning.plan
    assert torch.allclose(model(x), expected, atol=1e-5)
    best = min(tuning.table, key=lambda row: row.ratio)
    assert (best.name, best.regret) == (fastest, 0)
    assert tuning.table[0].name == "contiguous"
    assert (tuning.table[0].ratio, tuning.table[0].low, tuning.table[0].high) == (1, 1, 1)


def test_in_doubt_the_model_stays_contiguous_and_the_noise_is_named(model, x, monkeypatch):
    Machine(monkeypatch, TIMES, noise=0.2)
    tuning = nhwc.tune(model, x, budget_seconds=8)
    assert tuning.choice == "contiguous"
    assert "the noise is larger than the gain" in tuning.notes[0] or "Nothing was faster" in tuning.notes[0]
    assert not any(row.is_wanted and row.bytes_to_move for row in tuning.plan.rows)


def test_the_budget_is_kept(model, x, monkeypatch):
    machine = Machine(monkeypatch, TIMES, noise=0.3)
    assert 10 <= nhwc.tune(model, x, budget_seconds=10).seconds == machine.now < 10.5
    machine.now = 0
    assert nhwc.tune(model, x, budget_seconds=0.001).table[-1].samples == 1


def test_of_a_single_round_it_is_said_that_it_says_nothing(model, x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.05})
    tuning = nhwc.tune(model, x, budget_seconds=0.001)
    assert (tuning.choice, tuning.table[2].high) == ("contiguous", None)
    assert "as fast as contiguous, in too few rounds to say anything" in tuning.notes[0]


def test_layers_are_exchanged_only_where_that_is_allowed_and_hooks_put_where_there_can_be_any(model, x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full, preserved": 0.01})
    names = [row.name for row in nhwc.tune(model, x, preserve=False).table]
    assert names[:3] == ["contiguous", "weights only", "full"]
    assert "full, preserved" not in names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
        frozen = torch.jit.freeze(scripted.eval())
    for module in (scripted, frozen):
        assert [row.name for row in nhwc.tune(module, x).table] == ["contiguous", "weights only"]


def test_where_nothing_can_change_that_is_said():
    tuning = nhwc.tune(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3))
    assert tuning.notes == ("There is nothing to decide: no plan changes anything in this model.",)
    assert tuning.choice == "contiguous"


def rest_of(model):
    """What a conversion may touch besides tensors."""
    return [
        (type(module), module.training, list(module._forward_pre_hooks.values()), list(module._forward_hooks.values()))
        for module in model.modules()
    ]


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_model_is_as_it_was(mode, itself, model, x, monkeypatch):
    if itself:
        monkeypatch.setattr(standing_in, "_has_room", lambda model: False)
    model[1].eval()
    model(x).sum().backward()
    before, rest = snapshot(model), rest_of(model)
    x.requires_grad_(True)
    x.grad = torch.ones_like(x)
    gradients = [(each.grad, each.grad.clone()) for each in (x, *model.parameters())]
    generators = torch.get_rng_state(), random.getstate()
    options = {"optimizer": torch.optim.AdamW} if mode == "training" else {}
    tuning = nhwc.tune(model, x, mode=mode, budget_seconds=0.4, **options)
    assert_unchanged(model, before)
    assert rest_of(model) == rest
    for tensor, (gradient, values) in zip((x, *model.parameters()), gradients):
        assert tensor.grad is gradient
        assert torch.equal(gradient, values)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert any("The model itself was tuned, and brought back" in note for note in tuning.notes) == itself
    assert any("steps of the optimizer were left out" in note for note in tuning.notes) == (
        itself and mode == "training"
    )


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_copy_of_a_scripted_model_trains_what_the_model_trains(model):
    model[0].requires_grad_(False)
    with ExitStack() as stack:
        twin = standing_in.stand_in_for(stack, torch.jit.script(model)).model
    assert [each.requires_grad for each in twin.parameters()] == [each.requires_grad for each in model.parameters()]


def test_a_model_that_cannot_be_copied_is_tuned_itself(model, x):
    model.lock = (each for each in ())  # generators cannot be copied
    before = snapshot(model)
    tuning = nhwc.tune(model, x, budget_seconds=0.1)
    assert "cannot pickle 'generator' object" in tuning.notes[-1]
    assert_unchanged(model, before)


@pytest.mark.parametrize("itself", [False, True])
def test_an_interrupt_gives_the_best_so_far(itself, model, x, monkeypatch):
    if itself:
        monkeypatch.setattr(standing_in, "_has_room", lambda model: False)
    machine = Machine(monkeypatch, TIMES | {"full": 0.05})
    machine.interrupt_at = 60
    before = snapshot(model)
    tuning = nhwc.tune(model, x)
    assert tuning.choice == "full"
    assert "It was interrupted: this is the best so far." in tuning.notes
    assert len(machine.calls) == 60
    machine.calls.clear()
    machine.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        nhwc.tune(model, x)
    assert_unchanged(model, before)


class Reads(nn.Module):
    """Code that goes wrong on channels-last."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 8, 3), how

    def forward(self, x):
        return self.how(self.conv(x))


def test_a_plan_under_which_the_model_raises_or_computes_something_else_is_out(x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.01, "weights only": 0.01})
    tuning = nhwc.tune(Reads(lambda y: y.view(len(y), -1)), x)
    assert tuning.choice == "contiguous"
    assert "RuntimeError: view size is not compatible" in tuning.table[1].remark
    assert tuning.table[1].seconds is None
    tuning = nhwc.tune(Reads(lambda y: y.as_strided((8,), (1,))), x)
    assert tuning.choice == "contiguous"
    assert "its output is off by" in tuning.table[1].remark
    assert "weights only: ValueError: its output is off by" in " ".join(str(tuning).split())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        nhwc.tune(Reads(lambda y: y.view(1, 2, 3)), x)


def test_outputs_are_compared_where_that_can_be(x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.08})
    outputs = [
        (lambda y: y + torch.rand_like(y), None),  # other numbers each time
        (lambda y: y * torch.tensor([0.0, float("nan")]).repeat(4).view(8, 1, 1), 0.0),
        (lambda y: None, 0.0),
        (lambda y: object(), 0.0),
    ]
    for output, difference in outputs:
        tuning = nhwc.tune(Reads(output), x)
        assert (tuning.choice, tuning.table[2].difference) == ("full", difference)


def test_a_search_that_fails_is_a_note(model, x, monkeypatch):
    def fail(*_):
        raise RuntimeError("no hooks here")

    Machine(monkeypatch, TIMES | {"full": 0.08})
    monkeypatch.setattr(trials, "search", fail)
    tuning = nhwc.tune(model, x)
    assert tuning.choice == "full"
    assert "The search beyond the fixed policies failed: RuntimeError: no hooks here" in tuning.notes


STEPS = []


class Recording(torch.optim.SGD):
    """Notes what it is given."""

    def step(self, closure=None):
        STEPS.append([(group["momentum"], group["lr"], len(group["params"])) for group in self.param_groups])
        assert all(each.grad is not None for group in self.param_groups for each in group["params"])
        before = [each.detach().clone() for group in self.param_groups for each in group["params"]]
        super().step(closure)
        after = [each for group in self.param_groups for each in group["params"]]
        assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_steps_are_taken_by_an_optimizer_of_the_given_kind(model, x):
    own = Recording([{"params": model[0].parameters(), "momentum": 0.5}, {"params": model[3].parameters()}], lr=0.1)
    kinds = {"class": Recording, "instance": own, "function": lambda parameters: Recording(parameters, momentum=0.9)}
    expected = {"class": [(0, 0, 10)], "instance": [(0.5, 0, 2), (0, 0, 2)], "function": [(0.9, 0, 10)]}
    for name, kind in kinds.items():
        STEPS.clear()
        tuning = nhwc.tune(model, x, mode="training", optimizer=kind, budget_seconds=0.1)
        assert STEPS[0] == expected[name]
        assert tuning.workload["optimizer"] == ("<lambda>" if name == "function" else "Recording")
    assert not own.state
    with pytest.raises(ValueError, match="tune: the SGD holds none of the model's parameters"):
        nhwc.tune(model, x, mode="training", optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1))


def test_the_loss_is_the_output_s_own_or_the_caller_s_or_a_mean_of_squares(x):
    class Named(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.conv, self.output = nn.Conv2d(3, 8, 3), output

        def forward(self, x):
            return self.output(self.conv(x))

    outputs = [
        lambda y: {"loss": y.sum(), "logits": y},
        lambda y: ([y, y.detach()], {"other": y}, None),
        lambda y: y,
    ]
    for output in outputs:
        nhwc.tune(Named(output), x, mode="training", budget_seconds=0.05)
    with pytest.raises(ValueError, match="in training mode the model has to return a tensor with a gradient"):
        nhwc.tune(Named(lambda y: y.detach()), x, mode="training")
    seen = []
    nhwc.tune(Named(outputs[2]), x, mode="training", loss=lambda y: seen.append(y) or y.sum(), budget_seconds=0.05)
    assert seen


def test_autocast_is_that_around_the_call_or_the_given_one(model, x):
    model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tuning = nhwc.tune(model, x, mode="training", budget_seconds=0.1)
        assert torch.is_autocast_enabled("cpu")
    assert tuning.workload["autocast"] == "bfloat16"
    assert nhwc.tune(model, x, autocast=torch.bfloat16, budget_seconds=0.1).workload["autocast"] == "bfloat16"
    assert nhwc.tune(model, x, budget_seconds=0.1).workload["autocast"] is None
    bfloat16 = nhwc.tune(model, x.bfloat16(), autocast=torch.bfloat16, budget_seconds=0.1)  # raises without a region
    assert bfloat16.table[0].seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "test"}, "expected mode to be 'inference' or 'training', got 'test'"),
        ({"budget_seconds": 0}, "expected budget_seconds to be a positive number, got 0"),
        ({"budget_seconds": "60"}, "expected budget_seconds to be a positive number, got '60'"),
        ({"autocast": "bfloat16"}, "expected autocast to be a floating dtype or None, got 'bfloat16'"),
        ({"optimizer": torch.optim.SGD}, "an optimizer and a loss are for mode='training'"),
        ({"mode": "training", "optimizer": 0.1}, "expected an optimizer, its class, or what makes one, got 0.1"),
    ],
)
def test_bad_arguments_raise_one_clear_error(options, message, model, x):
    with pytest.raises(ValueError, match=message):
        nhwc.tune(model, x, **options)


def test_what_is_no_model_or_no_input_or_has_no_weights_yet_raises(model, x):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got list"):
        nhwc.tune([model], x)
    with pytest.raises(TypeError, match=r"give torch.randn\(1, 3, 8, 8\)"):
        nhwc.tune(model, (1, 3, 8, 8))
    with pytest.raises(ValueError, match="lazy layer"):
        nhwc.tune(nn.LazyConv2d(3, 3), x)
    with pytest.raises(ValueError, match="expected a model whose weights have values"):
        nhwc.tune(model.to("meta"), x.to("meta"))


class Writing(nn.Module):
    """Writes to its input, and keeps what it was given in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.means = []

    def forward(self, x, cache):
        self.means.append(x.mean().item())
        cache.append(x)
        return self.layer(x.sub_(0.5).div_(0.5))


def test_what_the_model_writes_to_its_inputs_does_not_reach_the_caller_nor_the_next_call(x):
    model, cache, before = Writing(), [], x.clone()
    tuning = nhwc.tune(model, (x, cache), budget_seconds=0.1)
    assert torch.equal(x, before)
    assert not cache
    assert tuning.workload["shapes"] == ["2x3x12x12"]
    assert all(row.difference is not None for row in tuning.table if row.samples)


def test_an_input_may_come_out_of_a_graph(x):
    features = x.requires_grad_() * 2
    tuning = nhwc.tune(nn.Conv2d(3, 4, 3), features, mode="training", budget_seconds=0.05)
    assert tuning.table[0].samples
    assert x.grad is None


def test_lbfgs_is_refused(model, x):
    with pytest.raises(ValueError, match="LBFGS calls the model as often as it likes"):
        nhwc.tune(model, x, mode="training", optimizer=torch.optim.LBFGS)


def test_inputs_may_be_named_and_several():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, image, scale=1):
            return self.conv(image) * scale

    x = torch.randn(1, 3, 8, 8)
    for inputs in ((x, torch.ones(1)), {"image": x, "scale": torch.ones(1)}):
        assert nhwc.tune(Two(), inputs, budget_seconds=0.05).workload["shapes"] == ["1x3x8x8", "1"]


@pytest.fixture
def tuning(model, x, monkeypatch):
    with monkeypatch.context() as patch:
        Machine(patch, TIMES | {"full": 0.08})
        return nhwc.tune(model, x, mode="training", autocast=torch.bfloat16, optimizer=torch.optim.SGD)


def test_a_decision_is_written_and_read(tuning):
    assert nhwc.Tuning.from_json(tuning.to_json()) == tuning
    read = json.loads(tuning.to_json())
    assert read["workload"] == {
        "model": "Sequential",
        "mode": "training",
        "dtype": "float32",
        "autocast": "bfloat16",
        "shapes": ["2x3x12x12"],
        "optimizer": "SGD",
    }
    assert {"device", "threads", "torch", "oneDNN"} < read["machine"].keys()
    assert [row["name"] for row in read["table"]][:4] == list(PLANS)
    for text in ("", "{}", tuning.to_json().replace('"version": 1', '"version": 9'), "[1]"):
        with pytest.raises(ValueError, match=r"Tuning.from_json: expected what Tuning.to_json writes"):
            nhwc.Tuning.from_json(text)
    with pytest.raises(ValueError, match="the digest does not fit"):
        nhwc.Tuning.from_json(tuning.to_json().replace('"path": "3"', '"path": "4"'))


def test_elsewhere_it_warns_of_what_differs(tuning):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(UserWarning, match=f"tuned under other conditions.*threads: {threads}, here {threads + 1}"):
            nhwc.Tuning.from_json(tuning.to_json())
    finally:
        torch.set_num_threads(threads)
    with pytest.warns(UserWarning, match="torch: 2.0, here 2"):
        nhwc.Tuning.from_json(tuning.to_json().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0"'))


def test_printed_it_fits_a_terminal_of_80_columns(tuning, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(tuning).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Tuning: full (")
    assert any(line.startswith("* full ") for line in lines)
    assert "'full' is 1.2" in str(tuning)


def test_progress_is_shown_on_a_terminal(model, x, monkeypatch, capsys):
    nhwc.tune(model, x, budget_seconds=0.05)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    nhwc.tune(model, x, budget_seconds=0.05)
    assert "best so far: contiguous" in capsys.readouterr().err


def test_without_tqdm_and_networkx_nothing_is_missing_but_the_bar_and_the_islands(model, x, monkeypatch):
    monkeypatch.setitem(progress.sys.modules, "tqdm", None)
    monkeypatch.setitem(progress.sys.modules, "networkx", None)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    Machine(monkeypatch, TIMES | {"full": 0.08})
    assert nhwc.tune(model, x).choice == "full"


def test_what_a_search_found_wins_where_it_beats_the_best_fixed_policy(model, x, monkeypatch):
    found = {}

    def find(workload, contiguous, full):
        found["mixed"] = without(full, {"3"})
        return found

    Machine(monkeypatch, TIMES | {"full": 0.08, "mixed": 0.07})
    monkeypatch.setattr(trials, "search", find)
    tuning = nhwc.tune(model, x)
    assert (tuning.choice, tuning.plan) == ("mixed", found["mixed"])
    nhwc.convert_(model, plan=tuning.plan)
    assert not model[0].weight.is_contiguous()
    assert model[3].weight.is_contiguous()
    assert tuning.plan.rows[1].reason is nhwc.Reason.FASTER_CONTIGUOUS
    nhwc.convert_(model, torch.contiguous_format)
    Machine(monkeypatch, TIMES | {"full": 0.08, "mixed": 0.08})
    monkeypatch.setattr(trials, "search", find)
    assert nhwc.tune(model, x).choice == "full"


def test_a_small_model_is_tuned_for_real(model, x):
    tuning = nhwc.tune(model, x, budget_seconds=1)
    assert tuning.choice in [row.name for row in tuning.table]
    assert all(row.difference < 1e-5 for row in tuning.table if row.samples)
    assert tuning.seconds < 30


def test_printed_a_plan_with_too_few_rounds_for_an_interval_has_its_speed_all_the_same(tuning):
    rows = (tuning.table[0], tuning.table[1]._replace(ratio=1.25, low=None, high=None))
    assert "0.80x unknown" in " ".join(str(replace(tuning, table=rows)).split())
