"""`tune`: which plan is the answer, what it leaves behind, and what it says.

Times are simulated but where real ones are the point.
"""

import json
import mmap
import platform
import random
import warnings
from dataclasses import replace

import pytest
import torch
from simulated_machine import Machine
from snapshots import assert_unchanged, snapshot
from torch import nn
from user_code import Function

import torch_nhwc as nhwc
from torch_nhwc.tuning import Tuning, workload
from torch_nhwc.tuning.tuner import Race, interval

TIMES = {"contiguous": 0.1, "weights only": 0.1, "full": 0.1, "full, preserved": 0.1}
PLANS = {
    "contiguous": lambda model: nhwc.plan(model, torch.contiguous_format),
    "weights only": lambda model: nhwc.plan(model, preserve=False),
    "full": lambda model: nhwc.plan(model, input_format="channels_last", preserve=False),
    "full, preserved": lambda model: nhwc.plan(model, input_format="channels_last"),
}


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)
    )


@pytest.fixture
def x():
    return torch.randn(2, 3, 12, 12)


def read_by(how):
    """Return a convolution, and code of the user's that reads its output."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), Function(how))


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("fastest", PLANS)
def test_the_fastest_plan_is_the_answer_and_applies(fastest, mode, model, x, monkeypatch):
    Machine(monkeypatch, TIMES | {fastest: 0.08})
    tuning = nhwc.tune(model, x, mode=mode)
    assert tuning.choice == fastest
    assert tuning.plan == PLANS[fastest](model.train(mode == "training"))
    expected = model.eval()(x)
    assert nhwc.convert_(model, plan=tuning.plan).plan == tuning.plan
    assert torch.allclose(model(x), expected, atol=1e-5)
    best = min(tuning.table, key=lambda row: row.ratio)
    assert (best.name, best.regret) == (fastest, 0)
    assert [row.name for row in tuning.table] == [*PLANS]
    assert (tuning.table[0].ratio, tuning.table[0].low, tuning.table[0].high) == (1, 1, 1)


def test_in_doubt_the_model_stays_contiguous_and_the_noise_is_named(model, x, monkeypatch):
    Machine(monkeypatch, TIMES, noise=0.2)
    tuning = nhwc.tune(model, x, budget_seconds=8)
    assert tuning.choice == "contiguous"
    assert "the noise is larger than the gain" in tuning.notes[0] or "Nothing was faster" in tuning.notes[0]


def test_a_race_that_the_budget_ends_says_so(model, x, monkeypatch):
    ended = "Too few rounds to distinguish 'contiguous', 'weights only', 'full', 'full, preserved' within 3%"
    Machine(monkeypatch, TIMES, noise=0.2)
    assert ended in nhwc.tune(model, x, budget_seconds=8).notes[1]
    Machine(monkeypatch, TIMES, noise=0.01)
    tuning = nhwc.tune(model.eval(), x)
    assert tuning.choice == "contiguous"
    assert "equal within 3%, and so the model stays contiguous" in tuning.notes[0] or "Nothing was" in tuning.notes[0]
    assert len(tuning.notes) == 1
    assert tuning.seconds < 60
    Machine(monkeypatch, TIMES | {"full": 0.02, "contiguous": 0.4}, noise=0.2)
    assert not [note for note in nhwc.tune(model, x, budget_seconds=4).notes if "Too few" in note]  # of the others


def test_a_model_in_training_mode_is_measured_in_inference_with_a_note(model, x, monkeypatch):
    Machine(monkeypatch, TIMES)
    said = "Inference was measured, and the model is in training mode: mode='training' measures steps."
    assert nhwc.tune(model, x).notes[-1] == said
    assert said not in nhwc.tune(model, x, mode="training").notes
    assert said not in nhwc.tune(model.eval(), x).notes


def test_the_table_says_what_the_candidates_convert(model, x, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    Machine(monkeypatch, TIMES)
    meant = "weights only: convolution weights; full: weights and inputs"
    assert f"{meant}; full, preserved: weights, inputs and replaced layers.\n" in str(nhwc.tune(model, x))
    assert f"{meant}.\n" in str(nhwc.tune(model, x, preserve=False))


def test_the_budget_is_kept_but_for_the_first_two_rounds(model, x, monkeypatch):
    machine = Machine(monkeypatch, TIMES, noise=0.3)
    assert 10 <= nhwc.tune(model, x, budget_seconds=10).seconds == machine.now < 10.5
    machine.now, machine.seconds = 0, TIMES | {"full": 0.05}
    tuning = nhwc.tune(model, x, budget_seconds=0.001)
    assert (tuning.choice, [row.samples for row in tuning.table]) == ("full", [2, 2, 2, 2])
    machine.seconds = TIMES | {"full": 0.09}
    tuning = nhwc.tune(model, x, budget_seconds=0.001)
    assert (tuning.choice, tuning.table[2].high) == ("contiguous", None)
    assert "as fast as contiguous, in too few rounds to say anything" in tuning.notes[0]


def test_what_was_not_decided_is_an_answer_of_its_own(model, x, monkeypatch):
    machine = Machine(monkeypatch, TIMES | {"full": 0.09}, noise=0.05)
    tuning = nhwc.tune(model, x, budget_seconds=0.001)
    assert (tuning.choice, tuning.is_decided) == ("contiguous", False)
    assert tuning.notes[0].startswith("Not decided. ")
    assert str(tuning).startswith("Tuning: not decided (")
    assert "* " not in str(tuning)
    assert Tuning.from_json(tuning.to_json()) == tuning
    for seconds in ({"full": 0.08}, {"full": 0.15, "weights only": 0.15, "full, preserved": 0.15}):
        machine.seconds = TIMES | seconds
        tuning = nhwc.tune(model, x)
        assert tuning.is_decided
        assert str(tuning).startswith(f"Tuning: {tuning.choice} (")


def test_the_times_agree_with_the_speeds_beside_them(model, x, monkeypatch):
    machine = Machine(monkeypatch, TIMES | {"full": 0.15, "full, preserved": 0.08}, noise=0.2)
    measure = machine.measure

    def slowing(job, device):  # 1 % with each call, so that candidates that drop out early have the lowest times
        machine.seconds = {name: seconds * 1.01 for name, seconds in machine.seconds.items()}
        return measure(job, device)

    monkeypatch.setattr(workload, "seconds", slowing)
    tuning = nhwc.tune(model, x, budget_seconds=20)
    contiguous, *others = tuning.table
    assert len({row.samples for row in tuning.table}) > 1
    best = min(row.seconds for row in tuning.table)
    for row in others:
        assert row.seconds == pytest.approx(contiguous.seconds * row.ratio)
        assert row.regret == pytest.approx(row.seconds / best - 1)


def test_a_warning_says_early_that_it_takes_longer_than_the_budget(model, x, monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys(TIMES, 3.0))
    with pytest.warns(UserWarning, match=r"a round takes about 12 s: this takes about 3\d s instead of 8") as caught:
        seconds = nhwc.tune(model, x, budget_seconds=8).seconds
    assert str(caught[0].message).partition("about 3")[2][0] == f"{seconds:.0f}"[1]
    machine.seconds = TIMES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nhwc.tune(model, x, budget_seconds=8)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_layers_are_replaced_only_if_allowed_and_torchscript_gets_no_hook(model, x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full, preserved": 0.01})
    assert [row.name for row in nhwc.tune(model, x, preserve=False).table] == ["contiguous", "weights only", "full"]
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    for module in (scripted, torch.jit.freeze(scripted.eval())):
        assert [row.name for row in nhwc.tune(module, x).table] == ["contiguous", "weights only"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the advice is for glibc's allocator")
@pytest.mark.parametrize("elements", [16, 16 << 20])
def test_page_faults_are_told_where_they_are_much_of_a_call(elements, x):
    def with_new_memory(out):
        memory = mmap.mmap(-1, 4 * elements)  # torch.zeros may get what the process has
        return torch.frombuffer(memory, dtype=torch.float32).zero_().sum() + out

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Function(with_new_memory))
    notes = nhwc.tune(model, x, budget_seconds=0.1).notes
    assert any(note.startswith("Page faults are ") for note in notes) == (elements > 16)


def test_the_dtype_of_autocast_may_be_a_name(model, x, monkeypatch):
    Machine(monkeypatch, TIMES)
    assert nhwc.tune(model, x, autocast="torch.bfloat16").workload["autocast"] == "bfloat16"


def test_if_nothing_can_change_the_notes_say_so():
    tuning = nhwc.tune(nn.Sequential(nn.Linear(3, 3)).eval(), torch.randn(2, 3))
    assert tuning.notes == ("There is nothing to decide: no plan changes anything in this model.",)
    assert tuning.choice == "contiguous"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_nothing_of_the_model_changes(mode, model, x):
    model[1].eval()
    model(x).sum().backward()
    x.requires_grad_(True)
    x.grad = torch.ones_like(x)

    def rest():
        hooks = [(list(each._forward_pre_hooks), list(each._forward_hooks)) for each in model.modules()]
        return hooks, [(type(each), each.training) for each in model.modules()], random.getstate()

    before, rest_before, generator = snapshot(model), rest(), torch.get_rng_state()
    gradients = [(each.grad, each.grad.clone()) for each in (x, *model.parameters())]
    options = {"optimizer": torch.optim.AdamW} if mode == "training" else {}
    nhwc.tune(model, x, mode=mode, budget_seconds=0.4, **options)
    assert_unchanged(model, before)
    assert rest() == rest_before
    assert torch.equal(torch.get_rng_state(), generator)
    for tensor, (gradient, values) in zip((x, *model.parameters()), gradients):
        assert tensor.grad is gradient
        assert torch.equal(gradient, values)


def test_a_model_that_cannot_be_copied_is_refused(model, x):
    model.lock = (each for each in ())  # generators cannot be copied
    with pytest.raises(
        RuntimeError, match=r"expected a model that can be copied.*got TypeError: cannot pickle 'generator'"
    ):
        nhwc.tune(model, x)


def test_an_interrupt_gives_the_best_so_far(model, x, monkeypatch):
    machine = Machine(monkeypatch, TIMES | {"full": 0.05})
    machine.interrupt_at = 50
    tuning = nhwc.tune(model, x)
    assert tuning.choice == "full"
    assert "It was interrupted: this is the best so far." in tuning.notes
    assert len(machine.calls) == 50
    for interrupt_at in (1, 8):  # while the first candidate is prepared, and in the last turn of the first round
        machine.calls.clear()
        machine.interrupt_at = interrupt_at
        with pytest.raises(KeyboardInterrupt):
            nhwc.tune(model, x)


def test_a_plan_under_which_the_model_raises_or_computes_something_else_is_out(x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.01, "weights only": 0.01})
    tuning = nhwc.tune(read_by(lambda y: y.view(len(y), -1)), x)
    assert tuning.choice == "contiguous"
    assert "RuntimeError: view size is not compatible" in tuning.table[1].remark
    assert tuning.table[1].seconds is None
    tuning = nhwc.tune(read_by(lambda y: y.as_strided((8,), (1,))), x)
    assert tuning.choice == "contiguous"
    assert "weights only: ValueError: its output is off by" in " ".join(str(tuning).split())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        nhwc.tune(read_by(lambda y: y.view(1, 2, 3)), x)


@pytest.mark.parametrize(
    ("output", "difference"),
    [
        (lambda y: y + torch.rand_like(y), None),  # other numbers each time
        (lambda y: y * torch.tensor([0.0, float("nan")]).repeat(4).view(8, 1, 1), 0.0),
        (lambda y: object(), 0.0),
    ],
    ids=["random", "NaN", "none"],
)
def test_outputs_are_compared_if_possible(output, difference, x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.08})
    tuning = nhwc.tune(read_by(output), x)
    assert (tuning.choice, tuning.table[2].difference) == ("full", difference)


class WrongOnChannelsLast(torch.autograd.Function):
    """Has no gradient of a channels-last input, as some of PyTorch's kernels."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 0 if x.stride(1) == 1 else 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


