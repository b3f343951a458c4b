"""Properties of all operators and functions, over the table in `support/calls.py`: no operator can forget one."""

from types import FunctionType

import pytest
import torch
from activations import channels_last, sliced
from calls import ANSWERS, CALLS, CHECKS, IN_STEPS, LACKS, OTHER_FORMATS
from selection import some_of
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from torch_nhwc import functional

HALVES = torch.bfloat16, torch.float16
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 6e-3}
# What the first of PyTorch's own operators refuses that it meets.
OTHER_KINDS = "none", "double", "int", "float8", "mkldnn", "nested", "sparse"
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
OPERATORS = [name for name, call in CALLS.items() if isinstance(call.of, torch._ops.OpOverload)]


def each_call(test):
    """Run a test with every call but those that lack the property."""
    name = test.__name__.removeprefix("test_")
    return pytest.mark.parametrize("name", [key for key in CALLS if name not in LACKS.get(key, ())])(test)


class Side:
    """One side of a comparison: ours in float32 and channels-last, or plain torch in float64 and contiguous."""

    def __init__(self, function, arguments):
        self.function = function
        self.flat, self.form = tree_flatten(arguments)
        self.at = [at for at, each in enumerate(self.flat) if isinstance(each, torch.Tensor) and each.requires_grad]
        self.leaves = [self.flat[at].detach() for at in self.at]
        for at in self.at:
            self.flat[at] = None

    def __call__(self, *tensors):
        """Return the first result for other tensors to derive by; what is written to is copied."""
        given = [each.clone() if isinstance(each, torch.Tensor) else each for each in self.flat]
        for at, tensor in zip(self.at, tensors, strict=True):
            given[at] = tensor
        return tree_leaves(self.function(*tree_unflatten(given, self.form)))[0]

    def required(self):
        """Return the tensors to derive by, as leaves."""
        return [each.detach().requires_grad_() for each in self.leaves]


def converted(arguments, arrange, dtype):
    """Return the arguments with floating-point tensors of another dtype, and all of them in another format."""

    def convert(each):
        out = each.detach().to(dtype) if each.is_floating_point() else each
        return arrange(out).detach().requires_grad_(each.requires_grad)

    return tree_map_only(torch.Tensor, convert, arguments)


def sides(name):
    """Return ours and plain torch."""
    call = CALLS[name]
    arguments = call.make()
    return Side(call.of, arguments), Side(call.stock, converted(arguments, torch.Tensor.contiguous, torch.float64))


