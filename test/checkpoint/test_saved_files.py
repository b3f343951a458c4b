"""Reading and writing files: kinds by their bytes, damaged files, and outputs that are whole or do not exist."""

import io
import os
import pickle
import resource
import time
import zipfile

import pytest
import safetensors.torch
import torch
from saved_files import STRIDES
from selection import exhaustive
from torch import nn

import torch_nhwc as nhwc

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def state_dict():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2)).state_dict()


def in_bytes(write):
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


SAVED = {
    "state dict": lambda: in_bytes(lambda file: torch.save(state_dict(), file)),
    "older format": lambda: in_bytes(lambda file: torch.save(state_dict(), file, _use_new_zipfile_serialization=False)),
    "archive": lambda: in_bytes(lambda file: torch.jit.save(torch.jit.script(nn.Conv2d(3, 4, 3)), file)),
}


@pytest.mark.parametrize("name", SAVED)
def test_the_bytes_of_a_file_say_what_it_holds_whatever_its_name(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(SAVED[name]())
    report = nhwc.convert_saved(tmp_path / "model.safetensors", tmp_path / "out.txt")
    assert [row.target_strides for row in report.rows] == [STRIDES]
    assert nhwc.Reason.SAVED_STRIDES.value not in report.remarks  # they are what the file is for
    loaded = torch.jit.load(tmp_path / "out.txt") if name == "archive" else torch.load(tmp_path / "out.txt")
    state = loaded.state_dict() if name == "archive" else loaded
    assert next(iter(state.values())).stride() == STRIDES
    assert zipfile.is_zipfile(tmp_path / "out.txt") == (name != "older format")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "out.txt"]


def test_h03_safetensors_keep_no_strides(tmp_path):
    safetensors.torch.save_file({"weight": torch.randn(4, 3, 3, 3)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"a safetensors file keeps no strides.*the model once they are loaded"):
        nhwc.convert_saved(tmp_path / "model.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


OTHERS = {
    "nothing": b"",
    "text": b"a text that is no model",
    "json": b'{"weight": 1}',
    "zip of others": in_bytes(lambda file: zipfile.ZipFile(file, "w").writestr("model/readme.txt", "hello")),
    "plain pickle": pickle.dumps({"weight": [1, 2]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_garbage_is_one_error(name, tmp_path):
    (tmp_path / "in.pt").write_bytes(OTHERS[name])
    with pytest.raises(ValueError, match=r"in.pt(: expected a TorchScript archive, an ex| cannot be read as an arch)"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    with pytest.raises(FileNotFoundError):
        nhwc.convert_saved(tmp_path / "missing.pt", tmp_path / "out.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("name", SAVED)
def test_truncated_files_are_refused_in_one_line(name, tmp_path):
    whole, path = SAVED[name](), tmp_path / "in.pt"
    for length in range(1, len(whole), len(whole) // 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"in\.pt") as raised:
            nhwc.convert_saved(path, tmp_path / "out.pt")
        assert len(str(raised.value).splitlines()) == 1
        assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("name", ["state dict", "archive"])
def test_a_changed_byte_of_a_weight_is_refused(name, tmp_path):
    path = tmp_path / "in.pt"
    path.write_bytes(SAVED[name]())
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda each: "/data/0" in each.filename or "/constants/0" in each.filename)
        weight = archive.read(record)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    load = torch.jit.load if name == "archive" else torch.load
    load(path)  # PyTorch does not look
    with pytest.raises(ValueError, match=r"in\.pt cannot be read as a .*: Bad CRC-32 for file"):
        nhwc.convert_saved(path, tmp_path / "out.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


def test_a_file_without_checksums_converts(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state_dict(), tmp_path / "in.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["0.weight"].stride() == STRIDES


def test_the_input_may_be_replaced_itself_and_keeps_its_mode_and_links(tmp_path):
    path, link = tmp_path / "model.pt", tmp_path / "link.pt"
    torch.save(state_dict(), path)
    path.chmod(0o640)
    link.symlink_to(path)
    nhwc.convert_saved(link, link)
    assert torch.load(path)["0.weight"].stride() == STRIDES
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_output_that_is_no_file_is_refused_and_stays(tmp_path):
    torch.save(state_dict(), tmp_path / "in.pt")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    for out in ("", "new/", "missing/out.pt", "in.pt/out.pt", "circle", "pipe"):
        with pytest.raises(ValueError, match="expected a file in a folder that exists"):
            nhwc.convert_saved(tmp_path / "in.pt", os.path.join(tmp_path, out))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "in.pt", "pipe"]
    assert (tmp_path / "circle").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("room", [0, 1000])
def test_a_full_disk_is_an_error_and_the_old_file_stays(name, room, tmp_path):
    """A limit on the length of files has the same effect, and needs no disk of its own."""
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    path.write_bytes(SAVED[name]())
    out.write_bytes(b"old")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        with pytest.raises(OSError, match="File too large"):
            nhwc.convert_saved(path, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.pt", "out.pt"]


@pytest.mark.parametrize("count", [2, exhaustive(40)])
def test_killed_at_any_moment_the_file_that_is_replaced_loads(count, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(state_dict(), path)

    def convert_to_and_fro():
        while True:
            for memory_format in (None, torch.contiguous_format):
                nhwc.convert_saved(path, path, memory_format=memory_format)

    for index in range(count):
        child = os.fork()
        if child == 0:
            convert_to_and_fro()
        time.sleep(0.01 + 0.003 * (index % 10))
        os.kill(child, 9)
        os.waitpid(child, 0)
        state = torch.load(path)
        assert all(torch.isfinite(each).all() for each in state.values())
        assert state["0.weight"].stride() in (STRIDES, (27, 9, 3, 1))