@pytest.mark.parametrize(("dtype", "choice"), [(torch.float32, "contiguous"), (torch.bfloat16, "full")])
def test_a_plan_under_which_gradients_are_wrong_is_out_unless_rounding_is_as_large(dtype, choice, x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.08})
    model = read_by(WrongOnChannelsLast.apply).append(nn.ReLU()).to(dtype)
    tuning = nhwc.tune(model, x.to(dtype), mode="training")
    assert tuning.choice == choice
    expected = "" if choice == "full" else "ValueError: its gradients are off by 100%"
    assert tuning.table[2].remark == expected
    assert nhwc.tune(model, x.to(dtype)).choice == "full"  # in inference


def test_gradients_that_differ_each_time_are_not_compared(x, monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.08})
    model = read_by(WrongOnChannelsLast.apply).append(nn.Dropout(0.5))
    assert nhwc.tune(model, x, mode="training").choice == "full"


def test_h76_a_group_norm_that_would_end_the_process_fails(monkeypatch):
    Machine(monkeypatch, TIMES | {"full": 0.01})
    model, x = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)), torch.randn(1, 8, 16, 16)
    tuning = nhwc.tune(model, x, mode="training")
    (row,) = (row for row in tuning.table if row.name == "full")
    is_mended = torch.__version__ >= "2.14"
    assert ("PyTorch's group norm ends the process" in row.remark) is not is_mended
    assert (tuning.choice == "full") is is_mended
    assert nhwc.tune(model, x).choice == "full"
    assert nhwc.tune(model, torch.randn(1, 8, 32, 64), mode="training").choice == "full"


