"""`convert_saved`: a saved model, whatever it was saved as, into another file of its kind."""

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torch_nhwc.checkpoint.programs import ProgramTensors, convert_inputs_, note_strides
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.converting.step_guard import release
from torch_nhwc.ops import set_strides_
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.plans import Options, ranks_of_inputs, without_inputs
from torch_nhwc.rendering import first_of, warn
from torch_nhwc.serialization import write_whole
from torch_nhwc.sites.finding import find
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site, TensorContainer


def convert_saved(
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    *,
    memory_format: torch.memory_format | str | None = None,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    allow_pickle: bool = False,
    strict: bool = False,
) -> Report:
    """Convert the convolution weights of a saved model, and write them to a file of the same kind.

    The bytes of a file say what it holds, not its name. The result loads as the file did, and runs without torch_nhwc,
    also from C++; code, other tensors and extra files stay.

    - A TorchScript archive: the weights that its graphs convolve with, including constants of frozen modules.
    - An exported program, or several, as `torch.export.save` writes them: the strides that the program notes for its
      tensors change with them.
    - A file of `torch.save`: every floating-point tensor of a state dict that is named weight and has four or five
      dimensions, and the optimizer state of such weights; with `allow_pickle`, whole models.

    The output is written to a temporary file that replaces `path_out` at the end: after an exception or a crash, the
    old file is there, or the new one. The input is not changed, unless it is the output.

    Args:
        path_in: The file to read.
        path_out: The file to write; it may be `path_in`.
        memory_format: As in `convert_`.
        input_format: `"channels_last"` also makes the code of a TorchScript archive convert the inputs of forward to
            channels-last, and `"channels_last_3d"` volumes alone, so that callers need no change.
        allow_pickle: Whether to load files that can run code while they are loaded: whole models, exported programs,
            and TorchScript classes with a `__setstate__`. Only for files that you trust.
        strict: As in `convert_`.

    Returns:
        A report on every weight. It cannot be reverted.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The file is damaged or of another kind; it may run code, without `allow_pickle`; `input_format` for
            a file that is no TorchScript archive; or an invalid argument. Nothing is written.
        RuntimeError: `strict`, and a weight was refused, or there is none; or an exported program would not run with
            such weights.

    Example:
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> torch.save(torch.nn.Conv2d(3, 8, 3).state_dict(), folder / "weights.pt")
        >>> _ = torch_nhwc.convert_saved(folder / "weights.pt", folder / "converted.pt")
        >>> torch.load(folder / "converted.pt")["weight"].stride()
        (27, 1, 9, 3)
    """
    options = Options.of(memory_format, None, None, input_format)
    path = Path(path_in)
    kind = _kind_of(path)
    if input_format is not None and kind is not _Kind.TORCHSCRIPT:
        raise ValueError(
            f"input_format: {path} is {kind.value}, and only the code of a TorchScript archive can convert "
            "its inputs without torch_nhwc: give it inputs in channels-last"
        )
    job = _Job(path, kind, options, allow_pickle, strict)
    convert = {_Kind.TORCHSCRIPT: _convert_archive, _Kind.EXPORTED: _convert_programs}.get(kind, _convert_pickle)
    with _replacing(path_out) as output:
        report = convert(job, output)
    return replace(report, remarks=(*report.remarks, *job.remarks))


class _Kind(Enum):
    """What a file holds."""

    TORCHSCRIPT = "a TorchScript archive"
    EXPORTED = "an exported program"
    TORCH_SAVE = "a file of torch.save"
    LEGACY_TORCH_SAVE = "a file of torch.save in its older format"


# A record that only this kind of archive has. PyTorch's own loaders look for the same ones, in this order.
_RECORDS = {"archive_format": _Kind.EXPORTED, "constants.pkl": _Kind.TORCHSCRIPT, "data.pkl": _Kind.TORCH_SAVE}
_ZIP = b"PK\x03\x04"
_LEGACY = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)


