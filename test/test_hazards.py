"""Public incidents with channels-last: what plain PyTorch does, and what we make of it; docs/safety.md lists them.

The hazards of several ranks are in test/distributed/test_ranks.py, h27 is in test/ops/test_compile.py.
"""

import contextlib
import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import torch_nhwc as nhwc
from torch_nhwc import Action, Outcome, Reason

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


def trained(make_optimizer, convert, converts_at=2):
    """A model after six steps, converted in the middle."""
    torch.manual_seed(0)
    model = network()
    optimizer = make_optimizer(model.parameters())
    for number in range(6):
        if number == converts_at:
            convert(model, optimizer)
        step(model, optimizer, number)
    return nn.utils.parameters_to_vector(p.detach().contiguous() for p in model.parameters())


FUSED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def test_h02_optimizer_state_saved_in_storage_order_is_scrambled_when_read_in_logical_order():
    weight = torch.arange(54.0).view(2, 3, 3, 3)
    state = weight.clone(memory_format=CL)
    as_stored = torch.empty(54).set_(state.untyped_storage()).view(2, 3, 3, 3)
    assert not torch.equal(as_stored, weight)  # the hazard

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    nhwc.convert_(model, optimizer=optimizer)
    for tensor in nhwc.contiguous_state_dict(optimizer.state_dict())["state"][0].values():
        stored = torch.empty(tensor.numel(), dtype=tensor.dtype).set_(tensor.untyped_storage())
        assert torch.equal(stored.view(tensor.shape), tensor)


def test_h03_safetensors_refuses_channels_last_tensors(tmp_path):
    from safetensors.torch import load_file, save_file

    model = network()
    plan = nhwc.convert_(model).plan
    with pytest.raises(ValueError, match="contiguous"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(nhwc.contiguous_state_dict(model), tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert nhwc.check(model, plan)
    nhwc.restore_(model, plan)
    assert not nhwc.check(model, plan)


@pytest.mark.parametrize("name", FUSED)
def test_h06_fused_optimizers_step_silently_wrong_where_layouts_differ(name):
    expected = trained(FUSED[name], lambda model, optimizer: None)
    assert not torch.allclose(trained(FUSED[name], lambda model, optimizer: STOCK(model, CL)), expected)
    ours = trained(FUSED[name], lambda model, optimizer: nhwc.convert_(model, optimizer=optimizer))
    torch.testing.assert_close(ours, expected)


def test_h06_a_checkpoint_in_the_other_layout_is_aligned():
    def load(model, optimizer, align):
        checkpoint = copy.deepcopy(optimizer.state_dict())  # contiguous
        nhwc.convert_(model, optimizer=optimizer)
        optimizer.load_state_dict(checkpoint)
        if align:
            assert nhwc.align_(model, optimizer)

    expected = trained(FUSED["AdamW"], lambda model, optimizer: None)
    wrong = trained(FUSED["AdamW"], lambda model, optimizer: load(model, optimizer, align=False))
    assert not torch.allclose(wrong, expected)
    right = trained(FUSED["AdamW"], lambda model, optimizer: load(model, optimizer, align=True))
    torch.testing.assert_close(right, expected)


def test_h07_optimizers_that_flatten_parameters_crash():
    def closure(model, optimizer):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3, 8, 8, dtype=torch.double)).square().mean()
        loss.backward()
        return loss

    model = STOCK(network(), CL)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="view"):
        optimizer.step(lambda: closure(model, optimizer))

    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.warns(UserWarning, match="takes a view"):
        report = nhwc.convert_(model, optimizer=optimizer)
    assert Reason.FLATTENING_OPTIMIZER in {row.reason for row in report.plan.rows}
    optimizer.step(lambda: closure(model, optimizer))

    before = layout(model := network())
    nhwc.convert_(model).revert()
    assert layout(model) == before


def test_h08_a_model_of_2d_and_3d_layers_is_half_converted():
    model = nn.ModuleDict({"image": nn.Conv2d(3, 4, 3), "volume": nn.Conv3d(3, 4, 3)})
    plain = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="rank 4"):
        plain.to(memory_format=CL)
    assert plain["image"].weight.is_contiguous(memory_format=CL)  # half
    nhwc.convert_(model)
    assert model["image"].weight.is_contiguous(memory_format=CL)
    assert model["volume"].weight.is_contiguous(memory_format=CL3D)


def weight_at_the_convolution(layer, monkeypatch):
    seen = []
    convolution = functional.conv2d
    monkeypatch.setattr(
        functional, "conv2d", lambda x, weight, *rest: seen.append(weight.stride()) or convolution(x, weight, *rest)
    )
    layer(torch.randn(1, 3, 8, 8))
    monkeypatch.undo()
    return seen[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "normed",
    [parametrizations.weight_norm, nn.utils.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm]
    + [lambda layer: prune.l1_unstructured(layer, "weight", amount=5)],
    ids=["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm", "pruned"],
)
def test_h09_computed_weights_are_skipped_without_a_word(normed, monkeypatch):
    layer = normed(nn.Conv2d(3, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STOCK(layer, CL)
    assert weight_at_the_convolution(layer, monkeypatch) == (27, 9, 3, 1)
    nhwc.convert_(layer)
    assert weight_at_the_convolution(layer, monkeypatch) == STRIDES


def test_h10_lazy_layers_raise():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.LazyConv2d(4, 3))
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)uninitialized"):
        STOCK(copy.deepcopy(model), CL)
    nhwc.convert_(model)
    assert model[0].weight.stride() == STRIDES
    model(torch.randn(1, 3, 8, 8))
    assert model[1].weight.stride() == STRIDES


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_h11_live_torchscript_modules_are_skipped(tmp_path):
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    STOCK(model, CL)
    assert model[0].weight.stride() == (27, 9, 3, 1)
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    nhwc.convert_(model)
    assert model[0].weight.stride() == STRIDES
    model.save(tmp_path / "model.pt")
    torch.save({"x": x, "y": expected}, tmp_path / "example.pt")
    code = (
        "import sys, torch; m = torch.jit.load('model.pt'); e = torch.load('example.pt')\n"
        "torch.testing.assert_close(m(e['x']), e['y']); assert 'torch_nhwc' not in sys.modules\n"
        "assert dict(m.named_parameters())['0.weight'].stride() == (27, 1, 9, 3)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)


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
    assert set(report.outcomes) == {Outcome.KEPT}


class Gone(nn.Conv2d):
    """A layer whose weight cannot be read."""

    @property
    def weight(self):
        raise OSError("the disk is gone")

    @weight.setter
    def weight(self, value):
        pass

    def register_parameter(self, name, parameter):
        if name != "weight":
            super().register_parameter(name, parameter)

    def reset_parameters(self):
        pass


def test_h16_an_error_midway_leaves_half_a_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Gone(3, 4, 3))
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