STEPS = []


class Recording(torch.optim.SGD):
    """Notes what it is given."""

    def step(self, closure=None):
        STEPS.append([(group["momentum"], group["lr"], len(group["params"])) for group in self.param_groups])
        parameters = [each for group in self.param_groups for each in group["params"]]
        assert all(each.grad is not None for each in parameters)
        before = [each.detach().clone() for each in parameters]
        super().step(closure)
        assert all(torch.equal(a, b) for a, b in zip(before, parameters))


@pytest.mark.parametrize(
    ("kind", "groups"), [("class", [(0, 0, 10)]), ("instance", [(0.5, 0, 2), (0, 0, 2)]), ("function", [(0.9, 0, 10)])]
)
def test_steps_are_taken_by_an_optimizer_of_the_given_kind(kind, groups, model, x):
    own = Recording([{"params": model[0].parameters(), "momentum": 0.5}, {"params": model[3].parameters()}], lr=0.1)
    kinds = {"class": Recording, "instance": own, "function": lambda parameters: Recording(parameters, momentum=0.9)}
    STEPS.clear()
    tuning = nhwc.tune(model, x, mode="training", optimizer=kinds[kind], budget_seconds=0.1)
    assert STEPS[0] == groups
    assert tuning.workload["optimizer"] == ("<lambda>" if kind == "function" else "Recording")
    assert not own.state