def random_like(tensors):
    """Return random tensors of these shapes and dtypes, the same numbers for each dtype."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in tensors]


def gradients(out, leaves, directions=None, **options):
    directions = random_like([out])[0] if directions is None else directions
    return torch.autograd.grad(out, leaves, directions, materialize_grads=True, **options)


def results_of(side):
    """Return a result, and the gradients of all tensors to derive by."""
    leaves = side.required()
    out = side(*leaves)
    return [out, *(gradients(out, leaves) if leaves else ())]


def assert_near(ours, real, tolerance=1e-5):
    for own, right in zip(ours, real, strict=True):
        assert own.shape == right.shape
        assert float((own.double() - right.double()).norm()) <= tolerance * float(right.double().norm()) + 1e-6


def test_every_operator_and_every_function_has_a_row():
    assert LACKS.keys() <= CALLS.keys()
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("nhwc::")]
    operators = {
        getattr(getattr(torch.ops.nhwc, each.name.removeprefix("nhwc::")), each.overload_name or "default")
        for each in schemas
    }
    functions = {getattr(functional, name) for name in functional.__all__}
    assert operators | functions == {call.of for call in CALLS.values()} | {*ANSWERS} | IN_STEPS


def assert_in_format(out):
    assert out.dim() not in (4, 5) or out.stride() == channels_last(out).stride()


@pytest.mark.parametrize(
    ("name", "dtype"),
    # What norms save for the backward is never of half precision.
    [(name, dtype) for name in CALLS for dtype in TOLERANCES if "norm_backward" not in name or dtype not in HALVES],
    ids=str,
)
def test_values_gradients_and_formats(name, dtype):
    call = CALLS[name]
    arguments = converted(call.make(), torch.Tensor.detach, dtype)
    ours = Side(call.of, arguments)
    found = results_of(ours)
    theirs = Side(call.stock, converted(arguments, torch.Tensor.contiguous, torch.float64))
    assert_near(found, results_of(theirs), TOLERANCES[dtype])
    assert {each.dtype for each in found} == {dtype}
    assert_in_format(found[0])
    # PyTorch's gradients of weights go by strides of size 1, and those of interpolations by the incoming gradient.
    if ours.leaves and "interpolate" not in name:
        assert found[1].stride() == ours.leaves[0].stride()


@each_call
def test_parts_of_larger_activations(name):
    ours, theirs = sides(name)
    if ours.leaves and ours.leaves[0].dim() in (4, 5):
        ours.leaves[0] = sliced(ours.leaves[0])
    found = results_of(ours)
    assert_near(found, results_of(theirs))
    assert_in_format(found[0])


@each_call
def test_only_the_needed_gradients(name):
    ours, theirs = sides(name)
    expected = results_of(theirs)[1:]
    for at, right in enumerate(expected):
        leaves = [each.requires_grad_(index == at) for index, each in enumerate(ours.required())]
        out = ours(*leaves)
        assert_near(gradients(out, leaves[at : at + 1]), [right])


@pytest.mark.parametrize(
    "arrange",
    [
        lambda each: each.clone(memory_format=torch.contiguous_format),  # depthwise weights as well
        lambda each: each.mT.contiguous().mT if each.dim() > 1 else each,
        lambda each: torch.stack([each, each], -1)[..., 0],
    ],
    ids=["contiguous", "in another order", "with gaps"],
)
@each_call
def test_other_formats_are_pytorch_s_bit_for_bit(name, arrange):
    call = CALLS[name]
    arguments = converted(call.make(), arrange, torch.float32)
    ours, theirs = (Side(function, arguments) for function in (call.of, call.stock))
    out, expected = (side(*side.leaves) for side in (ours, theirs))
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    call = CALLS[name]
    arguments = call.make()
    torch.library.opcheck(call.of, tuple(arguments), test_utils=call.checks, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in OPERATORS if "norm_backward" not in name])  # whose saved are float32
def test_opcheck_without_gradients(name, dtype):
    call = CALLS[name]
    arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, converted(call.make(), torch.Tensor.detach, dtype))
    checks = [each for each in call.checks if each != "test_aot_dispatch_dynamic"]
    torch.library.opcheck(call.of, tuple(arguments), test_utils=checks)


@each_call
def test_gradients_are_right_to_any_order(name):
    call = CALLS[name]
    side = Side(call.of, converted(call.make(), lambda each: each, torch.float64))
    leaves = tuple(side.required())
    assert torch.autograd.gradcheck(side, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(side, leaves, fast_mode=True)


@each_call
def test_higher_orders(name):
    """In float32, where finite differences are too coarse."""
    results = []
    for side in sides(name):
        leaves = side.required()
        first = gradients(side(*leaves).pow(2), leaves, create_graph=True)
        results.append([*first, *gradients(sum(each.square().sum() for each in first), leaves)])
    assert_near(*results)


@each_call
def test_forward_mode(name):
    assert_near(*(torch.func.jvp(side, tuple(side.leaves), tuple(random_like(side.leaves))) for side in sides(name)))


@each_call
def test_batched_gradients(name):
    """By the batching of autograd's engine, as `torch.autograd.functional.jacobian` vectorizes."""
    results = []
    for side in sides(name):
        leaves = side.required()
        results.append(batched(leaves, [side(*leaves)]))
    assert_near(*results)


@each_call
def test_batched_gradients_of_second_order(name):
    """As `torch.autograd.functional.hessian` vectorizes."""
    results = []
    for side in sides(name):
        leaves = side.required()
        results.append(batched(leaves, gradients(side(*leaves).pow(2), leaves, create_graph=True)))
    assert_near(*results)


