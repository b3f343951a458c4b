"""Models on a CUDA device: converted where they are, with all that follows, and back."""

import comparison
import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Outcome
from torch_nhwc.planning import Action

pytestmark = pytest.mark.cuda


def network():
    """2D and 3D layers that move bytes, one that only restrides, and tensors that are no weights of convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 16, 1),
        nn.ConvTranspose2d(16, 8, 3), nn.Unflatten(1, (4, 2)), nn.Conv3d(4, 4, 2), nn.Flatten(), nn.LazyLinear(2),
    ).double()  # fmt: skip


@pytest.fixture
def model():
    model = network()
    model(inputs("cpu"))
    return model.cuda()


def inputs(device="cuda"):
    return torch.randn(2, 3, 12, 12, dtype=torch.double, device=device)


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_weights_convert_where_they_are_and_revert(model):
    x, before, layouts = inputs(), values(model), comparison.layouts(model)
    expected = model.eval()(x)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    report = nhwc.convert_(model)
    assert {row.device for row in report.plan.rows} == {"cuda:0"}
    assert set(report.outcomes) == {Outcome.IN_PLACE, Outcome.RESTRIDED}
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    comparison.assert_weights_arrive_in(None, model, x)
    torch.testing.assert_close(model(x), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {row.action for row in nhwc.plan(model).rows} == {Action.KEEP}
    report.revert()
    assert comparison.layouts(model) == layouts
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_converted_model_is_captured_in_a_graph_and_one_that_is_being_captured_stays(model):
    model.eval().requires_grad_(False)
    x = inputs()
    before = comparison.layouts(model)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        with pytest.raises(RuntimeError, match="expected no CUDA graph to be captured"):
            nhwc.convert_(model)
    assert comparison.layouts(model) == before
    expected = model(x)
    nhwc.convert_(model)
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)
