"""Whether layers in channels-last are right and faster on kernels of this library, measured once on each GPU."""

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from torch_nhwc.ops.library import PACKAGE, library_path

KINDS = ("group", "instance", "batch")
"""Norms of several channels in a group, of one channel, and batch norm of volumes, in bfloat16."""
SIZES = (2 << 20, 32 << 20)
"""The bytes of the activations that are timed."""
GAIN = 1.05
"""How much faster than PyTorch's way in the format the kernels have to be."""
SWITCH, FOLDER = "TORCH_NHWC_CUDA_NORMS", "TORCH_NHWC_CACHE_DIR"
DRIVER = Path("/proc/driver/nvidia/version")
_FREE_BYTES = 512 << 20


class NormQualification(NamedTuple):
    """What was measured of the norms' kernels on a GPU."""

    device: str
    """The GPU's name."""
    right: int
    """In how many cases they were as exact as float64 allows, twice with the same bits."""
    cases: int
    speedups: dict[str, list[float]]
    """PyTorch's time over theirs, for each of `KINDS` and each of `SIZES`."""
    kept: str
    """The file with this, or an empty text if none could be written."""

    @property
    def least_bytes(self) -> list[int]:
        """From how many bytes of an activation on they gain, for each of `KINDS`; -1 is never."""
        if self.right < self.cases:
            return [-1] * len(KINDS)
        return [_least(self.speedups[kind]) for kind in KINDS]

    def __str__(self) -> str:
        gains = ", ".join(f"{kind} norm {self.speedups[kind][-1]:.1f}x PyTorch's way" for kind in KINDS)
        kept = f"; kept in {self.kept}" if self.kept else ""
        return f"{self.device}: right in {self.right} of {self.cases} cases; {gains} at {SIZES[-1] >> 20} MB{kept}"


def qualify_norms(device: torch.device | str = "cuda") -> NormQualification | None:
    """Measure the norms' kernels on a GPU, once, and let them run where they are right and gain 1.05.

    `convert_`, `plan` and `tune` call this for a model on a GPU. It takes about 0.3 s the first time. The result is
    kept for the process, and in a small file of the folder `TORCH_NHWC_CACHE_DIR`, by default `torch_nhwc` among the
    user's caches, under the GPU's name, its driver, torch and this build. `TORCH_NHWC_CUDA_NORMS=measure` measures
    again.

    Args:
        device: The GPU.

    Returns:
        What was measured, or `None` where nothing is: on other devices, in a library without CUDA or without code for
        the GPU, where `TORCH_NHWC_CUDA_NORMS` is 0 or 1, while a graph is captured or compiled, and with less than
        512 MB of free memory.

    Example:
        >>> torch_nhwc.ops.qualify_norms("cpu") is None
        True
    """
    device = torch.device(device)
    if device.type != "cuda" or os.environ.get(SWITCH) in ("0", "1") or torch.compiler.is_compiling():
        return None
    if (known := _qualified.get(device)) is not None:
        return known
    if torch._C._len_torch_dispatch_stack() > 0:  # of fake tensors, for example
        return None
    if torch.ops.nhwc.missing_cuda_image(device) or torch.cuda.is_current_stream_capturing():
        return None
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with _lock:
        if device not in _qualified:
            if torch.cuda.mem_get_info(device)[0] < _FREE_BYTES:
                return None
            found = None if os.environ.get(SWITCH) == "measure" else _read(device)
            _qualified[device] = found or _write(device, _measure(device))
            torch.ops.nhwc.set_cuda_norms(device, _qualified[device].least_bytes)
        return _qualified[device]


