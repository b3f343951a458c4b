"""`trace`: watch the formats of what each operator reads and writes, by a dispatch mode."""

import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from torch_nhwc.nn import hooks
from torch_nhwc.running import calls
from torch_nhwc.running.containers import tensors_in
from torch_nhwc.running.module_stack import ModuleStack
from torch_nhwc.sites.finding import walk_layers
from torch_nhwc.sites.site import OPERATORS, walk
from torch_nhwc.tracing.other_ranks import OtherRanks
from torch_nhwc.tracing.traces import (
    AMBIGUOUS,
    CHANNELS_LAST_NAMES,
    CONTIGUOUS,
    INPUT_HOOK,
    OTHER,
    FormatLoss,
    Gain,
    Layout,
    MixedConvolution,
    OperatorRow,
    Phase,
    Trace,
    TracedModule,
    TraceWriter,
    format_of,
    is_channels_last,
    is_channels_last_like,
    layouts_of,
)

OURS = "torch_nhwc.functional"
PRESERVE = "replaced by preserve=True"
RESHAPE = "a reshape that is unavoidable"
WRITTEN = "{0} writes to the copy; in a contiguous model, it writes to the activation itself, which is still in use"
# What this package has instead, by the function of `torch.nn.functional` that called the operator,
BY_FUNCTION = frozenset(("cross_entropy", "instance_norm", "pad"))
# or by the operator itself. test/tracing/test_advice.py tries all of them.
BY_OPERATOR = {
    **dict.fromkeys(("aten::avg_pool3d", "aten::avg_pool3d_backward"), "avg_pool3d"),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::_adaptive_avg_pool3d_backward"), "adaptive_avg_pool3d"),
    **dict.fromkeys(("aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward"), "adaptive_max_pool3d"),
    "aten::max_unpool3d": "max_unpool3d",
    **dict.fromkeys(("aten::_softmax", "aten::_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("aten::_log_softmax", "aten::_log_softmax_backward_data"), "log_softmax"),
}


def trace(model: nn.Module) -> AbstractContextManager[Trace]:
    """See where a model loses channels-last while it runs in the block.

    Every operator counts that runs in the block in this thread, and those of its backward, with the module that called
    it. The model does not change. Each operator takes some tens of microseconds longer.

    Args:
        model: A module. The trace names its inner modules by their paths in it.

    Returns:
        What begins the block with the trace, which is filled while the block runs.

    Raises:
        TypeError: The model is not a module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 3), torch.nn.AvgPool3d(2))
        >>> with torch_nhwc.channels_last(model, preserve=False), torch_nhwc.trace(model) as trace:
        ...     model(torch.randn(2, 3, 8, 8, 8)).sum().backward()
        >>> [(loss.path, loss.operator, loss.phase) for loss in trace.losses]
        [('1', 'aten::avg_pool3d', 'forward')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: expected a torch.nn.Module, got {type(model).__name__}")
    return _Tracing(model)


class _Tracing(AbstractContextManager[Trace]):
    def __init__(self, model: nn.Module) -> None:
        self._block = _traced(model)

    def __repr__(self) -> str:
        return "<nothing is traced yet: `with torch_nhwc.trace(model) as trace: model(x)`, then `print(trace)`>"

    def __enter__(self) -> Trace:
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)


@contextmanager
def _traced(model: nn.Module) -> Iterator[Trace]:
    recorder = _Recorder(model)
    try:
        with recorder.calls, recorder:
            yield recorder.writer.trace
    finally:
        recorder.settle_gone(is_end=True)


_SCRIPTED = "a TorchScript module, whose operators show without the modules inside of it"
_COMPILED = "it is compiled, and runs uncompiled under a trace: the compiler may choose other formats"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Sees the operators of a thread and of its backward, and the modules that run."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the call below this class does it without importing the compiler, which takes a second

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.calls, self.writer = _Calls(model, self), TraceWriter()
        self.replaceable = {layer.path for layer in walk_layers(model).layers if layer.reason is None}
        # Parameters, buffers, and what is computed from nothing else; but not what is used as an activation, such as a
        # learned constant that a convolution reads.
        self.weights, self.used, self.gradients = _TensorSet(), _TensorSet(), _TensorSet()
        for tensor in (*model.parameters(), *model.buffers()):
            self.weights.add(tensor)
        self.has_channels_last = False
        # Copies of activations, by the address of their storage.
        self.copies: dict[int, _Copy] = {}
        # What operators inside of our layers and functions wrote in another format, by the address of its storage,
        # until it is known whether the format is restored.
        self.held: dict[int, _Held] = {}
        self.other_ranks = OtherRanks()
        self.lock = threading.RLock()  # the backward of several GPUs runs in several threads
        for path, module, _ in walk(model):
            if isinstance(module, torch.jit.ScriptModule):
                self.writer.add_unseen(path, _SCRIPTED)
            elif module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                self.writer.add_unseen(path, _COMPILED)

    def begin_forward(self, args: Any) -> None:
        """Note that a module is called outside of all others."""
        self.has_channels_last = False
        self.copies = {key: each for key, each in self.copies.items() if not _is_gone(each.copy)}
        self.other_ranks.forget()
        self.settle_gone()
        for _, tensor in tensors_in(args):
            self._use(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is not OpOverload:
            self.writer.add_unseen(self.calls.path, f"what {func.name()} runs")
            return func(*args, **kwargs)
        operator = _OPERATORS.get(id(func)) or _OPERATORS.setdefault(id(func), _Operator(func))
        if operator.is_composite:  # in inference mode; the operators inside of it come here
            _push_mode(self)  # `with self` would take longer than the operator
            try:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                _pop_mode()
        result = func(*args, **kwargs)
        with self.lock:
            self._record(operator, args, operator.tensors(args, kwargs), result)
        return result

    def _record(self, operator: "_Operator", args: Any, tensors: list[Tensor], result: Any) -> None:
        is_backward, site = self.calls.of_call(operator.name)
        phase: Phase = "backward" if is_backward else "forward"
        self.writer.trace.operators[phase] += 1
        results = [result] if type(result) is Tensor else _flat((result,))
        if operator.input_index == 0 and self._is_weight(tensors[0]):
            self._use(tensors[0])
        activations = self._activations(operator, tensors, results, is_backward, site)
        if operator.weight_gradient and result[operator.weight_gradient] is not None:
            self.weights.add(result[operator.weight_gradient])
        if self.held and activations:
            self._settle(operator, activations, results, site)
        if self.copies and (operator.writes_in_place or operator.name == "aten::_unsafe_view") and not is_backward:
            self._note_use_of_copies(operator, results)
        if not activations:
            return
        formats = [format_of(each) for each in activations]

        def describe(written: Tensor) -> FormatLoss:
            where = site or self.calls.locate(operator.name)
            layout = Layout(CONTIGUOUS, tuple(written.shape))
            row = where.path, operator.name, phase, layouts_of(activations), (layout,), where.source
            return FormatLoss(*row, written.nbytes, 1)

        if not is_backward:
            for loss in self.other_ranks.losses(activations, formats, results, describe):
                self.writer.add(loss)
        for kind, size in self._findings(operator, args, activations, formats, result, is_backward):
            site = site or self.calls.locate(operator.name)
            inputs = tensors[: 3 if is_backward else 2] if kind is MixedConvolution else tensors
            layouts = layouts_of(inputs), layouts_of(results)
            new = kind(site.path, operator.name, phase, *layouts, site.source, size, 1)
            if isinstance(new, FormatLoss) and site.function == OURS:
                written = max(operator.results_written(result), key=_size_if_contiguous)
                storage = written.untyped_storage()
                self.held[storage._cdata] = _Held(new, StorageWeakRef(storage))  # type: ignore[no-untyped-call, unused-ignore]
                continue
            row = self.writer.add(new)
            if isinstance(row, FormatLoss):
                row.advice = self._advice(row, site, args) if row is new else row.advice
                if operator.name == "aten::clone" and row.advice != PRESERVE:
                    storages = result.untyped_storage(), tensors[0].untyped_storage()
                    self.copies[storages[0]._cdata] = _Copy(row, *map(StorageWeakRef, storages))

    def _note_use_of_copies(self, operator: "_Operator", results: list[Tensor]) -> None:
        """Say of copies of activations that they are reshapes, or that an operator writes to them."""
        for each in results:
            copied = self.copies.get(each.untyped_storage()._cdata) if each.layout == torch.strided else None
            if copied is None:
                continue
            if not operator.writes_in_place:
                copied.loss.advice = copied.loss.advice or RESHAPE
            elif not _is_gone(copied.activation):
                copied.loss.advice = WRITTEN.format(operator.name.removeprefix("aten::"))

    def _settle(
        self, operator: "_Operator", activations: list[Tensor], results: list[Tensor], site: "CallSite | None"
    ) -> None:
        """Say of what our layers and functions wrote whether they restored its format, or let other code read it."""
        for each in activations:
            key = each.untyped_storage()._cdata if each.layout == torch.strided else None
            if key not in self.held:
                continue
            site = site or self.calls.locate(operator.name)
            is_restored = any(is_channels_last(format_of(result)) for result in results)
            if site.function != OURS and not self.calls.is_in_our_node():
                self.writer.add(self.held.pop(key).loss)
            elif is_restored:
                self.writer.add(self.held.pop(key).loss, "restored")

    def settle_output(self, output: Any) -> None:
        """Note what a module returns: its format is not restored any more."""
        for _, tensor in tensors_in(output) if self.held else ():
            held = self.held.pop(tensor.untyped_storage()._cdata, None) if tensor.layout == torch.strided else None
            if held is not None:
                self.writer.add(held.loss)

    def settle_gone(self, *, is_end: bool = False) -> None:
        """Note what was freed without being returned: its format was restored. At the end, the rest was lost."""
        held, self.held = self.held, {}
        for key, each in held.items():
            if _is_gone(each.storage):
                self.writer.add(each.loss, "restored")
            elif is_end:
                self.writer.add(each.loss)
            else:
                self.held[key] = each

    def _use(self, tensor: Tensor) -> None:
        """Take a tensor for an activation from here on."""
        self.weights.pop(id(tensor), None)
        self.used.add(tensor)

    def _is_weight(self, tensor: Tensor) -> bool:
        if id(tensor) in self.weights:
            return True
        # A parameter of another model.
        return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter) and id(tensor) not in self.used

    def _activations(
        self,
        operator: "_Operator",
        tensors: list[Tensor],
        results: list[Tensor],
        is_backward: bool,
        site: "CallSite | None",
    ) -> list[Tensor]:
        """Return what an operator reads in addition to weights; in backward the gradients among it, if known."""
        weights = self.weights
        activations = [
            each for each in tensors if id(each) not in weights and (type(each) is Tensor or not self._is_weight(each))
        ]
        is_accumulated = is_backward and site is None
        is_of_weights = len(activations) < len(tensors) and not any(each.dim() for each in activations)
        if is_accumulated or is_of_weights:
            for tensor in results:
                self.weights.add(tensor)
            return []
        if is_backward:
            gradients = [each for each in activations if id(each) in self.gradients]
            if gradients or self.calls.is_root():
                for tensor in results:
                    self.gradients.add(tensor)
            activations = gradients or activations
        if operator.writes_in_place:
            if any(map(self._is_weight, results)):  # an optimizer's step
                return []
            if operator.is_overwriting:
                activations = [each for each in activations if not any(each is result for result in results)]
        return activations

    def _findings(
        self,
        operator: "_Operator",
        args: Any,
        activations: list[Tensor],
        formats: list[str | None],
        result: Any,
        is_backward: bool,
    ) -> list[tuple[type[OperatorRow], int]]:
        """Return the kinds of rows that a call belongs to, each with the bytes that it is about."""
        found: list[tuple[type[OperatorRow], int]] = []
        if not CHANNELS_LAST_NAMES.isdisjoint(formats):
            self.has_channels_last |= not is_backward
            lost = _bytes_lost(operator, activations, formats, result, is_backward)
            if lost:
                found.append((FormatLoss, lost))
        elif not (is_backward or self.has_channels_last or AMBIGUOUS in formats):
            gained = sum(each.nbytes for each in _flat((result,)) if is_channels_last(format_of(each)))
            if gained:
                self.has_channels_last = True
                found.append((Gain, gained))
        if operator.input_index is not None:
            operands = args[operator.input_index : operator.input_index + 2]
            formats = [format_of(each) for each in operands]
            if CONTIGUOUS in formats and not CHANNELS_LAST_NAMES.isdisjoint(formats):
                copied = sum(each.nbytes for each, name in zip(operands, formats) if name == CONTIGUOUS)
                found.append((MixedConvolution, copied))
        return found

    def _advice(self, loss: FormatLoss, site: "CallSite", args: Any) -> str | None:
        if loss.path in self.replaceable:
            return PRESERVE
        name = site.function if site.function in BY_FUNCTION else BY_OPERATOR.get(loss.operator)
        if name in ("softmax", "log_softmax"):
            dim = args[2 if loss.operator.endswith("_backward_data") else 1]
            name = name if dim in (1, 1 - len(loss.inputs[0].shape)) else None
        return name and f"torch_nhwc.functional.{name}"


_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # this function and all that it calls
set_code_exec_strategy(_Recorder.__torch_dispatch__.__code__, _SKIP)
_BACKWARD_OF_CONVOLUTION = ("aten::convolution_backward", "aten::convolution_backward_overrideable")


class _Operator:
    """What the schema of an operator says, read once."""

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.overload = overload  # while it lives, no other one has its id
        self.name: str = schema.name
        # A decomposition in Python does not count: it may compute something else.
        self.is_composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
            overload.name(), "CompositeImplicitAutograd"
        )
        # The position of the weight's gradient among the results: it is no activation.
        self.weight_gradient = 1 if self.name in _BACKWARD_OF_CONVOLUTION else None
        # The position of a convolution's input; the weight is the next argument.
        self.input_index = 0 if self.name in OPERATORS else self.weight_gradient
        arguments = [(index, each) for index, each in enumerate(schema.arguments) if "Tensor" in str(each.type)]
        self.positions = [index for index, each in arguments if not each.kwarg_only]
        self.keywords = [each.name for _, each in arguments if each.kwarg_only]
        written = [each.alias_info is not None and each.alias_info.is_write for each in schema.returns]
        self.writes_in_place = any(written)
        # Whether it does not read what it writes in place.
        self.is_overwriting = self.name == "aten::copy_" or any(each.is_out for _, each in arguments)
        bare = self.name.partition("::")[2]
        reads_no_values = bare.startswith("new_") or bare.endswith("_like")
        # The positions of results that are no views, as far as the schema says.
        self.written = [
            index
            for index, each in enumerate(() if reads_no_values else schema.returns)
            if written[index] or (each.alias_info is None and index != self.weight_gradient)
        ]
        self.returns_many = len(schema.returns) > 1

    def tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors among the arguments."""
        count = len(args)
        found = _flat([args[index] for index in self.positions if index < count])
        return found + _flat([kwargs.get(name) for name in self.keywords]) if self.keywords else found

    def results_written(self, result: Any) -> list[Tensor]:
        """Return the results that are no views of what existed before, as far as the schema says."""
        return _flat([result[index] for index in self.written] if self.returns_many else [result] * len(self.written))


_OPERATORS: dict[int, _Operator] = {}  # by id, because hashing an operator calls Python
_is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]


def _bytes_lost(
    operator: _Operator, read: list[Tensor], formats: list[str | None], result: Any, is_backward: bool
) -> int:
    """Return how many bytes an operator wrote in another format than that of a channels-last input of the rank."""
    bytes_lost = 0
    for each in operator.results_written(result):
        name = format_of(each)
        if name is None or name == AMBIGUOUS or is_channels_last(name):
            continue
        # Where gradients of two formats meet, one had lost the format before: a pool over whole planes returns a
        # contiguous one.
        if is_backward and any(name == own for other, own in zip(read, formats) if other is not each):
            continue
        has_read = any(is_channels_last_like(own, each) for own in formats)
        # Some schemas do not say that a result is a view.
        if has_read and (operator.writes_in_place or not any(_is_alias_of(each, other) for other in read)):
            bytes_lost += each.nbytes
    return bytes_lost


class _Copy(NamedTuple):
    """A contiguous copy of a channels-last activation, which a contiguous model would not make."""

    loss: FormatLoss
    copy: StorageWeakRef
    """Weak, and keeps the address of the storage from being used again."""
    activation: StorageWeakRef


class _Held(NamedTuple):
    """What an operator inside of our layers and functions wrote in another format."""

    loss: FormatLoss
    storage: StorageWeakRef


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call, unused-ignore]


