"""Who holds a weight's bytes, and the outcome: every kind of holder, owner and arrangement, byte by byte."""

import copy
import ctypes
import subprocess
import sys
import threading
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_nhwc as nhwc
from torch_nhwc import Outcome

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning", "ignore:TypedStorage:UserWarning"
    ),
]


def parameter(shape=(4, 3, 3, 3), device="cpu"):
    """Distinct whole numbers: any wrong byte shows, and sums of products are exact in every order."""
    return nn.Parameter(torch.randperm(int(torch.Size(shape).numel()), device=device).float().view(shape) + 1)


def layer_of(weight):
    convolution = nn.Conv2d if weight.dim() == 4 else nn.Conv3d
    layer = convolution(weight.shape[1], weight.shape[0], weight.shape[2:], device=weight.device)
    layer.weight = weight
    return layer


def input_of(weight):
    shape = (2, weight.shape[1], *(5,) * (weight.dim() - 2))
    return torch.randint(1, 9, shape, device=weight.device).float().requires_grad_()


def trained(module, weight):
    module(input_of(weight)).square().mean().backward()
    return module


def stepped(w, path):
    layer = layer_of(w)
    optimizer = torch.optim.AdamW(layer.parameters())
    trained(layer, w)
    optimizer.step()
    return w, optimizer.state[w]["exp_avg"]


def gradient_held(w, path):
    w.grad = torch.randn_like(w)
    return w, w.grad.detach()


def loaded_script(w, path):
    torch.jit.script(layer_of(w)).save(path / "layer.pt")
    return torch.jit.load(path / "layer.pt").weight, path / "layer.pt"


def loaded(w, path, **options):
    torch.save(layer_of(w).state_dict(), path / "state.pt")
    return torch.load(path / "state.pt", **options)["weight"], path / "state.pt"


def assigned_safetensors(w, path):
    state, layer = layer_of(w).state_dict(), layer_of(nn.Parameter(torch.empty_like(w, device="meta")))
    save_file(state, path / "state.safetensors")
    layer.load_state_dict(load_file(path / "state.safetensors"), assign=True)
    return layer.weight, path / "state.safetensors"


def wrapped(w, path):
    model = trained(nn.parallel.DistributedDataParallel(layer_of(w)), w)
    return w, model


def unwrapped(w, gradient_as_bucket_view):
    trained(nn.parallel.DistributedDataParallel(layer_of(w), gradient_as_bucket_view=gradient_as_bucket_view), w)
    return w


def file_shared(w, path):
    (path / "weight").write_bytes(raw(w))
    mapped = torch.from_file(str(path / "weight"), shared=True, size=w.numel())
    return nn.Parameter(mapped.view(w.shape)), path / "weight"


def in_larger_storage(w, start, end):
    flat = torch.randn(start + w.numel() + end, device=w.device)
    flat[start : start + w.numel()] = w.detach().flatten()
    return nn.Parameter(flat[start : start + w.numel()].view(w.shape)), flat


def strided(w, strides):
    return nn.Parameter(torch.empty_strided(w.shape, strides, device=w.device).copy_(w.detach())), None


def did(action, w):
    """Return only the weight after an action whose result is dropped."""
    action(w)
    return w, None