def kept_qualifications() -> list[str]:
    """Return what is known of the GPUs of this machine, without measuring anything."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found = (_qualified.get(device) or _read(device) for device in devices)
    return [str(each) for each in found if each is not None]


_qualified: dict[torch.device, NormQualification] = {}
_lock = threading.Lock()


def _least(speedups: list[float]) -> int:
    """Return the size from which on all gain; the smallest one stands for what is smaller."""
    least = -1
    for size, speedup in zip(reversed(SIZES), reversed(speedups)):
        if speedup < GAIN:
            break
        least = 0 if size == SIZES[0] else size
    return least


# --- The file ---


def _key(device: torch.device) -> dict[str, object]:
    """Return what a measurement holds for."""
    properties = torch.cuda.get_device_properties(device)
    library = library_path().stat()
    built = (PACKAGE / "build_info.json").read_bytes() + f"{library.st_size} {library.st_mtime_ns}".encode()
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "driver": DRIVER.read_text().split("\n")[0] if DRIVER.exists() else "",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "library": hashlib.sha256(built).hexdigest(),
    }


def _file(key: dict[str, object]) -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get(FOLDER) or Path(caches) / "torch_nhwc")
    return folder / f"norms-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def _read(device: torch.device) -> NormQualification | None:
    """Return what an earlier process measured; what is damaged or of something else counts for nothing."""
    key = _key(device)
    try:
        kept = json.loads(_file(key).read_text())
        speedups = {kind: [float(each) for each in kept["speedups"][kind]] for kind in KINDS}
        if kept["key"] != key or any(len(each) != len(SIZES) for each in speedups.values()):
            return None
        return NormQualification(str(key["device"]), int(kept["right"]), int(kept["cases"]), speedups, str(_file(key)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _write(device: torch.device, found: NormQualification) -> NormQualification:
    """Keep a measurement for other processes, where that is possible; the last one that does so wins."""
    key = _key(device)
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": key, "right": found.right, "cases": found.cases, "speedups": found.speedups})
        written = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        written.write_text(text)
        written.replace(file)
    except (OSError, RuntimeError):
        return found
    return found._replace(kept=str(file))


# --- The measurement ---


def _measure(device: torch.device) -> NormQualification:
    properties = torch.cuda.get_device_properties(device)
    with ExitStack() as stack:
        # Whatever the caller computes with.
        for each in (torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device)):
            stack.enter_context(each)
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.random.fork_rng([device]))
        torch.manual_seed(0)
        with _kernels(device, runs=True):
            right = [_is_right(case, device) for case in _cases()]
        are_right = all(right) and not torch.are_deterministic_algorithms_enabled()
        speedups = {kind: [_speedup(kind, size, device) if are_right else 0.0 for size in SIZES] for kind in KINDS}
    if all(right) and not are_right:  # so that two runs agree, whatever a clock says
        speedups = {kind: [GAIN for _ in SIZES] for kind in KINDS}
    return NormQualification(properties.name, sum(right), len(right), speedups, "")


@contextmanager
def _kernels(device: torch.device, runs: bool) -> Iterator[None]:
    """Switch the kernels on or off for all norms of a device."""
    torch.ops.nhwc.set_cuda_norms(device, [0 if runs else -1] * len(KINDS))
    try:
        yield
    finally:
        torch.ops.nhwc.set_cuda_norms(device, [])


class _Case(NamedTuple):
    """A call that returns a result and its gradients, of an input, a gradient and parameters of these shapes."""

    call: Callable[..., list[Tensor]]
    dtype: torch.dtype
    input: tuple[int, ...]
    grad: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...] = ()


def _cases() -> Iterator[_Case]:
    """Yield norms and other layers: vectors that fill rows or do not, one block and chunks."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((2, 6, 6), (1, 36, 36)) if dtype != torch.float16 else ((2, 6, 6),):
            for channels, groups in ((64, 32), (64, 64), (33, 11), (33, 33)):
                input = shape[0], channels, *shape[1:]
                yield _Case(partial(_results, "group", groups), dtype, input, input, ((channels,),) * 2)
    for input in ((2, 64, 6, 6), (1, 64, 36, 36)):
        yield _Case(partial(_results, "batch", 64), torch.bfloat16, input, input, ((64,),) * 2)
    nhwc = torch.ops.nhwc
    for dtype, channels in itertools.product((torch.float32, torch.bfloat16), (33, 64)):
        plane, volume = (2, channels, 5, 6), (1, channels, 3, 4, 5)
        pad = partial(_with_gradients, lambda x: nhwc.pad(x, [1, 2, 2, 1], "reflect"))
        yield _Case(pad, dtype, plane, (2, channels, 8, 9))
        rms = partial(_with_gradients, lambda x, w, b: nhwc.normalize(x, w, b, 2.0, 1e-12, "silu"))
        yield _Case(rms, dtype, volume, volume, ((channels,),) * 2)
        for mode in ("nearest", "trilinear"):
            larger = partial(_with_gradients, lambda x, mode=mode: nhwc.interpolate(x, None, [2.0] * 3, mode))
            yield _Case(larger, dtype, volume, (1, channels, 6, 8, 10))
        depthwise = partial(
            _with_gradients, lambda x, weight: nhwc.conv3d(x, weight, None, [1] * 3, [1] * 3, [1] * 3, len(weight))
        )
        yield _Case(depthwise, dtype, volume, volume, ((channels, 1, 3, 3, 3),))


