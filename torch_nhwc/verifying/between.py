"""Running a whole model with every layer cut out of it: what is left is the code between them.

Each layer gives what the reference's gave, so that the code runs on the reference's values.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_nhwc.running.intercepting import intercepted
from torch_nhwc.running.nested import mapped, tensors_in
from torch_nhwc.verifying.alone import DrawInLogicalOrder, gradient_for, repeatable, seed
from torch_nhwc.verifying.differences import can_have_gradient
from torch_nhwc.verifying.inputs import Change, Inputs, as_it_is, laid_out, laid_out_like

Call = tuple[str, int]
"""The path of a layer, and the how many-th call of it."""
Replay = Mapping[Call, list[Tensor]]
"""What each call is to give."""
Visit = Callable[[str, nn.Module, Inputs, int], None]


class CallsDifferError(RuntimeError):
    """A model calls other layers than the reference, or one of them returns other tensors."""


Values = dict[tuple[str, str], tuple[float, Tensor]]
"""What code has computed, by the path of its module and by what it is: a position in order of execution, the tensor."""


class Passage(NamedTuple):
    """One run: what the code between the layers has computed, and what the layers were said to have given."""

    values: Values
    outputs: dict[Call, list[Tensor]]
    """Of the layers, in order of execution."""
    without_tensors: dict[str, str]
    """The class of what a layer, or the model, has returned, where no tensor is found in it; by its path."""


class PassageError(RuntimeError):
    """The model has raised; the path is that of the innermost module that was running."""

    def __init__(self, path: str, position: float, cause: Exception) -> None:
        super().__init__(str(cause))
        self.path, self.position, self.cause = path, position, cause


def run_between(
    model: nn.Module,
    paths: Mapping[int, str],
    inputs: Inputs,
    *,
    replay: Replay | None = None,
    visit: Visit | None = None,
    channels_last: bool = False,
    backward: bool = True,
    change: Change = as_it_is,
) -> Passage:
    """Runs a model and cuts out its layers: the modules whose forward calls no other module.

    A layer runs, and then its outputs give way to others of the same strides. So the model's own code runs in the
    formats that its layers really make, on the values of the reference.

    Args:
        model: to be run; it is afterwards what it was.
        paths: of the modules to look at, by their identity.
        inputs: of the model, which gets copies.
        replay: what each layer is to give; without it, it is what the layer gives, to be recorded.
        visit: called behind each layer, with its path, the layer, its inputs and the number of calls so far.
        channels_last: whether images among the inputs come in channels-last.
        backward: whether gradients are taken of the code between the layers.
        change: of the inputs, of what is replayed, and of the gradients that arrive.

    Raises:
        PassageError: the model raises, or it calls other layers than those of `replay`.
    """
    inputs = inputs.mapped(change)
    changed = replay and {call: [change(str(call), each) for each in tensors] for call, tensors in replay.items()}
    run = _Run(paths, changed, visit, backward)
    with repeatable(model), DrawInLogicalOrder():
        given = inputs.mapped(
            lambda name, tensor: run.leaf(("", f"gradient of {name}"), -1, laid_out(tensor, channels_last))
        )
        try:
            with _calls_go_to(run):
                output = model(*given.args, **given.kwargs)
            for call in replay or ():
                if call not in run.outputs:
                    raise CallsDifferError(f"{call[0]!r} is not called, or less often")
            for name, tensor in run.tensors_of("", output):
                run.note("", name, tensor)
            if backward:
                run.take_gradients(model, change)
        except Exception as error:
            raise PassageError(run.failed_in, len(run.outputs), error) from error
    return Passage(run.values, run.outputs, run.without_tensors)


class _Run:
    """One run, while it goes on."""

    def __init__(self, paths: Mapping[int, str], replay: Replay | None, visit: Visit | None, backward: bool) -> None:
        self.paths, self.replay, self.visit, self.backward = paths, replay, visit, backward
        self.values: Values = {}
        self.outputs: dict[Call, list[Tensor]] = {}
        self.without_tensors: dict[str, str] = {}
        self.leaves: Values = {}
        self.ends: list[Tensor] = []
        self.running: list[tuple[str, bool]] = []
        self.counts: dict[str, int] = {}
        self.failed_in = ""
        self.thread: int | None = threading.get_ident()

    def leaf(self, key: tuple[str, str], position: float, tensor: Tensor) -> Tensor:
        """A tensor whose gradient is wanted, as one that code may write to."""
        tensor = tensor.detach()
        if not (self.backward and can_have_gradient(tensor)):
            return tensor
        self.leaves[key] = position, tensor.requires_grad_()
        return tensor.clone()

    def tensors_of(self, path: str, output: Any) -> list[tuple[str, Tensor]]:
        """The tensors in what a layer returns, or the model."""
        found = list(tensors_in(output, "output"))
        if not found:
            self.without_tensors[path] = type(output).__name__
        return found

    def note(self, owner: str, what: str, tensor: Tensor) -> None:
        """Keeps what the code of a module has computed."""
        self.values[owner, what] = len(self.outputs) - 0.5, tensor.detach()
        if tensor.requires_grad:
            self.ends.append(tensor)

    def call(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for the call of a module."""
        path = self.paths.get(id(module)) if threading.get_ident() == self.thread else None
        if path is None:
            return call(module, *args, **kwargs)
        owner = self.running[-1][0] if self.running else ""
        if self.running:
            self.running[-1] = owner, True
        # As they are before the layer, which may write to them.
        inputs = Inputs(args, kwargs).mapped(lambda _, tensor: tensor.clone())
        self.running.append((path, False))
        try:
            result = call(module, *args, **kwargs)
        except Exception:
            self.failed_in = self.failed_in or path
            raise
        finally:
            _, has_inner = self.running.pop()
        return result if has_inner else self._give_way(owner, path, module, inputs, result)

    def _give_way(self, owner: str, path: str, module: nn.Module, inputs: Inputs, result: Any) -> Any:
        number = self.counts[path] = self.counts.get(path, -1) + 1
        local = path.removeprefix(f"{owner}.") if owner else path
        which = f"{local!r}" + (f", call {number + 1}" if number else "") if self.running else "the model"
        if self.running:
            for name, tensor in inputs.named():
                self.note(owner, f"{name} of {which}", tensor)
        if self.visit is not None:
            thread, self.thread = self.thread, None
            with _disable_current_modes():
                self.visit(path, module, inputs, len(self.outputs))
            self.thread = thread
        given = [tensor for _, tensor in self.tensors_of(path, result)]
        position = len(self.outputs)
        if self.replay is None:
            others = [tensor.detach().clone() for tensor in given]
        else:
            others = self.replay.get((path, number), [])
            if (path, number) not in self.replay or [each.shape for each in others] != [each.shape for each in given]:
                self.failed_in = owner
                raise CallsDifferError(f"{which} is called another time, or returns tensors of other shapes")
        self.outputs[path, number] = others
        seed(position)  # whatever the layer has drawn
        waiting = iter(others)

        def other(name: str, tensor: Tensor) -> Tensor:
            return self.leaf((owner, f"gradient of {name} of {which}"), position, laid_out_like(next(waiting), tensor))

        return mapped(result, "output", other)

    def take_gradients(self, model: nn.Module, change: Change) -> None:
        """Notes the gradients of the layers' outputs, of the model's inputs, and of parameters used between layers."""
        wanted = dict(self.leaves)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    wanted[self.paths.get(id(module), ""), f"gradient of {name}"] = len(self.outputs), parameter
        if not (self.ends and wanted):
            return
        gradients = [
            laid_out_like(change(f"gradient {number}", gradient_for(end, number)), end)
            for number, end in enumerate(self.ends)
        ]
        tensors = [tensor for _, tensor in wanted.values()]
        found = torch.autograd.grad(self.ends, tensors, gradients, allow_unused=True)
        for (key, (position, _)), gradient in zip(wanted.items(), found):
            if gradient is not None:
                self.values[key] = position + 0.6, gradient.detach()  # behind what the next layer is given


_LOCK = threading.RLock()  # threads take turns


@contextmanager
def _calls_go_to(run: _Run) -> Iterator[None]:
    """Has the calls of modules seen, as tracers do it: no hook is put on anybody's module, and keywords are seen."""
    is_over = False

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return original(module, *args, **kwargs) if is_over else run.call(original, module, args, kwargs)

        return call

    with _LOCK, intercepted(nn.Module, "__call__", around):
        try:
            yield
        finally:
            is_over = True
