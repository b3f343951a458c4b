"""What `verify` finds, and what it does not report."""

import copy
import json
import math
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from planted_faults import CL, Scrambled, ScrambledBackward, ScrambledInput, is_last
from selection import exhaustive, some_of
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from user_code import Function

import torch_nhwc as nhwc
from torch_nhwc.rendering import several
from torch_nhwc.running.calls import copy_model
from torch_nhwc.verifying import Verdict, Verification

X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def sequence(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


def converted(model, **options):
    nhwc.convert_(other := copy_model(model), input_format="channels_last", **options)
    return other


def verified(model, inputs=X, *, after=None, **options):
    return nhwc.verify(model, after or converted(model), inputs, **options)


def differing(verification):
    """Return the layers that differ, and what of them; the model differs with each."""
    return {(row.path, row.what) for row in verification.differing if row.path}


def one_line(verification):
    return " ".join(str(verification).split())


class Functions(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function, self.end = nn.Conv2d(3, 8, 3, padding=1), function, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.end(self.function(self.conv(x)))


def test_layers_and_then_the_model_have_rows_for_parameters_outputs_gradients_and_buffers_in_order_of_execution():
    verification = verified(sequence(nn.BatchNorm2d(8), nn.ReLU(inplace=True)))
    assert verification
    assert verification.first is None
    of_layer = {"weight", "bias", "output", "gradient of input", "gradient of weight", "gradient of bias"}
    rows = {}
    for row in verification.rows:
        rows.setdefault((row.path, row.layer), set()).add(row.what)
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert list(rows) == [("0", "Conv2d"), ("1", "BatchNorm2d"), ("2", "ReLU"), ("", "Sequential")]
    assert list(rows.values())[:3] == [of_layer, of_layer | buffers, {"output", "gradient of input"}]
    assert rows["", "Sequential"] >= {"output", "gradient of input", "gradient of 0.weight"}
    assert {row.verdict for row in verification.rows} == {Verdict.EQUAL}
    assert all(0 <= row.error <= row.tolerance for row in verification.rows)


class TestFaults:
    @pytest.mark.parametrize(
        ("layer", "what"),
        [
            (Scrambled(8, 8, 3), "output"),
            exhaustive(ScrambledInput(), "output"),
            (ScrambledBackward(), "gradient of input"),
        ],
        ids=lambda each: type(each).__name__,
    )
    def test_a_layer_that_is_wrong_in_channels_last_is_the_first_that_differs(self, layer, what):
        verification = verified(sequence(nn.ReLU(), layer, nn.Conv2d(8, 4, 1)))
        first = verification.first
        assert (first.path, first.layer, first.what) == ("2", type(layer).__name__, what)
        assert {row.path for row in verification.differing} == {"2", ""}
        assert first.error > 100 * first.tolerance
        assert "channels-last" in first.inputs

    def test_a_fault_in_backward_alone_needs_gradients(self):
        assert verified(sequence(ScrambledBackward()), backward=False)

    def test_a_fault_in_a_small_channel_is_found_next_to_a_large_one(self):
        class Wrong(nn.Conv2d):
            def forward(self, x):
                large, small = super().forward(x).split([1, 7], 1)
                return torch.cat([1e5 * large, 0.9 * small.detach() if is_last(x) else small], 1)

        found = {row.what: row for row in verified(sequence(nn.ReLU(), Wrong(8, 8, 3))).differing if row.path}
        assert {row.path for row in found.values()} == {"2"}
        assert found["output"].largest < 10
        assert found["gradient of weight"].largest < 1e4

    def test_a_scrambled_weight_of_a_layer_that_does_not_run_is_found(self):
        class Sparing(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

            def forward(self, x):
                return self.used(x)

        model = Sparing()
        after = converted(model)
        verification = verified(model, after=after)
        assert verification.not_run == ("spare",)
        assert "did not run, only parameters were compared: spare" in one_line(verification)
        with torch.no_grad():
            after.spare.weight.copy_(after.spare.weight.flip(0))
        assert differing(verified(model, after=after)) == {("spare", "weight")}
        assert "TORCH_NHWC_WINOGRAD=0" in one_line(verified(model, after=after))
        assert "TORCH_NHWC_WINOGRAD" not in one_line(verification)

    def test_rows_of_layers_are_printed_and_those_of_the_model_counted(self):
        model = sequence(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
        after = copy.deepcopy(model)
        with torch.no_grad():
            next(after.parameters())[0, 0].add_(1)
        verification = verified(model, after=after)
        of_model = [row for row in verification.differing if not row.path]
        assert f"and {several(len(of_model), 'row')} of the whole model" in one_line(verification)
        assert "the whole model" not in one_line(verified(model[0], after=after[0]))  # which has no other rows

    def test_wrong_running_statistics_are_found(self):
        class Wrong(nn.BatchNorm2d):
            def forward(self, x):
                y = super().forward(x)
                if self.training and x.is_contiguous(memory_format=CL) and not x.is_contiguous():
                    self.running_mean.data += 1
                return y

        model = sequence(Wrong(8))
        assert differing(verified(model)) == {("1", "running_mean")}
        assert verified(model.eval())

    def test_h36_group_norm_is_found_by_a_large_mean_alone(self):
        model = sequence(nn.GroupNorm(2, 8))
        verification = verified(model, after=converted(model, preserve=False))
        assert {(row.layer, row.inputs) for row in verification.differing} == {
            ("GroupNorm", "a large mean, channels-last")
        }
        assert verification.first.before_differs
        assert "preserve=True replaces the layers that are known" in one_line(verification)
        assert verified(model, after=converted(model, preserve=True))

    @pytest.mark.parametrize("batch", some_of([1, 3], 3))
    def test_h35_instance_norm_is_found_by_a_batch_of_one(self, batch):
        model = sequence(nn.InstanceNorm2d(8))
        verification = verified(model, X[:batch], after=converted(model, preserve=False))
        assert differing(verification) == {("1", "gradient of input")}
        assert batch == 1 or "a batch of 1" in verification.first.inputs
        assert verified(model, X[:batch], after=converted(model, preserve=True))

    @pytest.mark.parametrize(
        ("function", "what"),
        [(ScrambledInput(), "output"), (ScrambledBackward(), "gradient of input")],
        ids=["forward", "backward"],
    )
    def test_a_fault_between_layers_is_found_in_the_model(self, function, what):
        first = verified(model := Functions(function.forward)).first
        assert (first.path, first.layer, first.what) == ("", type(model).__name__, what)

    def test_a_layer_or_a_model_that_raises_on_channels_last_is_found(self):
        def view(x):
            return x.view(len(x), -1)[:, :64].reshape(-1, 8, 2, 4)

        for model, path in ((Functions(view), ""), (sequence(Function(view)), "1")):
            first = verified(model).first
            assert (first.path, first.what, first.error) == (path, "forward", math.inf)
            assert first.note.startswith("RuntimeError: view size is not compatible")


def test_a_division_by_the_deviation_of_a_constant_channel_is_found():
    class DividesByDeviation(nn.Module):
        def forward(self, x):
            deviation = x.std((2, 3), keepdim=True)
            return x / (deviation if self.is_wrong else deviation.clamp(min=1e-3))

    before = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(DividesByDeviation()))
    before[1][0].is_wrong = False
    after = copy.deepcopy(before)
    after[1][0].is_wrong = True
    first = nhwc.verify(before, after, torch.randn(2, 3, 8, 8), backward=False).first
    assert (first.path, first.what) == ("1.0", "output")
    assert first.inputs.startswith("a constant channel")


def test_what_does_not_repeat_itself_is_not_said_to_differ():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    verification = verified(sequence(Counting()))
    assert verification
    assert {row.path for row in verification.rows if row.verdict is Verdict.UNREPEATABLE} == {"1", ""}
    assert "cannot be repeated" in one_line(verification)


def test_outputs_without_tensors_are_said_to_be_uncompared():
    class Yielding(nn.Conv2d):
        def forward(self, x):
            yield super().forward(x)

    verification = verified(nn.Sequential(Yielding(3, 8, 3)), backward=False)
    assert verification
    uncompared = [(row.path, row.what) for row in verification.rows if row.verdict is Verdict.NOT_COMPARED]
    assert uncompared == [("0", "output"), ("", "output")]
    text = one_line(verification)
    assert "nothing differs, but not all could be compared" in text
    assert "0, the model itself: no tensor is found in what it returns" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_of_nothing_but_rounding_errors_are_compared_with_other_channels(dtype):
    torch.manual_seed(0)
    # The gradient of a normalization of two values is zero, but for its epsilon.
    model = nn.Sequential(nn.BatchNorm2d(256)).to(dtype)
    x = (torch.randn(2, 256, 1, 1) * torch.logspace(-3, 3, 256).view(256, 1, 1)).to(dtype)
    assert (verification := verified(model, x, after=converted(model, preserve=True))), str(verification)


@dataclass
class Output:
    image: torch.Tensor
    rest: tuple


class ByKeyword(nn.Module):
    def forward(self, *, image, scale, name=None):
        return OrderedDict(images=[image * scale, image[:, 0].sum()], name=name)


class Everything(nn.Module):
    """Whatever a model may do that is right in both formats."""

    def __init__(self):
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.act, self.drop, self.pool = nn.ReLU(inplace=True), nn.Dropout(0.5), nn.MaxPool2d(2, return_indices=True)
        self.norm, self.shared = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.table, self.attention = nn.Embedding(5, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.gain = nn.Parameter(torch.ones(8, 1, 1))
        self.by_keyword, self.scripted = ByKeyword(), torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))

    def forward(self, x, labels, *, shift=0.0):
        x = self.norm(self.drop(self.act(self.conv(x))))
        for _ in range(2):
            x = functional.dropout(self.shared(x), 0.5, self.training)
        x = self.scripted(x * self.gain)
        x = x + checkpoint(self.shared, x, use_reentrant=False)
        made = self.by_keyword(image=x, scale=2.0, name="none")
        pooled, indices = self.pool(made["images"][0])
        tokens = pooled.flatten(2).transpose(1, 2) + self.table(labels)[:, None] + shift
        attended, _ = self.attention(tokens, tokens, tokens)
        return Output(pooled, (indices, attended, None, "text"))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("training", some_of([True, False], True), ids=["train", "eval"])
def test_nothing_differs_in_a_model_that_does_a_bit_of_everything(training):
    torch.manual_seed(0)
    model = Everything().train(training)
    verification = verified(model, {"x": X, "labels": torch.tensor([0, 2, 4]), "shift": 1.0})
    assert verification, str(verification)
    assert {row.verdict for row in verification.rows} == {Verdict.EQUAL}
    assert {(row.path, row.what) for row in verification.rows} >= {
        ("conv", "parametrizations.weight.original1"),
        ("conv", "gradient of parametrizations.weight.original1"),
        ("shared", "gradient of weight"),
        ("table", "gradient of weight"),
        ("attention", "gradient of in_proj_weight"),
        ("by_keyword", "output.images[0]"),
        ("pool", "output[1]"),
        ("scripted", "output"),
        ("", "gain"),
        ("", "gradient of gain"),
        ("", "output.rest[1]"),
    }


@pytest.mark.parametrize("dtype", some_of([torch.bfloat16, torch.float16, torch.float64], torch.float16), ids=str)
def test_nothing_differs_in_other_dtypes(dtype):
    model = sequence(nn.BatchNorm2d(8), nn.GELU(), nn.AvgPool2d(2), nn.GroupNorm(2, 8)).to(dtype)
    assert (verification := verified(model, X.to(dtype), after=converted(model, preserve=True))), str(verification)


def test_the_callers_autocast_region_holds_for_every_layer():
    model = sequence(nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        verification = verified(model, after=converted(model, preserve=True))
    assert verification, str(verification)
    largest = {row.what: row for row in verification.rows if row.path == "2"}["output"]
    assert largest.tolerance > 1e-2 * largest.largest


def test_a_difference_of_rounding_errors_is_compared_with_a_noise_floor():
    cancelling = Function(lambda x: (x + 1e6).sum((2, 3)) - 1e6 * x[0, 0].numel())
    verification = verified(sequence(cancelling), rtol=1e-9)
    row = next(row for row in verification.rows if row.path == "1" and row.what == "output")
    assert row.verdict is Verdict.EQUAL
    assert row.floor > 1e-3


class Huge(torch.autograd.Function):
    """The identity, whose gradient is as wrong as memory that nobody wrote, but for float64."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.dtype == torch.float64 else torch.full_like(grad, 1e15)


class WrongConv2d(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, Huge.apply(weight), bias)


def test_a_wrong_reference_does_not_judge_a_right_model():
    before = sequence(nn.ReLU(), WrongConv2d(8, 8, 3))
    right = converted(before)
    right[2].__class__ = nn.Conv2d
    verification = verified(before, after=right)
    assert verification, str(verification)
    (row,) = [row for row in verification.rows if row.is_reference_wrong and row.path]
    assert (row.path, row.what, row.verdict) == ("2", "gradient of weight", Verdict.EQUAL)
    assert row.error <= row.tolerance < 1 < row.reference_error
    assert "2, the model itself: the reference itself is plainly wrong here" in one_line(verification)
    assert ("2", "gradient of weight") in differing(verified(before, after=converted(before)))


def test_every_row_has_the_error_of_the_reference_where_float64_is_affordable():
    rows = verified(sequence(nn.ReLU(), nn.Conv2d(8, 8, 3))).rows
    computed = [row for row in rows if row.inputs]
    assert computed
    assert all(0 <= row.reference_error <= row.tolerance and not row.is_reference_wrong for row in computed)
    random = verified(sequence(nn.Dropout())).rows
    assert {row.reference_error for row in random if row.path == "1"} == {None}


def test_the_callers_tolerances_hold_for_everything_but_parameters():
    model = sequence(nn.Conv2d(8, 8, 3))
    after = converted(model)
    with torch.no_grad():
        after[1].bias += 0.01
    assert not verified(model, after=after)
    assert differing(allowed := verified(model, after=after, atol=0.1)) == {("1", "bias")}
    assert len(allowed.differing) == 1


class TestResult:
    def test_json_has_every_row_and_no_words_of_its_own_for_infinity(self):
        def reject(constant):
            raise AssertionError(constant)

        verification = verified(Functions(lambda x: x.view(-1, 8, 4, 4)))
        assert verification.first.error == math.inf
        read = json.loads(verification.to_json(), parse_constant=reject)
        assert [row["what"] for row in read["rows"]] == [row.what for row in verification.rows]
        assert {row["verdict"] for row in read["rows"]} == {"EQUAL", "DIFFERS"}
        assert Verification.from_json(verification.to_json()) == verification

    def test_text_fits_a_terminal_of_80_columns(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        text = str(verified(sequence(ScrambledInput(), nn.GroupNorm(2, 8)), backward=False))
        assert max(map(len, text.splitlines())) <= 80
        assert "first '1' (ScrambledInput): output" in " ".join(text.split())
        assert str(verified(sequence())).endswith("nothing differs\n")


class TestErrors:
    @pytest.mark.parametrize(
        ("after", "message"),
        [
            (sequence().eval(), "the same module '1': evaluation in one, absent in the other"),
            (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), r"the same parameter '0\.weight': \(8, 3, 3, 3\)"),
            (sequence(nn.ReLU()), "the same module '': evaluation in one, training in the other"),
            (sequence(nn.ReLU()).eval().requires_grad_(False), "requires_grad=True in one, .*=False in the other"),
            (nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()), r"'0\.weight' has no values yet"),
        ],
        ids=["modules", "shapes", "modes", "frozen", "lazy"],
    )
    def test_models_that_cannot_be_compared_are_refused(self, after, message):
        with pytest.raises(ValueError, match=message):
            nhwc.verify(sequence(nn.ReLU()).eval(), after, X)

    def test_arguments_that_are_no_two_models_are_refused(self):
        model = sequence(nn.ReLU())
        with pytest.raises(ValueError, match="before and after are the same model"):
            nhwc.verify(model, model, X)
        with pytest.raises(TypeError, match="expected two modules, or a module and a report, got str"):
            nhwc.verify(model, "model", X)
        report = nhwc.convert_(copy.deepcopy(model))
        with pytest.raises(ValueError, match="the model of the report no longer exists"):
            nhwc.verify(model, report, X)

    def test_what_the_reference_raises_is_raised(self):
        with pytest.raises(RuntimeError, match="expected input"):
            verified(sequence(), torch.randn(2, 5, 8, 8))


Pair = namedtuple("Pair", "first second")


class Unknown(OrderedDict):
    """A subclass that pytree does not know."""


class Registered(OrderedDict):
    """As the outputs of diffusers' models are registered, without names for its children."""


pytree.register_pytree_node(
    Registered, lambda each: (list(each.values()), list(each)), lambda values, keys: Registered(zip(keys, values))
)


def model_output(y):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda y: (y, [y, 1]), ["output[0]", "output[1][0]"]),
        (lambda y: {"a": {"b": deque([y])}}, ["output.a.b[0]"]),
        (lambda y: Pair(1, y), ["output.second"]),
        (lambda y: Output(y, {"key": y}), ["output.image", "output.rest.key"]),
        (lambda y: UserDict(a=y), ["output.a"]),
        (lambda y: Unknown(a=[y]), ["output.a[0]"]),
        (lambda y: Registered(sample=y, hidden=[y]), ["output.sample", "output.hidden[0]"]),
        (model_output, ["output.last_hidden_state"]),
        (lambda y: y.max(1), ["output[0]", "output[1]"]),
    ],
)
def test_the_tensors_of_an_output_are_named_whatever_holds_them(make, names):
    rows = verified(nn.Sequential(nn.Conv2d(3, 8, 3), Function(make))).rows
    assert [row.what for row in rows if not row.path and row.what.startswith("output")] == names
