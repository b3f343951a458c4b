"""Saved programs of torch.export (.pt2): converted if they are trusted, and not loaded otherwise."""

import contextlib
import io
import json

import pytest
import torch
from saved_files import SITES, STRIDES, Network, assert_run_elsewhere
from torch import nn
from torch.export.pt2_archive._package import load_pt2, package_pt2
from torch.nn import functional
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Reason

X = torch.randn(2, 3, 8, 8)


def exported(model, x=X):
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},))


def converted(program, folder, **options):
    """Return a program that was saved and converted, and the report."""
    torch.export.save(program, folder / "in.pt2")
    report = nhwc.convert_saved(folder / "in.pt2", folder / "out.pt2", allow_pickle=True, **options)
    return torch.export.load(folder / "out.pt2"), report


def noted(program):
    """Return the strides that a program notes for its tensors."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    return {spec.target: values[spec.arg.name].stride() for spec in specs if spec.target is not None}


def tensors_of(program):
    return {**program.constants, **program.state_dict}


def changed(path, change):
    """Write an archive anew, with each record as a function of its name and bytes returns it."""
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


def test_a_program_converts_with_its_extra_files_and_notes_the_strides(tmp_path):
    model = Network().eval()
    torch.export.save(exported(model), tmp_path / "in.pt2", extra_files={"labels.txt": "é"})
    before = (tmp_path / "in.pt2").read_bytes()
    report = nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True, strict=True)
    assert {row.full_name: row.target_strides for row in report.rows}.items() >= SITES.items()
    assert (report.rows[0].full_name, report.rows[0].layer) == ("first.weight", "Conv2d")
    assert (tmp_path / "in.pt2").read_bytes() == before
    extra = {"labels.txt": ""}
    program = torch.export.load(tmp_path / "out.pt2", extra_files=extra)
    assert extra == {"labels.txt": "é"}
    assert noted(program) == {name: tensor.stride() for name, tensor in tensors_of(program).items()}
    assert noted(program)["first.weight"] == STRIDES
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    assert values["relu"].is_contiguous(memory_format=torch.channels_last)  # computed from the weights
    torch.testing.assert_close(program.example_inputs[0][0], X)
    torch.testing.assert_close(program.module()(X), model(X))


@pytest.mark.exhaustive  # a process of its own
def test_a_saved_program_runs_without_this_package(tmp_path):
    model = Network()
    converted(exported(model), tmp_path)
    assert_run_elsewhere(tmp_path, {"out.pt2": ("program", X, model(X).detach(), SITES)})


@pytest.mark.exhaustive  # the compiler takes a minute
def test_aot_inductor_compiles_a_converted_program_to_equal_numbers(tmp_path):
    model = Network()
    program, _ = converted(exported(model), tmp_path)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(X), model(X))


def test_all_programs_of_an_archive_convert_in_both_directions(tmp_path):
    programs = {name: torch.export.export(nn.Conv2d(3, 4, 3), (X,)) for name in ("encoder", "decoder")}
    package_pt2(tmp_path / "in.pt2", exported_programs=programs)
    for memory_format, strides in ((None, STRIDES), ("contiguous_format", (27, 9, 3, 1))):
        report = nhwc.convert_saved(
            tmp_path / "in.pt2", tmp_path / "in.pt2", allow_pickle=True, memory_format=memory_format
        )
        assert [row.full_name for row in report.rows] == ["encoder.weight", "decoder.weight"]
        for name, program in load_pt2(tmp_path / "in.pt2").exported_programs.items():
            assert program.state_dict["weight"].stride() == noted(program)["weight"] == strides
            torch.testing.assert_close(program.module()(X), programs[name].module()(X))


class Reaching(nn.Module):
    """Weights that reach convolutions in other ways than as the parameter of a layer."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.register_buffer("buffer", torch.randn(3, 3, 3, 3))
        self.register_buffer("unsaved", torch.randn(3, 3, 3, 3), persistent=False)
        self.constant = torch.randn(3, 3, 3, 3)
        self.branched = nn.Conv2d(3, 3, 3)
        self.ungraded = nn.ConvTranspose2d(3, 3, 3, groups=3)
        self.position = nn.Parameter(torch.randn(1, 3, 1, 1))
        self.normed = parametrizations.weight_norm(nn.Conv2d(3, 3, 1))

    def forward(self, x):
        x = functional.conv2d(x + self.position, self.kernel.to(torch.float64), padding=1)
        x = functional.conv2d(x, self.buffer.detach(), padding=1)
        x = functional.conv2d(x, self.unsaved, padding=1)
        x = functional.conv2d(x, self.constant, padding=1)
        x = torch.cond(x.sum() > 0, lambda x: self.branched(x), lambda x: self.branched(-x), (x,))
        with torch.no_grad():
            x = self.ungraded(x)
        return self.normed(x)


