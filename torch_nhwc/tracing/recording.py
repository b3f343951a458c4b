"""Looking at every operator while a model runs, in each of its threads."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from torch_nhwc.running.intercepting import intercepted
from torch_nhwc.running.outputs import tensors_of
from torch_nhwc.tracing.advice import RESHAPE, Adviser
from torch_nhwc.tracing.compiled import is_compiled, left_alone, looked_through
from torch_nhwc.tracing.layouts import layouts_of
from torch_nhwc.tracing.marks import Marks, Weights
from torch_nhwc.tracing.operators import Finding, Operator, findings, flat
from torch_nhwc.tracing.places import ForwardPass, Place, Places
from torch_nhwc.tracing.reorders import Reorders
from torch_nhwc.tracing.rows import Loss, MixedConvolution, Phase, TracedModule, Unseen
from torch_nhwc.tracing.tallies import Tallies

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OPERATORS: dict[int, Operator] = {}  # by id, since their hash is written in Python
_COMPILED = "it is compiled, or calls what is: what shows is eager code, from which the compiler's may differ"


class _Thread(threading.local):
    def __init__(self, tallies: Tallies) -> None:
        self.counter = tallies.counter()

    copied: tuple[int, Loss] | None = None
    """The copy that was the last loss, by the id of its result, if nothing ran since."""
    is_submitting = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Sees every call of a module, and the operators of each thread that runs those of the model."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is skipped below, without loading it

    def __init__(self, model: nn.Module, paths: dict[int, str], tallies: Tallies, adviser: Adviser) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.tallies, self.adviser = tallies, adviser
        self.places, self.weights, self.gradients = Places(paths), Weights(model), Marks()
        self.here = _Thread(tallies)
        self.reorders: Reorders | None = None
        self.is_over = False

    @contextmanager
    def watch(self, reorders: AbstractContextManager[Reorders] | None) -> Iterator[None]:
        """Looks while the block runs."""
        with ExitStack() as stack:
            self.reorders = stack.enter_context(reorders) if reorders else None
            stack.callback(self._end)
            # Hooks would not be told of the end of what an interrupt leaves.
            stack.enter_context(intercepted(nn.Module, "__call__", self._calling))
            stack.enter_context(intercepted(threading.Thread, "start", self._starting))
            stack.enter_context(intercepted(ThreadPoolExecutor, "submit", self._submitting))
            with self:
                yield

    def _end(self) -> None:
        self.is_over = True

    @looked_through
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiled() and not self.is_over and type(func) is OpOverload:
            self._tell_compiled()
        return self._run(func, args, kwargs or {})

    @left_alone
    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.is_over:
            return func(*args, **kwargs)
        if type(func) is not OpOverload:
            self.tallies.add(Unseen(self.places.path(), f"what {func.name()} runs"))
            return func(*args, **kwargs)
        operator = _OPERATORS.get(id(func)) or _OPERATORS.setdefault(id(func), Operator(func))
        if operator.is_composite:  # as in inference mode; what it is made of comes here
            _push_mode(self)  # not by `with self`, which keeps books for all threads together
            try:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                _pop_mode()
        is_backward, place = self.places.of_call(operator.name)
        if self.reorders is None:
            result = func(*args, **kwargs)
        else:
            path = place.path if place else self.places.path()
            call = partial(func, *args, **kwargs)
            result = self.reorders.run(call, path, "backward" if is_backward else "forward")
        here = self.here
        here.counter[is_backward] += 1
        tensors = operator.tensors(args, kwargs)
        results = [result] if type(result) is Tensor else flat((result,))
        activations = self._activations(operator, tensors, results, is_backward, is_backward and place is None)
        if operator.weight_gradient and result[operator.weight_gradient] is not None:
            self.weights.add(result[operator.weight_gradient])
        if here.copied is not None:
            if operator.name == "aten::_unsafe_view" and id(args[0]) == here.copied[0]:
                self.tallies.advise(here.copied[1], RESHAPE)
            here.copied = None
        if activations:
            forward = None if is_backward else self.places.forward()
            for finding in findings(operator, args, activations, result, forward):
                place = place or self.places.locate(operator.name)
                self._tell(finding, operator, place, is_backward, args, tensors, results)
        return result

    def _activations(
        self, operator: Operator, tensors: list[Tensor], results: list[Tensor], is_backward: bool, is_summed: bool
    ) -> list[Tensor]:
        """What an operator read beside weights; in backward the gradients among it, if they are known."""
        if operator.convolved == 0 and self.weights.has(tensors[0]):
            self.weights.use(tensors[0])
        activations = self.weights.others(tensors)
        if is_summed or (len(activations) < len(tensors) and not any(each.dim() for each in activations)):
            for tensor in results:  # of nothing but weights and numbers
                self.weights.add(tensor)
            return []
        if is_backward:
            gradients = self.gradients.among(activations)
            if gradients or self.places.is_root():
                for tensor in results:
                    self.gradients.add(tensor)
            activations = gradients or activations
        if operator.writes_in_place:
            if any(map(self.weights.has, results)):  # such as an optimizer's step
                return []
            if operator.is_overwriting:
                activations = [each for each in activations if not any(each is result for result in results)]
        return activations

    def _tell(
        self,
        finding: Finding,
        operator: Operator,
        place: Place,
        is_backward: bool,
        arguments: Any,
        tensors: list[Tensor],
        results: list[Tensor],
    ) -> None:
        inputs = tensors[: 3 if is_backward else 2] if finding.kind is MixedConvolution else tensors
        outputs = layouts_of(results)
        phase: Phase = "backward" if is_backward else "forward"
        row = finding.kind(place.path, operator.name, phase, layouts_of(inputs), outputs, place.source)
        if self.tallies.add(row, finding.bytes, 1) and isinstance(row, Loss):
            advice = self.adviser.of(row, place.function, arguments)
            if advice is not None:
                self.tallies.advise(row, advice)
            elif operator.name == "aten::clone":
                self.here.copied = id(results[0]), row

    def _tell_compiled(self) -> None:
        path = self.places.tell_compiled()
        if path is not None:
            self.tallies.add(Unseen(path, _COMPILED))

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What sees modules that are called."""
        get_path, within, here = self.places.paths.get, self.places.within, self.places.threads

        @looked_through
        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = get_path(id(module))
            if path is None or self.is_over:
                return call(module, *args, **kwargs)
            if self.tallies.begin(path) or not here.now.frames or is_compiled():
                return self._visit_module(path, call, module, args, kwargs)
            return within(path, call, (module, *args), kwargs)

        return calling

    def _visit_module(self, path: str, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module for the first time, or outside of others."""
        is_first = self.tallies.begin(path)
        if self.places.is_inside():
            if is_compiled():
                self._tell_compiled()
            outputs = self.places.within(path, call, (module, *args), kwargs)
        else:
            for tensor in tensors_of((args, kwargs)):
                self.weights.use(tensor)
            self.places.begin()
            is_seen = self._is_here()
            outputs = self._visit(path, call, (module, *args), kwargs)
            if not is_seen:
                for node in _graph(tensors_of(outputs)):
                    node.register_prehook(self._push_for_node)
        if is_first and not self.is_over:
            given = layouts_of(tensors_of((args, kwargs)))
            self.tallies.add_module(TracedModule(path, type(module).__name__, given, layouts_of(tensors_of(outputs))))
        return outputs

    def _starting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What sees threads that begin, perhaps to run a part of a module."""

        def starting(thread: threading.Thread) -> None:
            if self._is_helped() and not self.here.is_submitting:
                run = partial(self._help, self.places.path(), self.places.forward(), thread.run)

                def run_once() -> None:
                    del thread.run
                    run()

                thread.run = run_once  # type: ignore[method-assign]
            call(thread)

        return starting

    def _submitting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What sees tasks that a pool is given; its threads are for others too."""

        def submitting(pool: Executor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_helped():
                function = partial(self._help, self.places.path(), self.places.forward(), function)
            was_submitting, self.here.is_submitting = self.here.is_submitting, True
            try:
                return call(pool, function, *args, **kwargs)
            finally:
                self.here.is_submitting = was_submitting

        return submitting

    def _is_helped(self) -> bool:
        """Whether what another thread is given is a part of a module."""
        return self.places.is_inside() and not self.is_over

    def _help(self, path: str, forward: ForwardPass, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a part of a module in another thread than the module."""
        if self.is_over:
            return function(*args, **kwargs)
        self.places.begin(forward)
        return self._visit(path, function, args, kwargs)

    def _visit(self, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs something in a thread, and looks at it if nothing does."""
        if self._is_here():
            return self.places.within(path, call, args, kwargs)
        _push_mode(self)
        try:
            return self.places.within(path, call, args, kwargs)
        finally:
            _pop_mode()

    def _push_for_node(self, _: object) -> None:
        """Looks at a node of a backward; autograd sets the modes anew for each."""
        if not self.is_over and not self._is_here():
            _push_mode(self)

    def _is_here(self) -> bool:
        return self in _get_current_dispatch_mode_stack()


def _graph(outputs: Iterable[Tensor]) -> list[Any]:
    """The nodes that the backward of outputs runs through, but for those that sum a parameter's gradient up."""
    nodes = {output.grad_fn: None for output in outputs if output.grad_fn is not None}
    pending: list[Any] = list(nodes)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes and not hasattr(node, "variable"):
                nodes[node] = None
                pending.append(node)
    return list(nodes)
