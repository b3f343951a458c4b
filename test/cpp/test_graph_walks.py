"""The walks over TorchScript graphs, in Python and in C++, find the same sites and say the same of them."""

import re
import subprocess

import cuda_build
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import mkldnn

import torch_nhwc as nhwc

# Compiling the program takes more than a minute; test_module.py has the walk in C++ in the fast tests.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
X = torch.randn(2, 3, 8, 8)


class Own(nn.Conv2d):
    """A layer of the user's own."""

    def forward(self, x):
        return functional.conv2d(x, self.weight, self.bias, padding=1)


class Kernels(nn.Module):
    """Convolutions on bare parameters: in a loop, a branch, a list and a fork."""

    def __init__(self):
        super().__init__()
        for name in ("looped", "branched", "forked", "detached", "optional"):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 3, 3, 3)))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(3, 3, 1, 3, 3)) for _ in range(2)])
        self.register_buffer("blur", torch.rand(3, 1, 3, 3))
        self.image = nn.Parameter(torch.randn(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = functional.conv2d(x, self.looped, padding="same")
        if x.numel() > 0:
            x = functional.conv2d(x, self.branched, padding=1) + self.image
        x = functional.conv2d(functional.conv2d(x, self.blur, groups=3), self.detached.detach(), padding=2)
        for kernel in self.listed:
            x = functional.conv3d(x.unsqueeze(2), kernel, padding=(0, 1, 1)).squeeze(2)
        return torch.jit.wait(torch.jit.fork(functional.conv2d, x, self.forked))

    @torch.jit.export
    def encode(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(functional.conv2d(x, self.optional), weight)


class Computed(nn.Conv2d):
    """Computes its weight in forward."""

    def forward(self, x):
        return functional.conv2d(x, self.weight * x.mean(), self.bias)


class Carried(nn.Conv2d):
    """Computes its weight in a loop, which carries it along."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(int(x.size(0))):
            x = functional.conv2d(x, weight, padding=1)
            weight = weight * 2
        return x


class LaidOut(nn.Conv2d):
    """Brings its weight, and what it computes from it, into the format itself."""

    def forward(self, x):
        x = functional.conv2d(x, torch.ops.nhwc.convert_weight(self.weight))
        return functional.conv2d(x, torch.ops.nhwc.convert_weight(self.weight * 2))


class FromArguments(nn.Module):
    """Computes a weight of nothing that the module has."""

    def forward(self, x):
        return functional.conv2d(x, x[:, :, :3, :3] * 2)


def layers():
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.BatchNorm2d(3),
        nn.Sequential(nn.ConvTranspose2d(3, 3, 2), nn.Conv2d(3, 3, 1, padding=1, padding_mode="reflect")),
        nn.Unflatten(1, (1, 3)),
        nn.Conv3d(1, 2, 1),
    )


def tied():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[1].weight = model[0].weight
    return model


def tied_by_view():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 3), nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    model[1].weight = nn.Parameter(model[0].weight.data.transpose(0, 1))
    model[3].register_buffer("first", model[2].weight.detach()[0])
    return model


def script(model):
    return torch.jit.script(model)


def trace(model):
    return torch.jit.trace(model, X)


def trace_under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return trace(model)


def quantized():
    from torch.ao import quantization

    model = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 3, 3), quantization.DeQuantStub()).eval()
    model.qconfig = quantization.default_qconfig
    quantization.prepare(model, inplace=True)(X)
    return quantization.convert(model, inplace=True)


def converted(model, **options):
    nhwc.convert_(model, **options)
    return model


MODELS = {
    "plain": lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.ConvTranspose2d(3, 3, 2)),
    "layers": layers,
    "own": lambda: nn.Sequential(Own(3, 3, 3), Own(3, 3, 3)),
    "own_root": lambda: Own(3, 3, 3),
    "kernels": lambda: nn.ModuleList([Kernels()])[0],
    "nested": lambda: nn.Sequential(nn.Sequential(Kernels()), nn.Conv2d(3, 3, 1)),
    "tied": tied,
    "tied_by_view": tied_by_view,
    "computed": lambda: nn.Sequential(Computed(3, 3, 3), nn.Conv2d(3, 3, 1), Computed(3, 3, 1)),
    "carried": lambda: nn.Sequential(Carried(3, 3, 3)),
    "normed": lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 3))),
    "laid_out": lambda: nn.Sequential(LaidOut(3, 3, 3)),
    "from_arguments": FromArguments,
    "converted": lambda: converted(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1))),
    "preserved": lambda: converted(layers(), preserve=True),
}
CASES = [(name, script, "loaded") for name in MODELS if name != "normed"]
CASES += [(name, trace, "loaded") for name in MODELS]
CASES += [(name, trace_under_autocast, "loaded") for name in ("layers", "own", "computed")]
CASES += [(name, script, "frozen") for name in ("layers", "own", "tied", "converted")]
CASES += [(name, script, "optimized") for name in ("plain", "own", "tied")]
PREPARE = {"loaded": lambda model: model, "frozen": torch.jit.freeze, "optimized": torch.jit.optimize_for_inference}
NAMELESS = {"COMPUTED_IN_FORWARD", "FROZEN", "PACKED"}


def assert_walks_agree(program, archive, prepared, compiler=script):
    """Python's plan is C++'s report; what has no attribute for its weight is named by each in its own way.

    The constants of frozen modules convert in Python, and are refused in C++.
    """
    model = PREPARE[prepared](torch.jit.load(archive).eval())
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    in_python = []
    for row in nhwc.plan(model).rows:
        reason = row.reason and row.reason.name.replace("ON_THE_FLY", "COMPUTED_IN_FORWARD")
        action = row.action.value
        if row.name.startswith("<constant") and reason in (None, "TIED"):
            action, reason = "refuse", "FROZEN"
        # A trace's graphs know a shared parameter by its first name alone, its layers each by their own.
        if compiler is not trace or reason != "TIED":
            in_python.append((row.full_name, action, reason))

    command = [program, "report", archive, prepared]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=cuda_build.environment()).stdout
    named = (*NAMELESS, "TIED", "TIED_BY_VIEW", "IN_FORMAT", "ONE_CHANNEL")
    reasons = {torch.ops.nhwc.sentence(reason): reason for reason in named}
    in_cpp = []
    for line in output.splitlines()[:-1]:
        name, action, text = re.fullmatch(r"(\S*) \(.*?: (\w+), (.*)", line).groups()
        in_cpp.append((name, action, reasons[text] if not text.startswith("strides") else None))

    def comparable(sites):
        return {
            (name if name in names and reason not in NAMELESS else None, *rest, reason) for name, *rest, reason in sites
        }

    assert comparable(in_python) == comparable(in_cpp), output
    return comparable(in_python)


@pytest.mark.parametrize(
    ("name", "compiler", "prepared"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}-{each[2]}") for each in CASES],
)
def test_the_walks_agree(name, compiler, prepared, program, tmp_path):
    compiler(MODELS[name]().eval()).save(tmp_path / "module.pt")
    sites = assert_walks_agree(program, tmp_path / "module.pt", prepared, compiler)
    assert sites or name in ("normed", "from_arguments")


@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="needs a quantized engine")
@pytest.mark.parametrize("prepared", ["loaded", "frozen"])
def test_the_walks_agree_on_quantized_weights(prepared, program, tmp_path):
    script(quantized()).save(tmp_path / "module.pt")
    assert assert_walks_agree(program, tmp_path / "module.pt", prepared) == {(None, "refuse", "PACKED")}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_the_walks_agree_on_weights_for_onednn(program, tmp_path):
    script(mkldnn.to_mkldnn(nn.Sequential(nn.Conv2d(3, 3, 3)).eval())).save(tmp_path / "module.pt")
    assert assert_walks_agree(program, tmp_path / "module.pt", "loaded") == {(None, "refuse", "PACKED")}
