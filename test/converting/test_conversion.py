"""Converting a model in place: what the verb takes, what it refuses, and its warnings."""

import os
import subprocess
import sys
import textwrap
import warnings
from functools import partial

import pytest
import torch
from snapshots import assert_unchanged, in_format, network, refused_view, snapshot
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason

CL, CL3D = torch.channels_last, torch.channels_last_3d


class TestArguments:
    """What convert_ and plan take."""

    @pytest.mark.parametrize(
        ("memory_format", "ranks"),
        [
            (None, {4, 5}),
            (CL, {4}),
            ("channels_last", {4}),
            ("torch.channels_last", {4}),
            (CL3D, {5}),
            ("channels_last_3d", {5}),
        ],
        ids=str,
    )
    def test_a_memory_format_means_the_sites_of_its_rank(self, memory_format, ranks):
        model = network()
        report = nhwc.convert_(model, memory_format)
        for row in report.plan.rows:
            assert (row.reason is Reason.OTHER_RANK) == (row.rank not in ranks)
        for name, is_in_format in in_format(model).items():
            assert is_in_format == (model.get_parameter(name).dim() in ranks)

    @pytest.mark.parametrize("memory_format", [torch.preserve_format, "nhwc", 3, ""])
    def test_another_memory_format_raises(self, memory_format):
        for verb in (nhwc.plan, nhwc.convert_):
            with pytest.raises(ValueError, match="expected memory_format to be None or one of contiguous_format, ch"):
                verb(network(), memory_format)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"input_format": torch.contiguous_format},
                "expected input_format to be 'channels_last', .* or None, got torch.contiguous_format",
            ),
            ({"storage": "inplace"}, "expected storage to be one of auto, fresh, reuse, detach, got 'inplace'"),
            ({"memory_format": torch.optim.SGD([torch.zeros(1)])}, r"got SGD \(give optimizers and others by name\)"),
        ],
    )
    def test_other_arguments_raise_before_anything_changes(self, options, message):
        model = network()
        before = snapshot(model)
        with pytest.raises(ValueError, match=message):
            nhwc.convert_(model, **options)
        assert_unchanged(model, before)

    def test_a_filter_sees_every_layer_with_its_path(self):
        model = network()
        seen = {}
        report = nhwc.convert_(
            model, filter_fn=lambda module, path: seen.setdefault(path, module) is model["first"], preserve=False
        )
        assert seen == {path: model.get_submodule(path) for path in ("first", "blocks.0", "blocks.1", "volume")}
        assert [row.reason for row in report.plan.rows] == [None, *[Reason.FILTERED] * 3]
        assert sum(in_format(model).values()) == 1

    @pytest.mark.parametrize("filter_fn", [lambda path, module: path.startswith("first"), lambda path: True])
    def test_a_filter_with_other_arguments_is_told_which(self, filter_fn):
        with pytest.raises(TypeError, match=r"^filter_fn is called as filter_fn\(module, path\), and raised: "):
            nhwc.convert_(network(), filter_fn=filter_fn)

    @pytest.mark.parametrize("storage", ["auto", "fresh", "reuse", "detach"])
    def test_storage_is_that_of_the_operators(self, storage):
        model = network()
        pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
        report = nhwc.convert_(model, storage=storage)
        moved = {name for name, p in model.named_parameters() if p.data_ptr() != pointers[name]}
        assert moved == (set(in_format(model)) if storage == "fresh" else set())
        assert (report.new_bytes > 0) == (storage == "fresh")


class TestRefusals:
    """A refused site does not stop the others, and is a warning, once."""

    @pytest.mark.parametrize("verb", ["convert_", "apply", "channels_last"])
    def test_warn_once_at_the_callers_line(self, verb):
        model = nn.Sequential(nn.Conv2d(3, 3, 3), refused_view(), refused_view())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if verb == "convert_":
                nhwc.convert_(model)
            elif verb == "apply":
                nhwc.convert_(model, plan=nhwc.plan(model))
            else:
                with nhwc.channels_last(model):
                    pass
        assert [str(each.filename) for each in caught] == [__file__]
        text = str(caught[0].message)
        assert text.startswith("torch_nhwc: 2 of 3 weights refused: '1.weight' (Conv2d), '2.weight' (Conv2d): it")

    @pytest.mark.parametrize("verb", ["convert_", "apply"])
    def test_raise_before_any_write_if_strict(self, verb):
        model = nn.Sequential(nn.Conv2d(3, 3, 3), refused_view())
        before = snapshot(model)
        call = partial(nhwc.convert_, plan=nhwc.plan(model)) if verb == "apply" else nhwc.convert_
        with pytest.raises(RuntimeError, match=r"'1.weight' \(Conv2d\): .* \(nothing was changed, since strict=True\)"):
            call(model, strict=True)
        assert_unchanged(model, before)


@pytest.mark.parametrize("call", ["convert_", "revert", "check"])
def test_the_optimizer_of_another_model_is_refused(call):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    other = torch.optim.Adam(nn.Conv2d(3, 4, 3).parameters())
    report = nhwc.convert_(model)
    calls = {
        "convert_": lambda: nhwc.convert_(model, optimizer=other),
        "revert": lambda: report.revert(optimizer=other),
        "check": lambda: nhwc.check(model, report.plan, optimizer=other),
    }
    with pytest.raises(ValueError, match="the Adam holds none of the model's parameters"):
        calls[call]()
    assert model[0].weight.stride() == (27, 1, 9, 3)


def test_a_conversion_imports_neither_the_compiler_nor_distributed_engines():
    script = """
        import sys
        import torch

        before = set(sys.modules)
        import torch_nhwc as nhwc

        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.LazyConv3d(4, 3))
        # Without an optimizer and example inputs: torch's own optimizers and dispatch modes import the compiler.
        report = nhwc.convert_(model, ema={"0.weight": model[0].weight.detach().clone()})
        str(report), report.to_json()
        report.revert()
        nhwc.convert_(model, plan=nhwc.plan(model))
        heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor")
        heavy += ("torch.ao.nn.quantized", "accelerate", "apex", "deepspeed", "transformers", "sympy")
        loaded = [name for name in heavy if name in set(sys.modules) - before]
        assert not loaded, loaded
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True, env=environment)
