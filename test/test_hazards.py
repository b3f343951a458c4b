"""Public incidents with channels-last: what plain PyTorch does, and what we make of it; docs/hazards.md lists them.

The hazards of several ranks are in test/distributed/test_ranks.py, h27 is in test/ops/test_compile.py. That PyTorch is
wrong in h35, h36 and h51 is shown in docs/upstream.md.
"""

import contextlib
import copy
import importlib
import os
import pickle
import random
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from comparison import strides_at_convolutions
from saved_files import assert_run_elsewhere
from selection import exhaustive
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from user_code import Function

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Reason
from torch_nhwc.planning import Action

CL, CL3D = torch.channels_last, torch.channels_last_3d
STOCK = nn.utils.convert_conv2d_weight_memory_format
STRIDES = (27, 1, 9, 3)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)).double()


def layout(model):
    return [(p.data_ptr(), p.stride()) for p in model.parameters()]


def step(model, optimizer, seed):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_h02_optimizer_state_saved_in_storage_order_is_scrambled_when_read_in_logical_order():
    weight = torch.arange(54.0).view(2, 3, 3, 3)
    state = weight.clone(memory_format=CL)
    as_stored = torch.empty(54).set_(state.untyped_storage()).view(2, 3, 3, 3)
    assert not torch.equal(as_stored, weight)  # the hazard

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    nhwc.convert_(model, optimizer=optimizer)
    for tensor in nhwc.checkpoint.contiguous_state_dict(optimizer.state_dict())["state"][0].values():
        stored = torch.empty(tensor.numel(), dtype=tensor.dtype).set_(tensor.untyped_storage())
        assert torch.equal(stored.view(tensor.shape), tensor)


@pytest.mark.parametrize("preserve", [True, False])
def test_h03_the_report_names_the_state_dict_that_safetensors_and_other_models_take(preserve, tmp_path):
    from safetensors.torch import load_file, save_file

    model, plain = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3))
    report = nhwc.convert_(model, preserve=preserve)
    named = "to save, take contiguous_state_dict(model) and contiguous_state_dict(optimizer.state_dict())"
    assert " ".join(str(report).split()).count(named) == 1
    assert not any(named in remark for remark in nhwc.convert_(model, preserve=preserve).remarks)  # nothing changes
    save_file(nhwc.checkpoint.contiguous_state_dict(model), tmp_path / "model.safetensors")
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert plain[0].weight.is_contiguous()
    plain.load_state_dict(model.state_dict())  # which copies the values
    assert plain[0].weight.is_contiguous()
    assert torch.equal(plain[0].weight, model[0].weight)
    plain.load_state_dict(model.state_dict(), assign=True)
    assert plain[0].weight.stride() == (27, 1, 9, 3)


def test_h03_safetensors_refuses_channels_last_tensors(tmp_path):
    from safetensors.torch import load_file, save_file

    model = network()
    plan = nhwc.convert_(model).plan
    with pytest.raises(ValueError, match="contiguous"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(nhwc.checkpoint.contiguous_state_dict(model), tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert nhwc.check(model, plan)
    nhwc.training.restore_(model, plan)
    assert not nhwc.check(model, plan)


@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "torch.save, assigned"])
def test_h03_a_plain_model_loads_the_file_of_a_converted_one_and_computes_the_same(kind, tmp_path):
    """It cannot say whose file it is, and need not: names, shapes and values are those of a plain model."""
    from safetensors.torch import load_file, save_file

    model, plain = network(), network()
    x = torch.randn(2, 3, 8, 8).double()
    expected = model(x)
    nhwc.convert_(model)
    if kind == "safetensors":
        save_file(nhwc.checkpoint.contiguous_state_dict(model), tmp_path / "model")
    else:
        torch.save(model.state_dict(), tmp_path / "model")
    state = (load_file if kind == "safetensors" else torch.load)(tmp_path / "model")
    plain.load_state_dict(state, assign="assigned" in kind)
    torch.testing.assert_close(plain(x), expected)
    assert nhwc.plan(plain).rows[0].action is (Action.KEEP if "assigned" in kind else Action.CONVERT)
    plain.load_state_dict(nhwc.checkpoint.convert_state_dict(state, nhwc.plan(plain)), assign=True)
    torch.testing.assert_close(plain(x), expected)


def test_h08_a_model_of_2d_and_3d_layers_is_half_converted():
    model = nn.ModuleDict({"image": nn.Conv2d(3, 4, 3), "volume": nn.Conv3d(3, 4, 3)})
    plain = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="rank 4"):
        plain.to(memory_format=CL)
    assert plain["image"].weight.is_contiguous(memory_format=CL)  # half
    nhwc.convert_(model)
    assert model["image"].weight.is_contiguous(memory_format=CL)
    assert model["volume"].weight.is_contiguous(memory_format=CL3D)


def test_h09_computed_weights_are_skipped_without_a_word():
    layer, x = parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STOCK(layer, CL)
    assert strides_at_convolutions(layer, x) == [(27, 9, 3, 1)]
    nhwc.convert_(layer)
    assert strides_at_convolutions(layer, x) == [STRIDES]


def test_h10_lazy_layers_raise():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.LazyConv2d(4, 3))
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)uninitialized"):
        STOCK(copy.deepcopy(model), CL)
    nhwc.convert_(model)
    assert model[0].weight.stride() == STRIDES
    model(torch.randn(1, 3, 8, 8))
    assert model[1].weight.stride() == STRIDES