# What "auto" does. Each case makes, from a contiguous weight and a folder, a weight and what else holds bytes of it
# (None: nothing that is known). A holder is whatever `seen_by` can read.
BY_OUTCOME = {
    # The weight alone owns its dense bytes, or only the Python wrapper of its own storage holds them.
    Outcome.IN_PLACE: {
        "nothing": lambda w, path: (w, None),
        "dropped_view": lambda w, path: did(lambda w: w.detach().view(-1).sum().item(), w),
        "deepcopy_of": lambda w, path: (copy.deepcopy(w), w),
        "trained": stepped,
        "loaded_script": loaded_script,
        "gradient_held": gradient_held,
        "dropped_storage": lambda w, path: did(lambda w: w.untyped_storage(), w),
        "is_shared": lambda w, path: did(lambda w: w.is_shared(), w),
        "torch_load": loaded,
        "dense_in_an_odd_order": lambda w, path: strided(w, w.transpose(0, 1).contiguous().transpose(0, 1).stride()),
        "ddp_undone": lambda w, path: (unwrapped(w, gradient_as_bucket_view=False), None),
    },
    # Something else holds them.
    Outcome.COPIED_HELD: {
        "detach": lambda w, path: (w, w.detach()),
        "view_of_one_filter": lambda w, path: (w, w.detach()[1]),
        "view_in_a_graph": lambda w, path: (w, w.view(-1)),
        "state_dict": lambda w, path: (w, layer_of(w).state_dict()["weight"]),
        "second_parameter": lambda w, path: (w, nn.Parameter(w.data)),
        "numpy_export": lambda w, path: (w, w.detach().numpy()),
        "dlpack_of_detach": lambda w, path: (w, np.from_dlpack(w.detach())),
        "storage": lambda w, path: (w, w.untyped_storage()),
        "whole_flat_buffer": lambda w, path: in_larger_storage(w, 0, 0),
        "base_of_a_plain_view": lambda w, path: (w.detach().clone().view(-1).view(w.shape), None),
    },
    # The memory comes from elsewhere, and its owner is not counted.
    Outcome.COPIED_FOREIGN: {
        "from_numpy": lambda w, path: (torch.from_numpy(a := w.detach().numpy().copy()), a),
        "from_dlpack": lambda w, path: (torch.from_dlpack(a := w.detach().numpy().copy()), a),
        "mapped_torch_load": lambda w, path: loaded(w, path, mmap=True),
        "assigned_safetensors": assigned_safetensors,
    },
    # The memory is shared, or mapped by PyTorch.
    Outcome.COPIED_SHARED: {
        "shared": lambda w, path: (nn.Parameter(w.detach().clone().share_memory_()), None),
        "sent_to_a_process": lambda w, path: did(ForkingPickler.dumps, w),
        "shared_and_held": lambda w, path: (nn.Parameter(a := w.detach().clone().share_memory_()), a),
        "file_shared": file_shared,
    },
    # The strides are not dense.
    Outcome.COPIED: {
        "gaps": lambda w, path: strided(w, [2 * stride for stride in w.stride()]),
        "overlaps": lambda w, path: (nn.Parameter(w.detach()[:1].clone().expand(w.shape)), None),
    },
    # The strides are canonical.
    Outcome.UNCHANGED: {
        "in_format": lambda w, path: (nn.Parameter(nhwc.convert_weight(w.detach())), None),
        "in_format_in_ddp": lambda w, path: wrapped(nn.Parameter(nhwc.convert_weight(w.detach())), path),
        "in_format_and_held": lambda w, path: (a := nhwc.convert_weight(w.detach()), a.detach()),
    },
    Outcome.PART_OF_LARGER_STORAGE: {
        "flat_buffer_slice": lambda w, path: in_larger_storage(w, 100, 50),
        "flat_buffer_tail": lambda w, path: in_larger_storage(w, 1, 0),
        "dropped_flat_buffer": lambda w, path: (in_larger_storage(w, 9, 9)[0], None),
    },
    Outcome.WRAPPED: {
        "ddp": wrapped,
    },
    Outcome.GRADIENT_IN_THE_WAY: {
        "ddp_undone_but_for_its_gradients": lambda w, path: (
            w,
            unwrapped(w, gradient_as_bucket_view=True).grad.detach(),
        ),
    },
}
CASES = {name: (make, outcome) for outcome, cases in BY_OUTCOME.items() for name, make in cases.items()}
# Those that mean the same wherever the memory is.
ON_ANY_DEVICE = [
    *("nothing", "dropped_view", "deepcopy_of", "trained", "gradient_held", "dropped_storage", "torch_load"),
    *("dense_in_an_odd_order", "detach", "view_of_one_filter", "view_in_a_graph", "state_dict", "second_parameter"),
    *("storage", "whole_flat_buffer", "base_of_a_plain_view", "gaps", "overlaps", "in_format", "in_format_and_held"),
    *("flat_buffer_slice", "flat_buffer_tail", "dropped_flat_buffer"),
]

