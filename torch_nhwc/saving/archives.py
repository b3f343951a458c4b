"""TorchScript archives: scripted, traced or frozen modules."""

import io
import json
import os
import pickle
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
        for folder in ("data", "constants"):
            _Storages(archive, folder).load()
        if not allow_pickle:
            _rehearse(path)
        model = load_archive(path, extra)
    report = convert(model)
    if request.input_format:
        remark = bring_inputs(model, report.rows, request)
        report = replace(report, remarks=(*report.remarks, remark))
    torch.jit.save(model, output, _extra_files=extra)  # type: ignore[no-untyped-call, unused-ignore]
    return report


class _Inert:
    """Stands for whatever is in an archive, and takes all that unpickling does to it."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def take(self, *arguments: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = take


class _Storages(pickle.Unpickler):
    """Reads which storages an archive has, and nothing else: torch does not compare their sizes with its records."""

    def __init__(self, archive: Any, folder: str) -> None:
        super().__init__(io.BytesIO(archive.get_record(f"{folder}.pkl")))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        return _dtype_of(name) if module == "torch" and name.endswith("Storage") else _Inert

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, count = pid
        record = f"{self._folder}/{key}"
        size = len(self._archive.get_record(record))
        if not 0 <= count * dtype.itemsize <= size:
            raise ValueError(f"the record {record!r} has {size} bytes, and is taken for {count} of {dtype}")
        return _Inert()


def _dtype_of(storage: str) -> torch.dtype:
    """The type of a storage's elements, by the name that it has in an archive."""
    name = storage.removesuffix("Storage").lower()
    names = torch.storage._storage_type_to_dtype_map()  # type: ignore[no-untyped-call, unused-ignore]
    found = {"complexhalf": torch.complex32}.get(name) or names.get(storage) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it has elements of a type that is not known, {storage}")
    return found


def load_archive(path: Path, extra: dict[str, str] | None = None, map_location: str | None = None) -> Any:
    """A model, all of it: torch puts off code, constants, and where code came from, until it is asked for them."""
    model: Any = torch.jit.load(path, map_location, extra)  # type: ignore[no-untyped-call, unused-ignore]
    modules = [module._c for module in model.modules()]
    for graph in (each._get_method(name).graph.copy() for each in modules for name in each._method_names()):
        torch._C._jit_pass_inline(graph)
        str(graph)
    return model


# Reads, from its input, the path that modules are imported from and that of an archive. Its last line says what came.
_LOAD = """
import json, os, sys
sys.path[:], path = json.load(sys.stdin)
from torch_nhwc.saving.archives import load_archive
try:
    load_archive(path, map_location="cpu")
    said = ["loaded", ""]
except Exception as error:
    said = ["refused", str(error) or type(error).__name__]
print(json.dumps(said), flush=True)
os._exit(0)  # whatever other packages do at the end
"""
_TRUST = "if you trust the file, allow_pickle=True loads it"


def _rehearse(path: Path) -> None:
    """Has an archive loaded elsewhere first: torch goes by numbers in it unchecked, and reads beyond its memory.

    Raises:
        RuntimeError: it cannot be loaded there, or ends the process.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # an application would start itself
        raise RuntimeError(f"no Python is known to try it in: {_TRUST}")
    answer, why = _load_elsewhere(path)
    if answer != "loaded":
        raise RuntimeError(why)


def _load_elsewhere(path: Path) -> tuple[str, str]:
    """Whether an archive was loaded in a process of its own, and why it was not."""
    folders = [os.fspath(each) for each in sys.path if isinstance(each, (str, os.PathLike))]
    command = [sys.executable, "-I", "-W", "ignore", "-c", _LOAD]
    try:
        done = subprocess.run(
            command, input=json.dumps([folders, str(path)]), capture_output=True, text=True, check=False
        )
        answer, why = json.loads(done.stdout.splitlines()[-1])
        return answer, why
    except OSError as error:
        ended = str(error)
    except (ValueError, IndexError):
        ended = f"exit status {done.returncode}"
        if done.returncode < 0:
            return "ended", f"it ends the process that loads it, by {signal.Signals(-done.returncode).name}"
    return "untried", f"it could not be tried in a process of its own ({ended}): {_TRUST}"