def test_h12_packed_weights_are_skipped():
    from torch.ao.nn import quantized

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(quantized.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))
    STOCK(copy.deepcopy(model), CL)  # without a word
    with pytest.warns(UserWarning, match="its weight is packed"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [Reason.PACKED, None]


def test_h13_gradients_and_state_stay_behind():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    STOCK(model, CL)
    assert model[0].weight.grad.stride() != model[0].weight.stride()

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    nhwc.convert_(model, optimizer=optimizer)
    state = optimizer.state[model[0].weight]
    strides = {tensor.stride() for tensor in (model[0].weight, model[0].weight.grad, state["exp_avg"])}
    assert strides == {STRIDES}


def test_h14_ties_break_and_views_leave_their_buffer():
    def tied():
        first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        second.weight = nn.Parameter(first.weight.data)
        flat = torch.randn(200)
        third = nn.Conv2d(3, 4, 3)
        third.weight = nn.Parameter(flat[:108].view(4, 3, 3, 3))
        return nn.Sequential(first, second, third), flat

    model, flat = tied()
    STOCK(model, CL)
    assert model[0].weight.data_ptr() != model[1].weight.data_ptr()
    assert model[2].weight.data_ptr() != flat.data_ptr()

    model, flat = tied()
    with pytest.warns(UserWarning, match="part of a larger storage"):
        report = nhwc.convert_(model)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert model[2].weight.data_ptr() == flat.data_ptr()
    assert report.plan.rows[2].reason is Reason.PART_OF_LARGER_STORAGE


def test_h15_converting_again_copies_everything_again():
    model = STOCK(network(), CL)
    before = layout(model)
    STOCK(model, CL)
    assert layout(model) != before
    before = layout(model)
    report = nhwc.convert_(model)
    assert layout(model) == before
    assert set(report.outcomes) == {Outcome.UNCHANGED}


def test_h16_an_error_midway_leaves_half_a_model():
    def gone(layer):
        raise OSError("the disk is gone")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))
    del model[1]._parameters["weight"]
    model[1].__class__ = type("Gone", (nn.Conv2d,), {"weight": property(gone)})
    before = layout(model)
    with pytest.raises(OSError, match="gone"):
        nhwc.convert_(model)
    assert layout(model) == before
    with pytest.raises(OSError, match="gone"):
        STOCK(model, CL)
    assert layout(model) != before


def test_h22_fusing_batch_norm_keeps_working():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    nhwc.convert_(model)
    fused = nn.utils.fuse_conv_bn_eval(*model)
    assert fused.weight.stride() == STRIDES
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(fused(x), model(x))
    with pytest.raises(RuntimeError, match="view"):
        model[0].weight.view(4, -1)  # what the fusions of other libraries do: revert, fuse, convert
    report = nhwc.convert_(model, torch.contiguous_format)
    model[0].weight.view(4, -1)
    report.revert()
    assert model[0].weight.stride() == STRIDES


def test_h23_modules_that_hold_a_memory_format_cannot_be_copied():
    class Holds(nn.Module):
        memory_format = None

    holder = Holds()
    holder.memory_format = CL
    with contextlib.suppress(TypeError):  # PyTorch may have repaired it
        copy.deepcopy(holder)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 1))
    nhwc.convert_(model, input_format="channels_last")
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(torch.randn(1, 3, 16, 16))
        assert each[0].weight.stride() == STRIDES


def test_h24_compiled_models_recompile_or_keep_stale_addresses():
    model = torch.compile(network(), backend="eager")
    before = layout(model)
    with pytest.warns(UserWarning, match="convert first, then compile. From the wrapper .* take model._orig_mod"):
        report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} == {Reason.COMPILED}
    assert layout(model) == before


def test_h26_shared_memory_is_left_without_a_word():
    model = network().share_memory()
    STOCK(model, CL)
    assert not model[0].weight.is_shared()

    model = network().share_memory()
    other = model[0].weight.detach()
    values = other.clone()
    with pytest.warns(UserWarning, match=r"'0\.weight' will no longer be in shared memory"):
        report = nhwc.convert_(model)
    assert report.outcomes[0] == Outcome.COPIED_SHARED
    assert "no longer shared" in str(report)
    assert other.stride() == (27, 9, 3, 1)
    assert torch.equal(other, values)  # what another process sees