def test_h23_modules_that_hold_a_memory_format_cannot_be_copied(tmp_path):
    class Holds(nn.Module):
        memory_format = None

    holder = Holds()
    holder.memory_format = CL
    with contextlib.suppress(TypeError):  # PyTorch may have repaired it
        copy.deepcopy(holder)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.LazyConv2d(4, 1))
    nhwc.convert_(model, input_format="channels_last")
    copies = [copy.deepcopy(model)]
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 1))  # PyTorch pickles no parametrized modules
    nhwc.convert_(plain, input_format="channels_last")
    copies.append(pickle.loads(pickle.dumps(plain)))
    torch.save(plain, tmp_path / "model.pt")
    copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
    for each in copies:
        each(torch.randn(1, 3, 16, 16))
        assert each[0].weight.stride() == STRIDES


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_h24_compiled_models_recompile_or_keep_stale_addresses(way):
    model = network()
    if way == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    before = layout(model)
    with pytest.warns(UserWarning, match="convert first, then make the optimizer, then wrap, then compile"):
        report = nhwc.convert_(model)
    assert {row.reason for row in report.plan.rows} == {Reason.COMPILED}
    assert layout(model) == before


def test_h25_loading_by_assignment_and_from_a_vector_take_the_format_away():
    model = network()
    contiguous = copy.deepcopy(model.state_dict())
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    plan = nhwc.convert_(model).plan
    for lose in (
        lambda: model.load_state_dict(contiguous, assign=True),
        lambda: nn.utils.vector_to_parameters(vector, model.parameters()),
        lambda: model.to(memory_format=torch.contiguous_format),
    ):
        lose()
        assert nhwc.check(model, plan)
        nhwc.restore_(model, plan)
        assert not nhwc.check(model, plan)


def test_h26_shared_memory_is_left_without_a_word():
    model = network().share_memory()
    STOCK(model, CL)
    assert not model[0].weight.is_shared()

    model = network().share_memory()
    other = model[0].weight.detach()
    values = other.clone()
    report = nhwc.convert_(model)
    assert report.outcomes[0] == Outcome.FRESH_SHARED
    assert "no longer shared" in str(report)
    assert other.stride() == (27, 9, 3, 1)
    assert torch.equal(other, values)  # what another process sees


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

            class Watch(torch.utils._python_dispatch.TorchDispatchMode):
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
    (wrong,) = torch.autograd.grad(functional.instance_norm(x), x, gradient.contiguous(memory_format=memory_format))
    assert not torch.allclose(wrong, right)

    norm = nn.InstanceNorm2d if rank == 2 else nn.InstanceNorm3d
    report = nhwc.convert_(nn.Sequential(layer(3, 4, 3), norm(4), layer(4, 4, 3)))
    assert report.remarks == (Reason.INSTANCE_NORM.value,)
    assert Reason.INSTANCE_NORM.value.split(":")[0] in " ".join(str(report).split())
    exchanged = norm(4)
    report = nhwc.convert_(nn.Sequential(layer(3, 4, 3), exchanged), preserve=True)
    assert Reason.INSTANCE_NORM.value not in report.remarks
    given = x.detach().contiguous(memory_format=memory_format).requires_grad_()
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
    contiguous, channels_last = error(x, norm), error(x.to(memory_format=CL), norm)
    assert channels_last > 100 * contiguous

    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm)
    report = nhwc.convert_(model)
    assert report.remarks == (Reason.GROUP_NORM.value,)
    report = nhwc.convert_(model, preserve=True)
    assert Reason.GROUP_NORM.value not in report.remarks
    assert error(x.to(memory_format=CL), norm) <= 2 * contiguous


@pytest.mark.parametrize(("layer", "memory_format"), [(nn.Conv2d, CL), (nn.Conv3d, CL3D)])
def test_h40_an_input_of_one_channel_stays_in_its_old_strides(layer, memory_format):
    shape = (2, 1, *[6] * (2 if layer is nn.Conv2d else 3))
    x = torch.randn(shape)
    wanted = torch.empty(shape, memory_format=memory_format).stride()
    assert x.contiguous(memory_format=memory_format).stride() != wanted

    model = nn.Sequential(nn.Identity(), layer(1, 4, 3))
    nhwc.convert_(model, input_format="channels_last")
    seen = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output))
    model(x)
    assert seen[0].stride() == wanted
    assert torch.equal(seen[0], x)