# What "auto" does: what "reuse", "fresh" and "detach" do there.
POLICIES = {
    Outcome.UNCHANGED: (Outcome.UNCHANGED, Outcome.UNCHANGED, Outcome.UNCHANGED),
    Outcome.RESTRIDED: (Outcome.RESTRIDED, Outcome.COPIED, Outcome.RESTRIDED),
    Outcome.IN_PLACE: (Outcome.IN_PLACE, Outcome.COPIED, Outcome.IN_PLACE),
    Outcome.COPIED: (Outcome.NOT_PERMUTABLE, Outcome.COPIED, Outcome.COPIED),
    Outcome.COPIED_HELD: (Outcome.HELD, Outcome.COPIED, Outcome.COPIED_HELD),
    Outcome.COPIED_FOREIGN: (Outcome.FOREIGN, Outcome.COPIED, Outcome.COPIED_FOREIGN),
    Outcome.COPIED_SHARED: (Outcome.SHARED, Outcome.COPIED, Outcome.COPIED_SHARED),
    Outcome.PART_OF_LARGER_STORAGE: (Outcome.PART_OF_LARGER_STORAGE, Outcome.COPIED, Outcome.COPIED),
    Outcome.WRAPPED: (Outcome.WRAPPED,) * 3,
    Outcome.GRADIENT_IN_THE_WAY: (Outcome.GRADIENT_IN_THE_WAY,) * 3,
}
REFUSALS = {
    Outcome.HELD: r"cannot be permuted in place: something else holds its storage .* use storage='auto' or 'fresh'",
    Outcome.FOREIGN: "cannot be permuted in place: its memory is not from the device's own allocator",
    Outcome.SHARED: "cannot be permuted in place: its memory is shared or mapped; use storage='auto' or 'fresh'",
    Outcome.NOT_PERMUTABLE: "cannot be permuted in place: its strides are not dense",
    Outcome.PART_OF_LARGER_STORAGE: r"is part of a larger storage .* pass storage='fresh'",
    Outcome.WRAPPED: r"has post hooks on its gradient accumulator.*convert first, then make the optimizer, then wrap",
    Outcome.GRADIENT_IN_THE_WAY: "has a gradient that cannot follow.*set .grad to None first",
}
IN_PLACE = (Outcome.UNCHANGED, Outcome.RESTRIDED, Outcome.IN_PLACE)


def raw(tensor):
    """Return the bytes of a dense tensor in memory order, read without a reference to its storage."""
    if tensor.is_cpu:
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return values_of(tensor.detach().as_strided((tensor.numel(),), (1,)))


def values_of(tensor):
    """Return a copy of the elements' bytes in logical order: `reference.bits` may be a view that holds the storage."""
    return reference.bits(tensor).numpy().tobytes()


def seen_by(holder):
    """Return a holder's address and bytes, without a change of the storage's count."""
    if isinstance(holder, torch.Tensor):
        return holder.data_ptr(), holder.stride(), values_of(holder)
    if isinstance(holder, np.ndarray):
        return holder.ctypes.data, holder.tobytes()
    if isinstance(holder, Path):
        return holder.read_bytes()
    if isinstance(holder, nn.Module):
        return values_of(holder.module.weight)
    return None if holder is None else bytes(holder)


