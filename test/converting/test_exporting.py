"""Weights that are laid out in each forward, in what is exported: by PyTorch's own operators, with equal numbers."""

import subprocess
import sys
import textwrap

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_graphs import onnx_model, operators_of
from selection import exhaustive
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore")  # exporters and the old weight_norm tell that they are old

KINDS = {
    "parametrized": parametrizations.weight_norm,
    "hooked": nn.utils.weight_norm,
    "in_each_forward": lambda layer: layer,
}


def network(kind):
    """Layers of one kind, each with another weight: of nine taps and one, grouped, transposed, of one channel."""
    layers = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 1, 3)]
    return nn.Sequential(*map(KINDS[kind], [*layers, nn.Conv2d(1, 2, 3)])).eval()


def convert(model, kind):
    rows = nhwc.convert_(model, each_forward=kind == "in_each_forward", strict=True).plan.rows
    assert nhwc.Action.EACH_FORWARD in [row.action for row in rows] or (
        nhwc.Reason.COPIED_EACH_FORWARD in [row.reason for row in rows]
    )


@pytest.mark.parametrize("dynamo", [False, exhaustive(True)])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind, dynamo):
    model, x = network(kind), torch.randn(2, 3, 8, 8)
    expected, plain = model(x).detach(), onnx_model(model, x, dynamo)
    convert(model, kind)
    exported = onnx_model(model, x, dynamo)
    assert operators_of(exported) == operators_of(plain)
    [output] = ReferenceEvaluator(exported).run(None, {exported.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected)


@pytest.mark.exhaustive
def test_a_package_of_aotinductor_runs_where_this_package_is_not(tmp_path):
    models, x = {kind: network(kind) for kind in KINDS}, torch.randn(2, 3, 8, 8)
    expected = [model(x).detach() for model in models.values()]
    for kind, model in models.items():
        convert(model, kind)

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.models = nn.ModuleList(models.values())

        def forward(self, x):
            return [model(x) for model in self.models]

    program = torch.export.export(All(), (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save((x, expected), tmp_path / "values.pt")
    code = """
        import sys, torch
        sys.modules["torch_nhwc"] = None
        x, expected = torch.load("values.pt")
        torch.testing.assert_close(list(torch._inductor.aoti_load_package("model.pt2")(x)), expected)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)


@pytest.mark.parametrize("export", [exhaustive("program"), "trace"])
def test_autocast_casts_what_is_converted_in_each_forward(export):
    class UnderAutocast(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return super().forward(x)

    model, x = UnderAutocast(*network("in_each_forward")), torch.randn(2, 3, 8, 8)
    convert(model, "in_each_forward")
    expected = model(x)
    made = torch.export.export(model, (x,)).module() if export == "program" else torch.jit.trace(model, x)
    output = made(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
