"""The page: what it shows, that nothing of a model gets out of its text, and that it works in a browser."""

import html
import json
import re
from pathlib import Path

import pytest
from browser import opened_in_browser

from torch_nhwc.page.content import Page, Step, Table
from torch_nhwc.page.rendering import render, write

HOSTILE = "</script><script>document.title='broken'</script>\"' onload=x <img src=http://example.invalid/x>"


def page(name="encoder.0"):
    steps = [
        Step(name, "Conv2d", "channels_last", details=[f"written by {name}"]),
        Step("norm", "GroupNorm", "contiguous", losses=2),
        Step("head", name, "", mixed=1),
        Step("", "Net", "blocked"),
    ]
    losses = Table("Losses", ["path", "bytes", name], [[f"a {name}", 200, 0.5], ["b", 1000, 0.25], ["c", 30, 12.0]])
    return Page(f"Trace of {name}", [f"3 of {name}"], steps, [losses, Table("None", ["path"], [])])


def test_modules_and_rows_are_on_it_in_order():
    text = render(page())
    assert re.findall(r'data-path="([^"]*)"', text) == ["encoder.0", "norm", "head", ""]
    assert re.findall(r'data-format="([^"]*)"', text)[3] == "blocked"
    assert [cell for cell in re.findall(r"<td[^>]*>([^<]*)</td>", text)][:6] == [
        "a encoder.0",
        "200",
        "0.5",
        "b",
        "1,000",
        "0.25",
    ]
    assert text.count('<rect class="other"') == 2  # the module, and the legend


def test_nothing_is_fetched():
    text = render(page())
    assert not re.search(r"https?:|@import|url\(", text.replace("http-equiv", ""))
    assert "default-src 'none'" in text


def test_what_comes_from_a_model_is_text():
    text = render(page(HOSTILE))
    assert "<img" not in text
    assert text.count("<script>") == 1
    assert "onload=x" in re.sub(r"<[^>]*>", "", text)


def fail(*arguments):
    raise OSError("the disk is full")


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write(page(), path)
    monkeypatch.undo()
    assert path.read_text() == "before"
    write(page(), path)
    assert path.read_text() == render(page())
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_without_jinja2_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'torch_nhwc\[page\]'"):
        render(page())


# What a person would do, and what is seen then.
PERSON = """{
const seen = {}, section = document.querySelector("section"), body = section.querySelector("tbody");
const cells = (column) => [...body.rows].filter((row) => !row.hidden).map((row) => row.cells[column].textContent);
const heads = [...section.querySelectorAll("th button")];
heads[1].click(); seen.up = cells(1);
heads[1].click(); seen.down = cells(1);
heads[0].click(); seen.names = cells(0).slice(1);
const input = section.querySelector("input");
input.value = "12"; input.dispatchEvent(new Event("input")); seen.filtered = cells(0);
seen.count = section.querySelector("output").value;
input.value = ""; input.dispatchEvent(new Event("input")); seen.all = cells(0).length;
const steps = [...document.querySelectorAll(".step")];
steps[0].dispatchEvent(new PointerEvent("pointerenter")); seen.hovered = document.getElementById("details").textContent;
steps[1].click(); steps[0].dispatchEvent(new PointerEvent("pointerleave"));
seen.pinned = document.getElementById("details").textContent;
const back = () => getComputedStyle(document.body).backgroundColor, before = back();
document.getElementById("theme").click(); seen.toggled = back() !== before;
seen.title = document.title;
seen.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.body.dataset.seen = JSON.stringify(seen);
}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [400, 1200], ids=["phone", "laptop"])
@pytest.mark.parametrize("name", ["encoder.0", HOSTILE], ids=["plain", "hostile"])
def test_it_works_in_a_browser(name, width, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render(page(name)).replace("</body>", f"<script>{PERSON}</script></body>"))
    (seen,) = re.findall(r'data-seen="([^"]*)"', opened_in_browser(path, width))
    seen = json.loads(html.unescape(seen))
    assert seen == {
        "up": ["30", "200", "1,000"],
        "down": ["1,000", "200", "30"],
        "names": ["b", "c"],
        "filtered": ["c"],
        "count": "1 of 3 rows",
        "all": 3,
        "hovered": f"{name}Conv2d, channels-lastwritten by {name}",
        "pinned": "normGroupNorm, contiguous",
        "toggled": True,
        "title": f"Trace of {name}",
        "wide": True,
    }
