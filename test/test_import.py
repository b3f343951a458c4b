"""What `import torch_nhwc` gives, and what it does not load."""

import subprocess
import sys

import torch_nhwc

TOOLS = "checkpoint", "cli", "cpp_extension", "data", "integrations", "tracing", "tuning", "verifying"
HEAVY = "expecttest", "jinja2", "networkx", "pandas", "rich", "tqdm", "typer", "torch._dynamo", "torch._inductor"
LATE = """
import sys, torch
before = set(sys.modules)
import torch_nhwc
loaded = set(sys.modules) - before
print(*loaded)
assert callable(torch_nhwc.data.collate) and "torch_nhwc.data" in sys.modules
from torch_nhwc import trace
assert "torch_nhwc.tracing" in sys.modules and "torch_nhwc.tuning" not in sys.modules
"""


def test_there_are_twenty_names_and_dir_shows_them_and_the_modules():
    assert len(torch_nhwc.__all__) == len(set(torch_nhwc.__all__)) == 20
    assert {*torch_nhwc.__all__, "data", "tracing", "training"} <= set(dir(torch_nhwc))
    assert all(hasattr(torch_nhwc, name) for name in dir(torch_nhwc))
    assert not hasattr(torch_nhwc, "collate")


def test_importing_it_after_torch_loads_no_tool_and_nothing_heavy():
    run = subprocess.run([sys.executable, "-c", LATE], check=True, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "torch_nhwc.converting" in loaded
    assert not loaded & {*HEAVY, *(f"torch_nhwc.{tool}" for tool in TOOLS)}
    # With torch everything is loaded that the package needs.
    assert {name.split(".")[0] for name in loaded} == {"torch_nhwc"}


def test_a_name_that_loads_on_first_use_is_the_one_of_its_module():
    assert torch_nhwc.trace is torch_nhwc.tracing.trace
    assert torch_nhwc.convert_saved is torch_nhwc.checkpoint.convert_saved
