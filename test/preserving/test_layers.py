"""Every layer that stands in for one of PyTorch's: numbers beside float64, formats, TorchScript, compilers."""

import copy

import pytest
import torch
from losing_layers import LAYERS
from onnx_graphs import onnx_operators
from reference import FORMATS, canonical_strides
from selection import exhaustive, some_of
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.preserving.exchange import exchange, is_exchanged
from torch_nhwc.preserving.losing import LOSSES

SOME = some_of(LAYERS, "group_norm", "instance_norm_3d", "softmax", "avg_pool", "circular_conv", "one_tap", "upsample")


def pair(name, dtype=torch.float32):
    """A layer and its exchanged copy, and an input."""
    make, shape = LAYERS[name]
    stock = make().to(dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 0.5)
    exchanged = copy.deepcopy(stock)
    exchange(exchanged)
    assert is_exchanged(type(exchanged))
    return stock, exchanged, torch.randn(shape, dtype=torch.float64).add(0.3).to(dtype)


def run(layer, x, gradient=None):
    """The output, the gradient of the input, and those of the parameters."""
    x = x.detach().requires_grad_()
    output = layer(x)
    gradient = torch.ones_like(output) if gradient is None else gradient.to(output.dtype)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], gradient)]


def gradient_for(output):
    return torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def as_channels_last(tensor):
    return tensor.contiguous(memory_format=FORMATS[tensor.dim()])


