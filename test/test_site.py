"""The site that `make site` builds: all pages and names are there, and nothing comes from elsewhere."""

import functools
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import opened_in_browser
from public_names import public_names

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.exhaustive  # building it takes a quarter of a minute


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.loaded, self.text = set(), set(), []
        self.is_in_paragraph = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.loaded |= {attributes[name] for name in ("src", "srcset", "data") if name in attributes}
        if tag == "link":
            self.loaded.add(attributes["href"])
        self.is_in_paragraph = tag == "p" or (self.is_in_paragraph and tag not in ("ul", "ol", "pre", "table"))

    def handle_endtag(self, tag):
        self.is_in_paragraph = self.is_in_paragraph and tag != "p"

    def handle_data(self, data):
        if self.is_in_paragraph:
            self.text += data.splitlines()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site without a network, and return its folder; a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://localhost:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | nowhere)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_public_name_has_an_entry(site, pages):
    ids = set().union(*(page.ids for path, page in pages.items() if path.parent == site / "reference"))
    assert {f"{module}.{name}" for module, names in public_names().items() for name in names} <= ids


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [each for each in page.loaded if urlsplit(each).netloc], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?http|@import", path.read_text()), path.name


def test_no_markdown_is_left(pages):
    """What GitHub takes for a list or a table, the site may not."""
    for path, page in pages.items():
        assert not [line for line in page.text if line.lstrip().startswith(("- ", "| ", "#", "```", ":::"))], path.name


def test_a_browser_has_nothing_to_complain_of(site, tmp_path):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/reference/torch_nhwc.html"
        try:
            assert 'id="torch_nhwc.convert_"' in opened_in_browser(tmp_path / "page", url=url)
        finally:
            server.shutdown()
