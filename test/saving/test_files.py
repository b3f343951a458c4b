"""Reading and writing files: what they are by their bytes, damaged ones, and outputs that are whole or not there."""

import io
import os
import pickle
import resource
import struct
import sys
import time
import zipfile

import pytest
import safetensors.torch
import torch
from saved_files import STRIDES, kill, run_killed
from selection import exhaustive
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.saving import files

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


def program():
    exported = torch.export.export(nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),))
    return in_bytes(lambda file: torch.export.save(exported, file))


@pytest.mark.parametrize("name", SAVED)
def test_a_file_is_what_its_bytes_are_whatever_its_name(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(SAVED[name]())
    report = nhwc.convert_saved(tmp_path / "model.safetensors", tmp_path / "out.txt")
    assert [row.target_strides for row in report.rows] == [STRIDES]
    assert files.kind_of(tmp_path / "out.txt") is files.kind_of(tmp_path / "model.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "out.txt"]


def test_h03_safetensors_keep_no_strides(tmp_path):
    safetensors.torch.save_file({"weight": torch.randn(4, 3, 3, 3)}, tmp_path / "model.pt")
    with pytest.raises(
        ValueError, match=r"a safetensors file keeps no strides.*convert the model once they are loaded"
    ):
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
def test_what_no_loader_knows_is_one_error(name, tmp_path):
    (tmp_path / "in.pt").write_bytes(OTHERS[name])
    with pytest.raises(ValueError, match=r"in.pt(: expected a TorchScript archive, an ex| cannot be read as an arch)"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    with pytest.raises(FileNotFoundError):
        nhwc.convert_saved(tmp_path / "missing.pt", tmp_path / "out.pt")
    with pytest.raises(IsADirectoryError):
        nhwc.convert_saved(tmp_path, tmp_path / "out.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


def assert_one_error_or_right(path, out):
    """Either it is refused in a line, with nothing written, or what is written loads as what is read does."""
    before, refused = path.read_bytes(), None
    try:
        nhwc.convert_saved(path, out)
    except ValueError as error:
        refused = str(error)
    if refused is None:
        out.unlink()
    assert refused is None or (str(path) in refused and len(refused.splitlines()) == 1)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", SAVED)
def test_files_that_were_cut_off_are_refused(name, tmp_path):
    whole, path = SAVED[name](), tmp_path / "in.pt"
    for length in range(1, len(whole), len(whole) // 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"in\.pt"):
            nhwc.convert_saved(path, tmp_path / "out.pt")
        assert_one_error_or_right(path, tmp_path / "out.pt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAVED)
def test_files_whose_bytes_were_changed_are_refused_or_converted(name, tmp_path):
    whole, path = bytearray(SAVED[name]()), tmp_path / "in.pt"
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        place, value = (int(torch.randint(high, (1,), generator=generator)) for high in (len(whole), 256))
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        assert_one_error_or_right(path, tmp_path / "out.pt")


def hostile(content, ending, there, instead):
    """An archive in which some bytes are others, in the records of such names, and the checksums are right."""
    source, changed = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    with zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            record = source.read(name)
            assert there in record or not name.endswith(ending)
            target.writestr(name, record.replace(there, instead) if name.endswith(ending) else record)
    return changed.getvalue()


FAR = pickle.BININT + struct.pack("<i", 2**30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["state dict", "archive"])
def test_records_whose_bytes_were_changed_under_right_checksums_are_refused_or_converted(name, tmp_path):
    whole, path = SAVED[name](), tmp_path / "in.pt"
    with zipfile.ZipFile(io.BytesIO(whole)) as records:
        contents = {each: records.read(each) for each in records.namelist()}
    generator = torch.Generator().manual_seed(0)
    draw = lambda high: int(torch.randint(high, (1,), generator=generator))  # noqa: E731
    for _ in range(200):
        changed = [*contents][draw(len(contents))]
        content = bytearray(contents[changed])
        content[draw(len(content))] = draw(256)
        with zipfile.ZipFile(path, "w") as target:
            for each, record in (contents | {changed: content}).items():
                target.writestr(each, bytes(record))
        assert_one_error_or_right(path, tmp_path / "out.pt")


def test_strides_that_reach_beyond_the_memory_are_refused(tmp_path):
    first_stride = pickle.BININT1 + b"\x1b"
    (tmp_path / "in.pt").write_bytes(hostile(SAVED["state dict"](), "data.pkl", first_stride, FAR))
    with pytest.raises(ValueError, match=r"in\.pt cannot be read as a file of torch.save"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")


def test_an_archive_that_ends_whoever_loads_it_is_one_error(rehearsed_for_real, tmp_path):
    """Where a line of a source lies among the texts of an archive is a number that PyTorch does not check."""
    line, next_line = pickle.BININT1 + b"\5", pickle.BININT1 + b"\6"
    (tmp_path / "in.pt").write_bytes(hostile(SAVED["archive"](), ".debug_pkl", line + next_line, FAR + next_line))
    with pytest.raises(
        ValueError, match=r"in\.pt cannot be read as a TorchScript archive: it ends the process.*SIGSEGV"
    ):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert_one_error_or_right(tmp_path / "in.pt", tmp_path / "out.pt")


def test_archives_are_rehearsed_whatever_modules_are_imported_from(rehearsed_for_real, tmp_path, monkeypatch):
    (tmp_path / "a {name}, 'é'\n.pt").write_bytes(SAVED["archive"]())
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, b"bytes", None, "", "x" * 200_000])
    nhwc.convert_saved(tmp_path / "a {name}, 'é'\n.pt", tmp_path / "out.pt")
    assert torch.jit.load(tmp_path / "out.pt").weight.stride() == STRIDES


@pytest.mark.parametrize(
    ("executable", "is_frozen", "why"),
    [
        ("", False, "no Python is known to try it in"),
        (sys.executable, True, "no Python is known to try it in"),
        ("/bin/false", False, r"could not be tried in a process of its own \(exit status 1\)"),
        ("/bin/cat", False, "could not be tried in a process of its own"),
        ("/is/missing", False, "could not be tried in a process of its own .*No such file"),
    ],
)
def test_an_archive_that_cannot_be_rehearsed_asks_for_the_flag(
    executable, is_frozen, why, rehearsed_for_real, tmp_path, monkeypatch
):
    (tmp_path / "in.pt").write_bytes(SAVED["archive"]())
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    with pytest.raises(ValueError, match=rf"in\.pt cannot be read as a Torch.*{why}.*allow_pickle=True"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", allow_pickle=True)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_storage_that_reaches_beyond_its_record_is_refused(is_trusted, tmp_path):
    """PyTorch's loader of archives does not compare them; that of state dicts does."""
    count, more = (pickle.BININT1 + bytes([108]), pickle.BININT1 + bytes([135]))
    (tmp_path / "in.pt").write_bytes(hostile(SAVED["archive"](), "data.pkl", count, more))
    with pytest.raises(
        ValueError, match=r"in\.pt .*record 'data/0' has 432 bytes, and is taken for 135 of torch.float32"
    ):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", allow_pickle=is_trusted)


@pytest.mark.parametrize("name", ["state dict", "archive"])
def test_a_changed_number_in_a_weight_is_refused(name, tmp_path):
    whole = SAVED[name]()
    with zipfile.ZipFile(io.BytesIO(whole)) as records:
        weight = next(records.read(each) for each in records.namelist() if each.endswith("data/0"))
    (tmp_path / "in.pt").write_bytes(whole.replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    with pytest.raises(ValueError, match=r"in\.pt cannot be read as an archive of torch: Bad CRC-32"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")


def test_a_file_without_checksums_converts(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state_dict(), tmp_path / "in.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["0.weight"].stride() == STRIDES


def test_a_few_bytes_that_stand_for_many_are_refused(tmp_path):
    torch.save({"weight": torch.zeros(1).expand(2**20, 2**10, 3, 3)}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"in\.pt: the elements of 'weight' \(\(1048576, 1024, 3, 3\)\) overlap in"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")


def test_what_holds_itself_is_refused(tmp_path):
    circle = {"weight": torch.randn(4, 3, 3, 3)}
    circle["self"] = circle
    torch.save(circle, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"in\.pt cannot be read as a file of torch.save: maximum recursion depth"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")


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
        with pytest.raises(ValueError, match="expected a file in a folder that is there"):
            nhwc.convert_saved(tmp_path / "in.pt", os.path.join(tmp_path, out))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "in.pt", "pipe"]
    assert (tmp_path / "circle").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_an_error(tmp_path):
    torch.save(state_dict(), tmp_path / "in.pt")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "closed" / "out.pt")


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path):
    torch.save(state_dict(), tmp_path / "in.pt")
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / ("x" * 255))
    with pytest.raises(OSError, match="File name too long"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / ("x" * 256))
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("write", [*SAVED.values(), exhaustive(program)], ids=[*SAVED, "program"])
@pytest.mark.parametrize("room", [0, 1000])
def test_a_disk_that_is_full_is_an_error_and_the_old_file_stays(write, room, tmp_path):
    """As is a limit on the length of files, which needs no disk of its own."""
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    path.write_bytes(write())
    out.write_bytes(b"old")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        with pytest.raises(OSError, match="File too large"):
            nhwc.convert_saved(path, out, allow_pickle=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.pt", "out.pt"]


@pytest.mark.parametrize("there", [exhaustive(None), "old"])
@pytest.mark.parametrize("moment", ["converting", "writing", "flushing", "replacing", "replaced"])
def test_killed_at_any_step_the_output_is_old_whole_or_absent(moment, there, tmp_path, monkeypatch):
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save(state_dict(), source)
    before = source.read_bytes()
    if there:
        out.write_bytes(b"old")
    save, replace = torch.save, os.replace

    def killed_in(function, *, after=False):
        def run(*arguments, **options):
            if after:
                function(*arguments, **options)
            kill()

        return run

    def save_half(content, file, **options):
        whole = in_bytes(lambda buffer: save(content, buffer, **options))
        file.write(whole[: len(whole) // 2])
        kill()

    changes = {
        "converting": (torch, "load", killed_in(torch.load)),
        "writing": (torch, "save", save_half),
        "flushing": (os, "fsync", killed_in(os.fsync)),
        "replacing": (os, "replace", killed_in(replace)),
        "replaced": (os, "replace", killed_in(replace, after=True)),
    }
    monkeypatch.setattr(*changes[moment])
    run_killed(lambda: nhwc.convert_saved(source, out))
    assert source.read_bytes() == before
    if moment == "replaced":
        assert torch.load(out)["0.weight"].stride() == STRIDES
    else:
        assert (out.read_bytes() if out.exists() else None) == (b"old" if there else None)


@pytest.mark.parametrize("count", [2, exhaustive(40)])
def test_killed_at_any_moment_the_file_that_is_replaced_loads(count, tmp_path):
    """Converts one file to and fro until it is killed."""
    path = tmp_path / "model.pt"
    torch.save(state_dict(), path)

    def to_and_fro():
        while True:
            for memory_format in (None, torch.contiguous_format):
                nhwc.convert_saved(path, path, memory_format=memory_format)

    seen = set()
    for index in range(count):
        child = os.fork()
        if child == 0:
            to_and_fro()
        time.sleep(0.01 + 0.003 * (index % 10))
        os.kill(child, 9)
        os.waitpid(child, 0)
        state = torch.load(path)
        assert all(torch.isfinite(each).all() for each in state.values())
        seen.add(state["0.weight"].stride())
    assert seen <= {STRIDES, (27, 9, 3, 1)}
