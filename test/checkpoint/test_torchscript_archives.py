"""TorchScript archives of plain PyTorch: they convert, and run with equal outputs without torch_nhwc."""

import itertools
import zipfile

import pytest
import torch
from saved_files import SITES, STRIDES, Network, assert_run_elsewhere
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc import Reason

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
X = torch.randn(2, 3, 8, 8)
COMPILERS = {
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, X),
    "frozen": lambda model: torch.jit.freeze(torch.jit.script(model)),
}
INPUTS = None, "channels_last"


def archive(folder, compiler, name="in.pt", **options):
    """Save a model as an archive; return the model and the path."""
    model = Network().eval()
    torch.jit.save(COMPILERS[compiler](model), folder / name, **options)
    return model, folder / name


@pytest.mark.exhaustive  # a process of its own
def test_h11_archives_run_with_equal_outputs_without_this_package(tmp_path):
    expected = {}
    for compiler, wanted in itertools.product(COMPILERS, INPUTS):
        model, path = archive(tmp_path, compiler, f"{compiler}.pt")
        before = path.read_bytes()
        out = path.with_name(f"{compiler}-{wanted}.out")
        report = nhwc.convert_saved(path, out, input_format=wanted)
        assert path.read_bytes() == before
        assert len([row for row in report.rows if row.target_strides and not row.reason]) == 4
        expected[out.name] = "archive", X, model(X).detach(), {} if compiler == "frozen" else SITES
        assert list(torch.jit.load(out).state_dict()) == list(torch.jit.load(path).state_dict())
    assert_run_elsewhere(tmp_path, expected)


def test_h11_an_archive_computes_the_same_and_calls_no_operator_of_ours(tmp_path):
    model, path = archive(tmp_path, "scripted")
    nhwc.convert_saved(path, tmp_path / "out.pt", input_format="channels_last")
    torch.testing.assert_close(torch.jit.load(tmp_path / "out.pt")(X), model(X))
    with zipfile.ZipFile(tmp_path / "out.pt") as records:
        code = [records.read(name) for name in records.namelist() if name.endswith((".py", ".pkl"))]
    assert any(b"_nhwc_convert_image" in each for each in code)
    assert not any(b"ops.nhwc" in each for each in code)


class Attribute(nn.Module):
    """Convolves with a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.kernel = torch.randn(4, 3, 3, 3)

    def forward(self, x):
        return nn.functional.conv2d(x, self.kernel)


def test_attributes_convert(tmp_path):
    model = torch.jit.script(Attribute())
    model.save(tmp_path / "in.pt")
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", strict=True)
    after = torch.jit.load(tmp_path / "out.pt")
    assert after.kernel.stride() == STRIDES
    torch.testing.assert_close(after(X), model(X))


def test_extra_files_and_other_methods_stay(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x)

        @torch.jit.export
        def encode(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return self.conv(x) * scale

    model = torch.jit.script(Both())
    extra = {"labels.txt": "é".encode(), "of/bytes.bin": b"\xff\x00"}
    torch.jit.save(model, tmp_path / "in.pt", _extra_files=extra)
    nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", input_format="channels_last")
    there = dict.fromkeys(extra, "")
    after = torch.jit.load(tmp_path / "out.pt", _extra_files=there)
    assert there == extra
    torch.testing.assert_close(after.encode(X), model.encode(X))


class Arguments(nn.Module):
    """Takes images in every way that a format of inputs knows, and one that it does not."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(
        self,
        image: Tensor,
        maybe: Tensor | None,
        images: list[Tensor],
        named: dict[str, Tensor],
        pair: tuple[Tensor, int],
        scale: float = 2.0,
    ) -> list[Tensor]:
        outputs = [self.conv(image) * scale, self.conv(pair[0])]
        if maybe is not None:
            outputs.append(self.conv(maybe))
        for each in images:
            outputs.append(self.conv(each))
        for each in named.values():
            outputs.append(self.conv(each))
        return outputs


