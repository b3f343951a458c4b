"""Fixtures of all tests: devices, one thread, and a compile cache that no earlier build of the library has filled."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Inductor's cache on disk does not see our library: after a rebuild it would serve the code of the old one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_nhwc_inductor_")

# Threads that wait leave their core to others: two tests run at a time, each with as many threads as there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Convolutions are compared with each other as float32, which TensorFloat-32 is not.
torch.backends.cudnn.allow_tf32 = False

LEFT_OUT = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the tests that need a GPU if there is none; test_gpu.py reports how many."""
    config.stash[LEFT_OUT] = []
    if torch.cuda.is_available() or os.environ.get("TORCH_NHWC_REQUIRE_GPU") == "1":
        return
    config.stash[LEFT_OUT] = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=config.stash[LEFT_OUT])
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]


@pytest.fixture
def left_out(request):
    """Return the tests that were deselected because there is no GPU."""
    return request.config.stash[LEFT_OUT]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Run the test on every device that the library has code for."""
    return request.param


@pytest.fixture
def package_copy(tmp_path):
    """Copy the installed package, to break it."""
    import torch_nhwc

    package, ignored = Path(torch_nhwc.__file__).parent, shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(package, tmp_path / "torch_nhwc", ignore=ignored))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, on which small models run fastest, above all on a machine that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """Make a group of this process alone."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_guard():
    """Turn the step guard off, without which a step on state in another layout is wrong."""
    from guarding import unguarded

    with unguarded():
        yield
