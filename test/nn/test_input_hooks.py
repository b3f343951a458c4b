"""The hook that converts a model's inputs to channels-last."""

import copy

import pytest
import torch
from bare_kernel import Kernel
from onnx_graphs import onnx_operators
from reference import in_channels_last
from selection import exhaustive
from torch import nn

import torch_nhwc as nhwc


class Entry(nn.Module):
    """Returns what it was given."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers or [nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)])

    def forward(self, *arguments, **keywords):
        return arguments, keywords


class Same(Entry):
    """Returns its one input."""

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 5), (1, 3, 1, 5), (1, 1, 1, 1), (0, 1, 4, 5), (2, 1, 4, 5, 6), (1, 3, 1, 1, 1)]
)
def test_h40_ambiguous_inputs_enter_in_canonical_strides_without_a_copy(shape):
    model = Same()
    nhwc.convert_(model, input_format="channels_last")
    x = torch.randn(shape, requires_grad=True)
    output = model(x)
    assert in_channels_last(output)
    assert torch.equal(output, x)
    if shape[1] == 1:
        assert output.data_ptr() == x.data_ptr()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), x)
    output.sum().backward()
    assert x.grad.shape == x.shape


def test_an_input_in_channels_last_is_passed_on_as_it_is_and_others_without_traces_on_them():
    model = Entry()
    nhwc.convert_(model, input_format="channels_last")
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert model(image)[0][0] is image
    contiguous = image.contiguous()
    model(contiguous)
    assert contiguous.__dict__ == {}


@pytest.mark.parametrize("kind", ["integers", "expanded", "sparse", "nested", "jagged"])
def test_what_is_not_an_image_is_passed_on_as_it_is(kind):
    tensor = {
        "integers": torch.randint(0, 2, (2, 3, 4, 4)),
        "expanded": torch.zeros(1, 1, 1, 1).expand(2, 3, 4, 4),
        "sparse": torch.randn(2, 3, 4, 4).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.randn(3, 4, 4), torch.randn(3, 6, 4)]),
        "jagged": torch.nested.nested_tensor([torch.randn(3, 4, 4), torch.randn(5, 4, 4)], layout=torch.jagged),
    }[kind]
    model = Same()
    nhwc.convert_(model, input_format="channels_last")
    assert model(tensor) is tensor


def test_converting_back_removes_the_hook_and_its_revert_restores_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    nhwc.convert_(model, input_format="channels_last")
    report = nhwc.convert_(model, torch.contiguous_format)
    assert not model._forward_pre_hooks
    report.revert()
    assert len(model._forward_pre_hooks) == 1


def test_h23_it_converts_positional_keyword_and_nested_inputs():
    model = Entry()
    nhwc.convert_(model, input_format="channels_last")
    x, volume, other = torch.randn(1, 3, 8, 8), torch.randn(1, 2, 4, 4, 4), torch.randn(3, 3)
    (first,), keywords = model(x, volume=volume, rest=[x, other])
    for actual, expected in zip((first, keywords["volume"], keywords["rest"][0]), (x, volume, x)):
        assert in_channels_last(actual)
        assert torch.equal(actual, expected)
    assert keywords["rest"][1] is other


class TestRanks:
    """Only what the model's convolutions take is an image or a volume."""

    @pytest.mark.filterwarnings("ignore:torch_nhwc. nothing to convert")
    @pytest.mark.parametrize(
        ("layers", "options", "ranks"),
        [
            ([nn.Conv2d(3, 4, 3)], {}, [4]),
            ([nn.ConvTranspose2d(3, 4, 3)], {}, [4]),
            ([nn.Conv3d(3, 4, 3)], {}, [5]),
            ([nn.LazyConvTranspose3d(4, 3)], {}, [5]),
            ([nn.Conv1d(3, 4, 3), nn.Conv2d(3, 4, 3)], {}, [4]),
            ([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)], {}, [4, 5]),
            ([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)], {"memory_format": "channels_last_3d"}, [5]),
            ([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)], {"input_format": "channels_last_3d"}, [5]),
            ([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)], {"input_format": torch.channels_last_3d}, [5]),
            ([nn.Linear(3, 4)], {}, []),
        ],
    )
    def test_are_those_of_the_requested_convolutions(self, layers, options, ranks):
        model = Entry(*layers)
        report = nhwc.convert_(model, **{"input_format": "channels_last"} | options)
        inputs = [torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 4)]
        passed_on, _ = model(*inputs)
        for given, got in zip(inputs, passed_on):
            assert in_channels_last(got) if given.dim() in ranks else got is given
        (remark, *_) = [each for each in report.remarks if each.startswith("input_format")]
        assert (" and ".join(f"{rank}D" for rank in ranks) if ranks else "no input is") in remark
        assert len(model._forward_pre_hooks) == bool(ranks)

    def test_of_a_later_call_are_added_and_reverted_in_order(self):
        model = Entry()
        first = nhwc.convert_(model, "channels_last", input_format="channels_last")
        second = nhwc.convert_(model, "channels_last_3d", input_format="channels_last")
        image, volume = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6)
        assert all(map(in_channels_last, model(image, volume)[0]))
        assert len(model._forward_pre_hooks) == 1
        second.revert()
        passed_on, _ = model(image, volume)
        assert in_channels_last(passed_on[0])
        assert passed_on[1] is volume
        first.revert()
        assert not model._forward_pre_hooks
        assert not model._forward_pre_hooks_with_kwargs

    def test_show_with_example_inputs_where_convolutions_are_functions(self):
        model, x = Kernel(), torch.randn(1, 3, 8, 8)
        plan = nhwc.plan(model, example_inputs=x, input_format="channels_last")
        nhwc.convert_(model, plan=plan)
        assert in_channels_last(model(x))


