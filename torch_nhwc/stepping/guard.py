"""The guard: before a fused optimizer on a CPU steps, what it reads beside its parameters lies as they do.

Such an optimizer goes through a parameter, its gradient and its state by place in memory, and steps silently wrong
where they lie differently: after loading a checkpoint in the other layout, for one. PyTorch calls the guard before each
step of every optimizer, until every layer that was converted is reverted: copies may outlive one that merely dies.

It remembers no parameters: copying, loading and casting make others, and `swap_tensors` takes none that is referred to
weakly. So it looks at all those that can be in a channels-last format.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.modules.optimizers import flattens_parameters, is_from_elsewhere
from torch_nhwc.ops import differing_layouts, lay_out_weights_
from torch_nhwc.running.trial import raises_on_channels_last
from torch_nhwc.stepping.loading import align_when_loaded, loading_optimizer
from torch_nhwc.stepping.records import lay_out, record_of, recorded, warn_of_failure, warn_once

_PLAIN = (nn.Parameter, Tensor)

_is_enabled = True
_is_for_good = False
_handles: list[RemovableHandle] = []
_stepping: set[int] = set()  # threads in which PyTorch may be going through its hooks
_layers: "dict[int, weakref.ref[nn.Module]]" = {}  # those that are converted, by identity
_generation = 0  # how often layers have joined them


def set_step_guard(enabled: bool) -> None:
    """Turns the guard at the step of optimizers off, or on, as it is from the start, for the whole process.

    A fused optimizer on a CPU steps silently wrong where a parameter, its gradient and its state lie differently in
    memory. Until all converted layers that train are reverted, the guard looks before such an optimizer steps, has what
    lies differently follow the parameter, and warns once for each optimizer. It never raises.

    Args:
        enabled: whether it is to look.

    Raises:
        TypeError: it is neither True nor False.

    Example:
        >>> torch_nhwc.set_step_guard(False)
        >>> torch_nhwc.set_step_guard(True)
    """
    global _is_enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"set_step_guard: expected True or False, got {enabled!r}")
    _is_enabled = enabled
    _install_or_remove()


def is_guarded() -> bool:
    """Whether the guard is turned on."""
    return _is_enabled


def watch(layer: nn.Module) -> None:
    """Has the guard there until the layer is released."""
    global _generation
    _layers[id(layer)] = weakref.ref(layer, functools.partial(_outlive, id(layer)))
    _generation += 1
    _install_or_remove()


def watch_for_good() -> None:
    """Has the guard there from then on: for weights whose layers are not known."""
    global _is_for_good
    _is_for_good = True
    _install_or_remove()


def _outlive(identity: int, _: object) -> None:
    """A layer has died unreverted, and there may be copies of it."""
    global _is_for_good
    _is_for_good = True
    _layers.pop(identity, None)


def is_watched(layer: nn.Module) -> bool:
    """Whether the guard is there for a layer."""
    return id(layer) in _layers


def release(layer: nn.Module) -> None:
    """Ends what `watch` began."""
    _layers.pop(id(layer), None)
    _install_or_remove()


def align_seen() -> None:
    """Has state that the guard has seen at a step follow its parameters once more, where those have gone back."""
    for optimizer in recorded():
        try:
            _lay_out(optimizer, with_gradients=False)
        except Exception as error:
            warn_of_failure(optimizer, error)


def _is_wanted() -> bool:
    return _is_enabled and (_is_for_good or bool(_layers))


def _install_or_remove() -> None:
    # Without a lock, which an interrupt could leave held: what another thread did is seen the next time round. Two that
    # install at once have the guard look twice, which does nothing the second time.
    while _is_wanted() != bool(_handles):
        if _is_wanted():
            _handles.append(register_optimizer_step_pre_hook(_before_step))
            _handles.append(register_optimizer_step_post_hook(_after_step))
            continue
        # A loop over hooks in another thread would raise: there they stay, do nothing, and go the next time.
        if _stepping.intersection(thread.ident for thread in threading.enumerate()) - {threading.get_ident()}:
            return
        for handle in tuple(_handles):
            handle.remove()
            _handles[:] = [each for each in _handles if each is not handle]


def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> tuple[Any, Any] | None:
    # Where the step is compiled, the optimizer's own loop of hooks is not: what is called here stays out of graphs too.
    if torch.compiler.is_compiling():
        _look_outside_of_graphs(optimizer, True)
        return None
    _stepping.add(threading.get_ident())
    if not _is_wanted():
        return None
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if not own:
        return _look_before(optimizer, arguments, keywords)
    # They come behind those of all optimizers, and may make gradients: the guard looks behind them, once.
    record = record_of(optimizer)
    if record.behind_own_hooks is not None:
        record.behind_own_hooks.remove()  # the last step raised
    record.behind_own_hooks = optimizer.register_step_pre_hook(_look_before)
    return None


def _look_before(optimizer: Optimizer, arguments: Any, keywords: Any) -> tuple[Any, Any] | None:
    closure: Any = keywords.get("closure") or next(iter(arguments[1:]), None)
    is_later = callable(closure) and next(_filters(optimizer, fused_only=True), None) is not None
    _look(optimizer, not is_later)
    if not is_later:
        return None
    closure = _looking_behind(closure, optimizer)
    if "closure" in keywords:
        return arguments, {**keywords, "closure": closure}
    return (arguments[0], closure, *arguments[2:]), keywords


def _after_step(optimizer: Optimizer, _: object, __: object) -> None:
    if torch.compiler.is_compiling():
        _take_back_outside_of_graphs(optimizer)
        return
    _take_back(optimizer)
    record = record_of(optimizer)
    if record.behind_own_hooks is not None:
        record.behind_own_hooks.remove()
        record.behind_own_hooks = None
    _stepping.discard(threading.get_ident())


def _looking_behind(closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """A closure makes gradients, and the guard looks at them once they are there."""

    @functools.wraps(closure)
    def look_behind(*arguments: Any, **keywords: Any) -> Any:
        _take_back(optimizer)  # where it is called more than once
        result = closure(*arguments, **keywords)
        _look(optimizer, True)
        return result

    return look_behind


def _look(optimizer: Optimizer, with_gradients: bool) -> None:
    """Never raises."""
    try:
        _take_back(optimizer)  # where the last step raised
        record = record_of(optimizer)
        strided = [each for each in _filters(optimizer) if not each.is_contiguous()]
        if any(getattr(each, "grad_sample", None) is not None for each in strided):
            problem = (
                "its parameters are channels-last and have gradients of each sample (Opacus), which are taken from "
                "activations by their strides, and are wrong for channels-last ones: revert the conversion"
            )
            warn_once("samples", optimizer, problem)
        if strided and record.generation != _generation:
            record.generation = _generation
            _foresee(optimizer, strided[0])
        apart = _lay_out(optimizer, with_gradients)
        if apart:
            labels = " and ".join(sorted({label for _, label, _ in apart}))
            problem = (
                f"{labels} did not lie as the parameters do ({len({id(each) for each, _, _ in apart})} of them), by "
                "which a fused optimizer on a CPU steps wrong, and were laid out as they do: give it to convert_ as "
                "optimizer=..., or call align_ after its state was loaded"
            )
            warn_once("moved", optimizer, problem)
    except Exception as error:
        warn_of_failure(optimizer, error)


def _foresee(optimizer: Optimizer, strided: Tensor) -> None:
    """Warns of an optimizer that is about to raise, and that nobody has named; one that is fused aligns from here on.

    Behind `load_state_dict`: after a revert the guard is gone, and a checkpoint from before it lies otherwise.
    """
    if flattens_parameters(optimizer) or (
        is_from_elsewhere(optimizer) and raises_on_channels_last(optimizer, strided.dim())
    ):
        problem = (
            "it takes views that channels-last parameters do not have, and raises: revert the conversion, and convert "
            "by each_forward=True, which leaves parameters contiguous"
        )
        warn_once("views", optimizer, problem)
    if any(group.get("fused") for group in optimizer.param_groups) and loading_optimizer(optimizer) is optimizer:
        align_when_loaded(optimizer)


def _filters(optimizer: Optimizer, fused_only: bool = False) -> Iterator[Tensor]:
    """The parameters that can be in a channels-last format."""
    for group in optimizer.param_groups:
        if not fused_only or group.get("fused"):
            for parameter in group["params"]:
                is_filter = type(parameter) in _PLAIN and parameter.dim() in CHANNELS_LAST
                if is_filter and (parameter.is_cpu or not fused_only):
                    yield parameter


def _lay_out(optimizer: Optimizer, with_gradients: bool) -> list[tuple[Tensor, str, Tensor]]:
    """Has state and gradients lie as their parameters on a CPU, where an optimizer is fused; gives what did not."""
    apart = _find_apart(optimizer, with_gradients)
    for parameter, label, tensor in apart:
        if label == "grad":
            _lay_out_gradient(optimizer, parameter, tensor)
    state = [(tensor, parameter.stride()) for parameter, label, tensor in apart if label != "grad"]
    lay_out([tensor for tensor, _ in state], [strides for _, strides in state])
    return apart


def _find_apart(optimizer: Optimizer, with_gradients: bool) -> list[tuple[Tensor, str, Tensor]]:
    """The parameter, label and tensor of each gradient and state that does not lie as its parameter."""
    parameters: list[Tensor] = []
    companions: list[Tensor] = []
    for parameter in _filters(optimizer, fused_only=True):
        gradient = parameter.grad if with_gradients else None
        state = optimizer.state.get(parameter) or {}
        of_parameter = [each for each in (gradient, *state.values()) if type(each) is Tensor]
        companions += of_parameter
        parameters += [parameter] * len(of_parameter)
    apart = []
    for index in differing_layouts(parameters, companions) if companions else ():
        parameter, tensor = parameters[index], companions[index]
        # A parameter with gaps, of a larger tensor, is none that was converted, and nothing can lie as it does.
        if torch.ops.aten.is_non_overlapping_and_dense(parameter):
            state = optimizer.state.get(parameter) or {}
            label = next((str(key) for key, value in state.items() if value is tensor), "grad")
            apart.append((parameter, label, tensor))
    return apart


def _lay_out_gradient(optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> None:
    """In its own memory; where something else sees that, a copy stands in for the gradient until the step is done."""
    try:
        lay_out_weights_([gradient], [parameter.stride()], storage="reuse")
    except RuntimeError:
        copy = torch.empty_strided(gradient.shape, parameter.stride(), dtype=gradient.dtype).copy_(gradient.detach())
        parameter.grad = copy
        record_of(optimizer).lent.append((parameter, gradient, copy))


def _take_back(optimizer: Optimizer) -> None:
    """With the values that the step has left: a fused one divides gradients by their scale."""
    lent = record_of(optimizer).lent
    while lent:
        parameter, gradient, copy = lent.pop()
        if parameter.grad is copy:
            parameter.grad = gradient
            if 0 not in gradient.stride():
                gradient.detach().copy_(copy)


_look_outside_of_graphs: Callable[[Optimizer, bool], None] = _disable_dynamo(_look)
_take_back_outside_of_graphs: Callable[[Optimizer], None] = _disable_dynamo(_take_back)