def test_the_loss_is_the_outputs_own_or_the_callers_or_a_mean_of_squares(x):
    for output in (lambda y: {"loss": y.sum(), "logits": y}, lambda y: ([y, y.detach()], {"other": y}, None)):
        nhwc.tune(read_by(output), x, mode="training", budget_seconds=0.05)
    with pytest.raises(ValueError, match="in training mode the model has to return a tensor with a gradient"):
        nhwc.tune(read_by(lambda y: y.detach()), x, mode="training")
    seen = []
    loss = lambda y: seen.append(y) or y.sum()  # noqa: E731
    nhwc.tune(read_by(lambda y: y), x, mode="training", loss=loss, budget_seconds=0.05)
    assert seen


@pytest.mark.parametrize("optimizer", ["adamw", "torch.optim.AdamW"])
@pytest.mark.parametrize("autocast", ["bf16", "BF16"])
def test_names_are_spelled_as_on_the_command_line(optimizer, autocast, model, x):
    tuning = nhwc.tune(model, x, mode="training", optimizer=optimizer, autocast=autocast, budget_seconds=0.1)
    assert (tuning.workload["optimizer"], tuning.workload["autocast"]) == ("AdamW", "bfloat16")
    with pytest.raises(ValueError, match="its class or name, or a function that makes one, got 'adamz'"):
        nhwc.tune(model, x, mode="training", optimizer="adamz")