def _is_right(case: _Case, device: torch.device) -> bool:
    """Return whether results and gradients are those of float64 on the CPU, and the same bits twice."""
    given = [torch.randn(shape, device="cpu").to(case.dtype) for shape in (case.input, case.grad, *case.parameters)]
    exact = case.call(*(each.double() for each in given))
    dense = [each.movedim(1, -1).contiguous().movedim(-1, 1) if each.dim() > 3 else each for each in given]
    first, second = ([each.cpu() for each in case.call(*(each.to(device) for each in dense))] for _ in range(2))
    room = 8 * torch.finfo(case.dtype).eps
    return all(
        torch.equal(one, other) and bool((one.double() - each).norm() <= room * each.norm())
        for one, other, each in zip(first, second, exact)
    )


def _with_gradients(call: Callable[..., Tensor], input: Tensor, grad: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Return the output of a call, and its gradients."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (input, *parameters)]
        out = call(*leaves)
        # As `torch.autograd.grad`, which first imports sympy: that takes longer than all cases.
        gradients = _engine_run_backward((out,), (grad,), False, False, tuple(leaves), False, accumulate_grad=False)
        return [out.detach(), *gradients]


def _results(kind: str, groups: int, input: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Return the output of a norm, and its gradients."""
    eps, mask = 1e-5, [True] * 3
    if kind == "batch":  # of volumes, since some images are PyTorch's anywhere
        input, grad = input.unsqueeze(2), grad.unsqueeze(2)
        out, mean, rstd = torch.ops.nhwc.native_batch_norm(input, None, None, weight, bias, True, 0.0, eps)
        of_input, *others = torch.ops.nhwc.native_batch_norm_backward(grad, input, mean, rstd, weight, True, eps, mask)
        return [out.squeeze(2), of_input.squeeze(2), *others]
    out, mean, rstd = torch.ops.nhwc.native_group_norm(input, groups, weight, bias, eps)
    return [out, *torch.ops.nhwc.native_group_norm_backward(grad, input, mean, rstd, weight, groups, eps, mask)]


def _by_pytorch(input: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> object:
    """Compute batch norm as PyTorch does without our kernels."""
    input, grad = input.unsqueeze(2), grad.unsqueeze(2)
    mask: list[bool] = [True] * 3
    _, mean, rstd = torch.ops.aten.native_batch_norm(input, weight, bias, None, None, True, 0.0, 1e-5)
    return torch.ops.aten.native_batch_norm_backward(grad, input, weight, None, None, mean, rstd, True, 1e-5, mask)


def _speedup(kind: str, nbytes: int, device: torch.device) -> float:
    """Return PyTorch's time over ours, forward and backward, in bfloat16."""
    channels, samples = 64, 4
    side = int((nbytes / (2 * channels * samples)) ** 0.5)
    input, grad = (
        torch.randn(samples, side, side, channels, device=device, dtype=torch.bfloat16).movedim(-1, 1) for _ in range(2)
    )
    weight, bias = (torch.randn(channels, device=device, dtype=torch.bfloat16) for _ in range(2))
    groups = 32 if kind == "group" else channels

    def by_kernels() -> object:
        return _results(kind, groups, input, grad, weight, bias)

    def by_pytorch() -> object:
        return _by_pytorch(input, grad, weight, bias) if kind == "batch" else by_kernels()

    with _kernels(device, runs=True):
        ours = _milliseconds(by_kernels)
    with _kernels(device, runs=False):
        return _milliseconds(by_pytorch) / ours


def _milliseconds(call: Callable[[], object]) -> float:
    """Return the median of five, by the GPU's own clock."""
    event: Any = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(5)]
    call()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(float(start.elapsed_time(end)) for start, end in events)[len(events) // 2]