@dataclass
class _Job:
    """One call of `convert_saved`."""

    path: Path
    kind: _Kind
    options: Options
    allow_pickle: bool
    strict: bool
    remarks: list[str] = field(default_factory=list)
    """Sentences for the report."""

    def expect_trusted(self, why: str) -> None:
        """Raise a ValueError for a file that could run code while it is loaded, unless that is allowed."""
        if not self.allow_pickle:
            raise ValueError(f"{self.path}: {why}: if you trust the file, allow_pickle=True loads it")

    def convert(self, model: nn.Module, optimizers: tuple[Optimizer, ...] = ()) -> Report:
        """Convert what was loaded, without putting code of this package into it."""
        memory_format = self.options.format.name
        planned = decide(find(model), Options.of(memory_format, preserve=False), with_gradients=False).plan
        rows = planned.rows
        # Without `preserve` the layers are those whose training the conversion itself would make wrong.
        needing = [row.path for row in rows if row.reason in _NEEDS_PACKAGE] + [row.path for row in planned.layers]
        left = list(dict.fromkeys(needing))
        sentence = f"{first_of(left)}: left unchanged, since the file would need torch_nhwc where it is loaded"
        why = _NOTHING if not rows else sentence if all(row.path in left for row in rows) else None
        if why and self.strict:
            raise RuntimeError(f"{self.path}: nothing to convert: {why} (nothing was written, since strict=True)")
        try:
            with warnings.catch_warnings():
                if why:
                    warnings.simplefilter("ignore")  # convert_ would recommend example inputs, or name the filter
                report = convert_(
                    model,
                    memory_format,
                    filter_fn=lambda _, path: path not in left,
                    optimizer=optimizers,
                    storage="detach",  # nothing else holds what was loaded
                    strict=self.strict,
                    preserve=False,
                )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        release(model.modules())  # nothing is trained here
        # The file that is written is to have these strides.
        remarks = tuple(each for each in report.remarks if each != Reason.SAVED_STRIDES.value)
        report = replace(report, remarks=remarks)
        if left:
            self.remarks.append(sentence)
        if why:
            warn(f"torch_nhwc: {self.path}: nothing to convert: {why}")
        if not rows:
            self.remarks.append(f"Nothing converts: {_NOTHING}")
            # The report does not recommend example inputs either.
            report = replace(report, plan=replace(report.plan, observed=True))
        return replace(report, remarks=tuple(map(_in_a_file, report.remarks)))


_NOTHING = (
    "there is no convolution, and in a state dict no floating-point tensor with four or five dimensions that is named "
    "weight"
)
# A conversion would put hooks or parametrizations of this package into the file, as it would replaced layers.
_NEEDS_PACKAGE = (Reason.LAZY, Reason.COPIED_EACH_FORWARD)


_FAULTS = {
    reason.value
    for reason in (
        *(Reason.WRONG_GRADIENTS, Reason.INSTANCE_NORM, Reason.GROUP_NORM, Reason.PIXEL_SHUFFLE),
        Reason.DEPTHWISE_VOLUMES,
    )
}


def _in_a_file(remark: str) -> str:
    """Return a remark with what can be done about a fault of a layer in a file, where no layer is replaced."""
    if remark not in _FAULTS:
        return remark
    fault = remark.partition(": ")[0].replace("preserve=False leaves", "the file keeps")
    return f"{fault}: a file keeps PyTorch's layers; convert_ replaces them in the model, once it is loaded"


# TorchScript archives.

_EXTRA = "extra/"


def _convert_archive(job: _Job, output: IO[bytes]) -> Report:
    archive, names = _open_archive(job.path)
    if "bytecode.pkl" in names:
        raise ValueError(
            f"{job.path}: it is for the lite interpreter, whose bytecode would be lost: convert the module before "
            "saving it for that"
        )
    if any(b"__setstate__" in archive.get_record(name) for name in names if name.lower().startswith("code/")):
        job.expect_trusted("classes in it have a __setstate__, which runs while they are loaded")
    extra = {name.removeprefix(_EXTRA): "" for name in names if name.startswith(_EXTRA)}
    with _reading(job.path, job.kind.value):
        model: Any = torch.jit.load(job.path, None, extra)  # type: ignore[no-untyped-call, unused-ignore]
    report = job.convert(model)
    name = job.options.input_format
    if name is not None:
        found = {row.rank for row in report.rows if job.options.format.serves(row.rank)}
        why = without_inputs(replace(report.plan, input_format=name))
        if why and job.strict:
            raise RuntimeError(f"{job.path}: {why} (nothing was written, since strict=True)")
        if why:
            warn(f"torch_nhwc: {job.path}: {why}")
        job.remarks.append(why or convert_inputs_(model, ranks_of_inputs(name, found)))
    torch.jit.save(model, output, _extra_files=extra)  # type: ignore[no-untyped-call, unused-ignore]
    return report


