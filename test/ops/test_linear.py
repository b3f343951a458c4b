"""Linear layers in half precision: in float32 where oneDNN does not take the dtype, or is switched off."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onednn import IS_X86, TAKES
from torch._dynamo.backends.common import aot_autograd

from torch_nhwc import functional

pytestmark = pytest.mark.skipif(not IS_X86, reason="on other CPUs all linear layers are PyTorch's")
HALVES = torch.bfloat16, torch.float16
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture
def without_onednn():
    """Products in half precision are slow on every machine."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def tensors(dtype, shape=(2, 7, 7, 96), outputs=80, bias=True):
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(outputs, shape[-1], dtype=torch.float64)
    given = [x, w, *([torch.randn(outputs, dtype=torch.float64)] if bias else [])]
    return [each.to(dtype).requires_grad_() for each in given]


def computed(function, given):
    """Return the result and all gradients."""
    out = function(*given)
    gradient = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, given, gradient.to(given[0].dtype).to(out.dtype))]


def rms(got, exact):
    return float((got.double() - exact).square().mean().sqrt())


@each_half
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(2, 7, 7, 96), (64, 96), (3, 20, 64), (600,), (1, 300), (4, 260)], ids=str)
@pytest.mark.usefixtures("without_onednn")
def test_values_are_at_least_as_exact_as_pytorch_s(shape, bias, dtype):
    given = tensors(dtype, shape, bias=bias)
    exactly = [each.detach().double().requires_grad_() for each in given]
    every = [computed(function, each) for function, each in ((functional.linear, given), (F.linear, given))]
    for ours, theirs, exact in zip(*every, computed(F.linear, exactly), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), dtype)
        assert rms(ours, exact) <= 1.02 * rms(theirs, exact)


@each_half
@pytest.mark.usefixtures("without_onednn")
def test_inputs_of_any_strides(dtype):
    x, w, b = tensors(dtype, (2, 96, 7, 8))
    w = torch.randn(80, 96).to(dtype)
    for each in (x.movedim(1, -1), x.mT.contiguous().mT.movedim(1, -1), torch.stack([x, x], -1)[..., 0].movedim(1, -1)):
        given = [each.detach().requires_grad_(), w.requires_grad_(), b]
        for ours, theirs in zip(computed(functional.linear, given), computed(F.linear, given), strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-1)


@each_half
def test_the_way_is_in_float32_where_onednn_does_not_take_the_dtype(dtype):
    def name(*given):
        return functional.linear(*given).grad_fn.name()

    assert torch.ops.nhwc.computes_in_float32(dtype) == (not TAKES[dtype])
    assert (name(*tensors(dtype, (64, 96))) == "NhwcLinearBackward") == (not TAKES[dtype])
    for other in (torch.float32, torch.float64):
        assert not torch.ops.nhwc.computes_in_float32(other)
        assert name(*tensors(other, (64, 96))) == "AddmmBackward0"
    with torch.backends.mkldnn.flags(enabled=False):
        assert name(*tensors(dtype, (64, 96))) == "NhwcLinearBackward"
        assert name(*tensors(dtype, (4, 16), 16)) == "AddmmBackward0"  # so small that casts would take longer
        assert name(*tensors(dtype, (2, 300))) == "NhwcLinearBackward"  # for the gradient of the input


@each_half
@pytest.mark.parametrize("required", [(0, 1, 2), (0,), (1,), (1, 2), (2,)], ids=str)
@pytest.mark.usefixtures("without_onednn")
def test_what_is_saved_is_what_pytorch_saves(required, dtype):
    given = [each.requires_grad_(at in required) for at, each in enumerate(tensors(dtype, (64, 96)))]
    every = []
    for function in (functional.linear, F.linear):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, to=saved: to.append(each) or each, lambda each: each
        ):
            out = function(*given)
        every.append(sorted((each.numel(), each.dtype, each.untyped_storage().data_ptr()) for each in saved))
        for at, gradient in zip(required, torch.autograd.grad(out.sum(), [given[at] for at in required])):
            assert gradient.shape == given[at].shape
    assert every[0] == every[1]


def test_a_change_in_place_of_what_is_saved_is_an_error():
    given = [each * 1 for each in tensors(torch.bfloat16, (64, 96))]
    with torch.backends.mkldnn.flags(enabled=False):
        out = functional.linear(*given)
    given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_half