def test_weights_are_found_on_every_path_to_a_convolution_and_computed_ones_are_refused(tmp_path):
    model, x = Reaching().double().eval(), X.double()
    model.constant = model.constant.double()
    with pytest.warns(UserWarning, match="1 of 7 weights refused: '<computed"):
        program, report = converted(exported(model, x), tmp_path)
    reasons = {row.full_name: row.reason for row in report.rows}
    assert reasons.pop("<computed 6>") is Reason.ON_THE_FLY
    assert reasons == dict.fromkeys(["kernel", "buffer", "unsaved", "constant", "branched.weight", "ungraded.weight"])
    assert {tensors_of(program)[name].stride() for name in [*reasons][:5]} == {STRIDES}
    torch.testing.assert_close(program.module()(x), model(x))


class ByStrides(nn.Module):
    """Reads an activation by strides, which are numbers in the program."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.as_strided(self.conv(x), (2, 4, 6), (144, 36, 1))


def test_a_program_that_would_not_run_is_refused_and_nothing_is_written(tmp_path):
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    programs = {
        r"would not run with these: Cannot view a tensor .* before exporting it": exported(flat).run_decompositions(),
        r"aten.as_strided.default reads conv2d by strides of its own": torch.export.export(ByStrides().eval(), (X,)),
    }
    for match, program in programs.items():
        with pytest.raises(RuntimeError, match=rf"in\.pt2: .*{match}"):
            converted(program, tmp_path)
        assert not (tmp_path / "out.pt2").exists()


class CountsInForward(nn.Module):
    """Has a size that depends on values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return (self.conv(x) > 0).nonzero().float().sum()


def test_gradients_and_symbols_stay_in_the_notes_of_a_program(tmp_path):
    def notes(program):
        nodes = [(node, node.meta.get("val")) for node in program.graph.nodes if node.op != "output"]
        needed = {node.name: getattr(value, "requires_grad", None) for node, value in nodes}
        return needed, [str(node.meta.get("unbacked_bindings")) for node, _ in nodes]

    program = torch.export.export(CountsInForward(), (X,))
    after, _ = converted(program, tmp_path, strict=True)
    assert notes(after) == notes(torch.export.load(tmp_path / "in.pt2"))
    assert notes(after)[0]["p_conv_weight"]


def expression(written):
    """Replace a size of the input by code that writes a file."""

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
    """Replace the example inputs by a pickle that weights_only refuses."""
    hidden = io.BytesIO()
    torch.save(((Writes(written),), {}), hidden)
    return lambda name, record: hidden.getvalue() if name == "data/sample_inputs/model.pt" else record


@pytest.mark.parametrize("hide", [expression, pickled])
def test_h41_torch_export_load_runs_what_is_in_the_file(hide, tmp_path):
    torch.export.save(torch.export.export(nn.Conv2d(3, 4, 3), (X,)), tmp_path / "in.pt2")
    written = tmp_path / "written"
    path = changed(tmp_path / "in.pt2", hide(written))
    with pytest.raises(ValueError, match=r"changed.pt2: torch.export.load evaluates expressions .* allow_pickle=True"):
        nhwc.convert_saved(path, tmp_path / "out.pt2")
    assert not written.exists()
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert written.exists()


def test_damaged_programs_are_one_error(tmp_path):
    torch.export.save(torch.export.export(nn.Conv2d(3, 4, 3), (X,)), tmp_path / "in.pt2")
    path = changed(tmp_path / "in.pt2", lambda name, record: b"{}" if name == "models/model.json" else record)
    with pytest.raises(ValueError, match=r"changed.pt2 cannot be read as an exported program: "):
        nhwc.convert_saved(path, tmp_path / "out.pt2", allow_pickle=True)
    assert not (tmp_path / "out.pt2").exists()


@pytest.mark.parametrize(
    ("record", "match"), [("data/aotinductor/model/model.so", "it is compiled"), ("data/other", "would lose it")]
)
def test_compiled_programs_and_unknown_records_are_refused(record, match, tmp_path):
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "in.pt2"))
    for name, content in (("archive_format", b"pt2"), ("archive_version", b"0"), (record, b"content")):
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    with pytest.raises(ValueError, match=match):
        nhwc.convert_saved(tmp_path / "in.pt2", tmp_path / "out.pt2", allow_pickle=True)
