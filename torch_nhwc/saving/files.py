"""What a file holds, by its bytes and never by its name; reading it with one clear error, and writing it whole."""

import io
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import torch

_ZIP = b"PK\x03\x04"
_LEGACY = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)


class Kind(Enum):
    """What a file may hold."""

    TORCHSCRIPT = "a TorchScript archive"
    EXPORTED = "an exported program"
    TORCH_SAVE = "a file of torch.save"
    LEGACY_TORCH_SAVE = "a file of torch.save in its older format"


# By a record that others do not have, which torch's own loaders go by as well; the first that is there.
_RECORDS = {"archive_format": Kind.EXPORTED, "constants.pkl": Kind.TORCHSCRIPT, "data.pkl": Kind.TORCH_SAVE}


def kind_of(path: Path) -> Kind:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of what is known, or its weights cannot be in channels-last.
    """
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY))
    if head == _LEGACY:
        return Kind.LEGACY_TORCH_SAVE
    if head.startswith(_ZIP):
        _, records = open_archive(path)
        for record, kind in _RECORDS.items():
            if record in records:
                return kind
    if head[8:9] == b"{":
        raise ValueError(
            f"{path}: a safetensors file keeps no strides, so that weights in it cannot be in channels-last: convert "
            "the model once they are loaded (convert_), or the state dict on its way into it (convert_state_dict)"
        )
    expected = f"{Kind.TORCHSCRIPT.value}, {Kind.EXPORTED.value} or {Kind.TORCH_SAVE.value}"
    raise ValueError(f"{path}: expected {expected}, and its bytes are those of none")


def open_archive(path: Path) -> tuple[Any, list[str]]:
    """What reads an archive's records, and their names, as torch's loaders see them."""
    with reading(path, "an archive of torch"):
        archive: Any = torch._C.PyTorchFileReader(str(path))
        names = archive.get_all_records()
        # Torch lists names cut off at 511 bytes, and finds records by whole ones, in any case: one that it finds and
        # does not list would be read and not have been looked at.
        if len({name.lower() for name in names}) < len(names) or not all(map(archive.has_record, names)):
            raise ValueError("two of its records have one name, or a name is too long")
        return archive, names


def expect_checksums(path: Path) -> None:
    """Raises a ValueError for an archive with a record that is not what its checksum is of: torch does not look."""
    with reading(path, "an archive of torch"), zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC:  # 0 where torch.serialization.set_crc32_options had it left out
                with archive.open(record) as content:
                    while content.read(2**20):
                        pass


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Makes whatever torch's loaders raise a ValueError of one line that names the file."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{path} cannot be read as {expected}: {why}") from error


def expect_trusted(path: Path, is_trusted: bool, why: str) -> None:
    """Raises a ValueError for a file that could run code of its own on being loaded, unless that is allowed."""
    if not is_trusted:
        raise ValueError(f"{path}: {why}: if you trust the file, allow_pickle=True loads it")


class _Output(io.RawIOBase):
    """A file that torch writes to. It keeps an error for later, since torch's writers end the process at one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, *_: int) -> int:  # to the start, where a program was written
        return 0

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Gives what to write to; what was written at the end takes the place of a file, whole.

    It lies beside the file, in a folder of its own. Killed at any moment, the file is the old one, the new one or
    absent; a kill may leave the folder behind.
    """
    target = Path(os.path.realpath(path))  # what a link leads to
    is_other = os.path.lexists(target) and not target.is_file()  # a folder, a device, a link to itself
    if not os.path.basename(path) or is_other or not target.parent.is_dir():
        raise ValueError(f"expected a file in a folder that is there, got {path}")
    with tempfile.TemporaryDirectory(prefix=".torch_nhwc-", dir=target.parent) as folder:
        part = Path(folder, "part")
        with open(part, "wb") as file:
            output = _Output(file)
            yield cast(IO[bytes], output)
            if output.error is not None:
                raise output.error
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
        _flush(target.parent)


def _flush(folder: Path) -> None:
    """Has the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
