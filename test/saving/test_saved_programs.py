"""Saved programs of torch.export (.pt2): converted where they are trusted, and not even loaded where they are not."""

import contextlib
import io
import json

import pytest
import torch
from saved_files import SITES, STRIDES, Network, assert_run_elsewhere
from torch import nn
from torch.export.pt2_archive._package import load_pt2, package_pt2

import torch_nhwc as nhwc
from torch_nhwc import Reason

X = torch.randn(2, 3, 8, 8)


def saved(model, path, **options):
    torch.export.save(torch.export.export(model.eval(), (X,)), path, **options)


def changed(path, change):
    """Writes an archive anew, each record as a function of its name and bytes has it."""
    reader, path = torch._C.PyTorchFileReader(str(path)), path.with_name("changed.pt2")
    records = {name: reader.get_record(name) for name in reader.get_all_records()}
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.set_min_version(6)
    for name, record in records.items():
        if name not in (".data/serialization_id", ".data/version", "byteorder", "version"):
            content = change(name, record)
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return path


def test_a_saved_program_converts_with_all_that_is_beside_it(tmp_path):
    model = Network()
    saved(model, tmp_path / "in.pt2", extra_files={"labels.txt": "é"})
    before = (tmp_path / "in.pt2").read_bytes()
    report = nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True, strict=True)
    assert {row.full_name: row.target_strides for row in report.rows}.items() >= SITES.items()
    assert (tmp_path / "in.pt2").read_bytes() == before
    extra = {"labels.txt": ""}
    program = torch.export.load(tmp_path / "out.pt2", extra_files=extra)
    assert extra == {"labels.txt": "é"}
    node = next(iter(program.graph.nodes))
    assert (node.name, node.meta["val"].stride()) == ("p_first_weight", STRIDES)
    torch.testing.assert_close(program.example_inputs[0][0], X)
    torch.testing.assert_close(program.module()(X), model(X))


@pytest.mark.exhaustive  # a process of its own
def test_a_saved_program_runs_where_this_package_is_not(tmp_path):
    model = Network()
    saved(model, tmp_path / "in.pt2")
    nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True)
    assert_run_elsewhere(tmp_path, {"out.pt2": ("program", X, model(X).detach(), SITES)})


@pytest.mark.exhaustive
def test_all_programs_of_an_archive_convert(tmp_path):
    programs = {name: torch.export.export(nn.Conv2d(3, 4, 3), (X,)) for name in ("encoder", "decoder")}
    package_pt2(tmp_path / "in.pt2", exported_programs=programs)
    report = nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True)
    assert [row.full_name for row in report.rows] == ["encoder.weight", "decoder.weight"]
    after = load_pt2(tmp_path / "out.pt2").exported_programs
    for name, program in after.items():
        assert program.state_dict["weight"].stride() == STRIDES
        torch.testing.assert_close(program.module()(X), programs[name].module()(X))


class TiedToBuffer(nn.Module):
    """Convolves with a weight, and with a buffer over its memory, which a loaded program has as a view of it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("other", self.conv.weight.detach())

    def forward(self, x):
        return self.conv(x) + nn.functional.conv2d(x, self.other)


def test_weights_over_one_memory_stay_together(tmp_path):
    saved(TiedToBuffer(), tmp_path / "in.pt2")
    with pytest.warns(UserWarning, match="2 of 2 sites stay as they are"):
        report = nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True)
    assert {row.reason for row in report.rows} == {Reason.NOT_A_LEAF}
    after = torch.export.load(tmp_path / "out.pt2").state_dict
    assert after["conv.weight"].data_ptr() == after["other"].data_ptr()


def expression(written):
    """Has a size of the input be what code gives, which writes a file."""

    def change(name, record):
        if name != "models/model.json":
            return record
        program = json.loads(record)
        code = f"open({str(written)!r}, 'w').close() or 2"
        size = {"as_expr": {"expr_str": code, "hint": {"as_int": 2}}}
        program["graph_module"]["graph"]["tensor_values"]["input"]["sizes"][0] = size
        return json.dumps(program).encode()

    return change


class Writes:
    def __init__(self, written):
        self.written = str(written)

    def __reduce__(self):
        return open, (self.written, "w")


def pickled(written):
    """Has an example input be a pickle that weights_only refuses."""
    hidden = io.BytesIO()
    torch.save(((Writes(written),), {}), hidden)
    return lambda name, record: hidden.getvalue() if name == "data/sample_inputs/model.pt" else record


@pytest.mark.parametrize("hide", [expression, pickled])
def test_h41_torch_export_load_runs_what_is_in_the_file(hide, tmp_path):
    saved(nn.Conv2d(3, 4, 3), tmp_path / "in.pt2")
    written = tmp_path / "written"
    path = changed(tmp_path / "in.pt2", hide(written))
    with pytest.raises(ValueError, match=r"changed.pt2: torch.export.load evaluates expressions .* allow_pickle=True"):
        nhwc.convert_saved(path, tmp_path / "out.pt2")
    assert not written.exists()
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert written.exists()


def test_damaged_programs_are_one_error(tmp_path):
    saved(nn.Conv2d(3, 4, 3), tmp_path / "in.pt2")
    path = changed(tmp_path / "in.pt2", lambda name, record: b"{}" if name == "models/model.json" else record)
    with pytest.raises(ValueError, match=r"changed.pt2 cannot be read as an exported program: "):
        nhwc.convert_saved(path, tmp_path / "out.pt2", allow_pickle=True)
    whole = (tmp_path / "in.pt2").read_bytes()
    for length in range(100, len(whole), len(whole) // 5):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"changed.pt2 cannot be read as an archive of torch: "):
            nhwc.convert_saved(path, tmp_path / "out.pt2", allow_pickle=True)
    assert not (tmp_path / "out.pt2").exists()


def test_what_would_be_lost_or_is_compiled_is_refused(tmp_path):
    saved(nn.Conv2d(3, 4, 3), tmp_path / "in.pt2")
    for name, match in (("data/aotinductor/model/model.so", "it is compiled"), ("data/other", "would lose it")):
        writer = torch._C.PyTorchFileWriter(str(tmp_path / "more.pt2"))
        for record, content in (("archive_format", b"pt2"), ("archive_version", b"0"), (name, b"content")):
            writer.write_record(record, content, len(content))
        writer.write_end_of_file()
        with pytest.raises(ValueError, match=match):
            nhwc.convert_saved(tmp_path / "more.pt2", tmp_path / "out.pt2", allow_pickle=True)


def test_a_format_of_inputs_is_for_archives_alone(tmp_path):
    saved(nn.Conv2d(3, 4, 3), tmp_path / "in.pt2")
    with pytest.raises(ValueError, match=r"in.pt2 is an exported program, and only the code of a TorchScript archive"):
        nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", input_format="channels_last", allow_pickle=True)
