"""Linear layers of a converted model: replaced where this machine is slow in half precision, and nowhere else."""

import copy

import pytest
import torch
from onednn import IS_X86, TAKES
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import original_class
from torch_nhwc.nn.replacements import PreservingLinear

pytestmark = pytest.mark.skipif(not IS_X86, reason="on other CPUs all linear layers are PyTorch's")
SLOW = not TAKES[torch.bfloat16]


class Own(nn.Linear):
    def forward(self, input):
        return nn.functional.linear(input, self.weight, self.bias) + 1


class Derived(nn.Linear):
    pass


def network(dtype=torch.float32):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 64), Derived(64, 64), Own(64, 8)).to(dtype)


@pytest.fixture
def without_onednn():
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_linear_layers_are_replaced_where_their_dtype_is_slow(dtype):
    model = network(dtype)
    report = nhwc.convert_(model)
    is_slow = dtype != torch.float64 and (SLOW or not TAKES[dtype])
    assert [isinstance(layer, PreservingLinear) for layer in model[2:]] == [is_slow, is_slow, False]
    assert ("1 Linear replaced: fast in half precision" in str(report)) == is_slow
    assert [row.path for row in report.plan.layers] == ["0", *(["2", "3", "4"] if is_slow else [])]
    report.revert()
    assert [type(layer) for layer in model[2:]] == [nn.Linear, Derived, Own]


@pytest.mark.usefixtures("without_onednn")
def test_replaced_layers_compute_the_same():
    stock = network().bfloat16()
    model = copy.deepcopy(stock)
    report = nhwc.convert_(model)
    assert nhwc.plan(model).digest == report.plan.digest
    assert nhwc.plan(copy.deepcopy(model)).digest == report.plan.digest
    x = torch.randn(16, 3, 8, 8).bfloat16()
    torch.testing.assert_close(model(x), stock(x), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    assert nhwc.verify(stock, model, (x,)).ok
    nhwc.convert_(model, torch.contiguous_format)
    assert [type(layer) for layer in model] == [type(layer) for layer in stock]


def test_a_plan_of_another_machine_is_carried_out():
    with torch.backends.mkldnn.flags(enabled=False):
        replacing = nhwc.Plan.from_json(nhwc.plan(network()).to_json())
    leaving = nhwc.plan(nn.Sequential(*network()[:2], nn.Identity()))  # has no row of a linear layer
    model = network()
    report = nhwc.convert_(model, plan=replacing)
    assert isinstance(model[2], PreservingLinear)
    assert report.plan.digest == replacing.digest
    nhwc.training.check(model, replacing)
    other = network()
    with torch.backends.mkldnn.flags(enabled=False):
        nhwc.convert_(other, plan=leaving)
    assert type(other[2]) is nn.Linear


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1100])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 1200), (1200, 24)])
def test_values_and_gradients_of_many_rows_are_as_accurate_as_their_dtype(rows, inputs, outputs):
    """Rows are cast in parts; the sum of a gradient goes on in float32 from one part to the next."""
    tensors = [torch.randn(rows, 2, inputs), torch.randn(outputs, inputs), torch.randn(outputs)]
    grad = torch.randn(rows, 2, outputs)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in tensors]
        with torch.backends.mkldnn.flags(enabled=False):
            out = torch.ops.nhwc.linear(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, grad.bfloat16().to(dtype))])
    for ours, exact in zip(*results, strict=True):
        assert ours.stride() == exact.stride()
        error = (ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < 2**-8


@pytest.mark.usefixtures("without_onednn")
def test_models_without_a_convolution_and_attention_stay_as_they_are():
    perceptron = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    nhwc.convert_(perceptron)
    assert type(perceptron[0]) is nn.Linear
    model = nn.ModuleList([nn.Conv2d(3, 8, 1), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)])
    stock, x = copy.deepcopy(model), torch.randn(2, 40, 32)
    nhwc.convert_(model)
    attending = model[1]
    assert type(attending.self_attn.out_proj) is type(stock[1].self_attn.out_proj)
    assert original_class(type(attending.linear1)) is nn.Linear
    assert isinstance(attending.linear1, PreservingLinear)
    for each in (model, stock):
        each.eval().bfloat16()
    for is_training in (False, True):
        for each in (model, stock):
            each.train(is_training)
            torch.manual_seed(0)
        results = []
        for each in (model, stock):
            torch.manual_seed(0)
            results.append(each[1](x.bfloat16()))
        torch.testing.assert_close(*results, rtol=5e-2, atol=5e-2)