def batched(leaves, outs):
    """Return gradients in three directions: ours at once, plain torch's, in float64, one after the other."""
    directions = random_like([each.new_empty(3, *each.shape) for each in outs])
    if leaves[0].dtype == torch.float32:
        return gradients(outs, leaves, directions, is_grads_batched=True, retain_graph=True)
    looped = [gradients(outs, leaves, each, retain_graph=True) for each in zip(*directions)]
    return [torch.stack(each) for each in zip(*looped)]


@each_call
def test_vmap(name):
    """Over each tensor to derive by, of results and gradients."""
    ours, theirs = sides(name)
    for at in range(len(ours.leaves)):

        def with_gradient(side, at=at):
            (direction,) = random_like([side(*side.leaves)])

            def total(each):
                out = side(*side.leaves[:at], each, *side.leaves[at + 1 :])
                return (out * direction).sum(), out

            return torch.func.grad(total, has_aux=True)

        mapped = torch.func.vmap(with_gradient(ours))(torch.stack([ours.leaves[at], 2 * ours.leaves[at]]))
        looped = [with_gradient(theirs)(each) for each in (theirs.leaves[at], 2 * theirs.leaves[at])]
        assert_near(mapped, [torch.stack(each) for each in zip(*looped)])


@each_call
def test_autocast(name):
    call = CALLS[name]
    arguments, results = call.make(), []
    for side in (Side(call.of, arguments), Side(call.stock, arguments)):
        leaves = side.required()
        with torch.autocast("cpu", torch.bfloat16):
            out = side(*leaves)
        results.append([out, *gradients(out, leaves)])
    assert [each.dtype for each in results[0]] == [each.dtype for each in results[1]]
    assert_near(*results, tolerance=3e-2)


