"""`convert_saved`: a saved model, whatever it was saved as, into another file of its kind."""

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.planning.planner import plan
from torch_nhwc.planning.rendering import NOTHING_IN_A_FILE
from torch_nhwc.planning.request import Request
from torch_nhwc.saving.archives import convert_archive
from torch_nhwc.saving.exported import convert_programs
from torch_nhwc.saving.files import Kind, expect_checksums, kind_of, replacing
from torch_nhwc.saving.pickles import convert_pickle
from torch_nhwc.stepping.guard import release

_NO_INPUTS = (
    "only the code of a TorchScript archive can bring inputs into a format where there is no torch_nhwc: give it such "
    "inputs"
)


def convert_saved(
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    *,
    memory_format: torch.memory_format | str | None = None,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    allow_pickle: bool = False,
    strict: bool = False,
) -> Report:
    """Brings the convolution weights of a saved model into a memory format, in a file of the same kind.

    What a file holds is known by its bytes. The result loads as it did, and runs, where there is no torch_nhwc, from
    C++ as well; code, other tensors and extra files stay.

    - A TorchScript archive: the weights that its graphs convolve with, constants of frozen modules among them.
    - An exported program, or several, as `torch.export.save` writes them: the strides that the program says its tensors
      have change with them.
    - A file of `torch.save`: every floating tensor of a state dict that is called weight and has four or five
      dimensions, and in a checkpoint the optimizer state of such weights; whole models, with `allow_pickle`.

    The output is written beside its place, and takes it whole: killed at any moment, the file that is there is the old
    one or the new one. The input is not changed, unless it is to be replaced itself.

    Without `allow_pickle`, a TorchScript archive is first loaded in a process of its own, for two seconds or three: one
    that was made for it can end the process that loads it. There, only PyTorch's operators and ours are known.

    Args:
        path_in: the file to read.
        path_out: the file to write; the same one, if you like.
        memory_format: as `convert_` takes it.
        input_format: `"channels_last"` also has the code of a TorchScript archive bring the inputs of forward into
            channels-last, and `"channels_last_3d"` volumes alone: whoever calls it gains without changing a line.
        allow_pickle: whether to load what can run code of the file's own on being loaded: whole models, exported
            programs, and TorchScript classes with a `__setstate__`. Only for files that you trust.
        strict: as `convert_` takes it.

    Returns:
        What was done to every weight, and why. It cannot be reverted.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the file is damaged, or of another kind; it may run code, without `allow_pickle`; `input_format` for
            what is no TorchScript archive; or an argument is none of those above. Nothing is written.
        RuntimeError: `strict`, and a weight was refused; an exported program would not run with such weights.

    Example:
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> torch.save(torch.nn.Conv2d(3, 8, 3).state_dict(), folder / "weights.pt")
        >>> _ = torch_nhwc.convert_saved(folder / "weights.pt", folder / "converted.pt")
        >>> torch.load(folder / "converted.pt")["weight"].stride()
        (27, 1, 9, 3)
    """
    request = Request.of(memory_format, None, None, input_format)
    source = Path(path_in)
    kind = kind_of(source)
    if input_format is not None and kind is not Kind.TORCHSCRIPT:
        raise ValueError(f"input_format: {path_in} is {kind.value}, and {_NO_INPUTS}")
    convert = partial(_convert, source, memory_format=memory_format, strict=strict)
    if kind is not Kind.LEGACY_TORCH_SAVE:
        expect_checksums(source)
    with replacing(path_out) as output:
        if kind is Kind.TORCHSCRIPT:
            return convert_archive(source, output, request, allow_pickle, convert)
        if kind is Kind.EXPORTED:
            return convert_programs(source, output, allow_pickle, convert)
        return convert_pickle(source, output, kind, allow_pickle, convert)


def _convert(path: Path, model: nn.Module, **options: Any) -> Report:
    try:
        for row in plan(model, options["memory_format"]).rows:  # a few bytes may stand for any number of them
            reach = 1 + sum((size - 1) * stride for size, stride in zip(row.shape or (), row.strides or ()))
            if row.bytes_to_move and math.prod(row.shape or ()) > reach:
                raise ValueError(f"the elements of {row.full_name!r} ({row.shape}) overlap in memory")
        report = convert_(model, storage="detach", **options)  # nothing else holds what was loaded
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for module in model.modules():
        release(module)  # which is not trained here
    if not report.rows:  # nor can it be run on example inputs
        sentence = f"Nothing converts: {NOTHING_IN_A_FILE}"
        report = replace(report, plan=replace(report.plan, observed=True), remarks=(*report.remarks, sentence))
    return report
