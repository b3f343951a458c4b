"""convert_module_ of C++: module.cpp checks torch::nn by itself, and converts the archives that are made here."""

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


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Build the program as a project without CMake does."""
    path = tmp_path_factory.mktemp("module") / "module"
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    flags += ["-include", "torch_nhwc/module.h"] * 2  # first, so that it is seen to need no other header
    flags += [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    flags += [f"-I{folder}" for folder in nhwc.cpp_extension.include_paths()]
    library = nhwc.cpp_extension.library_path()
    links = ["-Wl,--no-as-needed", library, f"-Wl,-rpath,{library.parent}"]
    links += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [os.environ.get("CXX", "c++"), *flags, Path(__file__).with_name("module.cpp"), "-o", path, *links]
    subprocess.run(command, check=True)
    return path


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=cuda_build.environment()).stdout


def test_the_walk_over_torch_nn(program):
    assert run(program) == "ok\n"


def convert(program, folder, module, x):
    """Return the program's report on a module, and the strides of the converted module's parameters and buffers.

    The converted module is loaded and run in a Python without torch_nhwc.
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


def scripted(x):
    return torch.jit.script(Layers())


def traced(x):
    return torch.jit.trace(Layers(), x)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (scripted, [*LAYERS, "5 sites: 3 convert, 1 restride, 1 keep, 0 refuse"]),
        # A trace knows a shared parameter by its first name alone.
        (traced, [*LAYERS[:1], *LAYERS[2:], "4 sites: 3 convert, 1 restride, 0 keep, 0 refuse"]),
    ],
)
def test_layers_of_an_archive(make, expected, program, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    report, strides = convert(program, tmp_path, make(x), x)
    assert report == expected
    assert strides["first.weight"] == strides["tied.weight"] == (27, 1, 9, 3)
    assert strides["volume.1.weight"] == (12, 1, 12, 6, 3)
    assert strides["line.weight"] == (9, 3, 1)


class Custom(nn.Module):
    """Convolutions without a layer, on plain attributes, and weights that are no sites."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.register_buffer("blur", torch.randn(3, 1, 3, 3))
        self.exported = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.modulated = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.image = nn.Parameter(torch.randn(1, 3, 1, 1))  # 4D, and not a weight

    def forward(self, x):
        x = nn.functional.conv2d(x + self.image, self.kernel, padding="same")
        if x.numel() > 0:
            x = nn.functional.conv2d(x, self.blur, groups=3, padding=1)
        return nn.functional.conv2d(x, self.modulated * x.mean())

    @torch.jit.export
    def decode(self, x):
        return nn.functional.conv_transpose2d(x, self.exported)

    @torch.jit.export
    def convolve(self, x, weight):
        return nn.functional.conv2d(x, weight)


def test_attributes_that_a_method_convolves_with_are_sites_and_computed_weights_are_not(program, tmp_path):
    report, strides = convert(program, tmp_path, torch.jit.script(Custom()), torch.randn(2, 3, 8, 8))
    converted = "[3, 3, 3, 3]: convert, strides [27, 9, 3, 1] to [27, 1, 9, 3]"
    assert sorted(report[:-1]) == [
        "blur (Custom) [3, 1, 3, 3]: restride, strides [9, 9, 3, 1] to [9, 1, 3, 1]",
        f"exported (Custom) {converted}",
        f"kernel (Custom) {converted}",
    ]
    assert report[-1] == "3 sites: 2 convert, 1 restride, 0 keep, 0 refuse"
    assert strides["modulated"] == (27, 9, 3, 1)
    assert strides["image"] == (3, 1, 1, 1)


def frozen(x):
    return torch.jit.freeze(torch.jit.script(Layers().eval()))


def parametrized(x):
    return torch.jit.trace(nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 3))), x)


@pytest.mark.parametrize("make", [frozen, parametrized])
def test_constants_and_computed_weights_are_no_sites(make, program, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    report, _ = convert(program, tmp_path, make(x), x)
    assert report == ["0 sites: 0 convert, 0 restride, 0 keep, 0 refuse"]
