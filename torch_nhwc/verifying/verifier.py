"""`verify`: whether a model computes what another one computes, layer by layer."""

import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_nhwc.modules.walk import walk
from torch_nhwc.running.copying import copy_of_inputs
from torch_nhwc.running.inputs import arguments_of
from torch_nhwc.verifying.alone import Results, repeatable
from torch_nhwc.verifying.between import PassageError, Replay, Values, Visit, run_between
from torch_nhwc.verifying.differences import can_have_gradient, rtol_for
from torch_nhwc.verifying.inputs import (
    AS_GIVEN,
    LARGE_MEAN,
    ROUNDINGS,
    Change,
    Inputs,
    as_it_is,
    variants,
    with_large_mean,
)
from torch_nhwc.verifying.layers import Noise, Options, Place, compare_layer, raised, uncompared
from torch_nhwc.verifying.verification import Verdict, Verification, VerificationRow, worst_of

Placed = tuple[float, VerificationRow]
"""A row, and its position in order of execution."""


def verify(
    before: nn.Module,
    after_or_report: Any,
    example_inputs: Any,
    *,
    backward: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Compares a model with its reference layer by layer, each layer on the input that the reference's layer had.

    Every layer runs in both formats, on the inputs as they are and on changed ones: with a large mean, with a constant
    channel, as a batch of 1 and of 2. Outputs, gradients of inputs and parameters, and buffers are compared by
    position. So is what the code between the layers computes, on the reference's values in the formats that the layers
    of the model really make. Where a difference is larger than rounding should be, a noise floor tells whether the
    reference itself is as far from its own float64 run, from another run, or from one on inputs changed by a rounding.

    Both models run several times, in the caller's autocast region if there is one. Buffers, random generators,
    gradients and the example inputs are afterwards what they were. It takes the time of fifty to a hundred
    training steps, and a few times the memory of one: small inputs do.

    Args:
        before: the reference, such as a deep copy that was made before a conversion.
        after_or_report: the model to be verified, or the report of its conversion.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones.
        backward: whether gradients are compared as well.
        rtol: how large a difference may be in units of the largest value in the same channel; `None` goes by the dtype:
             1e-10 in float64, 1e-4 in float32, 4e-3 in float16, 2e-2 in bfloat16.
        atol: what is added to that.

    Returns:
        A row for everything that was compared; true where nothing differs.

    Raises:
        TypeError: a model is none.
        ValueError: both are the same model, are built differently, are in different modes, have lazy layers or are on
            the meta device; the model of the report is gone.
        Exception: whatever the reference raises on the example inputs.

    Example:
        >>> import copy
        >>> before = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
        >>> model = copy.deepcopy(before)
        >>> report = torch_nhwc.convert_(model)
        >>> verification = torch_nhwc.verify(before, report, torch.randn(2, 3, 8, 8))
        >>> verification.first.layer, verification.first.inputs
        ('GroupNorm', 'a large mean, channels-last')
    """
    start = time.perf_counter()
    is_module = isinstance(after_or_report, nn.Module) or not hasattr(after_or_report, "model")
    after = after_or_report if is_module else after_or_report.model
    _expect_alike(before, after)
    inputs = Inputs(*arguments_of(before, copy_of_inputs(example_inputs)))
    run = _Comparison(before, after, Options(backward, rtol, atol or 0.0))
    with repeatable(before, after):
        rows = worst_of(run.rows(inputs))
    return Verification(tuple(rows), run.not_run(), time.perf_counter() - start)


class _Comparison:
    """Two models, while they are compared."""

    def __init__(self, before: nn.Module, after: nn.Module, options: Options) -> None:
        self.before, self.after, self.options = before, after, options
        self.modules = _modules(before)
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.modules_after = _modules(after)
        self.paths_after = {id(module): path for path, module in self.modules_after.items()}
        self.buffers = {name: buffer.detach().clone() for name, buffer in before.named_buffers()}
        self.first_call: dict[str, int] = {}

    def rows(self, inputs: Inputs) -> Iterator[Placed]:
        """All rows, those on one thing several times."""
        layers: list[Placed] = []

        def visit(path: str, layer: nn.Module, given: Inputs, position: int) -> None:
            self.first_call.setdefault(path, position)
            for name, buffer in layer.named_buffers(prefix=path):  # which the layer may have changed by now
                if name in self.buffers and buffer.shape == self.buffers[name].shape:
                    buffer.detach().copy_(self.buffers[name])
            rows = compare_layer(path, layer, self.modules_after[path], given, self.options)
            layers.extend((position, row) for row in rows)

        for label, changed in variants(inputs, of_model=True):
            yield from self._between(label, changed, visit if label == AS_GIVEN else None)
        yield from self._parameters()
        yield from layers

    def not_run(self) -> tuple[str, ...]:
        """The layers with parameters of their own that were not called, nor were modules around them, as a layer."""
        called = set(self.first_call)
        return tuple(
            path
            for path, module in self.modules.items()
            if module._parameters and not module._modules and called.isdisjoint(_and_above(path))
        )

    def _parameters(self) -> Iterator[Placed]:
        """Whether the parameters are equal, bit for bit."""
        for path, module in self.modules.items():
            theirs = dict(self.modules_after[path].named_parameters())
            for name, parameter in module.named_parameters(recurse=isinstance(module, torch.jit.ScriptModule)):
                pair = parameter.detach(), theirs[name].detach()
                rtol = 0.0 if pair[0].dtype == pair[1].dtype else rtol_for(pair)
                place = Place(path, type(module).__name__, name, "")
                row = Noise({name: pair[0]}, weights={name}, rtol=rtol, atol=0.0).judge(place, name, pair[1])
                yield self.first_call.get(path, len(self.modules)) - 0.25, row

    def _between(self, label: str, inputs: Inputs, visit: Visit | None) -> Iterator[Placed]:
        """The rows of the code between the layers, on the layers' outputs as they are and with a large mean."""
        try:
            recorded = run_between(self.before, self.paths, inputs, visit=visit, backward=False)
        except PassageError as error:
            if label == AS_GIVEN:
                raise error.cause from None
            return  # it does not take such a batch
        outputs = recorded.outputs
        shifted = {call: [with_large_mean("", each) for each in tensors] for call, tensors in outputs.items()}
        for path, returned in recorded.without_tensors.items():
            note = f"no tensor is found in what it returns, which is of the class {returned}"
            place = Place(path, type(self.modules[path]).__name__, "output", label)
            yield self.first_call.get(path, len(outputs)), uncompared(place, Verdict.NOT_COMPARED, note)
        yield from self._compare_between(label, inputs, outputs, formats=(False, True))
        yield from self._compare_between(f"{label}, {LARGE_MEAN} between layers", inputs, shifted, formats=(True,))

    def _compare_between(self, label: str, inputs: Inputs, replay: Replay, formats: Iterable[bool]) -> Iterator[Placed]:
        """The rows of the code between the layers where these give what they are told to."""
        reference = _Between.of(self, inputs, replay, has_large_mean=LARGE_MEAN in label)
        if reference is None:
            return
        run = partial(run_between, self.after, self.paths_after, inputs, replay=replay, backward=reference.backward)
        on_channels_last = cache(reference.on_channels_last)
        for channels_last in formats:
            where = f"{label}, channels-last" if channels_last else label
            try:
                found = run(channels_last=channels_last).values
            except PassageError as error:
                row = raised(error.path, type(self.modules[error.path]).__name__, where, error.cause)
                before_differs = channels_last and on_channels_last() is None
                yield error.position, row._replace(before_differs=before_differs)
                continue
            for key, (position, _) in reference.values.items():
                path, what = key
                place = Place(path, type(self.modules[path]).__name__, what, where)
                result = found[key][1] if key in found else None
                own = on_channels_last if channels_last else None
                yield position, reference.judge(place, key, result, own, always_repeats=label == AS_GIVEN)


class _Between(Noise):
    """What the code between the layers of the reference computes."""

    def __init__(self, run: _Comparison, inputs: Inputs, replay: Replay, backward: bool, has_large_mean: bool) -> None:
        self.run, self.inputs, self.replay, self.backward = run, inputs, replay, backward
        self.values = self._run()
        results = _tensors(self.values)
        rtol = rtol_for(results.values(), has_large_mean) if run.options.rtol is None else run.options.rtol
        weights = {
            (path, f"gradient of {name}")
            for path, module in run.modules.items()
            for name, _ in module.named_parameters(recurse=False)
        }
        super().__init__(results, weights, rtol, run.options.atol)

    @classmethod
    def of(cls, run: _Comparison, inputs: Inputs, replay: Replay, has_large_mean: bool) -> "_Between | None":
        """With gradients where there are any; `None` where the code does not take such values."""
        for backward in (True, False) if run.options.backward else (False,):
            try:
                return cls(run, inputs, replay, backward, has_large_mean)
            except PassageError:
                continue
        return None

    def again(self) -> Results:
        """The results of another run."""
        return _tensors(self._run())

    def after_rounding(self) -> list[tuple[Results, Results]]:
        """Those on values, and gradients, that are changed by a rounding; in 16 bit that is too much to tell."""
        if any(tensor.dtype.itemsize < 4 for tensor in self.results.values() if can_have_gradient(tensor)):
            return []
        return [(_tensors(self._run(change=change)), self.results) for change in ROUNDINGS]

    def on_channels_last(self) -> Results | None:
        """The results where the model's images come in channels-last; `None` where it raises then."""
        try:
            return _tensors(self._run(channels_last=True))
        except PassageError:
            return None

    def _run(self, channels_last: bool = False, change: Change = as_it_is) -> Values:
        run = partial(run_between, self.run.before, self.run.paths, self.inputs, replay=self.replay)
        return run(backward=self.backward, channels_last=channels_last, change=change).values


def _tensors(values: Values) -> Results:
    return {key: tensor for key, (_, tensor) in values.items()}


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by their paths; what computes a parametrized weight belongs to its layer."""
    return {path: module for path, module, _ in walk(model) if "parametrizations" not in path.split(".")}


def _and_above(path: str) -> Iterator[str]:
    """A path, and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _expect_alike(before: Any, after: Any) -> None:
    """Raises where two models cannot be compared."""
    if after is None:
        raise ValueError("verify: the model of the report is gone")
    for model in (before, after):
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: expected two modules, or a module and a report, got {type(model).__name__}")
    if before is after:
        raise ValueError(
            "verify: before and after are the same model: give a deep copy that was made before converting"
        )
    ours, theirs = _modules(before), _modules(after)
    for path in (*ours, *theirs):
        if path not in ours or path not in theirs:
            raise ValueError(f"verify: the models are built differently: only one of them has {path!r}")
        if ours[path].training != theirs[path].training:
            raise ValueError(f"verify: {path!r} is in training mode in one model alone")
    named = [dict(model.named_parameters()) for model in (before, after)]
    for name, parameter in (*named[0].items(), *named[1].items()):
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(f"verify: {name!r} has no values yet: run the model once, or load its weights")
    for name in (*named[0], *named[1]):
        first, second = (parameters.get(name) for parameters in named)
        if first is None or second is None or first.shape != second.shape:
            raise ValueError(f"verify: the models are built differently: they disagree on {name!r}")
        if first.requires_grad != second.requires_grad:
            raise ValueError(f"verify: {name!r} requires a gradient in one model alone")
