"""Every replacement of one of PyTorch's layers: numbers compared with float64, formats, TorchScript, compilers."""

import copy
import itertools

import pytest
import torch
from losing_layers import LAYERS, ON_GPU
from onnx_graphs import onnx_operators
from reference import FORMATS, canonical_strides
from selection import exhaustive, some_of
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import REPLACEMENTS, Preserving, is_preserving

SOME = some_of(
    LAYERS,
    *("group_norm", "instance_norm_3d", "batch_norm", "softmax", "avg_pool", "circular_conv", "one_tap"),
)


def pair(name, dtype=torch.float32):
    """Return a layer and its replaced copy, and an input."""
    make, shape = LAYERS[name]
    stock = make().to(dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 0.5)
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    assert is_preserving(type(replaced))
    return stock, replaced, torch.randn(shape, dtype=torch.float64).add(0.3).to(dtype)


def run(layer, x, gradient=None):
    """Return the output, the gradient of the input, and those of the parameters."""
    x = x.detach().requires_grad_()
    output = layer(x)
    gradient = torch.ones_like(output) if gradient is None else gradient.to(output.dtype)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], gradient)]


def gradient_for(output):
    return torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def as_channels_last(tensor):
    return tensor.contiguous(memory_format=FORMATS[tensor.dim()])


def test_every_class_of_the_table_is_tried():
    others = {nn.CrossEntropyLoss, nn.MaxUnpool3d, nn.Linear}
    assert {type(make()) for make, _ in (LAYERS | ON_GPU).values()} | others == set(REPLACEMENTS)
    assert {type(make()) for make, _ in ON_GPU.values()} == {
        each for each, row in REPLACEMENTS.items() if not row.on_cpu
    }


@pytest.mark.parametrize("name", ON_GPU)
def test_layers_that_gain_on_a_gpu_are_pytorchs_on_a_cpu(name):
    make, shape = ON_GPU[name]
    stock, replaced, x = make(), make(), torch.randn(shape)
    swap_class(replaced, Preserving)
    for given in (x, as_channels_last(x)):
        expected = stock(given)
        for layer in (replaced, torch.jit.script(copy.deepcopy(replaced)), torch.jit.trace(replaced, given)):
            assert torch.equal(layer(given), expected)
            assert layer(given).stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_and_formats_on_channels_last(name, dtype):
    stock, replaced, x = pair(name, dtype)
    gradient = gradient_for(copy.deepcopy(stock).double()(x.double()))
    exact = run(copy.deepcopy(stock).double(), x.double(), gradient)
    try:
        theirs = run(stock, x, gradient)
    except NotImplementedError:  # some pools have no bfloat16 at all
        theirs = [each.to(dtype) for each in exact]
    ours = run(replaced, as_channels_last(x), as_channels_last(gradient))
    for got, other, right in zip(ours, theirs, exact):
        assert got.dtype == other.dtype
        error, theirs_error = (float((each.double() - right).abs().max()) for each in (got, other))
        assert error <= 2 * theirs_error + 2 * torch.finfo(dtype).eps * float(right.abs().max())
    for got in ours[:2]:
        assert got.stride() == canonical_strides(got.shape, FORMATS[got.dim()])


@pytest.mark.parametrize("channels", [6, 18])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": True, "ignore_index": 2, "reduction": "none"},
        {"label_smoothing": 0.1, "reduction": "sum"},
        {"weight": True, "label_smoothing": 0.1},
    ],
    ids=["plain", "weighted", "smoothed", "both"],
)
def test_cross_entropy_is_pytorch_s(options, kind, channels):
    options = options | ({"weight": torch.rand(channels)} if "weight" in options else {})
    if kind == "probabilities":  # for which PyTorch refuses an index to ignore
        options = {name: value for name, value in options.items() if name != "ignore_index"}
    stock = nn.CrossEntropyLoss(**options)
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    target = torch.randint(0, channels, (2, 5, 7))
    if kind == "probabilities":
        target = torch.rand(2, channels, 5, 7).softmax(1)
    x = torch.randn(2, channels, 5, 7)
    results = []
    for loss, given in ((stock, x), (replaced, as_channels_last(x)), (torch.jit.script(replaced), as_channels_last(x))):
        given = given.detach().requires_grad_()
        output = loss(given, target)
        results.append((output, *torch.autograd.grad(output.sum(), given)))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])
        assert got[0].stride() == results[0][0].stride()
        assert got[1].stride() == canonical_strides(x.shape, torch.channels_last)


