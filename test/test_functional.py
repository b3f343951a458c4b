"""The functions of `torch_nhwc.functional`: signatures, which calls are PyTorch's, errors."""

import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from calls import FUNCTIONS
from reference import FORMATS
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torch_nhwc import functional

CL, CL3D = torch.channels_last, torch.channels_last_3d
IMAGE, VOLUME = (2, 6, 5, 7), (2, 6, 4, 5, 7)
WIDE = (2, 18, 3, 5)  # of so many channels that softmax goes over a view
EACH = [
    pytest.param(name, shape, arguments, id=f"{name} {index}")
    for name, calls in FUNCTIONS.items()
    for index, (shape, arguments) in enumerate(calls)
    if name != "cross_entropy"  # of which a loss without dimensions comes out
]


def tensors_of(shape, arguments):
    """Return an activation and the arguments of a call after it, without gradients."""
    given = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments()]
    return torch.randn(shape), given


NORMS = ("batch_norm", "group_norm", "instance_norm")


@pytest.mark.parametrize("name", functional.__all__)
def test_signatures_are_pytorch_s(name):
    ours = inspect.signature(getattr(functional, name)).parameters.values()
    theirs = getattr(F, name)
    try:
        expected = inspect.signature(theirs).parameters.values()
    except ValueError:  # of a function in C++ the documentation has it
        first = theirs.__doc__.strip().splitlines()[0]
        names = (
            first[first.index("(") + 1 : first.rindex(")")].replace("'none'", "none").replace(" = ", "=").split(", ")
        )
        assert [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in ours] == names
        return
    if [each.name for each in expected] == ["args", "kwargs"]:
        assert [each.name for each in ours] == ["input", "output_size", "return_indices"]
        return
    # What follows a norm in the same pass comes after PyTorch's arguments.
    following = [("activation", None), ("residual", None), ("negative_slope", 0.01)] if name in NORMS else []
    if name == "normalize":
        following = [("weight", None), ("bias", None), ("scale", 1.0), ("activation", None)]
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in expected] + following


class Noting:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        called.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(Noting, torch.Tensor):
    """A subclass that only adds to what a tensor is."""


class Interpreting(Noting, TwoTensor):
    """A subclass with a `__torch_dispatch__` of its own."""


called = []


@pytest.mark.parametrize(("name", "shape", "arguments"), EACH)
def test_plain_subclasses_keep_their_class_numbers_and_format(name, shape, arguments):
    x, arguments = tensors_of(shape, arguments)
    x = (100 + x).contiguous(memory_format=FORMATS[len(shape)])
    expected_input, given = x.clone().requires_grad_(), x.clone().as_subclass(Tagged).requires_grad_()
    ours = getattr(functional, name)
    expected = ours(expected_input, *arguments)
    called.clear()
    output = ours(given, *arguments)
    assert [inspect.unwrap(each) for each in called] == [ours]  # once, as for PyTorch's functions
    assert type(output) is Tagged
    assert not output._is_view()  # of which an activation in place would copy the gradient
    output, gradient = output.as_subclass(torch.Tensor), torch.randn_like(expected)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert output.stride() == expected.stride()
    results = [torch.autograd.grad(y, x, gradient)[0] for y, x in ((output, given), (expected, expected_input))]
    assert torch.equal(results[0].as_subclass(torch.Tensor), results[1])
    assert results[0].stride() == results[1].stride()


def test_parameters_and_targets_may_be_plain_subclasses_too():
    x, target = torch.randn(WIDE).contiguous(memory_format=CL), torch.randint(0, 18, (2, 3, 5))
    loss = functional.cross_entropy(x, target.as_subclass(Tagged), reduction="none")
    assert type(loss) is Tagged
    assert torch.equal(loss.as_subclass(torch.Tensor), functional.cross_entropy(x, target, reduction="none"))
    weight = torch.randn(18)
    normed = functional.group_norm(x, 3, weight.as_subclass(Tagged))
    assert torch.equal(normed.as_subclass(torch.Tensor), functional.group_norm(x, 3, weight))


@pytest.mark.parametrize(("name", "shape", "arguments"), EACH)
def test_subclasses_that_compute_in_their_own_way_get_pytorch_s_function(name, shape, arguments):
    x, arguments = tensors_of(shape, arguments)
    x = x.contiguous(memory_format=FORMATS[len(shape)])
    called.clear()
    assert isinstance(getattr(functional, name)(Interpreting(x, x), *arguments), TwoTensor)
    assert called
    assert not any("nhwc" in f"{each} {getattr(each, '__module__', '')}" for each in called)