def test_autocast_is_that_around_the_call_or_the_given_one(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tuning = nhwc.tune(model, x, mode="training", budget_seconds=0.1)
        assert torch.is_autocast_enabled("cpu")
    assert tuning.workload["autocast"] == "bfloat16"
    assert nhwc.tune(model, x, budget_seconds=0.1).workload["autocast"] is None
    tuning = nhwc.tune(model, x.bfloat16(), autocast=torch.bfloat16, budget_seconds=0.1)  # raises without a region
    assert tuning.workload["autocast"] == "bfloat16"


COMPILED = {f"{name}, compiled": seconds for name, seconds in TIMES.items()}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("faster", "choice"),
    [
        ({"full": 0.09, "full, compiled": 0.05}, "full, compiled"),
        ({"full": 0.09, "contiguous, compiled": 0.05}, "contiguous, compiled"),
        ({"full": 0.05, "full, compiled": 0.06}, "full"),
    ],
)
def test_compiled_models_take_part(faster, choice, mode, model, x, monkeypatch):
    Machine(monkeypatch, TIMES | COMPILED | faster)
    tuning = nhwc.tune(model, x, mode=mode, compile=True)
    assert tuning.choice == choice
    assert tuning.compile == choice.endswith("compiled")
    assert tuning.plan == PLANS[choice.removesuffix(", compiled")](model.train(mode == "training"))
    is_compiled = "Compile the model: " if tuning.compile else "Do not compile the model: "
    assert tuning.notes[0].startswith(f"{is_compiled}'{choice}' is ")
    rows = {row.name: row.compile_seconds for row in tuning.table}
    assert rows == dict.fromkeys(PLANS) | {"contiguous, compiled": 100, "full, compiled": 100}
    assert "compile\n" in str(tuning)
    assert "100.00 s" in str(tuning)
    assert Tuning.from_json(tuning.to_json()) == tuning


def test_the_time_to_compile_is_not_part_of_the_budget(model, x, monkeypatch):
    Machine(monkeypatch, TIMES | COMPILED, noise=0.3)
    assert 220 <= nhwc.tune(model, x, budget_seconds=20, compile=True).seconds < 221.5


def test_a_model_without_convolutions_may_still_be_compiled(monkeypatch):
    Machine(monkeypatch, {"contiguous": 0.1, "contiguous, compiled": 0.05})
    tuning = nhwc.tune(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3), compile=True)
    assert (tuning.choice, tuning.compile) == ("contiguous, compiled", True)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_cannot_be_compiled_is_a_row_with_the_reason(x):
    tuning = nhwc.tune(torch.jit.script(nn.Conv2d(3, 8, 3)), x, budget_seconds=0.1, compile=True)
    assert tuning.compile is False
    for row in tuning.table[2:]:
        assert row.seconds is None
        assert "RuntimeError: torch.compile does not support compiling torch.jit.script" in row.remark


def test_an_interrupt_while_it_compiles_gives_the_best_so_far(model, x, monkeypatch):
    before = snapshot(model)
    machine = Machine(monkeypatch, TIMES | COMPILED | {"full": 0.05})
    nhwc.tune(model, x, compile=True)
    machine.interrupt_at = machine.calls.index("contiguous, compiled") + 1
    machine.calls.clear()
    machine.chance.seed(0)
    tuning = nhwc.tune(model, x, compile=True)
    assert machine.calls[-1] == "contiguous, compiled"
    assert (tuning.choice, tuning.compile) == ("full", False)
    assert tuning.notes[0].startswith("'full' is ")
    assert "It was interrupted: this is the best so far." in tuning.notes
    assert_unchanged(model, before)


def test_a_model_is_really_compiled(x):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    before, expected = snapshot(model), model(x)
    tuning = nhwc.tune(model, x, budget_seconds=0.5, compile=True)
    assert_unchanged(model, before)
    assert not [row.remark for row in tuning.table if row.remark]
    rows = [row for row in tuning.table if row.name.endswith(", compiled")]
    assert len(rows) == 2
    for row in rows:
        assert row.seconds < row.compile_seconds
        assert row.difference < 1e-5
    nhwc.convert_(model, plan=tuning.plan)
    assert torch.allclose(torch.compile(model)(x), expected, atol=1e-5)