@pytest.mark.parametrize("storage", ["auto", "detach", "fresh"])
def test_h26_weights_that_leave_shared_memory_are_named_before_anything_changes(storage):
    model = network().share_memory()
    before = layout(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Convert, and revert, before sharing the model"):
            nhwc.convert_(model, storage=storage)
        assert layout(model) == before
        assert nhwc.plan(model, storage=storage).rows[0].action is Action.CONVERT

        model = network()
        report = nhwc.convert_(model, storage=storage)  # of what is not shared there is nothing to say
        model.share_memory()
        before = layout(model)
        with pytest.raises(UserWarning, match=r"'0\.weight' will no longer be in shared memory"):
            report.revert()
        assert layout(model) == before
    with pytest.warns(UserWarning, match="no longer be in shared memory"):
        report.revert()
    assert model[0].weight.is_contiguous()
    assert not model[0].weight.is_shared()


def test_h28_averaged_copies_disagree():
    model = network()
    averaged = AveragedModel(model)
    STOCK(model, CL)
    assert averaged.module[0].weight.stride() != model[0].weight.stride()

    model = network()
    averaged = AveragedModel(model)
    nhwc.convert_(model, ema=averaged)
    assert averaged.module[0].weight.stride() == model[0].weight.stride() == STRIDES
    averaged.update_parameters(model)


def test_h29_a_parameter_converted_in_inference_mode_can_never_train_again():
    model = network()
    with torch.inference_mode():
        STOCK(model, CL)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        model(torch.randn(1, 3, 8, 8, dtype=torch.double)).sum().backward()

    model = network()
    with torch.inference_mode():
        nhwc.convert_(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert model[0].weight.stride() == STRIDES


def test_h32_frozen_constants_of_compiled_code_keep_the_old_layout():
    # Inductor freezing itself takes a compiler and a minute; what can be seen is that the model is compiled.
    model = torch.compile(network().eval(), options={"freezing": True})
    with pytest.raises(RuntimeError, match="compiled code may hold its weight as a constant"):
        nhwc.convert_(model, strict=True)


def test_h33_autocast_keeps_its_copy_of_a_weight_in_the_old_layout(monkeypatch):
    for convert, strides in ((lambda m: STOCK(m, CL), (27, 9, 3, 1)), (nhwc.convert_, STRIDES)):
        layer = nn.Conv2d(3, 4, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.randn(1, 3, 8, 8))
            convert(layer)
            seen = []

            class Watch(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                    if "convolution" in str(func):
                        seen.append(args[1].stride())
                    return func(*args, **(kwargs or {}))

            with Watch():
                layer(torch.randn(1, 3, 8, 8))
        assert seen == [strides]


@pytest.mark.parametrize(("layer", "memory_format"), [(nn.Conv2d, CL), (nn.Conv3d, CL3D)])
def test_h35_the_gradient_of_instance_norm_is_wrong_for_a_batch_of_one(layer, memory_format):
    rank = 2 if layer is nn.Conv2d else 3
    x = torch.randn(1, 4, *[6] * rank, dtype=torch.double, requires_grad=True)
    gradient = torch.randn_like(x)
    (right,) = torch.autograd.grad(functional.instance_norm(x), x, gradient)

    norm = nn.InstanceNorm2d if rank == 2 else nn.InstanceNorm3d
    report = nhwc.convert_(nn.Sequential(layer(3, 4, 3), norm(4), layer(4, 4, 3)).eval(), preserve=False)
    assert report.remarks[:-1] == (Reason.INSTANCE_NORM.value, Reason.WRONG_GRADIENTS.value)
    assert Reason.INSTANCE_NORM.value.split(":")[0] in " ".join(str(report).split())
    exchanged = norm(4)
    report = nhwc.convert_(nn.Sequential(layer(3, 4, 3), exchanged), preserve=True)
    assert Reason.INSTANCE_NORM.value not in report.remarks
    for given in (x, x.detach().contiguous(memory_format=memory_format).requires_grad_()):
        (same,) = torch.autograd.grad(exchanged(given), given, gradient.contiguous(memory_format=memory_format))
        torch.testing.assert_close(same, right)
    # What the sentence recommends.
    group_norm = nn.GroupNorm(4, 4, affine=False).double()
    (same,) = torch.autograd.grad(group_norm(x), x, gradient.contiguous(memory_format=memory_format))
    torch.testing.assert_close(same, right)


def test_h34_a_weight_in_a_flat_buffer_gets_a_storage_that_its_optimizer_does_not_know():
    def flat_model():
        layer = nn.Conv2d(3, 4, 3, bias=False)
        flat = torch.randn(108)
        layer.weight = nn.Parameter(flat.view(4, 3, 3, 3)[:])
        layer.weight.data = torch.cat([flat, flat])[:108].view(4, 3, 3, 3)
        return layer

    layer = flat_model()
    pointer = layer.weight.data_ptr()
    STOCK(layer, CL)
    assert layer.weight.data_ptr() != pointer

    layer = flat_model()
    pointer = layer.weight.data_ptr()
    with pytest.raises(RuntimeError, match="part of a larger storage"):
        nhwc.convert_(layer, strict=True)
    assert layer.weight.data_ptr() == pointer
    assert nhwc.convert_(layer, storage="fresh").plan.rows[0].action is Action.CONVERT


def test_h36_group_norm_on_channels_last_is_inaccurate():
    def error(x, norm):
        exact = functional.group_norm(x.double(), 2)
        return float((norm(x) - exact).abs().max())

    x = 1000 + torch.randn(2, 8, 16, 16)
    norm = nn.GroupNorm(2, 8, affine=False)
    contiguous = error(x, norm)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm)
    report = nhwc.convert_(model.eval(), preserve=False)
    assert report.remarks[:-1] == (Reason.GROUP_NORM.value, Reason.WRONG_GRADIENTS.value)
    report = nhwc.convert_(model, preserve=True)
    assert Reason.GROUP_NORM.value not in report.remarks
    assert error(x.to(memory_format=CL), norm) <= 2 * contiguous


def test_h38_sums_norms_and_hashes_of_a_scrambled_weight_are_equal():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(216.0).view(8, 3, 3, 3) % 17)  # of which every sum is exact
    after = copy.deepcopy(model)
    right, wrong = model[0].weight, after[0].weight
    with torch.no_grad():
        wrong.copy_(right.permute(0, 2, 3, 1).reshape(right.shape))
    assert not torch.equal(wrong, right)
    for measure in (torch.sum, torch.norm, torch.hash_tensor, lambda weight: weight.flatten().sort().values.sum()):
        assert torch.equal(measure(wrong), measure(right))  # the hazard

    first = nhwc.verify(model, after, torch.randn(2, 3, 8, 8)).first
    assert (first.path, first.what, first.tolerance) == ("0", "weight", 0)


def test_h17_a_kernel_that_is_wrong_for_a_shape_that_fits_both_formats():
    class Wrong(nn.Conv2d):
        """Takes a weight of one tap for channels-last by its strides, and reads it wrongly."""

        def forward(self, x):
            weight = self.weight
            if weight.shape[2:] == (1, 1) and weight.stride(2) != 1:  # of both formats, by PyTorch's own measure
                weight = weight.flip(1)
            return self._conv_forward(x, weight, self.bias)

    model = nn.Sequential(Wrong(3, 8, 1), nn.Conv2d(8, 8, 3)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.double)
    expected = model(x)
    stock = STOCK(copy.deepcopy(model), CL)
    weight = stock[0].weight
    assert weight.is_contiguous()
    assert weight.is_contiguous(memory_format=CL)
    assert not torch.allclose(stock(x), expected)  # the hazard

    before = copy.deepcopy(model)
    report = nhwc.convert_(model)
    assert not torch.allclose(model(x), expected)
    verification = nhwc.verify(before, model, x)
    assert not verification
    assert (verification.first.path, verification.first.what) == ("0", "output")
    report.revert()
    torch.testing.assert_close(model(x), expected)
    assert nhwc.verify(before, model, x)


@pytest.mark.parametrize(("layer", "memory_format"), [(nn.Conv2d, CL), (nn.Conv3d, CL3D)])
def test_h40_an_input_of_one_channel_stays_in_its_old_strides(layer, memory_format):
    shape = (2, 1, *[6] * (2 if layer is nn.Conv2d else 3))
    x = torch.randn(shape)
    wanted = torch.empty(shape, memory_format=memory_format).stride()
    assert x.contiguous(memory_format=memory_format).stride() != wanted

    class Doubles(nn.Sequential):
        def forward(self, x):
            seen.append(x)
            return super().forward(torch.cat([x, x], 1))

    seen = []
    model = Doubles(layer(2, 4, 3))
    nhwc.convert_(model, input_format="channels_last")
    model(x)
    assert seen[0].stride() == wanted
    assert torch.equal(seen[0], x)


def test_h49_videos_and_sets_of_images_are_no_volumes():
    transformers = importlib.import_module("transformers")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0, "model_type": "llama"}
    config = transformers.Idefics3Config(vision_config=vision, text_config=text, image_token_id=31, scale_factor=2)
    model = transformers.Idefics3Model(config).eval()
    tokens = torch.tensor([[1, *[31] * 12, 2]] * 2)
    images = torch.randn(2, 3, 3, 16, 16)  # three in each text, of three channels
    with torch.no_grad():
        expected = model(input_ids=tokens, pixel_values=images).last_hidden_state
        with pytest.raises(RuntimeError, match="view"):
            model(input_ids=tokens, pixel_values=images.to(memory_format=CL3D))

        report = nhwc.convert_(model, input_format="channels_last")
        actual = model(input_ids=tokens, pixel_values=images).last_hidden_state
    torch.testing.assert_close(actual, expected)
    assert any("converts 4D inputs" in remark for remark in report.remarks)