def test_nested_tensors_get_pytorch_s_function():
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    for call in (lambda f: f.gelu(nested), lambda f: f.softmax(nested, -1)):
        for output, expected in zip(call(functional).unbind(), call(F).unbind(), strict=True):
            assert torch.equal(output, expected)


@pytest.mark.parametrize("given", [None, torch.randn(1, 4, 4, 4).to_sparse()], ids=["none", "sparse"])
@pytest.mark.parametrize("name", ["gelu", "softmax", "conv2d", "conv_transpose2d"])
def test_no_tensor_and_a_sparse_one_get_pytorch_s_error(name, given):
    arguments = {"gelu": (), "softmax": (1,)}.get(name, (torch.randn(4, 4, 3, 3),))
    errors = []
    for module in (functional, F):
        with pytest.raises((TypeError, AttributeError, RuntimeError)) as raised:
            getattr(module, name)(given, *arguments)
        errors.append((raised.type, str(raised.value).partition(" - got")[0]))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("axes", [2, 3])
def test_a_transposed_convolution_has_no_padding_by_name(axes):
    x, w = torch.randn(1, 8, *(6,) * axes), torch.randn(8, 4, *(3,) * axes)
    x = x.contiguous(memory_format=FORMATS[x.dim()])
    with pytest.raises(TypeError, match=r"argument 'padding' .* must be tuple of ints, not str"):
        getattr(functional, f"conv_transpose{axes}d")(x, w, None, 1, "same")


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad mode": torch.enable_grad}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "shape", "arguments"), EACH)
def test_results_are_no_views_and_may_be_changed_in_place(name, shape, arguments, mode, requires_grad):
    def result(module, x):
        x.requires_grad_(requires_grad)
        with MODES[mode]():
            output = getattr(module, name)(x, *arguments)
            if module is F:
                output = output * 1  # PyTorch's instance norm is a view
            assert not output._is_view()
            assert output._base is None
            if mode == "inference_mode":
                return [output.relu_()]
        added = torch.ones(1, requires_grad=True)
        output += added
        F.relu_(output).square().sum().backward()
        return [output, added.grad, *([x.grad] if x.grad is not None else [])]

    x, arguments = tensors_of(shape, arguments)
    given = x.contiguous(memory_format=FORMATS[len(shape)])
    if "softmax" in name and requires_grad and mode == "grad mode":  # the backward reads the output
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result(functional, given)
    else:
        for ours, theirs in zip(result(functional, given), result(F, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_results_with_a_tangent_are_no_views_without_a_gradient():
    x, tangent = torch.randn(2, *VOLUME).unbind()
    expected = 2 * torch.func.jvp(F.gelu, (x,), (tangent,))[1]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        output = functional.gelu(torch.autograd.forward_ad.make_dual(x.contiguous(memory_format=CL3D), tangent))
        assert not output._is_view()
        found = torch.autograd.forward_ad.unpack_dual(output.mul_(2)).tangent
    torch.testing.assert_close(found, expected)


def test_the_indices_of_a_pool_and_losses_without_reduction_are_no_views():
    x = torch.randn(VOLUME).contiguous(memory_format=CL3D)
    assert not any(each._is_view() for each in functional.adaptive_max_pool3d(x, 2, return_indices=True))
    assert not functional.adaptive_avg_pool3d(x, 1)._is_view()
    wide, target = torch.randn(WIDE).contiguous(memory_format=CL), torch.ones(2, 3, 5, dtype=torch.long)
    assert not functional.cross_entropy(wide, target, reduction="none")._is_view()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 2, 3), (3, 1, 1)], ids=str)
def test_other_kernels_and_paddings_by_name_give_pytorch_s_results(kernel):
    weight, x = torch.randn(4, 6, *kernel), torch.randn(VOLUME)
    for options in ({"padding": "same"}, {"padding": "same", "dilation": (1, 2, 1)}, {"padding": "valid", "stride": 2}):
        given = x.contiguous(memory_format=CL3D)
        torch.testing.assert_close(functional.conv3d(given, weight, **options), F.conv3d(x, weight, **options))
    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided"):
        functional.conv3d(x, weight, padding="same", stride=2)


