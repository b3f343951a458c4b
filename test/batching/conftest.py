"""What the tests of batches share: to pass for a loader's worker process."""

import pytest
from torch.utils.data import _utils


@pytest.fixture(params=[False, True], ids=["main", "worker"])
def in_worker(request, monkeypatch):
    """Whether the process passes for a loader's worker."""
    if request.param:
        info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
        monkeypatch.setattr(_utils.worker, "_worker_info", info)
    return request.param
