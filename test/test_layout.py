"""Formats, strides, which tensors share memory, and bringing a tensor into a format."""

import pytest
import torch
from reference import FORMATS, SHAPES, SOURCES, arrange, canonical_strides, random_weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_nhwc.layout import (
    CONTIGUOUS,
    Format,
    contiguous_copies,
    has_strides,
    in_format,
    is_convertible,
    is_fake,
    is_permuted,
    memory_id,
    tied_by_view,
)

LAST = Format(None)


@pytest.mark.parametrize("given", [torch.channels_last_3d, "channels_last_3d", "torch.channels_last_3d"])
def test_a_format_is_given_as_pytorch_has_it_or_by_name(given):
    wanted = Format.of(given)
    assert wanted == Format("channels_last_3d")
    assert (wanted.is_channels_last, wanted.serves(4), wanted.serves(5)) == (True, False, True)
    assert (LAST.name_at(4), LAST.name_at(5)) == ("channels_last", "channels_last_3d")
    assert (LAST.for_operators, CONTIGUOUS.for_operators) == (None, torch.contiguous_format)
    assert (LAST.of_filters(1, 1), LAST.of_filters(1, 4)) == (CONTIGUOUS, LAST)


@pytest.mark.parametrize(
    ("given", "got"), [("other", "'other'"), (torch.preserve_format, "torch.preserve_format"), ([], "list .give opt")]
)
def test_other_formats_are_named_in_the_error(given, got):
    with pytest.raises(ValueError, match=f"None or one of contiguous_format, channels_last, .*, got {got}"):
        Format.of(given)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 4), (5,), (2, 0, 3), ()], ids=str)
def test_canonical_strides_are_those_of_new_tensors(shape):
    assert CONTIGUOUS.strides(torch.Size(shape)) == torch.empty(shape).stride()
    expected = canonical_strides(shape, FORMATS.get(len(shape), torch.contiguous_format))
    assert LAST.strides(torch.Size(shape)) == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_in_format_has_canonical_strides_and_its_own_values(shape, source):
    tensor = arrange(random_weight(shape), source)
    for channels_last, wanted in ((True, LAST), (False, CONTIGUOUS)):
        result = in_format(tensor, channels_last)
        assert result.stride() == wanted.strides(tensor.shape)
        assert torch.equal(result.nan_to_num(), tensor.nan_to_num())
        assert (result is tensor) == (tensor.stride() == result.stride())
        assert in_format(result, channels_last) is result


@pytest.mark.parametrize("shape", [(2, 1, 4, 5), (1, 3, 1, 1), (2, 3, 1, 1, 1)], ids=str)
def test_no_bytes_move_where_strides_alone_differ(shape):
    tensor = torch.randn(shape)
    assert in_format(in_format(tensor), channels_last=False).data_ptr() == tensor.data_ptr()


class ToChannelsLast(nn.Module):
    def forward(self, x):
        return in_format(x)


WAYS = {
    "scripted": lambda module, x: torch.jit.script(module),
    "traced": torch.jit.trace,
    "compiled": lambda module, x: torch.compile(module, backend="aot_eager", fullgraph=True),
    "vmap": lambda module, x: lambda x: torch.vmap(module)(x[None])[0],
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 5, 2)], ids=str)
def test_tracers_compilers_and_transforms_convert_tensors(way, shape):
    torch._dynamo.reset()
    x = torch.randn(shape, requires_grad=True)
    result = WAYS[way](ToChannelsLast(), x)(x)
    assert result.stride() == LAST.strides(x.shape)
    assert torch.equal(result, x)
    (gradient,) = torch.autograd.grad(result.square().sum(), x)
    assert torch.equal(gradient, 2 * x)


def test_only_dense_tensors_of_a_rank_are_convertible():
    image = torch.randn(2, 3, 4, 5)
    assert is_convertible(image, [4])
    for other in (image[0], image[:1].expand(2, 3, 4, 5), image.to_sparse(), torch.nested.nested_tensor([image[0]])):
        assert not is_convertible(other, [4, 5])


def test_strides_are_compared_where_there_is_more_than_one_element():
    tensor = torch.randn(2, 3, 1, 1)
    assert has_strides(tensor, (3, 1, 3, 3))
    assert not has_strides(tensor, (1, 2, 1, 1))
    assert has_strides(tensor.to_sparse(), (1, 2, 1, 1))
    assert is_permuted(torch.Size((2, 3, 4, 1)), (12, 1, 3, 3))
    assert not is_permuted(torch.Size((2, 3, 1, 1)), (3, 1, 3, 3))


def test_fake_tensors_and_places_in_memory_are_recognised():
    tensor = torch.randn(2, 3)
    assert memory_id(tensor.detach()) == memory_id(tensor) != memory_id(tensor[1])
    assert memory_id(meta := tensor.to("meta")) == id(meta)
    with FakeTensorMode():
        assert is_fake(torch.empty(2))
    assert not is_fake(tensor)


class TestTiedByView:
    """Weights that would be separated from tensors that overlap with them."""

    def test_views_and_aliases_outside_of_the_weights_are_tied(self):
        flat = torch.randn(40)
        weight, overlapping, apart = (nn.Parameter(flat[start : start + 9].view(1, 1, 3, 3)) for start in (0, 8, 20))
        assert tied_by_view([], [weight, overlapping, apart, None]) == {id(weight), id(overlapping)}
        buffer = weight.detach()
        assert tied_by_view([buffer], [weight, apart]) == {id(weight), id(buffer)}
        assert tied_by_view([weight.to("meta"), None], [weight]) == set()

    @pytest.mark.parametrize("kind", [list, iter])
    def test_weights_that_are_exact_aliases_stay_together(self, kind):
        weight = nn.Parameter(torch.randn(4, 1, 3, 3))
        alias = nn.Parameter(weight.detach().as_strided((4, 1, 3, 3), (9, 1, 3, 1)))
        assert tied_by_view([], kind([weight, alias])) == set()


def test_contiguous_copies_keep_aliases_and_what_is_contiguous():
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    contiguous = contiguous_copies()
    first, second = contiguous(weight), contiguous(weight.detach())
    assert first is second
    assert first.is_contiguous()
    assert torch.equal(first, weight)
    assert contiguous(first) is first