SGD_OF_ANOTHER = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "test"}, "expected mode to be 'inference' or 'training', got 'test'"),
        ({"budget_seconds": 0}, "expected budget_seconds to be a positive number, got 0"),
        ({"budget_seconds": "60"}, "expected budget_seconds to be a positive number, got '60'"),
        ({"compile": "yes"}, "expected compile to be True or False, got 'yes'"),
        ({"autocast": "bfloat15"}, "expected autocast to be a floating dtype or None, got 'bfloat15'"),
        ({"optimizer": torch.optim.SGD}, "an optimizer and a loss are for mode='training'"),
        ({"mode": "training", "optimizer": 0.1}, "expected an optimizer, its class or name, or a function"),
        ({"mode": "training", "optimizer": torch.optim.LBFGS}, "LBFGS calls the model several times in a step"),
        ({"mode": "training", "optimizer": SGD_OF_ANOTHER}, "the SGD holds none of the model's parameters"),
    ],
)
def test_bad_arguments_raise_one_clear_error(options, message, model, x):
    with pytest.raises(ValueError, match=message):
        nhwc.tune(model, x, **options)


def test_a_model_without_weights_and_a_shape_raise(model, x):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got list"):
        nhwc.tune([model], x)
    with pytest.raises(TypeError, match=r"give torch.randn\(1, 3, 8, 8\)"):
        nhwc.tune(model, (1, 3, 8, 8))
    with pytest.raises(ValueError, match="compile=True is for a model that is not compiled yet"):
        nhwc.tune(torch.compile(model), x, compile=True)
    with pytest.raises(ValueError, match="not a lazy layer"):
        nhwc.tune(nn.LazyConv2d(3, 3), x)
    with pytest.raises(ValueError, match="expected a model whose weights have values"):
        nhwc.tune(model.to("meta"), x.to("meta"))