@pytest.mark.parametrize("storage", ["auto", "reuse", "fresh", "detach"])
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 3, 2, 3, 3), (4, 3, 1, 1), (4, 1, 3, 3)], ids=str)
@pytest.mark.parametrize(
    ("case", "device"),
    [(case, "cpu") for case in CASES] + [pytest.param(case, "cuda", marks=pytest.mark.cuda) for case in ON_ANY_DEVICE],
)
def test_bytes_move_only_where_nothing_else_can_see_them(case, device, shape, storage, tmp_path):
    make, expected = CASES[case]
    weight, holder = make(parameter(shape, device), tmp_path)
    strides, pointer, before, seen = weight.stride(), weight.data_ptr(), values_of(weight), seen_by(holder)
    memory = raw(weight) if weight.is_contiguous() else None
    converted = reference.convert_weight(weight.detach())
    owned, gradient = weight.grad, None if weight.grad is None else weight.grad.detach().clone()
    moves_nothing = 1 in shape  # one tap or one channel
    if moves_nothing and weight.is_contiguous() and expected > Outcome.UNCHANGED:
        expected = Outcome.RESTRIDED  # whoever holds the bytes
    expected = dict(zip(("auto", "reuse", "fresh", "detach"), (expected, *POLICIES[expected])))[storage]

    assert nhwc.ops.plan_weights([weight], storage=storage) == [expected]
    assert (weight.stride(), weight.data_ptr()) == (strides, pointer)
    if expected.is_refusal:
        bystander = parameter(shape, device)
        for call in (
            lambda: nhwc.convert_weight_(weight, storage=storage),
            lambda: nhwc.convert_weights_([bystander, weight], storage=storage),
        ):
            with pytest.raises(RuntimeError, match=REFUSALS[expected]):
                call()
        assert (weight.stride(), weight.data_ptr()) == (strides, pointer)
        assert values_of(weight) == before
        assert seen_by(holder) == seen
        assert bystander.is_contiguous()
        return

    assert nhwc.convert_weight_(weight, storage=storage) == expected
    reference.assert_same(weight, converted)
    assert raw(weight) == raw(converted)
    assert (weight.data_ptr() == pointer) == (expected in IN_PLACE)
    assert seen_by(holder) == seen
    assert weight.grad is owned
    if gradient is not None:
        reference.assert_same(weight.grad, reference.convert_weight(gradient))
    if expected in (Outcome.RESTRIDED, Outcome.IN_PLACE):
        back = nhwc.convert_weights_([weight], torch.contiguous_format, storage="reuse")
        assert back == [Outcome.RESTRIDED if moves_nothing else Outcome.IN_PLACE]
        assert weight.data_ptr() == pointer
        assert weight.is_contiguous()
        assert values_of(weight) == before
        assert memory is None or raw(weight) == memory
        assert seen_by(holder) == seen


@pytest.mark.parametrize("storage", ["auto", "reuse", "fresh", "detach"])
def test_an_earlier_graph_accumulates_right_gradients(storage, device):
    for view in (False, True):
        weight, other = parameter(device=device), torch.randn(108, device=device, requires_grad=True)
        out = weight.view(-1) * other if view else weight * other.view(4, 3, 3, 3)
        values = weight.detach().clone()
        if view and storage == "reuse":
            with pytest.raises(RuntimeError, match="something else holds its storage"):
                nhwc.convert_weight_(weight, storage=storage)
        else:
            nhwc.convert_weight_(weight, storage=storage)
        out.sum().backward()
        assert torch.equal(other.grad, values.view(-1))
        assert torch.equal(weight.grad, other.detach().view(4, 3, 3, 3))


@pytest.mark.parametrize("storage", ["auto", "reuse", "fresh", "detach"])
def test_a_tied_weight_is_converted_once(storage, device):
    weight = parameter(device=device)
    expected = Outcome.COPIED if storage == "fresh" else Outcome.IN_PLACE
    converted = reference.convert_weight(weight.detach())
    assert nhwc.ops.plan_weights([weight, weight], storage=storage) == [expected] * 2
    assert nhwc.convert_weights_([weight, weight], storage=storage) == [expected] * 2
    reference.assert_same(weight, converted)


@pytest.mark.parametrize("storage", ["auto", "fresh", "detach"])
def test_exact_aliases_stay_aliases_and_others_leave(storage, device):
    first = parameter(device=device)
    alias = nn.Parameter(first.data)
    other = nn.Parameter(first.data.view(-1).view(4, 3, 3, 3).transpose(0, 1))
    with pytest.raises(RuntimeError, match="weight 0 of 3: the weight cannot be permuted in place: something else"):
        nhwc.convert_weights_([first, alias, other], storage="reuse")
    assert first.data_ptr() == alias.data_ptr() == other.data_ptr()
    assert first.is_contiguous()
    values, pointer = first.detach().clone(), first.data_ptr()
    expected = Outcome.COPIED if storage == "fresh" else Outcome.COPIED_HELD
    assert nhwc.convert_weights_([first, alias, other], storage=storage) == [expected] * 3
    assert pointer != first.data_ptr() == alias.data_ptr() != other.data_ptr()
    for weight, wanted in ((first, values), (alias, values), (other, values.transpose(0, 1))):
        reference.assert_same(weight, reference.convert_weight(wanted))
    with torch.no_grad():
        first[0, 0, 0, 0] += 1
    assert alias[0, 0, 0, 0] == first[0, 0, 0, 0]


