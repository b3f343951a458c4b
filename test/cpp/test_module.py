"""The walk over modules in C++: module.cpp checks torch::nn by itself, and converts the archives that are made here."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cuda_build
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import cpp_extension

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """What a build without CMake does."""
    path = tmp_path_factory.mktemp("module") / "module"
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror"]
    flags += ["-include", "torch_nhwc/module.h"]  # first, so that it is seen to need no other header
    flags += [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    flags += [f"-I{folder}" for folder in nhwc.include_paths()]
    links = ["-Wl,--no-as-needed", nhwc.library_path(), f"-Wl,-rpath,{nhwc.library_path().parent}"]
    links += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, HERE / "module.cpp", "-o", path, *links], check=True)
    return path


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=cuda_build.environment()).stdout


def test_the_walk_over_torch_nn(program):
    assert run(program) == "ok\n"


def convert(program, folder, module, x):
    """The report of the program on a module, which is then loaded and run by a Python that knows no torch_nhwc.

    Also the strides of the parameters and buffers there.
    """
    module.save(folder / "module.pt")
    report = run(program, folder / "module.pt", folder / "converted.pt")
    torch.save({"x": x, "out": module(x)}, folder / "expected.pt")
    script = """
        import sys, torch
        module = torch.jit.load("converted.pt")
        expected = torch.load("expected.pt")
        torch.testing.assert_close(module(expected["x"]), expected["out"], rtol=1e-4, atol=1e-4)
        assert "torch_nhwc" not in sys.modules
        torch.save({name: value.stride() for name, value in module.state_dict().items()}, "strides.pt")
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True, cwd=folder)
    return report.splitlines(), torch.load(folder / "strides.pt")


class Layers(nn.Module):
    """Every kind of convolution layer, a weight that two share, and a layer of another rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
        self.tied = nn.Conv2d(3, 3, 3, padding="same")
        self.tied.weight = self.first.weight
        self.up = nn.ConvTranspose2d(3, 3, 2)
        self.volume = nn.Sequential(nn.Conv3d(3, 2, 1), nn.ConvTranspose3d(2, 3, (1, 2, 2)))
        self.line = nn.Conv1d(3, 3, 3)

    def forward(self, x):
        x = self.up(self.tied(self.first(x)))
        return self.volume(x.unsqueeze(2)).sum(2) + self.line(x.flatten(2)).sum()


TIED = "keep, it is the same tensor as an earlier site's, and changes with it"
LAYERS = [
    "first.weight (Conv2d) [3, 3, 3, 3]: convert, strides [27, 9, 3, 1] to [27, 1, 9, 3]",
    f"tied.weight (Conv2d) [3, 3, 3, 3]: {TIED}",
    "up.weight (ConvTranspose2d) [3, 3, 2, 2]: convert, strides [12, 4, 2, 1] to [12, 1, 6, 3]",
    "volume.0.weight (Conv3d) [2, 3, 1, 1, 1]: restride, strides [3, 1, 1, 1, 1] to [3, 1, 3, 3, 3]",
    "volume.1.weight (ConvTranspose3d) [2, 3, 1, 2, 2]: convert, strides [12, 4, 4, 2, 1] to [12, 1, 12, 6, 3]",
]


def test_a_scripted_module(program, tmp_path):
    report, strides = convert(program, tmp_path, torch.jit.script(Layers()), torch.randn(2, 3, 8, 8))
    assert report == [*LAYERS, "5 sites: 3 convert, 1 restride, 1 keep, 0 refuse"]
    assert strides["first.weight"] == strides["tied.weight"] == (27, 1, 9, 3)
    assert strides["volume.1.weight"] == (12, 1, 12, 6, 3)
    assert strides["line.weight"] == (9, 3, 1)


def test_a_traced_module(program, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    report, strides = convert(program, tmp_path, torch.jit.trace(Layers(), x), x)
    # A trace knows a shared parameter by its first name alone.
    assert report == [*LAYERS[:1], *LAYERS[2:], "4 sites: 3 convert, 1 restride, 0 keep, 0 refuse"]
    assert strides["first.weight"] == strides["tied.weight"] == (27, 1, 9, 3)


class Custom(nn.Module):
    """Convolutions without a layer, on parameters and buffers, wherever TorchScript has them."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.register_buffer("blur", torch.randn(3, 1, 3, 3))
        self.kernels = nn.ParameterList([nn.Parameter(torch.randn(3, 3, 3, 3)) for _ in range(2)])
        self.forked = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.exported = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.modulated = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.image = nn.Parameter(torch.randn(1, 3, 1, 1))  # 4D, and no weight

    def forward(self, x):
        for _ in range(2):
            x = nn.functional.conv2d(x, self.kernel, padding="same") / 9
        if x.numel() > 0:
            x = nn.functional.conv2d(x, self.blur, groups=3, padding=1)
        for kernel in self.kernels:
            x = nn.functional.conv2d(x, kernel, padding=1) / 9
        forked = torch.jit.fork(nn.functional.conv2d, x + self.image, self.forked)
        return torch.jit.wait(forked).mean() + nn.functional.conv2d(x, self.modulated * x.mean())

    @torch.jit.export
    def decode(self, x):
        return nn.functional.conv_transpose2d(x, self.exported)

    @torch.jit.export
    def convolve(self, x, weight):
        return nn.functional.conv2d(x, weight)


