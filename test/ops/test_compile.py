"""opcheck, torch.compile, torch.export and FakeTensor: equal results in equal strides, or one clear error."""

import itertools
import subprocess
import sys

import pytest
import torch
from selection import exhaustive, some_of

import torch_nhwc as nhwc

SAMPLES = {
    "contiguous": lambda: torch.randn(4, 3, 3, 3),
    "channels_last": lambda: torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(4, 6, 3, 3)[:, ::2],
    "expanded": lambda: torch.randn(1, 3, 3, 3).expand(4, 3, 3, 3),
    "1x1": lambda: torch.randn(4, 3, 1, 1),
    "one_channel": lambda: torch.randn(4, 1, 3, 3),
    "empty": lambda: torch.randn(0, 3, 3, 3),
    "3d": lambda: torch.randn(4, 3, 3, 2, 3),
}
BACKENDS = ["eager", "aot_eager", "inductor"]
# Whether sizes are symbols, and the shape of the weight: not all pairs, since strides follow from a shape alone.
FAST = [(False, (4, 3, 3, 3)), (True, (4, 1, 3, 3))]
CASES = [*FAST, (False, (4, 3, 1, 1)), (True, (8, 7, 5, 5))]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck_of_the_functional_operators(sample, requires_grad, device):
    with torch.device(device):
        weight, other = SAMPLES[sample]().requires_grad_(requires_grad), SAMPLES["3d"]()
    # Either format with and without a cast, and with and without a gradient: not all eight pairs of these.
    casts = [{}, {"dtype": torch.float64}] if requires_grad else [{"dtype": torch.bfloat16}, {}]
    for arguments, options in zip(((), (torch.contiguous_format,)), casts):
        torch.library.opcheck(torch.ops.nhwc.convert_weight.default, (weight, *arguments), options)
    if requires_grad:
        torch.library.opcheck(torch.ops.nhwc.convert_weights.default, ([weight, other],), {"dtype": torch.float64})


def test_opcheck_of_no_weights():
    torch.library.opcheck(torch.ops.nhwc.convert_weights.default, ([],))


COMPILED = [
    (backend, *case) if backend != "inductor" and case in FAST else exhaustive(backend, *case)
    for backend, case in itertools.product(BACKENDS, CASES)
]


@pytest.mark.parametrize(("backend", "dynamic", "shape"), COMPILED, ids=str)
def test_h27_compiled_and_eager_agree_in_values_strides_and_gradients(backend, dynamic, shape):
    def layer(w, x):
        weight = torch.ops.nhwc.convert_weight(w)
        back = torch.ops.nhwc.convert_weight(weight, torch.contiguous_format, dtype=torch.float64)
        (listed,) = torch.ops.nhwc.convert_weights([w * 2])
        return torch.nn.functional.conv2d(x, weight), weight, back, listed

    for memory_format in (torch.contiguous_format, torch.channels_last):
        w = nhwc.convert_weight(torch.randn(shape), memory_format).requires_grad_()
        eager = w.detach().clone().requires_grad_()
        x = torch.randn(2, shape[1], 8, 8)
        torch._dynamo.reset()  # there is a limit to the variants of one function
        compiled = torch.compile(layer, backend=backend, dynamic=dynamic, fullgraph=True)
        actual, expected = compiled(w, x), layer(eager, x)
        torch.testing.assert_close(actual, expected)
        assert [a.stride() for a in actual[1:]] == [e.stride() for e in expected[1:]]
        actual[0].sum().backward()
        expected[0].sum().backward()
        torch.testing.assert_close(w.grad, eager.grad)
        if 1 not in shape:  # AccumulateGrad overlooks the strides of sizes of 1
            assert w.grad.stride() == eager.grad.stride()


@pytest.mark.parametrize("backend", some_of(BACKENDS, "eager", "aot_eager"))
def test_in_place_in_a_compiled_graph_raises_and_breaks_the_graph_when_called_by_our_name(backend):
    layer = torch.nn.Conv2d(3, 4, 3)
    before = layer.weight.stride()

    def by_operator(x):
        torch.ops.nhwc.convert_weight_(layer.weight)
        return layer(x)

    def by_name(x):
        nhwc.convert_weight_(layer.weight)
        return layer(x)

    x = torch.randn(1, 3, 8, 8)
    expected = layer(x)
    with pytest.raises(Exception, match="nhwc::convert_weight_: the weight is traced, fake, functional"):
        torch.compile(by_operator, backend=backend)(x)
    assert layer.weight.stride() == before
    torch.testing.assert_close(torch.compile(by_name, backend=backend)(x), expected)
    assert layer.weight.stride() == (27, 1, 9, 3)


class Layer(torch.nn.Module):
    """A convolution whose weight passes through the operators."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x):
        weight = torch.ops.nhwc.convert_weight(self.weight)
        return torch.nn.functional.conv2d(x, weight), weight


@pytest.mark.parametrize("strict", some_of([False, True], False))
def test_an_exported_program_runs_where_only_the_library_is_loaded(strict, tmp_path):
    layer, x = Layer(), torch.randn(2, 3, 8, 8)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((x, layer(x)[0]), tmp_path / "expected.pt")
    script = f"""
import torch
torch.ops.load_library({str(nhwc.cpp_extension.library_path())!r})
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
program = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
out, weight = program(x)
torch.testing.assert_close(out, expected)
assert weight.stride() == (27, 1, 9, 3)
assert program(torch.randn(5, 3, 8, 8))[0].shape == (5, 4, 6, 6)
import sys
assert "torch_nhwc" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env={"PATH": ""})