# Exported programs.

# The records that torch.export reads and writes.
_KNOWN = (
    *("archive_format", "archive_version", "byteorder", "version", ".data/", "extra/", "models/"),
    *("data/weights/", "data/constants/", "data/sample_inputs/"),
)


def _convert_programs(job: _Job, output: IO[bytes]) -> Report:
    for name in _open_archive(job.path)[1]:
        if name.startswith("data/aotinductor/"):
            raise ValueError(f"{job.path}: it is compiled, with its weights in the code: convert the program first")
        if not name.startswith(_KNOWN):
            raise ValueError(f"{job.path}: torch.export does not know {name!r} in it, and would lose it")
    job.expect_trusted(
        "torch.export.load evaluates expressions and compiles a graph that are text in the file, and unpickles what "
        "weights_only refuses"
    )
    from torch.export.pt2_archive._package import load_pt2, package_pt2  # imports the compiler, which takes a second

    with _reading(job.path, job.kind.value), open(job.path, "rb") as file:
        contents = load_pt2(file)
    programs = contents.exported_programs
    tensors = {name: ProgramTensors(program) for name, program in programs.items()}
    report = job.convert(tensors["model"] if [*tensors] == ["model"] else Contents(tensors))
    for program in programs.values():
        try:
            note_strides(program)
        except RuntimeError as error:
            raise RuntimeError(f"{job.path}: {error}") from error
    package_pt2(output, exported_programs=programs, extra_files=contents.extra_files)
    return report


# Files of torch.save.


def _convert_pickle(job: _Job, output: IO[bytes]) -> Report:
    content = _load_pickle(job)
    parts, state = dict(_parts(content)), list(_optimizer_state(content))
    optimizers = tuple(each for each in tree_leaves(content) if isinstance(each, Optimizer))
    root = parts[""] if [*parts] == [""] else Contents(parts)
    report = job.convert(root, optimizers)
    if any(row.layer == StateDict.layer for row in report.rows):
        job.remarks.append(
            "a model takes the strides of a state dict only by load_state_dict(..., assign=True); otherwise it keeps "
            "its own"
        )
    if _set_strides_of_state(job.path, state, root, report):
        job.remarks.append(
            "the optimizer state in the file has the strides of its weights: load them by assign=True, or into a model "
            "in channels-last: a fused CPU optimizer gives wrong updates, silently, where weights and state differ"
        )
    torch.save(content, output, _use_new_zipfile_serialization=job.kind is _Kind.TORCH_SAVE)
    return report


class StateDict(TensorContainer):
    """The tensors of a state dict. Its sites are the floating-point tensors called `weight` of a convolution's rank."""

    layer = "state dict"

    def sites(self, prefix: str) -> list[Site]:
        """Return the weights of the state dict that can be those of convolutions."""
        return [
            # The number of groups is unknown: with one channel in a filter, it may be one.
            Site(path, "weight", self.layer, tensor.dim(), 1 if tensor.shape[1] == 1 else 0, self, tensor, None)
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if tensor.dim() in (4, 5) and tensor.is_floating_point()
            for path, _, last in [".".join(filter(None, (prefix, name))).rpartition(".")]
            if last == "weight"
        ]


class Contents(nn.Module):
    """The models and the state dicts of a file, under their paths in it."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(parts)


def _load_pickle(job: _Job) -> Any:
    try:
        # An open file, since torch.load decides by the name of a path.
        with _reading(job.path, job.kind.value), open(job.path, "rb") as file:
            return torch.load(file, weights_only=not job.allow_pickle)
    except ValueError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            job.expect_trusted(
                "torch.load refuses it as tensors and plain data, and loading anything more may run code that is in it"
            )
        raise


def _parts(content: Any, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the models and state dicts of a file with their paths in it."""
    if isinstance(content, nn.Module):
        yield path, content
    elif isinstance(content, (Mapping, list, tuple)) and not _is_optimizer_state(content):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        named = [(str(name), each) for name, each in items]
        tensors = {name: each for name, each in named if isinstance(each, Tensor)}
        if tensors:
            yield path, StateDict(tensors)
        for name, each in named:
            yield from _parts(each, f"{path}.{name}" if path else name)