@pytest.mark.parametrize("name", SOME)
def test_scripted_and_traced_layers_keep_operator_and_format(name, tmp_path):
    stock, replaced, x = pair(name)
    x = as_channels_last(x)
    expected = replaced(x)
    kept = {"circular_conv": "nhwc::pad_circular"}.get(name, "nhwc::")
    if "softmax" in name or "shuffle" in name:  # which consist of PyTorch's operators
        kept = "softmax" if "softmax" in name else "permute"
    if "adaptive_avg" not in name:  # sizes of None are not scriptable in PyTorch either
        replaced.eval(), stock.eval()
        scripted = torch.jit.script(copy.deepcopy(replaced))
        torch.testing.assert_close(scripted(x), replaced(x))
        assert kept in str(scripted.inlined_graph)
        assert scripted(x).stride() == expected.stride()
        torch.jit.save(scripted, tmp_path / "scripted.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "scripted.pt")(x), replaced(x))
        replaced.train()
    traced = torch.jit.trace(replaced, x, check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    for other in (x[:1], torch.cat([x, x], -1), torch.cat([x, x], -1).contiguous()):
        torch.testing.assert_close(traced(other), replaced(other))
    if "adaptive_avg" not in name:  # whose sizes are those of the input
        assert kept in str(traced.inlined_graph)
        assert traced(x).stride() == expected.stride()


@pytest.mark.parametrize("name", ["instance_norm", "pixel_shuffle", "pixel_unshuffle"])
def test_layers_that_are_traced_on_contiguous_inputs_take_other_sizes(name):
    _, replaced, x = pair(name)
    traced = torch.jit.trace(replaced.eval(), x, check_trace=False)
    for other in (torch.cat([x, x]), torch.cat([x, x], -1), torch.cat([x, x, x], -2)):
        torch.testing.assert_close(traced(other), replaced(other))


@pytest.mark.parametrize("name", SOME)
def test_compilers_and_exported_programs_see_pytorch_s_operators(name):
    stock, replaced, x = pair(name)
    stock.eval(), replaced.eval()
    seen = []

    def backend(graph, _):
        seen.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    output = torch.compile(replaced, backend=backend, fullgraph=True)(as_channels_last(x))
    torch.testing.assert_close(output, stock(x))
    program = torch.export.export(replaced, (as_channels_last(x),))
    assert seen
    assert not any("nhwc" in line.split("#")[0] for text in (*seen, str(program.graph)) for line in text.splitlines())
    torch.testing.assert_close(program.module()(as_channels_last(x)), stock(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        *((name, False) for name in LAYERS if "shuffle" not in name),  # no exporter takes those of volumes
        *(exhaustive(name, True) for name in ("group_norm", "circular_conv_3d")),
    ],
)
def test_onnx_has_pytorch_s_operators(name, dynamo):
    stock, replaced, x = pair(name)
    expected = onnx_operators(stock.eval(), x, dynamo)
    assert onnx_operators(replaced.eval(), as_channels_last(x), dynamo) == expected


@pytest.mark.parametrize(("stride", "adjusted"), [(1, True), (2, True), (2, False)])
def test_a_layer_that_pads_before_a_depthwise_convolution_of_a_subclass(stride, adjusted):
    """Its weight gradient is by our kernels: EfficientNet of transformers pads by itself where there is a stride."""
    modeling = pytest.importorskip("transformers.models.efficientnet.modeling_efficientnet")
    stock = modeling.EfficientNetDepthwiseLayer(modeling.EfficientNetConfig(), 8, stride, 5, adjusted)
    replaced = copy.deepcopy(stock)
    nhwc.convert_(replaced)
    x = torch.randn(2, 8, 13, 12)
    gradient = torch.randn_like(stock(x))
    for got, expected in zip(run(replaced, as_channels_last(x), gradient), run(stock.double(), x.double(), gradient)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    padded = replaced.depthwise_conv_pad(as_channels_last(x))
    convolved = replaced.depthwise_conv(padded)
    assert convolved.grad_fn.name() == "NhwcConvolutionBackward"
    for each in (padded, convolved, replaced(as_channels_last(x))):
        assert each.stride() == canonical_strides(each.shape, torch.channels_last)


def test_the_indices_of_a_max_pool_are_pytorch_s():
    stock = nn.AdaptiveMaxPool3d((2, 3, 3), return_indices=True)
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    x = torch.randn(2, 6, 4, 5, 7)
    for got, expected in zip(replaced(as_channels_last(x)), stock(x), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(torch.jit.script(replaced)(as_channels_last(x)), stock(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"stride": (1, 2, 2), "padding": (0, 1, 0)}], ids=str)
def test_max_unpool_is_pytorch_s_in_the_format(options):
    stock = nn.MaxUnpool3d((2, 3, 2), **options)
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    pooled, indices = nn.MaxPool3d((2, 3, 2), **options, return_indices=True)(torch.randn(2, 6, 5, 6, 7))
    sizes = [(5, 6, 7), (2, 6, 5, 6, 7), [5, 6, 7]]
    for layer, size, memory_format in itertools.product(
        (replaced, torch.jit.script(replaced)), sizes, (torch.contiguous_format, torch.channels_last_3d)
    ):
        x, given = (pooled.detach().clone().requires_grad_() for _ in range(2))
        if isinstance(layer, torch.jit.ScriptModule):
            size = list(size)
        expected = stock(x, indices, size)
        output = layer(as_channels_last(given), indices.contiguous(memory_format=memory_format), size)
        gradient = torch.randn(expected.shape)
        output.backward(as_channels_last(gradient)), expected.backward(gradient)
        assert torch.equal(output, expected)
        assert torch.equal(given.grad, x.grad)
        assert output.stride() == canonical_strides(output.shape, torch.channels_last_3d)
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    assert torch.equal(compiled(as_channels_last(pooled), indices, (5, 6, 7)), stock(pooled, indices, (5, 6, 7)))
