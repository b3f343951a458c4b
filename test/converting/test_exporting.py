"""Exported models whose weights are converted in each forward: by PyTorch's own operators, with equal numbers."""

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_graphs import onnx_model, operators_of
from selection import exhaustive
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc

pytestmark = pytest.mark.filterwarnings("ignore")  # exporters and the old weight_norm are deprecated

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
    assert nhwc.planning.Action.EACH_FORWARD in [row.action for row in rows] or (
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
