"""Traces, plans, reports, tunings and verifications as pages."""

import copy
import html
import re

import pytest
import torch
from browser import opened_in_browser
from torch import nn

import torch_nhwc as nhwc


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Softmax2d()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), Block(), nn.Conv2d(8, 4, 1), nn.Flatten())


X = torch.zeros(2, 3, 8, 8)


def traced():
    network = model()
    with nhwc.channels_last(network), nhwc.trace(network) as trace:
        network(X)
    return trace


def tuned():
    return nhwc.tune(model(), X, budget_seconds=0.1)


def verified():
    network = model()
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[2].weight.zero_()
    return nhwc.verify(network, other, X, backward=False)


def steps_of(path):
    """The paths and formats on the ribbon."""
    text = path.read_text()
    found = (re.findall(rf'{name}="([^"]*)"', text) for name in ("data-path", "data-format"))
    return list(zip(*(map(html.unescape, each) for each in found)))


def cells_of(path):
    return [html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", path.read_text())]


def test_a_trace_has_the_modules_that_ran_and_where_it_lost(tmp_path):
    trace, path = traced(), tmp_path / "trace.html"
    trace.html(path)
    assert steps_of(path) == [
        ("0", "channels-last"),
        ("1.layers.0", "channels-last"),
        ("1.layers.1", "contiguous"),
        ("2", "channels-last"),
        ("3", "no images or volumes"),
    ]
    text = path.read_text()
    assert "<title>Trace of Sequential</title>" in text
    assert "2 losses of 1.5 kB, 1 mixed convolution." in text
    labels = re.findall(r'aria-label="([^"]*(?:loses|mixed)[^"]*)"', text)
    assert labels == [
        "0, Conv2d, channels-last, mixed",
        "1.layers.1, Softmax2d, contiguous, loses channels-last",
        "3, Flatten, no images or volumes, loses channels-last",
    ]
    cells = cells_of(path)
    assert "exchanged by preserve=True" in cells
    (mixed,) = trace.mixed
    assert f"{mixed.bytes:,}" in cells
    nhwc.Trace.from_json(trace.to_json()).html(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_a_plan_has_weights_and_layers_in_the_formats_to_come(tmp_path):
    network, path = model(), str(tmp_path / "plan.html")
    plan = nhwc.plan(network, preserve=True, filter_fn=lambda module, name: name != "1.layers.0")
    plan.html(path)
    assert steps_of(tmp_path / "plan.html") == [
        ("0.weight", "channels-last"),
        ("1.layers.0.weight", "contiguous"),
        ("2.weight", "channels-last"),
        ("1.layers.1", "channels-last"),
    ]
    cells = cells_of(tmp_path / "plan.html")
    assert cells[:7] == ["0.weight", "Conv2d", "8x3x3x3", "float32", "convert", "864", ""]
    assert f"FILTERED: {nhwc.Reason.FILTERED.value}" in cells


def test_a_report_says_what_was_done(tmp_path):
    network, path = model(), tmp_path / "report.html"
    entry = nhwc.EntryRow("1.layers.1", "contiguous_format", is_shared=False)
    plan = nhwc.plan(network)
    plan = nhwc.Plan(plan.rows, plan.memory_format, entries=(entry,))
    nhwc.convert_(network, plan=plan).html(path)
    assert [step for step, _ in steps_of(path)] == ["0.weight", "1.layers.0.weight", "2.weight"]
    assert "in place" in cells_of(path)
    assert cells_of(path)[-2:] == ["1.layers.1", "contiguous_format"]
    assert "Moved: 2 in place." in path.read_text()


def test_a_tuning_has_candidates_and_its_plan(tmp_path):
    tuning, path = tuned(), tmp_path / "tuning.html"
    tuning.html(path)
    assert [step for step, _ in steps_of(path)] == [row.full_name for row in tuning.plan.rows]
    names = [f"{row.name} (chosen)" if row.name == tuning.choice else row.name for row in tuning.table]
    cells = cells_of(path)
    assert [cell for cell in cells if cell in names] == names
    assert all(note in html.unescape(path.read_text()) for note in tuning.notes)


def test_a_verification_has_a_row_for_every_comparison(tmp_path):
    verification, path = verified(), tmp_path / "verification.html"
    verification.html(path)
    assert " differ, first '2' (Conv2d): weight" in html.unescape(path.read_text())
    cells = cells_of(path)
    assert [cell for cell in cells if cell in ("equal", "differs")] == [row.verdict for row in verification.rows]
    assert cells[:3] == ["the model", "Sequential", "input of '0'"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("made", [traced, lambda: nhwc.plan(model(), preserve=True), tuned, verified])
def test_they_open_in_a_browser(made, tmp_path):
    path = tmp_path / "page.html"
    made().html(path)
    assert "rows</output>" in opened_in_browser(path)