class TestOneChannel:
    """Where PyTorch's convolution takes one channel and strides over its width, its input is not converted."""

    @pytest.mark.parametrize(
        ("layer", "stays"),
        [
            (nn.Conv2d(1, 4, 3, stride=(1, 2)), True),
            (nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3, stride=2)), True),
            (nn.ConvTranspose2d(1, 4, 3, stride=2), True),
            (nn.LazyConv2d(4, 3, stride=2), True),
            (nn.Conv2d(1, 4, 3, stride=(2, 1)), False),
            (nn.LazyConv2d(4, 3), False),
            (nn.ConvTranspose2d(4, 1, 3), False),
            (nn.Conv2d(3, 4, 3), False),
            (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), False),
            (nn.Conv2d(4, 4, 3, groups=4), False),
        ],
    )
    def test_an_input_of_one_channel_stays_as_it_is(self, layer, stays):
        model = Same(layer)
        report = nhwc.convert_(model, input_format="channels_last", preserve=False)
        x = torch.randn(2, 1, 4, 5)
        assert (model(x) is x) == stays
        assert in_channels_last(model(x)) != stays
        assert in_channels_last(model(torch.randn(2, 3, 4, 5)))
        assert any("one channel" in remark for remark in report.remarks) == stays
        nhwc.convert_(model, input_format="channels_last", preserve=False)
        assert len(model._forward_pre_hooks) == 1

    def test_an_input_of_a_replaced_stem_is_converted(self):
        model = nn.Sequential(nn.Conv3d(1, 4, 3, stride=2), nn.Conv3d(4, 4, 1))
        expected = copy.deepcopy(model)
        report = nhwc.convert_(model, input_format="channels_last")
        assert not any("one channel" in remark for remark in report.remarks)
        x = torch.randn(2, 1, 6, 6, 6)
        stem, whole = model[0](model._forward_pre_hooks.popitem()[1](model, (x,), {})[0][0]), expected(x)
        assert in_channels_last(stem)
        torch.testing.assert_close(model[1](stem), whole)

    @pytest.mark.filterwarnings("ignore:.torch.jit")
    @pytest.mark.parametrize("preserve", [True, False])
    def test_torchscript_does_the_same(self, preserve):
        model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2))
        nhwc.convert_(model, input_format="channels_last", preserve=preserve)
        x = torch.randn(2, 1, 6, 6)
        scripted = torch.jit.script(model)
        assert scripted(x).stride() == model(x).stride()
        assert in_channels_last(scripted(x)) == preserve


def test_a_stride_of_0_in_a_dimension_of_size_1_does_not_matter():
    model = Same(nn.Conv2d(3, 4, 1))
    nhwc.convert_(model, input_format="channels_last")
    x = torch.randn(3, 4, 5).expand(1, 3, 4, 5)
    strange = x.as_strided(x.shape, (0, *x.stride()[1:]))
    assert in_channels_last(model(strange))
    assert model(torch.randn(1, 3, 4, 5).expand(2, 3, 4, 5)).stride()[0] == 0


def image_network():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()


def converted(model=None):
    model = model or image_network()
    nhwc.convert_(model, input_format="channels_last")
    return model


def exported(model, x):
    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=8)}
    return torch.export.export(model, (x,), dynamic_shapes=(sizes,)).module()


MADE = {"script": lambda model, x: torch.jit.script(model), "trace": torch.jit.trace, "export": exported}


class TestCompilersAndTransforms:
    """The hook is a part of what is made of the model."""

    @pytest.mark.filterwarnings("ignore:.torch.jit")
    @pytest.mark.parametrize("has_parent", [False, True])
    @pytest.mark.parametrize("make", ["script", "trace", exhaustive("export")])
    def test_it_is_in_what_is_scripted_traced_and_exported(self, make, has_parent):
        model, x = converted(), torch.randn(2, 3, 8, 8)
        whole = nn.Sequential(model, nn.ReLU()) if has_parent else model
        made = MADE[make](whole, x)
        for each in (x, torch.randn(4, 3, 16, 8)):
            expected = whole(each)
            assert in_channels_last(expected)
            torch.testing.assert_close(made(each), expected)
            assert made(each).stride() == expected.stride()
        assert len(model._forward_pre_hooks) == 1

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("dynamo", [False, exhaustive(True)])
    def test_onnx_has_no_trace_of_it(self, dynamo):
        x = torch.randn(2, 3, 8, 8)
        model = image_network()
        expected = onnx_operators(model, x, dynamo)
        assert onnx_operators(converted(model), x, dynamo) == expected