def test_h58_vmap_knows_one_memory_format():
    def enter(x):
        return x.contiguous(memory_format=CL)

    x = torch.randn(2, 1, 3, 8, 8)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(enter)(x)

    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    expected = torch.stack([model(each) for each in x])
    nhwc.convert_(model, input_format="channels_last")
    torch.testing.assert_close(torch.func.vmap(model)(x), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_h59_torchscript_takes_no_hook_with_keywords():
    class Hook:
        def __call__(self, module, arguments, keywords):
            return arguments, keywords

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8)
    handle = model.register_forward_pre_hook(Hook(), with_kwargs=True)
    with pytest.raises(AttributeError, match="__name__"):
        torch.jit.script(model)
    handle.remove()

    nhwc.convert_(model, input_format="channels_last")
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_h60_a_module_that_keeps_a_weak_reference_cannot_be_copied():
    model = network()
    model.report = weakref.ref(model)
    with pytest.raises(TypeError, match="weakref"):
        pickle.dumps(model)

    model.report = nhwc.convert_(model, input_format="channels_last")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (other.report.plan, other.report.outcomes) == (model.report.plan, model.report.outcomes)
        with pytest.raises(RuntimeError, match="this report is a copy, or was loaded, and belongs to no model"):
            other.report.revert()


def offload(level, model, path):
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(model, cpu, cpu, level, num_blocks_per_group=1, offload_to_disk_path=str(path))


