"""TorchScript archives: scripted, traced or frozen modules."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from torch_nhwc.converting.report import Report
from torch_nhwc.planning.request import Request
from torch_nhwc.saving.files import Kind, expect_trusted, open_archive, reading
from torch_nhwc.saving.script_inputs import bring_inputs

_EXTRA = "extra/"
# By a record that it has, what would come out as something else.
_OTHERS = {
    "bytecode.pkl": "it is for the lite interpreter, whose bytecode would be lost: convert the module before that",
    "model.json": "it is of PyTorch 1.1 or older: save it again by a later one",
}


def convert_archive(
    path: Path, output: IO[bytes], request: Request, allow_pickle: bool, convert: Callable[..., Report]
) -> Report:
    """Converts what is in one file into another.

    Args:
        path: of the file to read.
        output: what to write to.
        request: what is asked for; a format of the inputs is brought about by code in the archive.
        allow_pickle: whether to load classes that run code of their own on being loaded.
        convert: called with the model.
    """
    archive, names = open_archive(path)
    with reading(path, Kind.TORCHSCRIPT.value):
        # Torch finds a record whatever the case of its name.
        code = [archive.get_record(name) for name in names if name.lower().startswith("code/")]
    for name, why in _OTHERS.items():
        if name in map(str.lower, names):
            raise ValueError(f"{path}: {why}")
    if any(b"__setstate__" in each for each in code):
        expect_trusted(path, allow_pickle, "classes in it have a __setstate__, which runs as they are loaded")
    extra = {name.removeprefix(_EXTRA): "" for name in names if name.startswith(_EXTRA)}
    with reading(path, Kind.TORCHSCRIPT.value):
        if not allow_pickle:
            _rehearse(path)
        model = load_archive(path, extra)
    report = convert(model)
    if request.input_format:
        remark = bring_inputs(model, report.rows, request)
        report = replace(report, remarks=(*report.remarks, remark))
    torch.jit.save(model, output, _extra_files=extra)  # type: ignore[no-untyped-call, unused-ignore]
    return report


def load_archive(path: Path, extra: dict[str, str] | None = None, map_location: str | None = None) -> Any:
    """A model, all of it: torch puts off code, constants, and where code came from, until it is asked for them."""
    model: Any = torch.jit.load(path, map_location, extra)  # type: ignore[no-untyped-call, unused-ignore]
    modules = [module._c for module in model.modules()]
    for graph in (each._get_method(name).graph.copy() for each in modules for name in each._method_names()):
        torch._C._jit_pass_inline(graph)
        str(graph)
    return model


# With the path that modules are imported from, and that of an archive.
_LOAD = """
import sys
sys.path[:] = {!r}
from torch_nhwc.saving.archives import load_archive
load_archive({!r}, map_location="cpu")
"""


def _rehearse(path: Path) -> None:
    """Has an archive loaded elsewhere first: torch goes by numbers in it unchecked, and reads beyond its memory.

    Raises:
        RuntimeError: that ends a process. Any other error comes again as the archive is loaded here.
    """
    if not sys.executable:
        raise RuntimeError("no Python is known to try it in: if you trust the file, allow_pickle=True loads it")
    code = _load_elsewhere(path)
    if code < 0:
        raise RuntimeError(f"it ends the process that loads it, by {signal.Signals(-code).name}")


def _load_elsewhere(path: Path) -> int:
    """The return code of a process that loads an archive; of a signal, the negative."""
    command = [sys.executable, "-c", _LOAD.format(sys.path, str(path))]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
