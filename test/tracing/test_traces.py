"""Traces as data: printed, written and read, and held to a budget."""

import pytest
import torch
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tracing import Trace, assert_layout


def traced(*layers):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).to(memory_format=torch.channels_last)
    x = channels_last(torch.randn(2, 3, 8, 8))
    with nhwc.trace(model) as trace:
        model(x).sum().backward()
    return trace


@pytest.fixture(scope="module")
def trace():
    return traced(nn.Softmax2d(), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_a_trace_survives_json(trace):
    read = Trace.from_json(trace.to_json())
    assert read == trace
    assert type(read.losses[0]) is type(trace.losses[0])
    assert read != traced()


def test_a_trace_prints_as_tables_that_fit(trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(trace)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Trace: ")
    assert "2 losses of 8.2 kB, 2 mixed convolutions" in " ".join(text.split())
    assert "1 of 2: replaced by preserve=True" in text
    assert "no loss, no mixed convolution" in " ".join(str(traced()).split())
    assert "nothing is traced yet: `with torch_nhwc.trace(model)" in str(nhwc.trace(nn.Conv2d(3, 4, 3)))
    with nhwc.trace(nn.Conv2d(3, 4, 3)) as nothing:
        pass
    assert "nothing ran: call the model inside of the block of `with`" in str(nothing)


class Images(nn.Module):
    """Returns images in a format, or something else."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name in ("channels_last", "contiguous_format"):
            return x.contiguous(memory_format=getattr(torch, self.name))
        return x[:, :, :1, :1] if self.name == "one pixel" else x.flatten(1)


LAST, FIRST = "channels_last", "contiguous_format"


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        ([LAST, LAST, "one pixel", "vector"], "channels-last throughout: 3 modules"),
        ([FIRST, FIRST], "contiguous from 0 on: 2 of 2 modules"),
        ([LAST, FIRST, FIRST, "one pixel"], "contiguous from 1 on: 2 of 4 modules"),
        ([FIRST, LAST, LAST], "channels-last in 2 of 3 modules, and not from 0 on"),
        ([LAST, FIRST, LAST], "channels-last in 2 of 3 modules, and not from 1 on"),
        (["vector"], ""),
    ],
)
def test_a_verdict_says_where_modules_wrote_channels_last(names, verdict):
    model = nn.Sequential(*map(Images, names))
    with nhwc.trace(model) as trace:
        x = torch.randn(2, 3, 8, 8)
        for layer in model:
            x = layer(x if x.dim() == 4 else torch.randn(2, 3, 8, 8))
    if "one pixel" not in names or FIRST not in names:
        trace.losses = trace.gained = ()
    assert trace.verdict() == verdict


def segmenting(channels):
    layers = nn.Conv3d(channels, 8, 3, stride=2), nn.Conv3d(8, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3)
    return nn.Sequential(*layers), torch.randn(1, channels, 17, 17, 17)


@pytest.mark.parametrize(
    ("channels", "options", "cause"),
    [
        (1, {"input_format": "channels_last"}, "the input has one channel and stayed contiguous; from 1 on each "),
        (3, {}, "the input stayed contiguous; from 0 on each convolution copies"),
        (3, {"input_format": "channels_last"}, ""),
    ],
)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_one_cause_of_all_mixed_convolutions_is_said_once(channels, options, cause, mode):
    model, x = segmenting(channels)
    nhwc.convert_(model, preserve=False, **options)
    with nhwc.trace(model) as trace, torch.set_grad_enabled(mode == "training"):
        y = model(x)
        if mode == "training":
            y.sum().backward()
    assert trace.mixed_cause().startswith(cause)
    assert bool(trace.mixed_cause()) == bool(cause)
    text = " ".join(str(trace).split())
    assert ("mixed convolution operator phase" in text) is (not cause)
    assert text.count("each convolution copies") == bool(cause)


def test_what_a_gain_and_a_loss_cause_is_not_said_of_the_input():
    class Gaining(nn.Module):
        def forward(self, x):
            return x.contiguous(memory_format=torch.channels_last_3d)

    class Losing(nn.Module):
        def forward(self, x):
            return x.contiguous()

    small, x = segmenting(1)
    model = nn.Sequential(*small, Gaining(), Losing(), nn.Conv3d(8, 8, 3))
    nhwc.convert_(model, preserve=False, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(x).sum().backward()
    assert trace.mixed_cause() == "the input has one channel and stayed contiguous; from 1 to 3 each convolution copies"
    assert {row.path for row in trace.mixed_by_others()} == {"6"}
    assert "mixed convolution operator phase" in " ".join(str(trace).split())


def test_a_budget_names_the_largest_first(trace):
    with pytest.raises(AssertionError) as error:
        assert_layout(trace)
    text = str(error.value)
    assert "2 losses of channels-last, 0 are allowed" in text
    assert "_softmax in 1, forward: channels_last -> contiguous 2x8x8x8; 1 time, 4.1 kB, at " in text
    assert "; replaced by preserve=True" in text
    assert "2 mixed convolutions, 0 are allowed" in text
    assert_layout(trace, max_losses=2, max_mixed=2, max_bytes=10**6)
    with pytest.raises(AssertionError, match=r"kB lost channels-last or were copied, 1.0 kB are allowed"):
        assert_layout(trace, max_losses=2, max_mixed=2, max_bytes=1000)
    with pytest.raises(AssertionError, match="losses") as error:
        assert_layout(trace, max_mixed=2)
    assert "mixed" not in str(error.value)


def test_a_budget_names_ten_at_most():
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.Softmax2d())]
    with pytest.raises(AssertionError, match=r"\.\.\. and \d+ more") as error:
        assert_layout(traced(*layers), max_mixed=100)
    assert str(error.value).count(" in ") == 10


def test_names_cannot_steer_the_terminal_and_need_no_encoding():
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    model.add_module("\x1b[2J\ud800", nn.Softmax2d())
    with nhwc.trace(model) as trace, torch.no_grad():
        model(channels_last(torch.randn(2, 3, 8, 8)))
    with pytest.raises(AssertionError) as error:
        assert_layout(trace)
    for text in (str(trace), str(error.value)):
        assert r"\x1b[2J\ud800" in text
        assert text.replace("\n", "").isprintable()
    assert Trace.from_json(trace.to_json()) == trace


def test_what_is_no_module_or_no_trace_is_refused():
    with pytest.raises(TypeError, match=r"trace: expected a torch\.nn\.Module, got function"), nhwc.trace(lambda x: x):
        pass
    with pytest.raises(TypeError, match=r"assert_layout: expected a Trace, got Conv2d: run it in `with trace"):
        assert_layout(nn.Conv2d(3, 4, 3))
