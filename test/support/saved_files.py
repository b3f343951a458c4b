"""A model to save, and saved models in a process without torch_nhwc."""

import io
import json
import os
import subprocess
import sys

import torch
from torch import nn

STRIDES = (27, 1, 9, 3)

# The strides of its weights, by name, without the transposed one.
SITES = {"first.weight": STRIDES, "grouped.weight": (18, 1, 6, 2), "volume.weight": (54, 1, 18, 6, 2)}


class Network(nn.Module):
    """Convolutions of both ranks, transposed and grouped ones, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.grouped, self.volume = nn.Conv2d(4, 4, 3, groups=2), nn.Conv3d(2, 2, 3, padding=1)
        self.last, self.head = nn.ConvTranspose2d(4, 2, 2), nn.Linear(2, 3)

    def forward(self, x):
        y = self.grouped(torch.relu(self.norm(self.first(x))))
        y = y + self.volume(y.unflatten(1, (2, 2))).flatten(1, 2)
        return self.head(self.last(y).mean((2, 3)))


def saved_and_loaded(module):
    """Return a module that was saved, as an archive if it is one of TorchScript, and loaded."""
    file = io.BytesIO()
    if isinstance(module, torch.jit.ScriptModule):
        torch.jit.save(module, file)
    else:
        torch.save(module, file)
    file.seek(0)
    return torch.jit.load(file) if isinstance(module, torch.jit.ScriptModule) else torch.load(file, weights_only=False)


_ELSEWHERE = """
import json, sys, torch
for path, expected in json.load(open("files.json")).items():
    x, y, strides = torch.load(expected)
    load = {"archive": torch.jit.load, "program": lambda path: torch.export.load(path).module()}
    model = load[expected.split("-")[0]](path)
    torch.testing.assert_close(model(x), y)
    own = model.state_dict()
    assert all(own[name].stride() == wanted for name, wanted in strides.items()), path
assert not any(name.startswith("torch_nhwc") for name in sys.modules)
"""


def assert_run_elsewhere(folder, expected):
    """Check outputs and strides of files in a process that cannot import torch_nhwc.

    Args:
        folder: The folder of the files.
        expected: For each file name, its kind, the input, the output, and the strides of weights by name.
    """
    names = {}
    for index, (name, (kind, *rest)) in enumerate(expected.items()):
        torch.save(rest, folder / f"{kind}-{index}.expected")
        names[name] = f"{kind}-{index}.expected"
    (folder / "files.json").write_text(json.dumps(names))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", _ELSEWHERE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=environment)
    assert done.returncode == 0, done.stderr
