"""Open a page in a real browser."""

import os
import shutil
import subprocess

import pytest


def opened_in_browser(path, width=1200, url=None):
    """Return the document of a page, or of a URL, after its scripts have run without a complaint."""
    browser = shutil.which("chromium")
    if browser is None:
        assert os.environ.get("TORCH_NHWC_REQUIRE_BROWSER") != "1", "chromium was promised"
        pytest.skip("chromium is not installed")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--enable-logging=stderr"]
    command = [browser, *flags, f"--user-data-dir={path.with_suffix('.profile')}", "--dump-dom", url or path.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in run.stderr, run.stderr
    return run.stdout
