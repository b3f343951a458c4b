"""The error for a framework that is not installed."""

import importlib
import re
import sys

import pytest

# The packages of which a module needs one, and the extra that installs it.
NEEDED = {
    "accelerate": (["accelerate"], "accelerate"),
    "lightning": (["lightning", "pytorch_lightning"], "lightning"),
    "transformers": (["transformers"], "transformers"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_framework_is_named_with_its_extra(name, monkeypatch):
    packages, extra = NEEDED[name]
    for each in [each for each in sys.modules if each.partition(".")[0] in packages]:
        monkeypatch.setitem(sys.modules, each, None)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"torch_nhwc.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"{name} is missing: pip install 'torch_nhwc[{extra}]'")):
        importlib.import_module(f"torch_nhwc.integrations.{name}")