def _size_if_contiguous(tensor: Tensor) -> int:
    return tensor.nbytes if format_of(tensor) in (CONTIGUOUS, OTHER) else -1


class _TensorSet(dict[int, "ref[Tensor]"]):
    """Tensors by their id, as long as they live."""

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        self[key] = ref(tensor, lambda _: self.pop(key, None))


def _flat(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, and in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None and isinstance(value, (list, tuple)):
            found += _flat(value)
    return found


class CallSite(NamedTuple):
    """Where an operator was called."""

    path: str
    """The path of the innermost module; empty outside of all modules."""
    source: str | None
    """The file and line of the innermost code that is neither PyTorch's nor this package's, or `INPUT_HOOK`."""
    function: str | None
    """The function of `torch.nn.functional` that called the operator; `OURS` for a function of this package."""
    operator: str
    """Its name, which resembles the name of autograd's node."""


_UNKNOWN = CallSite("", None, None, "")


class _Calls(ModuleStack):
    """The modules that run, what each read and wrote the first time, and where each operator was called."""

    def __init__(self, model: nn.Module, recorder: "_Recorder") -> None:
        super().__init__(model)
        self.recorder = recorder
        self._traced: dict[int, TracedModule | None] = {}
        self._recorded: dict[int, _Recorded] = {threading.get_ident(): _Recorded()}
        # By module, the backward in which it was called, as by a checkpoint; -1 outside of all.
        self._backward_of: dict[int, int] = {}
        self._root = -1, -1
        self._node: tuple[int, int, CallSite | None] = -1, -1, None

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.running:
            self.recorder.begin_forward(args)
        super()._enter(module, args)
        self._backward_of[id(module)] = _current_graph_task_id()
        self._traced.setdefault(id(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave(module, args, output)
        self.recorder.settle_output(output)
        path = self.paths.get(id(module))
        # After an exception there is no output.
        if self._traced.get(id(module)) is None and path is not None and output is not None:
            layouts = [layouts_of(tensor for _, tensor in tensors_in(each)) for each in (args, output)]
            self._traced[id(module)] = TracedModule(path, type(module).__name__, *layouts)
            self.recorder.writer.trace.modules = tuple(each for each in self._traced.values() if each is not None)

    def of_call(self, operator: str) -> tuple[bool, CallSite | None]:
        """Return whether the operator that runs computes a gradient, and where the forward called it.

        The site is `None` in the forward if autograd does not record the call, and where a leaf's gradient is
        accumulated.
        """
        task, number = _current_graph_task_id(), _get_sequence_nr() - 1
        recorded = self._recorded.get(threading.get_ident())
        if recorded is None:  # a thread of autograd, which runs the backward of a GPU
            recorded = self._recorded[threading.get_ident()] = _Recorded()
        is_new = number > recorded.numbers[-1]
        if task != -1 and not self._is_computed_again(task):
            site = self._of_node(task)
            if is_new and site is not None and torch.is_grad_enabled():  # for a second-order gradient
                recorded.add(number, site)
            return True, site
        if not is_new:
            return False, None
        site = self.locate(operator)
        recorded.add(number, site)
        return False, site

    def locate(self, operator: str) -> CallSite:
        """Return where the operator that runs is called."""
        frame: FrameType | None = sys._getframe(1)
        source = function = None
        while frame is not None:
            kind = _kind_of(frame.f_code.co_filename)
            if kind == "caller":
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                break
            if kind == "hook":
                source = INPUT_HOOK
                break
            if kind == "end":
                break
            if kind == "function":
                function = frame.f_code.co_name
            elif kind == "ours":
                function = OURS
            frame = frame.f_back
        return CallSite(self.path, source, function, operator)

    def is_root(self) -> bool:
        """Return whether the node that runs is the first one of its backward."""
        return self._node[:2] == self._root

    def is_in_our_node(self) -> bool:
        """Return whether a gradient is computed by this package's library."""
        node: Any = _current_autograd_node()
        return node is not None and node.name().startswith(_OUR_NODES)

    def _is_computed_again(self, task: int) -> bool:
        running = self.running
        return bool(running) and self._backward_of[id(running[-1].module)] == task

    def _of_node(self, task: int) -> CallSite | None:
        node: Any = _current_autograd_node()
        if node is None:
            return _UNKNOWN
        number = node._sequence_nr()
        if self._root[0] != task:
            self._root = task, number
        if self._node[:2] != (task, number):
            self._node = task, number, self._find(number, node.name())
        return self._node[2]

    def _find(self, number: int, name: str) -> CallSite | None:
        if name == "torch::autograd::AccumulateGrad":
            return None
        # Threads number their nodes independently: the name decides between them.
        sites = [recorded.find(number) for recorded in self._recorded.values()]
        return next((site for site in sites if site.operator and _is_node_of(name, site.operator)), sites[0])


_MOST = 1 << 17


class _Recorded:
    """The call sites of one thread, by autograd's sequence number, which increases within a thread.

    A node without a site of its own, such as that of a write into a view, belongs to the operator before it.
    """

    def __init__(self) -> None:
        # The nodes that exist already were not seen.
        self.numbers = [_get_sequence_nr() - 1]
        self.sites = [_UNKNOWN]

    def add(self, number: int, site: CallSite) -> None:
        """Record the site of a node; the oldest sites are forgotten."""
        if len(self.numbers) == 2 * _MOST:
            del self.numbers[:_MOST], self.sites[:_MOST]
        self.numbers.append(number)
        self.sites.append(site)

    def find(self, number: int) -> CallSite:
        """Return the site of a node."""
        index = bisect_right(self.numbers, number) - 1
        return self.sites[index] if index >= 0 else _UNKNOWN


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OUR_FUNCTIONS = f"{_PACKAGE}functional"
# The files whose frames are skipped to find the code that calls.
_SKIPPED = (_PACKAGE, f"{Path(torch.__file__).parent}{os.sep}", "<eval_with_key>", "<frozen")
# What is further out than the last three has called backward, or is this package and called the model itself.
_KINDS = {
    torch.nn.functional.__file__: "function",
    hooks.__file__: "hook",
    torch.autograd.graph.__file__: "end",
    calls.__file__: "end",
}
_OUR_NODES = "ChannelsLast", "Nhwc"
_OUR_PROGRAM = f"{_PACKAGE}cli{os.sep}"


@cache
def _kind_of(file: str) -> str:
    if not file.startswith(_SKIPPED):
        return "caller"
    if file.startswith(_OUR_PROGRAM):
        return "end"
    return "ours" if file.startswith(_OUR_FUNCTIONS) else _KINDS.get(file, "")


def _is_node_of(name: str, operator: str) -> bool:
    return name.lower().startswith(operator.partition("::")[2].strip("_").replace("_", ""))