def test_a_custom_module(program, tmp_path):
    report, strides = convert(program, tmp_path, torch.jit.script(Custom()), torch.randn(2, 3, 8, 8))
    converted = "[3, 3, 3, 3]: convert, strides [27, 9, 3, 1] to [27, 1, 9, 3]"
    assert sorted(report[:-1]) == [
        "blur (Custom) [3, 1, 3, 3]: restride, strides [9, 9, 3, 1] to [9, 1, 3, 1]",
        f"exported (Custom) {converted}",
        f"forked (Custom) {converted}",
        f"kernel (Custom) {converted}",
        f"kernels.0 (ParameterList) {converted}",
        f"kernels.1 (ParameterList) {converted}",
        "modulated (Custom): refuse, the weight that reaches the convolution is computed from it: "
        "use torch.ops.nhwc.convert_weight there",
    ]
    assert report[-1] == "7 sites: 5 convert, 1 restride, 0 keep, 1 refuse"
    assert strides["modulated"] == (27, 9, 3, 1)
    assert strides["image"] == (3, 1, 1, 1)


def test_a_frozen_module(program, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    frozen = torch.jit.freeze(torch.jit.script(Layers().eval()))
    report, _ = convert(program, tmp_path, frozen, x)
    reason = "refuse, its weight is a constant of a frozen TorchScript module: convert before freezing"
    # An archive does not keep the names of constants.
    assert [line.split(" ", 1)[1] for line in report[:-1]] == [
        f"(conv2d) [3, 3, 3, 3]: {reason}",
        f"(conv_transpose2d) [3, 3, 2, 2]: {reason}",
        f"(conv3d) [2, 3, 1, 1, 1]: {reason}",
        f"(conv_transpose3d) [2, 3, 1, 2, 2]: {reason}",
    ]
    assert report[-1] == "4 sites: 0 convert, 0 restride, 0 keep, 4 refuse"


def test_computed_weights(program, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    norm = parametrizations.weight_norm
    module = nn.Sequential(norm(nn.Conv2d(3, 3, 3)), nn.Flatten(2), norm(nn.Conv1d(3, 3, 3)))
    report, strides = convert(program, tmp_path, torch.jit.trace(module, x), x)
    assert report == [
        "0.parametrizations.weight.original1 (ParametrizationList): refuse, the weight that reaches the convolution is "
        "computed from it: use torch.ops.nhwc.convert_weight there",
        "1 site: 0 convert, 0 restride, 0 keep, 1 refuse",
    ]
    assert strides["0.parametrizations.weight.original1"] == (27, 9, 3, 1)


@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="needs a quantized engine")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_module(program, tmp_path):
    from torch.ao import quantization

    x = torch.randn(2, 3, 8, 8)
    module = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 3, 3), quantization.DeQuantStub()).eval()
    module.qconfig = quantization.default_qconfig
    quantization.prepare(module, inplace=True)(x)
    quantization.convert(module, inplace=True)
    report, _ = convert(program, tmp_path, torch.jit.script(module), x)
    assert report == [
        "1._packed_params (Conv2d): refuse, its weight is packed (quantized, or for oneDNN): convert before packing",
        "1 site: 0 convert, 0 restride, 0 keep, 1 refuse",
    ]