@pytest.mark.usefixtures("without_onednn")
def test_under_autocast_tensors_are_lowered_first(dtype):
    given, saved = tensors(torch.float32), []
    exactly = [each.detach().double().requires_grad_() for each in given]
    with (
        torch.autocast("cpu", dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each),
    ):
        out = functional.linear(*given)
    assert out.dtype == dtype
    assert out.grad_fn.name() == "NhwcLinearBackward"
    assert {each.dtype for each in saved} == {dtype}
    gradient = torch.randn(out.shape).to(dtype)
    got = [out, *torch.autograd.grad(out, given, gradient)]
    expected = F.linear(*exactly)
    for each, right in zip(got, [expected, *torch.autograd.grad(expected, exactly, gradient.double())], strict=True):
        assert rms(each, right) <= 1e-2 * float(right.square().mean().sqrt())
    assert {each.dtype for each in got[1:]} == {torch.float32}


@each_half
@pytest.mark.usefixtures("without_onednn")
def test_derivatives_of_other_kinds(dtype):
    """Transforms and tangents see PyTorch's operators."""
    x, w, b = (each.detach() / 8 for each in tensors(dtype, (64, 96)))  # float16 holds no large squares
    tangents = [torch.randn_like(each) for each in (x, w, b)]
    exactly = [[each.double() for each in group] for group in ((x, w, b), tangents)]
    pairs = [
        (
            torch.func.jvp(functional.linear, (x, w, b), tuple(tangents))[1],
            torch.func.jvp(F.linear, *map(tuple, exactly))[1],
        ),
        (
            torch.func.vmap(lambda each: functional.linear(each, w, b))(torch.stack([x, 2 * x])),
            torch.stack([F.linear(*exactly[0]), F.linear(2 * exactly[0][0], *exactly[0][1:])]),
        ),
        (
            torch.func.grad(lambda w: functional.linear(x, w, b).float().square().sum())(w),
            torch.func.grad(lambda w: F.linear(exactly[0][0], w, exactly[0][2]).square().sum())(exactly[0][1]),
        ),
    ]
    leaves = [each.requires_grad_() for each in (x, w, b)]
    exact = [each.requires_grad_() for each in exactly[0]]
    second = []
    for function, given in ((functional.linear, leaves), (F.linear, exact)):
        (first,) = torch.autograd.grad(function(*given).square().sum(), given[0], create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), given[1])[0])
    for got, right in (*pairs, second):
        assert got.dtype == dtype
        assert rms(got, right) <= 2e-2 * float(right.square().mean().sqrt())


@each_half
@pytest.mark.usefixtures("without_onednn")
def test_exceptions_are_pytorch_s(dtype):
    x, w, b = (each.detach() for each in tensors(dtype, (64, 96)))
    wrong = [
        *((x.float(), w, b), (x, w.float(), b), (x, w, b.float()), (x[:, 1:], w, b), (x, w[:, 1:], b), (x, w, b[1:])),
        *((x, w[0], b), (x, w[None], b), (x, w, b[None]), (x[0, 0], w, b), (x, None, b), (x, w, 1)),
        *((x[:0], w, b), (x, w[:0], b[:0]), (x[:, :0], w[:, :0], b), (x, w, b[:1]), (x.to("meta"), w, b)),
    ]
    for arguments in wrong:
        results = []
        for function in (functional.linear, F.linear):
            try:
                results.append(function(*arguments))
            except Exception as error:
                results.append((type(error), str(error)))
        assert type(results[0]) is type(results[1])
        if isinstance(results[0], tuple):
            assert results[0] == results[1]
        elif not results[0].is_meta:
            torch.testing.assert_close(*results, rtol=0, atol=0)


@each_half
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("without_onednn")
def test_compiled_graphs_have_casts_and_exported_programs_a_linear_layer(dynamic, dtype):
    torch._dynamo.reset()
    graphs = []

    def seen(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    layer = torch.nn.Linear(96, 80).to(dtype)
    call = lambda x: functional.linear(x, layer.weight, layer.bias)  # noqa: E731
    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=seen), fullgraph=True, dynamic=dynamic)
    x = torch.randn(64, 96).to(dtype)
    torch.testing.assert_close(compiled(x), call(x))
    addmm = next(line for line in graphs[0].splitlines() if "aten.addmm" in line)
    assert '"f32[' in addmm
    program = torch.export.export(layer, (x,))
    assert "aten.linear" in str(program.graph)
    assert "to_copy" not in str(program.graph)


class Subclass(torch.Tensor):
    pass


@pytest.mark.usefixtures("without_onednn")
def test_subclasses_stay_themselves():
    x, w, b = (each.detach() for each in tensors(torch.bfloat16))
    out = functional.linear(x.as_subclass(Subclass), w, b)
    assert type(out) is Subclass
    torch.testing.assert_close(out.as_subclass(torch.Tensor), functional.linear(x, w, b), rtol=0, atol=0)
