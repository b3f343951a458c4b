"""TorchScript archives: scripted, traced or frozen modules."""

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
        model = torch.jit.load(path, _extra_files=extra)  # type: ignore[no-untyped-call, unused-ignore]
        _read_code(model)
    report = convert(model)
    if request.input_format:
        remark = bring_inputs(model, report.rows, request)
        report = replace(report, remarks=(*report.remarks, remark))
    torch.jit.save(model, output, _extra_files=extra)  # type: ignore[no-untyped-call, unused-ignore]
    return report


def _read_code(model: torch.jit.ScriptModule) -> None:
    """Has torch read what it puts off until it is asked for it: code, constants, and where code came from."""
    modules: list[Any] = [module._c for module in model.modules()]
    for graph in (each._get_method(name).graph.copy() for each in modules for name in each._method_names()):
        torch._C._jit_pass_inline(graph)
        str(graph)
