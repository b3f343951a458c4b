"""The table of operators that keep channels-last is this torch's."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is of torch 2.13")
@pytest.mark.filterwarnings("ignore")
def test_the_docs_have_the_table_that_the_script_writes():
    spec = importlib.util.spec_from_file_location("keeping_operators", ROOT / "tools/keeping_operators.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert f"{tool.BEGIN}{tool.table('cpu')}{tool.END}" in (ROOT / "docs/trace.md").read_text()