def test_other_ranks_and_arguments_give_pytorch_s_results():
    image, line = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 5)
    channels_last = image.contiguous(memory_format=CL)
    for call in (
        lambda f: f.avg_pool3d(channels_last, 2),
        lambda f: f.adaptive_max_pool3d(channels_last, 2, return_indices=True)[1],
        lambda f: f.softmax(channels_last, 2),
        lambda f: f.softmax(channels_last, 1, dtype=torch.float64),
        lambda f: f.pad(channels_last, (1, 1)),
        lambda f: f.pad(channels_last, (1, 1, 1, 1), "reflect"),
        lambda f: f.pad(channels_last, (1, 1, 1, 1), "constant", 3.0),
        lambda f: f.pad(line, (1, 1), "circular"),
        lambda f: f.gelu(line),
        lambda f: f.group_norm(line, 2),
        lambda f: f.group_norm(line[..., 0], 2),
        lambda f: f.instance_norm(line),
        lambda f: f.batch_norm(line, torch.zeros(6), torch.ones(6)),
        lambda f: f.batch_norm(line[..., 0], None, None, training=True),
        lambda f: f.batch_norm(channels_last, torch.zeros(6), torch.ones(6)),
        lambda f: f.instance_norm(channels_last, torch.zeros(6), torch.ones(6), use_input_stats=False),
    ):
        torch.testing.assert_close(call(functional), call(F))