@pytest.mark.parametrize("refer", [weakref.ref, StorageWeakRef])
def test_a_weak_reference_to_the_storage_holds_nothing(refer, device):
    weight = parameter(device=device)
    reference = refer(weight.untyped_storage())
    pointer = weight.data_ptr()
    assert nhwc.convert_weight_(weight) == Outcome.IN_PLACE
    if refer is weakref.ref:
        assert reference() is weight.untyped_storage()  # what it finds is the weight's own, as the weight has it
    assert weight.data_ptr() == pointer
    assert nhwc.convert_weight_(weight, torch.contiguous_format, storage="fresh") == Outcome.COPIED
    assert reference() is None if refer is weakref.ref else reference.expired()


def test_a_storage_outlives_its_weight_and_comes_back(device):
    weight = parameter(device=device)
    values = weight.detach().clone()
    holder = weight.untyped_storage()
    del weight  # from here on Python alone has the storage
    weight = torch.empty(0, device=device).set_(holder, 0, (4, 3, 3, 3))
    assert nhwc.ops.plan_weights([weight]) == [Outcome.COPIED_HELD]
    del holder
    assert nhwc.convert_weight_(weight) == Outcome.IN_PLACE
    assert torch.equal(weight, values)


def test_the_holders_are_counted_without_the_lock_of_python(device):
    # The operators give it away; other threads of Python run meanwhile, and take and drop storages of their own.
    may_end = threading.Event()

    def make_wrappers():
        while not may_end.is_set():
            [torch.empty(1).untyped_storage() for _ in range(100)]

    thread = threading.Thread(target=make_wrappers)
    thread.start()
    try:
        for turn in range(200):
            weight = parameter(device=device)
            holder = weight.untyped_storage()
            if turn % 2:
                del holder
            assert nhwc.convert_weight_(weight) == (Outcome.IN_PLACE if turn % 2 else Outcome.COPIED_HELD)
    finally:
        may_end.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory that Linux keeps")
def test_the_peak_of_memory_in_place_and_in_new_storage():
    # Not getrusage: its ru_maxrss starts at the peak of the process that forked this one, and would hide any growth.
    script = """
import re, torch
from pathlib import Path
import torch_nhwc as nhwc

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def print_peak(weights, storage, memory_format):
    Path("/proc/self/clear_refs").write_text("5")  # the highest counts from here
    before = memory("VmRSS")
    nhwc.convert_weights_(weights, memory_format, storage=storage)
    print(memory("VmHWM") - max(before, memory("VmRSS")))

formats = torch.channels_last, torch.contiguous_format
# The first foreign ones go with their arrays, the others are slices of one array that stays.
alone = [torch.from_numpy(torch.randn(512, 512, 3, 3).numpy()) for _ in range(8)]
array = torch.randn(8, 512, 512, 3, 3).numpy()
slices = [torch.from_numpy(each) for each in array]
small = [torch.randn(64, 64, 3, 3) for _ in range(200)]
for storage in ("auto", "fresh"):
    for memory_format in formats:
        print_peak([*alone, *slices, *small], storage, memory_format)
owned = torch.ones(2048, 910, 3, 3)
for storage, memory_format in (("reuse", formats[0]), ("reuse", formats[1]), ("fresh", formats[0])):
    print_peak([owned], storage, memory_format)
print(owned.nbytes, alone[0].nbytes)
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    *listed, there, back, meter, nbytes, largest = map(int, run.stdout.split())
    assert max(listed) < largest + 2**20  # the largest weight, above what is there before and after
    assert max(there, back) < 2**20 + nbytes / 100  # in place
    assert meter > nbytes / 2  # the same meter sees new storage