@each_call
def test_autocast_around_the_backward(name):
    """What was computed in float32 has gradients in float32."""
    side, theirs = sides(name)
    leaves, expected = side.required(), theirs.required()
    out = side(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(out, leaves)
    assert_near(found, gradients(theirs(*expected), expected))


@each_call
def test_checkpoints(name):
    side = sides(name)[0]
    expected = results_of(side)
    leaves = side.required()
    out = checkpoint(side, *leaves, use_reentrant=False)
    assert_near([out, *(gradients(out, leaves) if leaves else ())], expected, tolerance=0)


@each_call
def test_threads(name):
    side, before = sides(name)[0], torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(results_of(side))
    finally:
        torch.set_num_threads(before)
    for each in results[1:]:
        assert_near(each, results[0])


@each_call
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tracing(name):
    call = CALLS[name]
    side = Side(call.of, call.make())
    traced = torch.jit.trace(side.__call__, tuple(side.leaves), check_trace=False)
    others = [each + 1 for each in side.leaves]
    assert_near([traced(*others)], [side(*others)])


def scripted(of, arguments):
    """Return TorchScript that calls with these arguments, of which tensors are its own arguments."""
    name = of._schema.name.replace("::", ".") if isinstance(of, torch._ops.OpOverload) else of.__name__
    called = f"torch.ops.{name}" if isinstance(of, torch._ops.OpOverload) else f"functional.{name}"
    flat, form = tree_flatten(arguments)

    class Name(str):
        __repr__ = str.__str__

    names = [Name(f"t{at}") if isinstance(each, torch.Tensor) else each for at, each in enumerate(flat)]
    given = ", ".join(f"{each}: Tensor" for each in names if isinstance(each, Name))
    literals = ", ".join(map(repr, tree_unflatten(names, form)))
    unit = torch.jit.CompilationUnit(f"def call({given}):\n    return {called}({literals})\n")
    return lambda *each: unit.call(*(one for one in tree_leaves(each) if isinstance(one, torch.Tensor)))


@each_call
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripting(name):
    call = CALLS[name]
    arguments = call.make()
    side, other = Side(scripted(call.of, arguments), arguments), Side(call.of, arguments)
    assert_near([side(*side.leaves)], [other(*other.leaves)])


# `test_opcheck` compiles the others, too.
COMPILED = [name for name in CALLS if name not in OPERATORS or CHECKS[-1] not in CALLS[name].checks]


@pytest.mark.parametrize(
    "name", some_of(COMPILED, "functional.gelu 0", "functional.cross_entropy 0", "functional.conv2d sliced")
)
def test_compiling(name):
    torch._dynamo.reset()
    side = sides(name)[0]
    call = torch.compile(CALLS[name].of, backend="aot_eager", fullgraph=True)
    results = []
    for function in (CALLS[name].of, call):
        side.function = function
        results.append(results_of(side))
    assert_near(*results)


@pytest.mark.parametrize("operator", ANSWERS, ids=str)
def test_answers(operator):
    """Operators without a gradient."""
    arguments, options = ANSWERS[operator]()
    # The other checks compare outputs, and have no comparison for a string.
    checks = ["test_schema", "test_faketensor"] + ["test_autograd_registration"] * bool(tree_leaves(arguments))
    torch.library.opcheck(operator, tuple(arguments), options, test_utils=checks)


def wrongly(arguments):
    """Yield calls with one argument that is wrong, odd, or of another kind, and what it is."""
    flat, form = tree_flatten(arguments)
    for at, each in enumerate(flat):
        if isinstance(each, torch.Tensor):
            each = each.detach()
            odd = {
                "none": None,
                "double": each.double(),
                "int": each.int(),
                "float8": each.float().to(torch.float8_e5m2),
                "meta": each.to("meta"),
                "mkldnn": each.float().to_mkldnn(),
                "nested": torch.nested.nested_tensor([each, each]),
                "no samples": each[:0],
                "fewer dimensions": each[0],
                "one less": each[1:],
                "no pixels": each[..., :0],
            }
            if at == 0:
                odd["sparse"] = each.to_sparse()
            if each.dim() > 1:
                odd["no channels"] = each[:, :0]
                odd["a channel less"] = each[:, 1:]
        elif type(each) is int:
            odd = {"zero": 0, "negative": -1}
        elif type(each) is str:
            odd = {"another name": "another"}
        else:
            continue
        for what, value in odd.items():
            yield f"{what} at {at}", tree_unflatten([*flat[:at], value, *flat[at + 1 :]], form)
    without = tree_map_only(torch.Tensor, lambda each: each[:, :0] if each.dim() > 1 else each, arguments)
    yield "no channels", without
    for at, each in enumerate(arguments):
        if isinstance(each, (list, tuple)):
            for what, value in {"empty": [], "longer": [*each, 1], "shorter": each[:-1]}.items():
                yield f"{what} at {at}", [*arguments[:at], value, *arguments[at + 1 :]]


def said(error):
    """Return the kind of an error and how its text begins, but for sizes in brackets, which may be those of a view."""
    return error and (type(error), str(error).partition(" (")[0][:40])


def outcome(function, arguments):
    """Return the result and no error, or no result and an error."""

    def copied(each):
        return each.detach() if each.is_nested else each.detach().clone()

    try:
        return tree_leaves(function(*tree_map_only(torch.Tensor, copied, arguments)))[0], None
    except Exception as error:
        return None, error


@each_call
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments(name):
    """As PyTorch's: its results or an error, of functions in its words; never an assertion inside of an operator."""
    call, found = CALLS[name], []
    for what, arguments in wrongly(call.make()):
        out, error = outcome(call.of, arguments)
        if error is not None and "INTERNAL ASSERT" in str(error):
            found.append(f"{what}: {error}"[:200])
        if OTHER_FORMATS in LACKS.get(name, ()) or "meta" in what:
            continue
        expected, real = outcome(call.stock, arguments)
        if (error is None) != (real is None):
            found.append(f"{what}: {error or 'no error'}, PyTorch: {real or 'no error'}"[:200])
        elif isinstance(call.of, FunctionType) and not what.startswith(OTHER_KINDS) and said(error) != said(real):
            found.append(f"{what}: {error}, PyTorch: {real}"[:200])
        elif error is None and out.layout == torch.strided and not out.is_nested:
            assert_near([out.double().nan_to_num()], [expected.double().nan_to_num()])
    assert not found, "\n".join(found)
