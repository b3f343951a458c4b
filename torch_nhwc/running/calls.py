"""Call models: once so that nothing remains of it, on copies, and against the clock."""

import copy
import inspect
import io
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.running.containers import map_tensors, tensors_in

Model = TypeVar("Model", bound=nn.Module)
Job = Callable[[], object]


def run_once(model: nn.Module, inputs: Any, *contexts: AbstractContextManager[Any]) -> Any:
    """Run a model without gradients, in its own mode, and return its output; see `preserved_state`.

    PyTorch's generators are rewound only if the run draws from them or seeds them, so that other threads do not draw
    the same numbers twice. Compiled modules run uncompiled, because a dispatch mode is active; while this runs, those
    that other threads call do as well, since PyTorch has one compiler stance for the process.

    Args:
        model: The model to run.
        inputs: See `arguments_of`.
        contexts: Context managers that are entered around the call alone.
    """
    with ExitStack() as stack:
        draws = Draws()
        stack.enter_context(
            preserved_state(model, must_rewind=lambda: draws.has_drawn or torch.initial_seed() != draws.seed)
        )
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(_uncompiled())
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(draws)
        return call(model, inputs)


_stance_lock = threading.Lock()
_stances: list[Any] = []  # the one to restore, once for each thread that is inside of `_uncompiled`


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run everything uncompiled. The stance is the process's: the last thread that leaves restores the former one."""
    with _stance_lock:
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _stance_lock:
            stance = _stances.pop()
            if not _stances:
                stance.__exit__(None, None, None)


@contextmanager
def preserved_state(*models: nn.Module, must_rewind: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Restore the models' buffers and training modes, and the random generators, at the end of the block.

    The generators are PyTorch's, Python's and NumPy's. A process has one of each for all threads: numbers that other
    threads draw meanwhile are drawn again. Autocast's cache of casted weights is cleared before and after the block.
    `must_rewind` says at the end of the block whether PyTorch's generators are restored.
    """
    restoring = _generators(must_rewind)
    for model in models:
        restoring += [partial(setattr, *mode) for mode in _training_modes(model)]
        for module in model.modules():
            restoring += _buffers(module)
    torch.clear_autocast_cache()  # a weight that was cast without a gradient must not be used with one, nor conversely
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for restore in restoring:
            restore()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module back into its own mode at the end of the block."""
    modes = _training_modes(model)
    try:
        if modes:
            model.eval()
        yield
    finally:
        for mode in modes:
            setattr(*mode)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with example inputs, as `arguments_of` takes them, and return its output."""
    args, kwargs = arguments_of(model, inputs)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments in a model's inputs.

    These are a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.

    Raises:
        TypeError: The inputs are a shape: integers that the model does not take as arguments.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if all(type(each) is int for each in inputs) and (isinstance(inputs, torch.Size) or not _takes(model, inputs)):
        sizes = ", ".join(map(str, inputs))
        raise TypeError(f"expected example_inputs to be tensors, got the shape ({sizes}): give torch.randn({sizes})")
    return tuple(inputs), {}


def copy_model(model: Model) -> Model:
    """Return a deep copy, in which TorchScript modules keep their own constants and what requires gradients."""
    # A deep copy of a frozen TorchScript module shares the constants of its graphs, which are its weights.
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) and any(map(_has_constants, module.modules())):
            with suppress(RuntimeError):  # archives with operators fused for oneDNN do not load
                archive = io.BytesIO(module.save_to_buffer())  # type: ignore[no-untyped-call, unused-ignore]
                memo[id(module)] = torch.jit.load(archive)  # type: ignore[no-untyped-call, unused-ignore]
    with torch.no_grad():  # otherwise parameters of a copied TorchScript module have a gradient function
        copied = copy.deepcopy(model, memo)
    for parameter, other in zip(model.parameters(), copied.parameters()):
        other.requires_grad_(parameter.requires_grad)
    return copied


def copy_inputs(inputs: Any) -> Any:
    """Return a deep copy of example inputs in which each tensor is a leaf."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    tensors = {id(tensor): tensor for _, tensor in tensors_in(inputs)}
    try:
        return copy.deepcopy(inputs, {identity: leaf(tensor) for identity, tensor in tensors.items()})
    except Exception:  # an argument such as a lock cannot be copied
        return map_tensors(inputs, leaf)


def seconds(job: Job, device: str = "cpu") -> float:
    """Return how long a job takes, including the device's work, but not the time to free the result."""
    _synchronize(device)
    start = time.perf_counter()
    result = job()
    _synchronize(device)
    taken = time.perf_counter() - start
    del result
    return taken


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes whether this thread draws random numbers; `seed` is that of PyTorch's generator before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.has_drawn, self.seed = False, torch.initial_seed()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def _generators(must_rewind: Callable[[], bool]) -> list[Callable[[], object]]:
    """Return functions that restore the random generators, PyTorch's only if they must be rewound."""

    def rewind(set_state: Callable[[Any], object], state: Any) -> None:
        if must_rewind():
            set_state(state)

    restoring: list[Callable[[], object]] = [partial(random.setstate, random.getstate())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        restoring.append(partial(rewind, torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    restoring.append(partial(rewind, torch.set_rng_state, torch.get_rng_state()))  # the last one: it has the seed
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        restoring.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return restoring


def _training_modes(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    # A frozen TorchScript module has no mode.
    return [(module, "training", module.training) for module in model.modules() if hasattr(module, "training")]


def _buffers(module: nn.Module) -> list[Callable[[], object]]:
    """Return functions that restore the buffers of one module: which there are, and their values."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    names = [] if is_scripted else [partial(_restore_names, module._buffers, dict(module._buffers))]
    buffers = module.buffers(recurse=False)
    return [*names, *(partial(_restore_values, buffer, buffer.detach().clone()) for buffer in buffers)]


def _restore_names(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(before)


def _restore_values(buffer: Tensor, values: Tensor) -> None:
    if buffer.shape != values.shape:  # observers of quantization resize their buffers
        buffer.resize_(values.shape)
    has_values = not buffer.is_meta and not hasattr(buffer, "fake_mode")
    if has_values and not torch.equal(buffer, values):  # writing would make graphs that saved the buffer useless
        buffer.detach().copy_(values)


def _takes(model: nn.Module, numbers: Sequence[int]) -> bool:
    """Return whether the model's signature accepts as many arguments."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return len(numbers) < 3
    try:
        signature.bind(*numbers)
    except TypeError:
        return False
    return True


def _has_constants(module: Any) -> bool:
    """Return whether the graphs of a TorchScript module contain tensors."""
    graphs = (module._c._get_method(name).graph for name in module._c._method_names())
    constants = (node for graph in graphs for node in graph.findAllNodes("prim::Constant"))
    return any(node.output().type().kind() == "TensorType" for node in constants)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