class Blocks(nn.Module):
    """As diffusers has them: blocks in a list, and layers beside them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_h50_groups_of_weights_that_diffusers_puts_back_from_a_disk_come_back_contiguous(level, tmp_path):
    importlib.import_module("diffusers")
    x, contiguous = torch.randn(1, 3, 9, 9), [(27, 9, 3, 1), (36, 9, 3, 1), (36, 9, 3, 1)]
    model = Blocks()
    offload(level, model, tmp_path / "stock")
    STOCK(model, CL)  # without a word
    assert strides_at_convolutions(model, x) == contiguous

    model = Blocks()
    expected = model(x)
    offload(level, model, tmp_path / "ours")
    with pytest.warns(UserWarning, match="restored before each forward.*from a disk they come back contiguous"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [Reason.OFFLOADED] * 3
    assert strides_at_convolutions(model, x) == contiguous
    torch.testing.assert_close(model(x), expected)

    model = Blocks()
    expected = model(x)
    nhwc.convert_(model, each_forward=True, strict=True)
    offload(level, model, tmp_path / "each forward")
    assert strides_at_convolutions(model, x) == [(27, 1, 9, 3), (36, 1, 12, 4), (36, 1, 12, 4)]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_h51_antialiased_interpolation_to_a_width_of_one_is_wrong_on_channels_last(mode):
    x = torch.rand(1, 3, 8, 8)
    resize = partial(functional.interpolate, size=(4, 1), mode=mode, antialias=True)
    expected = resize(x)
    for converted in (x.to(memory_format=CL), nhwc.convert_weight(x)):
        torch.testing.assert_close(resize(converted.contiguous()), expected)
        right = functional.interpolate(converted, size=(4, 2), mode=mode, antialias=True)
        torch.testing.assert_close(right, functional.interpolate(x, size=(4, 2), mode=mode, antialias=True))


def test_h52_random_numbers_are_drawn_in_the_order_of_memory():
    weight = torch.ones(8, 3, 3, 3)
    draws = (
        lambda tensor: functional.dropout(tensor),
        torch.randn_like,
        lambda tensor: tensor.clone().normal_(),
        lambda tensor: nn.init.kaiming_uniform_(tensor.clone()),
    )
    for draw in draws:
        drawn = []
        for each in (weight, weight.to(memory_format=CL)):
            torch.manual_seed(0)
            drawn.append(draw(each))
        assert not torch.equal(*drawn)

    # A conversion draws nothing, and converting what was initialised keeps it.
    torch.manual_seed(0)
    model = network()
    expected = torch.rand(3)
    torch.manual_seed(0)
    nhwc.convert_(again := network())
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(again[0].weight, model[0].weight)


class Meanwhile(nn.Module):
    """Something else draws, in another thread, while it runs."""

    def __init__(self, draws):
        super().__init__()
        self.layer, self.draws, self.others = nn.Conv2d(3, 3, 3), draws, []

    def forward(self, x):
        if self.draws:
            torch.rand(3)
        thread = threading.Thread(target=lambda: self.others.append(torch.rand(3)))
        thread.start()
        thread.join()
        return self.layer(x)


def test_h53_a_run_on_example_inputs_rewinds_the_generator_of_other_threads_only_where_it_draws_itself():
    x, model = torch.randn(1, 3, 4, 4), Meanwhile(draws=False)
    with torch.random.fork_rng():  # what plain PyTorch has for it
        model(x)
    assert torch.equal(torch.rand(3), model.others[-1])  # the same number for two

    nhwc.plan(model, example_inputs=x)
    assert not torch.equal(torch.rand(3), model.others[-1])

    model, before = Meanwhile(draws=True), torch.get_rng_state()
    nhwc.plan(model, example_inputs=x)
    assert torch.equal(torch.get_rng_state(), before)  # whatever others have drawn

    model, before = Function(lambda x: torch.manual_seed(1) and x), torch.get_rng_state()
    nhwc.plan(model, example_inputs=x)
    assert torch.equal(torch.get_rng_state(), before)


def one_channel(draw):
    """Return a convolution of one channel and an input, often with an output of width 1."""
    rank = draw.choice([2, 2, 3])
    kernel, stride, dilation = ([draw.randint(1, most) for _ in range(rank)] for most in (4, 3, 2))
    padding = [draw.randint(0, 1) for _ in range(rank)]
    least = [max(d * (k - 1) + 1 - 2 * p, 1) for k, d, p in zip(kernel, dilation, padding)]
    sizes = [size + draw.choice([0, 0, 1, 2, 5]) for size in least]
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    layer = nn.Conv2d if rank == 2 else nn.Conv3d
    made = layer(1, draw.choice([1, 4, 16, 33]), kernel, stride, padding, dilation, dtype=dtype)
    return made, torch.randn(draw.randint(1, 3), 1, *sizes, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("seed", [0, *(exhaustive(seed) for seed in range(1, 20))])
def test_h42_convolutions_of_one_channel_are_wrong_on_channels_last(seed):
    """On a CPU with AVX-512, where the width is strided and the output's is 1; with AMX also on contiguous inputs."""
    draw = random.Random(seed)
    for _ in range(30):
        plain, x = one_channel(draw)
        layer = copy.deepcopy(plain)
        if draw.random() < 0.5:
            layer.weight.data = nhwc.convert_weight(layer.weight.data)
        model = nn.Sequential(layer)
        report = nhwc.convert_(model, each_forward=draw.random() < 0.3, input_format="channels_last")
        assert report.plan.rows[0].action is not Action.CONVERT
        results = []
        right = x.detach().double().requires_grad_()
        for each, given in ((plain.double(), right), (model, x)):
            out = each(given)
            results.append((out, *torch.autograd.grad(out.sum(), (given, *each.parameters()))))
        tolerance = 2e-2 if x.dtype is torch.bfloat16 else 1e-4
        for actual, expected in zip(*reversed(results)):
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_h69_a_convolution_of_nothing_but_padding_is_its_bias():
    """That PyTorch's can end the process is left to h42, whose draws have done so."""
    for shape, taps, options in (
        ((3, 1, 5, 1), (4, 1), ((1, 2), (1, 1), (2, 2))),
        ((2, 8, 1, 6), (1, 3), ((2, 1), 1, 1)),
    ):
        x = torch.randn(shape).contiguous(memory_format=CL).requires_grad_()
        weight, bias = torch.randn(16, shape[1], *taps, requires_grad=True), torch.randn(16, requires_grad=True)
        out = nhwc.functional.conv2d(x, weight, bias, *options)
        assert torch.equal(out, bias.view(1, 16, 1, 1).expand_as(out))
        of_x, of_weight, of_bias = torch.autograd.grad(out.sum(), (x, weight, bias))
        assert not of_x.any()
        assert not of_weight.any()
        assert torch.equal(of_bias, torch.full((16,), out[:, 0].numel(), dtype=torch.float32))


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(1, 4, 3), lambda: nn.ConvTranspose3d(4, 1, 3)], ids=["2d", "3d"])
def test_h42_filters_of_one_channel_have_contiguous_strides(make):
    layer = make()
    STOCK(layer, CL) if layer.weight.dim() == 4 else nn.utils.convert_conv3d_weight_memory_format(layer, CL3D)
    contiguous, place = torch.empty(layer.weight.shape).stride(), layer.weight.data_ptr()
    assert layer.weight.stride() != contiguous
    report = nhwc.convert_(layer)
    row = report.plan.rows[0]
    assert (row.action, row.reason, row.target_strides) == (Action.RESTRIDE, Reason.ONE_CHANNEL, contiguous)
    assert (layer.weight.stride(), layer.weight.data_ptr()) == (contiguous, place)
    assert nhwc.check(layer, report.plan) == []
    depthwise = nn.Conv2d(4, 4, 3, groups=4)
    nhwc.convert_(depthwise)
    assert depthwise.weight.stride() == (9, 1, 3, 1)


