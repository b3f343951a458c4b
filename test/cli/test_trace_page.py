"""The page of a trace: its content, names of a model as plain text, and use in a browser."""

import html
import json
import re

import pytest
import torch
from browser import opened_in_browser
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.cli.trace_page import page_of
from torch_nhwc.tracing import Trace

HOSTILE = "</script><script>document.title='broken'</script>\"' onload=x <img src=http://example.invalid/x>"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Softmax2d()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def trace():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), nn.Conv2d(8, 4, 1), nn.Flatten())
    with nhwc.channels_last(model, preserve=False), nhwc.trace(model) as trace:
        model(torch.zeros(2, 3, 8, 8))
    return trace


def hostile(trace):
    """Return the trace with a hostile name for the first layer and that layer's class."""
    changed = Trace.from_json(trace.to_json())
    changed.modules[1].path = changed.mixed[0].path = changed.losses[0].path = HOSTILE
    changed.modules[0].layer = changed.modules[1].layer = changed.losses[0].advice = HOSTILE
    return changed


def bars_of(text):
    """Return the paths and formats of the bars."""
    found = (re.findall(rf'{name}="([^"]*)"', text) for name in ("data-path", "data-format"))
    return list(zip(*(map(html.unescape, each) for each in found)))


def test_the_modules_that_ran_are_bars_in_their_order(trace):
    text = page_of(trace)
    assert bars_of(text) == [
        ("0", "channels-last"),
        ("1.layers.0", "channels-last"),
        ("1.layers.1", "contiguous"),
        ("2", "channels-last"),
        ("3", "no images or volumes"),
    ]
    assert re.findall(r'aria-label="([^"]*(?:loses|mixed)[^"]*)"', text) == [
        "0, Conv2d, channels-last, mixed",
        "1.layers.1, Softmax2d, contiguous, loses channels-last",
        "3, Flatten, no images or volumes, loses channels-last",
    ]


def test_losses_and_mixed_convolutions_are_in_tables(trace):
    text = page_of(trace)
    assert "<title>Trace of Sequential</title>" in text
    assert "2 losses of 1.5 kB, 1 mixed convolution." in text
    cells = [html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", text)]
    assert "replaced by preserve=True" in cells
    assert f"{trace.losses[0].bytes:,}" in cells
    assert f"{trace.mixed[0].bytes:,}" in cells
    assert page_of(Trace.from_json(trace.to_json())) == text


def test_the_verdict_is_first_and_names_are_text(trace):
    text = page_of(trace)
    first = html.unescape(re.search(r"<p[^>]*>([^<]*)</p>", text)[1])
    assert first == "Channels-last in 3 of 4 modules, and not from 1.layers.1 on."
    names = re.findall(r"</span>([^<]*)</button>", text)
    assert names == [path for path, _ in bars_of(text)]


def test_there_is_no_empty_table_and_one_cause_is_a_sentence():
    model = nn.Sequential(nn.Conv3d(1, 8, 3, stride=2), nn.Conv3d(8, 8, 3), nn.Conv3d(8, 8, 3))
    nhwc.convert_(model, input_format="channels_last", preserve=False)
    with nhwc.trace(model) as trace:
        model(torch.randn(1, 1, 17, 17, 17))
    text = page_of(trace)
    assert len(trace.mixed) == 2
    assert "<table" not in text
    assert "The input has one channel and stayed contiguous; from 1 on each convolution copies" in text


def test_nothing_is_fetched(trace):
    text = page_of(trace)
    assert not re.search(r"https?:|@import|url\(", text.replace("http-equiv", ""))
    assert "default-src 'none'" in text


def test_what_comes_from_a_model_is_text(trace):
    text = page_of(hostile(trace))
    assert "<img" not in text
    assert text.count("<script>") == 1
    assert "onload=x" in re.sub(r"<[^>]*>", "", text)


# A person's actions, and what the page shows after them.
PERSON = """{
const seen = {}, body = document.querySelector("tbody");
const cells = (column) => [...body.rows].map((row) => row.cells[column].textContent);
const heads = [...document.querySelector("table").querySelectorAll("th button")];
heads[5].click(); seen.up = cells(5);
heads[5].click(); seen.down = cells(5);
heads[1].click(); seen.names = cells(1);
const bars = [...document.querySelectorAll("button.bar")], details = document.getElementById("details");
bars[0].dispatchEvent(new PointerEvent("pointerenter")); seen.hovered = details.firstChild.textContent;
bars[2].click(); seen.tapped = details.textContent.startsWith("1.layers.1Softmax2d, contiguous");
seen.pressed = bars.map((bar) => bar.getAttribute("aria-pressed"));
seen.title = document.title;
seen.fits = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.body.dataset.seen = JSON.stringify(seen);
}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [400, 1200], ids=["phone", "laptop"])
def test_it_works_in_a_browser(trace, width, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(hostile(trace)).replace("</body>", f"<script>{PERSON}</script></body>"))
    (seen,) = re.findall(r'data-seen="([^"]*)"', opened_in_browser(path, width))
    sizes = sorted(row.bytes for row in trace.losses)
    assert json.loads(html.unescape(seen)) == {
        "up": [f"{size:,}" for size in sizes],
        "down": [f"{size:,}" for size in reversed(sizes)],
        "names": sorted(row.operator for row in trace.losses),
        "hovered": HOSTILE,
        "tapped": True,
        "pressed": ["false", "false", "true", "false", "false"],
        "title": f"Trace of {HOSTILE}",
        "fits": True,
    }