def test_every_class_of_the_table_is_tried():
    assert {type(make()) for make, _ in LAYERS.values()} | {nn.CrossEntropyLoss} == set(LOSSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_and_formats_on_channels_last(name, dtype):
    stock, exchanged, x = pair(name, dtype)
    gradient = gradient_for(copy.deepcopy(stock).double()(x.double()))
    exact = run(copy.deepcopy(stock).double(), x.double(), gradient)
    try:
        theirs = run(stock, x, gradient)
    except NotImplementedError:  # some pools have no bfloat16 at all
        theirs = [each.to(dtype) for each in exact]
    ours = run(exchanged, as_channels_last(x), as_channels_last(gradient))
    for got, other, right in zip(ours, theirs, exact):
        assert got.dtype == other.dtype
        error, theirs_error = (float((each.double() - right).abs().max()) for each in (got, other))
        assert error <= 2 * theirs_error + 2 * torch.finfo(dtype).eps * float(right.abs().max())
    for got in ours[:2]:
        assert got.stride() == canonical_strides(got.shape, FORMATS[got.dim()])


@pytest.mark.parametrize("name", LAYERS)
def test_contiguous_inputs_are_pytorch_s_bit_for_bit(name):
    stock, exchanged, x = pair(name)
    for got, expected in zip(run(exchanged, x), run(stock, x), strict=True):
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_mode_and_running_statistics_are_kept(name):
    stock, exchanged, x = pair(name)
    for layer, given in ((stock, x), (exchanged, as_channels_last(x))):
        layer(given)  # which moves the running statistics
        layer.eval()
    torch.testing.assert_close(exchanged(as_channels_last(x)), stock(x))
    for got, expected in zip(exchanged.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(got, expected)


def test_convolutions_that_are_others_by_now_are_right():
    padded = nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular")
    grown = nn.Conv3d(6, 4, 1, padding="same")
    for layer in (padded, grown):
        exchange(layer)
    padded.padding_mode = "zeros"
    grown.weight, grown.kernel_size = nn.Parameter(torch.randn(4, 6, 3, 3, 3)), (3, 3, 3)
    image, volume = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 4, 5, 7)
    expected = nn.functional.conv2d(image, padded.weight, padded.bias, padding=1)
    torch.testing.assert_close(padded(as_channels_last(image)), expected)
    expected = nn.functional.conv3d(volume, grown.weight, grown.bias, padding=1)
    torch.testing.assert_close(grown(as_channels_last(volume)), expected)


def test_a_row_of_one_tap_in_the_plane_comes_back_from_json():
    plan = nhwc.plan(nn.Conv3d(6, 4, (3, 1, 1), padding=(1, 0, 0)), preserve=True)
    assert [(row.layer, row.action) for row in plan.layers] == [("Conv3d", nhwc.Action.EXCHANGE)]
    assert nhwc.Plan.from_json(plan.to_json()) == plan


def test_the_indices_of_a_max_pool_are_pytorch_s():
    stock = nn.AdaptiveMaxPool3d((2, 3, 3), return_indices=True)
    exchanged = copy.deepcopy(stock)
    exchange(exchanged)
    x = torch.randn(2, 6, 4, 5, 7)
    for got, expected in zip(exchanged(as_channels_last(x)), stock(x), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(torch.jit.script(exchanged)(as_channels_last(x)), stock(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": torch.rand(6), "ignore_index": 2, "reduction": "none"},
        {"label_smoothing": 0.1, "reduction": "sum"},
        {"weight": torch.rand(6), "label_smoothing": 0.1},
    ],
    ids=["plain", "weighted", "smoothed", "both"],
)
def test_cross_entropy_is_pytorch_s(options):
    stock = nn.CrossEntropyLoss(**options)
    exchanged = copy.deepcopy(stock)
    exchange(exchanged)
    target = torch.randint(0, 6, (2, 5, 7))
    results = []
    for loss, x in ((stock, torch.randn(2, 6, 5, 7)), (exchanged, None)):
        x = results[0][0] if x is None else x
        x = as_channels_last(x) if loss is exchanged else x
        x.requires_grad_()
        output = loss(x, target)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        results.append((x.detach(), output, gradient))
    torch.testing.assert_close(results[1], results[0])
    assert results[1][2].stride() == canonical_strides((2, 6, 5, 7), torch.channels_last)


@pytest.mark.parametrize("name", SOME)
def test_scripted_and_traced_layers_keep_the_operator(name, tmp_path):
    stock, exchanged, x = pair(name)
    x = as_channels_last(x)
    expected = exchanged(x)
    kept = {"circular_conv": "pad_circular"}.get(name, "")
    if "adaptive_avg" not in name:  # sizes of None are not scriptable in PyTorch either
        exchanged.eval(), stock.eval()
        scripted = torch.jit.script(copy.deepcopy(exchanged))
        torch.testing.assert_close(scripted(x), exchanged(x))
        if "upsample" not in name:  # whose scripted form is PyTorch's
            assert f"nhwc::{kept}" in str(scripted.inlined_graph)
        torch.jit.save(scripted, tmp_path / "scripted.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "scripted.pt")(x), exchanged(x))
        exchanged.train()
    traced = torch.jit.trace(exchanged, x, check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    if "adaptive_avg" not in name:  # whose sizes are those of the input
        assert f"nhwc::{kept}" in str(traced.inlined_graph)
        assert traced(x).stride() == expected.stride()


@pytest.mark.parametrize("name", SOME)
def test_compilers_and_exported_programs_see_pytorch_s_operators(name):
    stock, exchanged, x = pair(name)
    stock.eval(), exchanged.eval()
    seen = []

    def backend(graph, _):
        seen.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    output = torch.compile(exchanged, backend=backend, fullgraph=True)(as_channels_last(x))
    torch.testing.assert_close(output, stock(x))
    program = torch.export.export(exchanged, (as_channels_last(x),))
    assert seen
    assert not any("nhwc" in line.split("#")[0] for text in (*seen, str(program.graph)) for line in text.splitlines())
    torch.testing.assert_close(program.module()(as_channels_last(x)), stock(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dynamo"),
    [*((name, False) for name in LAYERS), *(exhaustive(name, True) for name in ("group_norm", "circular_conv_3d"))],
)
def test_onnx_has_pytorch_s_operators(name, dynamo):
    stock, exchanged, x = pair(name)
    expected = onnx_operators(stock.eval(), x, dynamo)
    assert onnx_operators(exchanged.eval(), as_channels_last(x), dynamo) == expected


@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "one_tap"])
def test_compiled_training_is_right(name):
    stock, exchanged, x = pair(name)
    gradient = gradient_for(stock(x)).float()
    torch._dynamo.reset()
    compiled = torch.compile(exchanged, backend="aot_eager")
    got = run(compiled, x, gradient)
    for one, other in zip(got, run(stock, x, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_autocast_gives_the_dtypes_of_the_layer_that_was_there(name):
    stock, exchanged, x = pair(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = stock(x), exchanged(as_channels_last(x))
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["group_norm", "instance_norm_3d"])
def test_one_value_for_each_channel_is_pytorch_s_error(name):
    stock, exchanged, x = pair(name)
    one = as_channels_last(x[:1, ..., :1, :1, :1] if x.dim() == 5 else x[:1, :, :1, :1])
    if name == "group_norm":
        one, stock, exchanged = one[:, :3], nn.GroupNorm(3, 3), nn.GroupNorm(3, 3)
        exchange(exchanged)
    for layer in (stock, exchanged):
        with pytest.raises(ValueError, match="Expected more than 1"):
            layer(one)


def test_a_channel_that_does_not_fit_is_pytorch_s_error():
    for make, x in (
        (lambda: nn.GroupNorm(2, 4), torch.randn(2, 5, 3, 3)),
        (lambda: nn.InstanceNorm2d(4, affine=True), torch.randn(2, 5, 3, 3)),
        (lambda: nn.Conv3d(4, 4, 1), torch.randn(2, 5, 3, 3, 3)),
        (lambda: nn.AvgPool3d(9), torch.randn(2, 5, 3, 3, 3)),
        (lambda: nn.CircularPad2d(9), torch.randn(2, 5, 3, 3)),
    ):
        stock, exchanged = make(), make()
        exchange(exchanged)
        with pytest.raises(Exception) as expected:  # noqa: PT011
            stock(x)
        with pytest.raises(type(expected.value)):
            exchanged(as_channels_last(x))
