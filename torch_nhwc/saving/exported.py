"""Exported programs, in the archives that torch.export.save writes (.pt2)."""

from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch import nn

from torch_nhwc.converting.report import Report
from torch_nhwc.finding.exported import module_for
from torch_nhwc.saving.files import Kind, expect_trusted, open_archive, reading

# The records that torch.export reads, and writes again.
_KNOWN = (
    *("archive_format", "archive_version", "byteorder", "version", ".data/", "extra/", "models/"),
    *("data/weights/", "data/constants/", "data/sample_inputs/"),
)
_COMPILED = "data/aotinductor/"
_RUNS = (
    "torch.export.load evaluates expressions and compiles a graph that are text in the file, and unpickles what "
    "weights_only refuses"
)


def convert_programs(path: Path, output: IO[bytes], allow_pickle: bool, convert: Callable[..., Report]) -> Report:
    """Converts what is in one file into another.

    Args:
        path: of the file to read.
        output: what to write to.
        allow_pickle: whether to load a program at all, which can run any code.
        convert: called with the program, or a module of several.
    """
    for name in open_archive(path)[1]:
        if name.startswith(_COMPILED):
            raise ValueError(f"{path}: it is compiled, with its weights in the code: convert the program before that")
        if not name.startswith(_KNOWN):
            raise ValueError(f"{path}: torch.export does not know {name!r} in it, and would lose it")
    expect_trusted(path, allow_pickle, _RUNS)
    from torch.export.pt2_archive._package import load_pt2, package_pt2  # which import the compiler, for a second

    with reading(path, Kind.EXPORTED.value), open(path, "rb") as file:
        contents = load_pt2(file)
    programs = contents.exported_programs
    root = nn.Module()
    root._modules.update({name: module_for(program) for name, program in programs.items()})
    report = convert(root._modules["model"] if [*programs] == ["model"] else root)
    package_pt2(output, exported_programs=programs, extra_files=contents.extra_files)
    return report