def test_cross_entropy_of_other_devices_and_dtypes_is_pytorch_s():
    meta = torch.empty(2, 3, 8, 8, dtype=torch.bfloat16, device="meta").to(memory_format=CL)
    assert functional.cross_entropy(meta, torch.empty(2, 8, 8, dtype=torch.long, device="meta")).shape == ()
    with pytest.raises(RuntimeError, match="expected scalar type Long but found Byte"):
        functional.cross_entropy(torch.ones(2, 3, 8, 8).to(memory_format=CL), torch.zeros(2, 8, 8, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("options", [{"size_average": False}, {"reduce": False}, {"ignore_index": 1}], ids=str)
@pytest.mark.parametrize("shape", [(2, 6), VOLUME, WIDE], ids=str)
def test_cross_entropy_takes_every_rank_and_old_options(shape, options):
    x, target = torch.randn(shape), torch.randint(0, 6, (shape[0], *shape[2:]))
    given = x.contiguous(memory_format=FORMATS.get(x.dim(), torch.contiguous_format))
    expected = F.cross_entropy(x, target, **options)
    torch.testing.assert_close(functional.cross_entropy(given, target, **options), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f.group_norm(torch.ones(1, 2, 1, 1), 2),
        lambda f: f.group_norm(torch.ones(2, 4, 3, 3), 3),
        lambda f: f.instance_norm(torch.ones(2, 4, 1, 1)),
        lambda f: f.batch_norm(torch.ones(1, 4, 1, 1), None, None, training=True),
        lambda f: f.batch_norm(torch.ones(2, 4, 32, 32), None, None),
        lambda f: f.batch_norm(torch.ones(2, 4, 32, 32), None, None, training=True, eps=-1.0),
        lambda f: f.softmax(torch.ones(2, 4, 3, 3), 4),
        lambda f: f.group_norm(torch.ones(2, 4, 3, 3), 2.0),
        lambda f: f.gelu(torch.ones(2, 4, 3, 3), approximate="other"),
        lambda f: f.cross_entropy(torch.ones(2, 4, 3, 3), torch.ones(2, 3, 3), reduction="other"),
        lambda f: f.cross_entropy(torch.ones(2, 16, 3, 3), torch.full((2, 3, 3), 17)),
        lambda f: f.cross_entropy(torch.ones(2, 16, 3, 3), torch.ones(2, 3, 3)),
        lambda f: f.avg_pool3d(torch.ones(2, 4, 3, 3, 3), 4),
        lambda f: f.max_unpool3d(torch.ones(2, 4, 3, 3, 3), torch.ones(2, 4, 3, 3, 3), 2),
        lambda f: f.max_unpool3d(torch.ones(2, 4, 3, 3, 3), torch.full((2, 4, 3, 3, 3), 216), 2),
        lambda f: f.max_unpool3d(torch.ones(2, 4, 3, 3, 3), torch.full((2, 4, 3, 3, 3), 1), 2, output_size=(9, 6, 6)),
        lambda f: f.max_unpool3d(torch.ones(2, 4, 3, 3, 3), torch.full((2, 4, 3, 3, 3), 1), (2, 2)),
        lambda f: f.pad(torch.ones(2, 4, 3, 3), (1, 1), "circular"),
        lambda f: f.conv3d(torch.ones(2, 4, 3, 3, 3), torch.ones(2, 4, 1, 1, 1), padding="other"),
        lambda f: f.pixel_shuffle(torch.ones(2, 4, 3, 3, 3), 2),
        lambda f: f.pixel_shuffle(torch.ones(2, 4, 4, 3, 3), 0),
        lambda f: f.pixel_shuffle(torch.ones(2, 4, 4, 3, 3), 2.0),
        lambda f: f.pixel_unshuffle(torch.ones(2, 4, 3, 4, 3), 2),
        lambda f: f.pixel_unshuffle(torch.ones(2, 4, 3, 4, 4), -1),
        lambda f: f.avg_pool3d(torch.ones(2, 3, 4, 5, 6), [2, 2, 2], [1, 1, 1], [2, 0, 0]),
        lambda f: f.avg_pool3d(torch.ones(2, 3, 4, 5, 6), 2, divisor_override=0),
        lambda f: f.conv3d(torch.ones(2, 3, 4, 5, 6), torch.ones(4, 3, 1, 1, 1).bfloat16()),
        lambda f: f.conv3d(torch.ones(2, 3, 4, 5, 6), torch.ones(4, 3, 9, 1, 1)),
        lambda f: f.conv2d(torch.ones(2, 4, 2, 3), torch.ones(6, 4, 9, 3), None, 1, [2, 1]),
        lambda f: f.conv2d(torch.ones(2, 4, 2, 3), torch.ones(6, 4, 5, 3), None, [2, 1], "same"),
        lambda f: f.conv2d(torch.ones(2, 4, 5, 3).bfloat16(), torch.ones(6, 4, 3, 3)),
        lambda f: f.conv2d(torch.ones(2, 4, 5, 3).half(), torch.ones(6, 4, 3, 3).half(), torch.ones(6)),
        lambda f: f.conv2d(torch.ones(2, 4, 5, 3).half(), torch.ones(6, 3, 3, 3).half()),
        lambda f: f.conv_transpose2d(torch.ones(2, 4, 2, 3), torch.ones(4, 6, 5, 3), None, 1, [2, 1], [2, 0]),
        lambda f: f.pad(torch.ones(2, 3, 4, 5), (6, 0, 0, 0), "circular"),
        lambda f: f.pad(torch.ones(2, 3, 4, 5), (-6, 0, 0, 0), "circular"),
        lambda f: f.group_norm(torch.ones(2, 8, 4, 5), 2, torch.ones(8).bfloat16()),
        lambda f: f.group_norm(torch.ones(2, 8, 4, 5).int(), 2),
        lambda f: f.batch_norm(torch.ones(2, 8, 24, 25), torch.ones(8), None, None, None, True),
        lambda f: f.batch_norm(torch.ones(2, 8, 24, 25).half(), *[torch.ones(8)] * 2, torch.ones(8).half(), None, True),
        lambda f: f.batch_norm(torch.ones(2, 8, 24, 25).int(), None, None, None, None, True),
        lambda f: f.gelu(torch.ones(2, 3, 4, 5).long()),
    ],
)
def test_errors_are_pytorch_s(call, monkeypatch):
    """On channels-last and on contiguous inputs: `torch.ones` here makes both in turn."""
    ones = torch.ones
    for is_channels_last in (False, True):

        def made(*shape, dtype=None, is_channels_last=is_channels_last):
            memory_format = FORMATS.get(len(shape)) if is_channels_last else torch.contiguous_format
            return ones(*shape, dtype=dtype).contiguous(memory_format=memory_format or torch.contiguous_format)

        monkeypatch.setattr(torch, "ones", made)
        errors = []
        for functions in (F, functional):
            with pytest.raises(Exception) as error:  # noqa: PT011
                call(functions)
            # The sizes in brackets may be those of a view.
            errors.append((error.type, str(error.value).splitlines()[0].partition(" (")[0]))
        assert errors[0] == errors[1]


class Normed(nn.Module):
    def forward(self, x):
        return functional.instance_norm(x)


WAYS = {
    "eager": lambda x: Normed(),
    "scripted": lambda x: torch.jit.script(Normed()),
    "traced": lambda x: torch.jit.trace(Normed(), x.detach()),
    "compiled": lambda x: torch.compile(Normed(), backend="aot_eager", fullgraph=True),
    "exported": lambda x: torch.export.export(Normed(), (x,)).module(),
    "under vmap": lambda x: lambda x: torch.func.vmap(Normed())(x[None])[0],
    "before an activation in place": lambda x: lambda x: F.leaky_relu(functional.instance_norm(x), 1.0, inplace=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CL], ids=str)
def test_h35_instance_norm_of_batch_one_takes_a_channels_last_gradient(way, memory_format):
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 1, 4, 5, 6, dtype=torch.double).unbind()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(F.instance_norm(x), x, gradient)
    given = x.detach().to(memory_format=memory_format).requires_grad_()
    (found,) = torch.autograd.grad(WAYS[way](given)(given), given, gradient.to(memory_format=CL))
    torch.testing.assert_close(found, expected)