def transposed_decoder():
    model = nn.ModuleDict({"encoder": nn.Conv2d(3, 8, 3), "decoder": nn.Conv2d(8, 3, 3)})
    model["decoder"].weight = nn.Parameter(model["encoder"].weight.data.transpose(0, 1))
    return model


def buffer_over_a_convolution():
    model = nn.ModuleDict({"convolution": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8)})
    model["norm"].register_buffer("first", model["convolution"].weight.detach()[0])
    return model


@pytest.mark.parametrize("make", [transposed_decoder, buffer_over_a_convolution])
def test_h46_parameters_over_one_memory_in_different_views_come_apart(make):
    def memory(model):
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    model = make()
    before = memory(model)
    STOCK(model, CL)
    assert memory(model) != before

    model = make()
    before, own = memory(model), layout(model)
    with pytest.warns(UserWarning, match="reads the same memory in another way"):
        report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} == {Reason.TIED_BY_VIEW}
    for convert in (
        lambda: nhwc.convert_(model, strict=True),
        lambda: nhwc.convert_(model, storage="fresh", strict=True),
        lambda: nhwc.convert_conv2d_weight_memory_format(model, CL),
    ):
        with pytest.raises(RuntimeError, match="a conversion would separate them"):
            convert()
    assert memory(model) == before
    assert layout(model) == own
    nhwc.convert_(model, each_forward=True, strict=True)
    assert layout(model) == own


def test_h46_a_weight_that_is_tied_by_a_view_later_is_not_reverted():
    model = nn.ModuleDict({"convolution": nn.Conv2d(3, 8, 3)})
    report = nhwc.convert_(model)
    model["filter"] = nn.BatchNorm2d(1)
    model["filter"].register_buffer("first", model["convolution"].weight.detach()[0])
    before = layout(model)
    with pytest.raises(RuntimeError, match=r"'convolution.weight': another parameter or buffer"):
        report.revert()
    assert layout(model) == before


def lazy_network():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3), nn.LazyConvTranspose2d(1, 3))
    nhwc.convert_(model)
    return model


LAZY_STRIDES = [STRIDES, (36, 1, 12, 4), (9, 9, 3, 1)]


def lazy_state():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 1, 3)).state_dict()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("assign", [False, True])
def test_h47_lazy_layers_convert_when_they_are_loaded(assign):
    model = lazy_network()
    before = [(type(each), id(each.weight)) for each in model]
    model.load_state_dict(nhwc.checkpoint.contiguous_state_dict(lazy_state()), assign=assign)
    assert [each.weight.stride() for each in model][assign:] == LAZY_STRIDES[assign:]
    assert assign or [(type(each), id(each.weight)) for each in model] == before
    for layer in model:
        assert not layer._load_state_dict_post_hooks
    model(torch.randn(1, 3, 8, 8))
    assert [each.weight.stride() for each in model][assign:] == LAZY_STRIDES[assign:]