def _optimizer_state(content: Any, is_inside: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in the optimizer state dicts of a file."""
    if isinstance(content, Tensor):
        if is_inside:
            yield content
    elif isinstance(content, (Mapping, list, tuple)):
        for each in content.values() if isinstance(content, Mapping) else content:
            yield from _optimizer_state(each, is_inside or _is_optimizer_state(content))


def _is_optimizer_state(content: Any) -> bool:
    return isinstance(content, Mapping) and content.keys() >= {"state", "param_groups"}


def _set_strides_of_state(path: Path, state: list[Tensor], root: nn.Module, report: Report) -> bool:
    """Give optimizer state the strides of the weights of its shapes; return whether there is any.

    Raises:
        ValueError: A shape is that of a weight that is converted and of a tensor that is not.
    """
    strides = {row.shape: row.target_strides for row in report.rows if row.target_strides is not None}
    state = [each for each in state if tuple(each.shape) in strides]
    if not state:
        return False
    converted = {row.full_name for row in report.rows if row.target_strides is not None}
    tensors = *root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)
    others = {tuple(tensor.shape) for name, tensor in tensors if name not in converted}
    for shape in (tuple(each.shape) for each in state):
        if shape in others:
            raise ValueError(
                f"{path}: optimizer state of shape {shape} may belong to a weight that is converted, or to a parameter "
                "that is not: convert the model and its optimizer once they are loaded"
            )
    set_strides_(state, [strides[tuple(each.shape)] for each in state], storage="detach")
    return True


# Reading and writing.


def _kind_of(path: Path) -> _Kind:
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY))
    if head == _LEGACY:
        return _Kind.LEGACY_TORCH_SAVE
    if head.startswith(_ZIP):
        _, records = _open_archive(path)
        for record, kind in _RECORDS.items():
            if record in records:
                _expect_checksums(path, kind)
                return kind
    if head[8:9] == b"{":
        raise ValueError(
            f"{path}: a safetensors file keeps no strides, so its weights cannot be in channels-last: convert the "
            "model once they are loaded (convert_), or the state dict while they are loaded (convert_state_dict)"
        )
    expected = f"{_Kind.TORCHSCRIPT.value}, {_Kind.EXPORTED.value} or {_Kind.TORCH_SAVE.value}"
    raise ValueError(f"{path}: expected {expected}, but its bytes are those of none of them")


def _open_archive(path: Path) -> tuple[Any, list[str]]:
    """Return PyTorch's reader of an archive, and the names of its records."""
    with _reading(path, "an archive of torch"):
        archive: Any = torch._C.PyTorchFileReader(str(path))
        return archive, archive.get_all_records()


def _expect_checksums(path: Path, kind: _Kind) -> None:
    """Raise a ValueError if a record does not fit its checksum.

    PyTorch's reader does not look, and what it writes has new checksums, by which the damage could not be seen again.
    """
    with _reading(path, kind.value), zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC:  # 0 where torch.serialization.set_crc32_options switched them off
                with archive.open(record) as file:
                    while file.read(1 << 20):
                        pass


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turn all errors of PyTorch's loaders into a ValueError of one line that names the file."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{path} cannot be read as {expected}: {why}") from error


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file for PyTorch's writers, whose content replaces the file at a path at the end.

    Raises:
        ValueError: The path is that of a folder, a device or a pipe, or its folder does not exist.
        OSError: The file cannot be written.
    """
    target = Path(os.path.realpath(path))
    is_other = os.path.lexists(target) and not target.is_file()
    if not os.path.basename(path) or is_other or not target.parent.is_dir():
        raise ValueError(f"expected a file in a folder that exists, got {path}")
    with write_whole(target) as temporary, open(temporary, "wb") as file:
        output = _Output(file)
        yield cast(IO[bytes], output)
        if output.error is not None:
            raise output.error


class _Output(io.RawIOBase):
    """A file that keeps the first error for later, since PyTorch's zip writer ends the process at an exception."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, *_: int) -> int:  # torch.export seeks to the start of what it has written
        return 0

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes
