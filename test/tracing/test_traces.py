"""Traces as data: printed, written and read, compared, and held to a budget."""

import json

import pytest
import torch
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc


def traced(*layers, batch=2, steps=1):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).to(memory_format=torch.channels_last)
    x = channels_last(torch.randn(batch, 3, 8, 8))
    with nhwc.trace(model) as trace:
        for _ in range(steps):
            model(x).sum().backward()
    return trace


@pytest.fixture(scope="module")
def trace():
    return traced(nn.Softmax2d(), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_a_trace_survives_json(trace):
    read = nhwc.Trace.from_json(trace.to_json())
    assert read == trace
    for name in ("losses", "mixed", "gained", "modules", "reorders", "unseen", "operators"):
        assert getattr(read, name) == getattr(trace, name)
    assert json.loads(trace.to_json())["version"] == 1
    assert read != traced()


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "JSON"), ("[]", "TypeError"), ('{"version": 2}', "version 2"), ('{"version": 1}', "operators")],
)
def test_what_is_no_trace_is_refused(text, why):
    with pytest.raises(ValueError, match=f"expected what Trace.to_json writes.*{why}"):
        nhwc.Trace.from_json(text)


def test_a_changed_row_is_refused(trace):
    described = json.loads(trace.to_json())
    del described["losses"][0]["count"]
    with pytest.raises(ValueError, match=r"expected what Trace.to_json writes.*count"):
        nhwc.Trace.from_json(json.dumps(described))


def test_a_trace_prints_as_tables_that_fit(trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(trace)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Trace: ")
    assert "2 losses of 8.2 kB, 2 mixed convolutions" in " ".join(text.split())
    assert "1 of 2: exchanged by preserve=True" in text
    assert "no loss, " in str(traced())


def test_differences_go_by_path_operator_and_phase():
    plain, losing = traced(), traced(nn.Softmax2d())
    assert not losing.diff(losing)
    assert str(losing.diff(losing)) == "no difference\n"
    assert losing.diff(traced(nn.Softmax2d(), batch=3)) == ((), (), ())
    more = traced(nn.Softmax2d(), steps=2).diff(losing)
    assert not more
    assert {(before.count, now.count) for before, now in more.changed} == {(1, 2)}
    new = losing.diff(plain)
    assert new
    assert [row.path for row in new.new if isinstance(row, nhwc.Loss)] == ["1"]
    assert plain.diff(losing).gone == new.new
    assert "new: _softmax in 1, forward: channels_last -> contiguous" in str(new)


def test_a_budget_names_the_offenders_the_largest_first(trace):
    with pytest.raises(AssertionError) as error:
        nhwc.assert_layout(trace)
    text = str(error.value)
    assert "2 losses of channels-last, 0 are allowed" in text
    assert "_softmax in 1, forward: channels_last -> contiguous 2x8x8x8; 1 time, 4.1 kB, at " in text
    assert "exchanged by preserve=True" in text
    assert "2 mixed convolutions, 0 are allowed" in text
    nhwc.assert_layout(trace, max_losses=2, max_mixed=2)
    nhwc.assert_layout(trace, max_losses=2, max_mixed=2, max_bytes=10**6)
    with pytest.raises(AssertionError, match=r"kB lost channels-last or were copied, 1.0 kB are allowed"):
        nhwc.assert_layout(trace, max_losses=2, max_mixed=2, max_bytes=1000)
    with pytest.raises(AssertionError, match="losses") as error:
        nhwc.assert_layout(trace, max_mixed=2)
    assert "mixed" not in str(error.value)


def test_a_budget_names_ten_at_most():
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.Softmax2d())]
    with pytest.raises(AssertionError, match=r"\.\.\. and 13 more") as error:
        nhwc.assert_layout(traced(*layers), max_mixed=100)
    assert str(error.value).count("_softmax") == 10


def test_names_cannot_steer_the_terminal_and_need_no_encoding(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    model.add_module("\x1b[2J\ud800", nn.Softmax2d())
    with nhwc.trace(model) as trace, torch.no_grad():
        model(channels_last(torch.randn(2, 3, 8, 8)))
    with pytest.raises(AssertionError) as error:
        nhwc.assert_layout(trace)
    for text in (str(trace), str(trace.diff(traced())), str(error.value)):
        assert r"\x1b[2J\ud800" in text
        assert text.replace("\n", "").isprintable()
    assert nhwc.Trace.from_json(trace.to_json()) == trace
    trace.html(tmp_path / "page.html")
    assert r"\ud800" in (tmp_path / "page.html").read_text()


def test_what_is_no_module_or_no_trace_is_refused():
    with pytest.raises(TypeError, match=r"trace: expected a torch\.nn\.Module, got function"), nhwc.trace(lambda x: x):
        pass
    with pytest.raises(TypeError, match=r"assert_layout: expected a Trace, got Conv2d: run it under `with trace"):
        nhwc.assert_layout(nn.Conv2d(3, 4, 3))