def test_forward_converts_its_inputs_and_keeps_its_arguments(tmp_path):
    before = torch.jit.script(Arguments().eval())
    before.save(tmp_path / "in.pt")
    report = nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", input_format="channels_last")
    assert report.remarks[-1] == (
        "input_format: forward converts its 4D inputs to channels-last, except those with one channel; "
        "arguments of type Tuple[Tensor, int] stay as they are"
    )
    after = torch.jit.load(tmp_path / "out.pt")
    arguments = X, X + 1, [X + 2], {"one": X + 3}, (X + 4, 1)
    torch.testing.assert_close(after(*arguments), before(*arguments))
    torch.testing.assert_close(after(X, None, [], {}, (X, 1), scale=3.0), before(X, None, [], {}, (X, 1), 3.0))
    names = [each.name for each in after.forward.schema.arguments]
    assert names == ["self", "image", "maybe", "images", "named", "pair", "scale"]
    convert = after._nhwc_convert_image
    assert convert(X).stride() == (192, 1, 24, 3)
    for other in (X[:, :1], X[0], X.long(), X[:, :, 0].unsqueeze(2).expand(2, 3, 8, 8)):
        assert convert(other).stride() == other.stride()

    again = nhwc.convert_saved(tmp_path / "out.pt", tmp_path / "again.pt", input_format="channels_last")
    assert again.remarks[-1] == "input_format: forward converts its inputs to channels-last already"
    torch.testing.assert_close(torch.jit.load(tmp_path / "again.pt")(*arguments), before(*arguments))


def test_a_format_of_the_inputs_that_fits_no_convolution_is_a_warning_and_an_error_if_strict(tmp_path):
    torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))).save(tmp_path / "in.pt")
    paths, message = (tmp_path / "in.pt", tmp_path / "out.pt"), "in.pt: input_format='channels_last_3d' converts no inp"
    with pytest.raises(RuntimeError, match=f"{message}.* pass 'channels_last', .*nothing was written, since strict"):
        nhwc.convert_saved(*paths, input_format="channels_last_3d", strict=True)
    assert not paths[1].exists()
    with pytest.warns(UserWarning, match=message):
        report = nhwc.convert_saved(*paths, input_format="channels_last_3d")
    assert "the convolutions are 2D: pass 'channels_last'" in report.remarks[-1]


def test_h22_norms_are_folded_into_converted_convolutions(tmp_path):
    model, path = archive(tmp_path, "scripted")
    nhwc.convert_saved(path, path)
    frozen = torch.jit.freeze(torch.jit.load(path))
    assert "batch_norm" not in str(frozen.graph)
    assert frozen.graph.findNode("aten::conv2d").inputsAt(1).toIValue().stride() == STRIDES
    torch.testing.assert_close(frozen(X), model(X))


class WritesOnLoading(nn.Module):
    """TorchScript's way to run code as an archive is loaded."""

    path: str

    def __init__(self, path):
        super().__init__()
        self.path, self.memory = path, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.memory

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        self.memory = torch.from_file(state[0], shared=True, size=4, dtype=torch.uint8).fill_(65)


def test_classes_that_run_code_on_being_loaded_are_refused(tmp_path):
    written = tmp_path / "written"
    torch.jit.script(WritesOnLoading(str(written))).save(tmp_path / "in.pt")
    with pytest.raises(
        ValueError, match=r"in.pt: classes in it have a __setstate__, which runs while they are loaded: if"
    ):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert not written.exists()
    with pytest.warns(UserWarning, match="nothing to convert"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", allow_pickle=True)
    assert written.read_bytes() == b"AAAA"


def test_an_archive_for_the_lite_interpreter_is_refused(tmp_path):
    torch.jit.script(nn.Conv2d(3, 4, 3))._save_for_lite_interpreter(str(tmp_path / "in.ptl"))
    with pytest.raises(ValueError, match="it is for the lite interpreter, whose bytecode would be lost"):
        nhwc.convert_saved(tmp_path / "in.ptl", tmp_path / "out.ptl")


def test_strict_refuses_what_is_computed_and_writes_nothing(tmp_path):
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    torch.jit.trace(model, X).save(tmp_path / "in.pt")
    with pytest.raises(RuntimeError, match="1 of 1 weight refused"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", strict=True)
    assert not (tmp_path / "out.pt").exists()
    with pytest.warns(UserWarning, match="1 of 1 weight refused"):
        report = nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert report.rows[0].reason is Reason.ON_THE_FLY
    with pytest.raises(RuntimeError, match=r"the model (is gone|no longer exists)"):
        report.revert()