class Writing(nn.Module):
    """Writes to its input, and keeps what it was given in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x, cache):
        cache.append(x)
        return self.layer(x.sub_(0.5).div_(0.5))


def test_the_models_writes_to_its_inputs_reach_neither_the_caller_nor_the_next_call(x):
    cache, before = [], x.clone()
    tuning = nhwc.tune(Writing(), {"x": x, "cache": cache}, budget_seconds=0.1)
    assert torch.equal(x, before)
    assert not cache
    assert tuning.workload["shapes"] == ["2x3x12x12"]
    assert all(row.difference is not None for row in tuning.table if row.samples)


@pytest.fixture
def tuning(model, x, monkeypatch):
    with monkeypatch.context() as patch:
        Machine(patch, TIMES | {"full": 0.08})
        return nhwc.tune(model, x, mode="training", autocast=torch.bfloat16, optimizer=torch.optim.SGD)


def test_a_decision_is_written_and_read(tuning):
    assert Tuning.from_json(tuning.to_json()) == tuning
    read = json.loads(tuning.to_json())
    assert read["workload"] == {
        "model": "Sequential",
        "mode": "training",
        "dtype": "float32",
        "autocast": "bfloat16",
        "shapes": ["2x3x12x12"],
        "optimizer": "SGD",
        "device": "cpu",
    }
    assert {"device", "threads", "torch", "oneDNN"} < read["machine"].keys()
    assert [row["name"] for row in read["table"]] == list(PLANS)


@pytest.mark.parametrize(
    ("part", "name", "value"), [("workload", "shapes", 3), ("workload", "device", "x"), ("machine", "threads", None)]
)
def test_a_decision_that_could_not_be_printed_is_refused(part, name, value, tuning):
    data = json.loads(tuning.to_json())
    data[part] |= {name: value}
    if value is None:
        del data[part][name]
    with pytest.raises(ValueError, match=r"Tuning.from_json: expected what Tuning.to_json writes"):
        Tuning.from_json(json.dumps(data))


def test_a_ratio_of_0_is_printed(tuning):
    data = json.loads(tuning.to_json())
    data["table"][1]["ratio"] = 0
    assert "failed" in str(Tuning.from_json(json.dumps(data)))


def test_a_decision_from_elsewhere_warns_of_what_differs(tuning):
    threads = torch.get_num_threads()
    elsewhere = replace(
        tuning, machine=tuning.machine | {"threads": threads + 1, "platform": "another", "torch": "2.0"}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Tuning.from_json(elsewhere.to_json())
    (warning,) = caught
    assert f"under other conditions, tune again: torch: 2.0, here {torch.__version__}; threads: " in str(
        warning.message
    )
    assert "platform" not in str(warning.message)
    assert warning.filename == __file__


def test_printed_it_fits_a_terminal_of_80_columns(tuning, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(tuning).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Tuning: full (")
    assert any(line.startswith("* full ") for line in lines)
    assert "'full' is 1.2" in str(tuning)
    rows = (tuning.table[0], tuning.table[1]._replace(ratio=1.25, low=None, high=None))
    assert "0.80x unknown" in " ".join(str(replace(tuning, table=rows)).split())


# The race: noise wins nothing.


def raced(times, seed=0, noise=0.02, rounds=40, drift=1.0):
    """Return a race of candidates that take so many seconds, with noise that only adds, on a slowing machine."""
    chance = random.Random(seed)
    race = Race(times)

    def measure(name):
        slowed = times[name] * drift**race.rounds
        return slowed * (1 + abs(chance.gauss(0, noise))) * (3 if chance.random() < 0.05 else 1)

    while race.rounds < rounds and not race.is_over():
        race.run_round(measure)
    return race


def test_noise_wins_nothing():
    winners = [raced(dict.fromkeys(["base", "a", "b", "c"], 1.0), seed, noise=0.05).winner() for seed in range(40)]
    assert winners.count("base") >= 37


@pytest.mark.parametrize(("slower", "answers"), [(1.3, ["base", "fast"]), (1.2, ["base", "base"])])
def test_two_rounds_decide_only_if_both_are_far_apart(slower, answers):
    race = Race(["base", "fast"])
    for answer in answers:
        race.run_round(lambda name: slower * (1 + race.rounds / 10) if name == "base" else 1.0)
        assert race.winner() == answer


def test_a_disturbance_of_samples_that_follow_each_other_drops_no_candidate():
    race = Race(["base", "fast"])  # in rounds of opposite order, `fast` is the last and then the first
    for disturbed in (2.0, 2.0, 1.0):
        race.run_round({"base": 1.0, "fast": 0.8 * disturbed}.__getitem__)
    assert race.running == ["base", "fast"]


def test_the_answer_is_the_best_lower_bound_over_the_baseline():
    race = Race(["base", "steady", "wild"])
    for wild in (0.7, 1.0, 0.72, 0.95):
        race.run_round({"base": 1.0, "steady": 0.9, "wild": wild}.__getitem__)
    assert race.best() == "wild"
    assert race.winner() == "steady"
    assert race.open_pairs() == [("base", "wild"), ("steady", "wild")]


def test_at_least_23_of_24_answers_are_within_3_percent_of_the_best():
    chance, speeds = random.Random(0), []
    for seed in range(96):
        times = {"base": 1.0} | {name: chance.uniform(0.8, 1.2) for name in ("a", "b", "c")}
        speeds.append(min(times.values()) / times[raced(times, seed, noise=0.03, rounds=60).winner()])
    assert sum(speed >= 0.97 for speed in speeds) >= 92
    assert min(speeds) >= 0.93


def test_a_race_is_over_once_more_rounds_would_tell_nothing():
    assert raced({"base": 1.0, "fast": 0.8}, noise=0.01, rounds=1000).rounds <= 12
    assert raced({"base": 1.0, "same": 1.0}, noise=0.002, rounds=1000).rounds <= 40
    assert raced({"base": 1.0, "slow": 2.0}, rounds=1000).rounds == 3


def test_an_interval_holds_the_true_ratio_and_says_nothing_on_one_pair():
    chance = random.Random(0)
    inside = 0
    for _ in range(300):
        limits = interval([1.1 * (1 + chance.gauss(0, 0.03)) for _ in range(10)])
        inside += limits.low < 1.1 < limits.high
    assert inside >= 290
    assert not interval([0.5]).is_faster
    assert interval([0.5]).low == 0
    assert interval([0.9] * 5).is_faster