@pytest.mark.filterwarnings(
    "ignore:Lazy modules are a new feature", "ignore:.torch.jit", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("way", ["wrapped", "traced", "flat"])
def test_h47_a_lazy_weight_that_came_otherwise_stays_in_the_first_forward(way):
    x = torch.randn(1, 3, 8, 8)
    model = lazy_network()
    weight = model[1].weight
    with torch.no_grad():
        for layer, shape in ((model[1], (4, 4, 3, 3)), (model[2], (4, 1, 3, 3))):
            layer.weight.materialize(shape)
            layer.bias.materialize((layer.out_channels,))
    if way == "wrapped":
        accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_: None)  # as DDP does
        run = model
    elif way == "flat":
        weight.data = torch.randn(1000)[: weight.numel()].view(weight.shape)
        run = model
    else:
        run = lambda x: torch.jit.trace(model, x, check_trace=False)  # noqa: E731
    with pytest.warns(UserWarning, match=r"the layer Conv2d.*, which was lazy, stays as it is: .*the weight (has|is)"):
        run(x)
    assert weight.is_contiguous()
    assert not any(layer._forward_pre_hooks for layer in model)


# By the names that Opacus has for them.
AbstractGradSampleModule = type("AbstractGradSampleModule", (nn.Module,), {"__module__": "opacus.grad_sample.gsm_base"})


class GradSampleModule(AbstractGradSampleModule):
    def __init__(self, module):
        super().__init__()
        self._module = module
        module.autograd_grad_sample_hooks = []


def expect_refused_for_opacus(wrap):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    wrapped = wrap(model)
    for options in ({}, {"each_forward": True}):
        with pytest.warns(UserWarning, match="Opacus computes per-sample gradients"):
            report = nhwc.convert_(wrapped, **options)
        assert {row.reason for row in report.plan.rows} == {Reason.PER_SAMPLE_GRADIENTS}
    with pytest.raises(RuntimeError, match="it needs a contiguous model with contiguous inputs"):
        nhwc.convert_(wrapped, input_format="channels_last")
    assert all(parameter.is_contiguous() for parameter in model.parameters())

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    report = nhwc.convert_(model)
    wrapped = wrap(model)
    assert len(nhwc.check(wrapped, report.plan)) == len(nhwc.check(model, report.plan)) == 2
    with pytest.raises(RuntimeError, match="Opacus computes"):
        nhwc.convert_(wrapped, strict=True)
    nhwc.convert_(wrapped, torch.contiguous_format, strict=True)
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_h48_models_by_the_names_of_opacus_are_refused():
    expect_refused_for_opacus(GradSampleModule)


@pytest.mark.exhaustive
def test_h48_the_gradients_of_each_sample_of_opacus_are_wrong():
    opacus = importlib.import_module("opacus")
    x = torch.randn(2, 3, 8, 8)

    def gradients(convert):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        convert(model)
        opacus.GradSampleModule(model)(x).square().sum().backward()
        return model[2].weight.grad_sample

    expected = gradients(lambda model: None)
    assert not torch.allclose(gradients(lambda model: STOCK(model, CL)), expected, atol=1e-3)
    assert torch.allclose(gradients(lambda model: nhwc.convert_(model).revert()), expected, atol=1e-3)
    expect_refused_for_opacus(opacus.GradSampleModule)


def viewing_layer(base):
    """Return a layer that views another one's weight, by PEFT's name for such layers."""

    def forward(self, x):
        weight = self.base_layer.weight.data
        return functional.conv2d(x, weight.view(weight.shape[0], -1).view(weight.shape))

    kind = type("BOFTLayer", (nn.Module,), {"__module__": "peft.tuners.boft.layer", "forward": forward})()
    kind.base_layer = base
    return kind


