"""What every test shares: the devices, and a compile cache that no earlier build of the library has filled."""

import os
import tempfile

import pytest

# Inductor's cache on disk does not see our library: after a rebuild it would serve the code of the old one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_nhwc_inductor_")

import torch

# Convolutions are compared with each other as float32, which TensorFloat-32 is not.
torch.backends.cudnn.allow_tf32 = False

REQUIRE_GPU = os.environ.get("TORCH_NHWC_REQUIRE_GPU") == "1"


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available() or REQUIRE_GPU:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Every device that the library has code for."""
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