def test_h54_layers_that_view_another_ones_weight_raise():
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        STOCK(viewing_layer(nn.Conv2d(3, 4, 3)), CL)(x)
    model = nn.Sequential(viewing_layer(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    expected = model(x)
    with pytest.warns(UserWarning, match="takes a view"):
        report = nhwc.convert_(model)
    assert [row.reason for row in report.plan.rows] == [Reason.VIEWS_WEIGHT, None]
    torch.testing.assert_close(model(x), expected)
    report.revert()
    nhwc.convert_(model, each_forward=True, strict=True)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["OFT", "BOFT", "HRA", "DoRA"])
def test_h54_layers_of_peft(kind, monkeypatch):
    peft = importlib.import_module("peft")
    for name in ("CC", "CXX"):  # BOFT leaves its own there, where its CUDA code cannot be compiled
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def adapted(convert=lambda model: None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))
        options = {"OFT": {"oft_block_size": 4, "r": 0}, "BOFT": {"boft_block_size": 4}, "HRA": {"r": 2}}
        name = "LoraConfig" if kind == "DoRA" else f"{kind}Config"
        config = getattr(peft, name)(target_modules=["0", "2"], **options.get(kind, {"r": 2, "use_dora": True}))
        model = peft.get_peft_model(model, config)
        convert(model)
        return model

    x = torch.randn(2, 4, 8, 8)

    def use(model):
        model(x).square().sum().backward()
        return model.merge_and_unload()(x)

    expected = use(adapted())
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        use(adapted(lambda model: STOCK(model, CL)))
    with pytest.warns(UserWarning, match="of PEFT"):
        torch.testing.assert_close(use(adapted(nhwc.convert_)), expected, atol=1e-4, rtol=1e-4)
    model = adapted(lambda model: nhwc.convert_(model, each_forward=True, strict=True))
    torch.testing.assert_close(use(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:.*weight_norm.* is deprecated")
def test_h55_weights_of_each_forward_are_exported_without_this_package(tmp_path):
    """ONNX and AOTInductor: test/converting/test_exporting.py."""
    models = [nn.Sequential(norm(nn.Conv2d(3, 4, 3))) for norm in (parametrizations.weight_norm, nn.utils.weight_norm)]
    models, x = [*models, nn.Sequential(nn.Conv2d(3, 4, 3))], torch.randn(1, 3, 8, 8)
    expected, files = [model(x).detach() for model in models], {}
    for index, model in enumerate(models):
        nhwc.convert_(model, each_forward=index == 2, strict=True, preserve=False)
        assert strides_at_convolutions(model, x) == [STRIDES]
        for name, kind in ((f"{index}.pt2", "program"), (f"{index}.pt", "archive")):
            files[name] = kind, x, expected[index], {}
        torch.export.save(torch.export.export(model.eval(), (x,)), tmp_path / f"{index}.pt2")
        torch.jit.trace(model, x).save(tmp_path / f"{index}.pt")
    assert_run_elsewhere(tmp_path, files)


def test_h56_an_orthogonal_weight_is_left_as_stock_leaves_it():
    model = nn.Sequential(parametrizations.orthogonal(nn.Conv2d(3, 4, 3)))
    before = layout(model)
    with pytest.warns(UserWarning, match="an orthogonal weight is computed from it"):
        report = nhwc.convert_(model)
    assert report.plan.rows[0].reason is Reason.ORTHOGONAL
    assert layout(model) == before
    nhwc.convert_(model, each_forward=True, strict=True)
    assert layout(model) == before
    nhwc.convert_(model, torch.contiguous_format, strict=True)


@pytest.mark.exhaustive
def test_h56_inductor_takes_a_view_of_an_orthogonal_weights_original():
    model, x = nn.Sequential(parametrizations.orthogonal(nn.Conv2d(3, 4, 3))), torch.randn(1, 3, 8, 8)
    expected = model(x)
    original = model[0].parametrizations.weight.original
    original.data = original.data.to(memory_format=CL)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.compile(copy.deepcopy(model))(x).sum().backward()
    nhwc.convert_(model, torch.contiguous_format, strict=True)
    nhwc.convert_(model, each_forward=True, strict=True)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model)(x), expected)


class ReluOfFlat(nn.Module):
    """Rectifies a view of an activation, and with it the activation, which is read afterwards."""

    def __init__(self):
        super().__init__()
        self.convolution, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.convolution(x)
        return self.relu(y.flatten(1)).mean() + y.mean()


@pytest.mark.parametrize("convert", [nhwc.convert_, lambda model: model.to(memory_format=CL)], ids=["ours", "stock"])
def test_h78_an_activation_in_place_on_a_reshape_that_copies_is_found(convert):
    torch.manual_seed(0)
    model, x = ReluOfFlat(), torch.randn(2, 3, 8, 8)
    reference = copy.deepcopy(model)
    convert(model)
    images = x.to(memory_format=CL)
    assert not torch.allclose(model(images), reference(x), atol=0.01)
    verification = nhwc.verify(model, reference, images)
    assert not verification.ok
    assert "the model itself" in " ".join(str(verification).split())
    with nhwc.trace(model) as trace:
        model(images)
    (loss,) = trace.losses
    assert (loss.path, loss.operator) == ("", "aten::clone")
    assert "relu_ writes to the copy" in loss.advice


class Shuffling(nn.Module):
    """Trades the depth of a volume for planes that are larger, and back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 3, 3, padding=1), nn.Conv3d(3, 2, 1)
        self.shuffle, self.unshuffle = nn.PixelShuffle(2), nn.PixelUnshuffle(2)

    def forward(self, x):
        return self.unshuffle(self.last(self.shuffle(self.first(x))))


def test_h79_pixel_shuffles_raise_for_channels_last_volumes():
    model, x = Shuffling(), torch.randn(2, 2, 8, 4, 4)
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().sum(), [*model.parameters()])
    report = nhwc.convert_(model, preserve=False, optimizer=())
    assert Reason.PIXEL_SHUFFLE.value in report.remarks
    with pytest.raises(RuntimeError, match="Supports only ChannelsLast, Contiguous"):
        model(x.to(memory_format=CL3D))
    report = nhwc.convert_(model, optimizer=())
    assert Reason.PIXEL_SHUFFLE.value not in report.remarks
    assert {row.layer for row in report.plan.layers} >= {"PixelShuffle", "PixelUnshuffle"}
    for given in (x, x.to(memory_format=CL3D)):
        output = model(given)
        assert output.is_contiguous(memory_format=CL3D)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.square().sum(), [*model.parameters()]), gradients)


def test_h79_there_is_no_remark_on_pixel_shuffles_of_images():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2))
    assert Reason.PIXEL_SHUFFLE.value not in nhwc.convert_(model, preserve=False).remarks
