"""`verify`: compare what two models compute, layer by layer and as a whole."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache, cached_property, partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.running.calls import arguments_of, copy_inputs, copy_model
from torch_nhwc.running.comparison import distances, largest, magnitudes, rms, tolerance_of
from torch_nhwc.running.module_stack import ModuleStack
from torch_nhwc.verifying.repeatable_run import (
    BOTH_CHANNELS_LAST,
    BOTH_CONTIGUOUS,
    LAYER_FORMATS,
    Change,
    Formats,
    Inputs,
    Results,
    can_have_gradient,
    is_image,
    repeatable,
    run_module,
)
from torch_nhwc.verifying.verification import Verdict, Verification, VerificationRow


class _Options(NamedTuple):
    """The arguments of `verify` about the comparison."""

    backward: bool
    rtol: float | None
    atol: float


def verify(
    before: nn.Module,
    after_or_report: Any,
    example_inputs: Any,
    *,
    backward: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Compare a model with its reference: each layer by itself, on the inputs of the reference's layer, and the whole.

    Layers run in both formats, on the inputs as they are and on changed ones: with a large mean, with a constant
    channel, and as batches of 1 and 2. Outputs, gradients of inputs and parameters, and buffers are compared by
    position, in each layer and in the whole model. Where a difference is larger than rounding errors usually are, a
    noise floor decides: how far the reference is from its own float64 run, from another run, and from one on inputs
    that change by a rounding error. Where the reference is plainly wrong by its float64 run, that run is the judge.

    Both models run several times, in the caller's autocast region if there is one. Buffers, random generators,
    gradients and the example inputs stay as they are. It takes as long as fifty to a hundred training steps, and the
    memory of a few: small inputs are enough.

    Args:
        before: The reference, such as a deep copy made before a conversion.
        after_or_report: The model to verify, or the report of its conversion.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        backward: Whether to compare gradients.
        rtol: How large a difference may be in units of the largest value in the same channel. `None` depends on the
            dtype: 1e-10 in float64, 1e-4 in float32, 4e-3 in float16, 2e-2 in bfloat16; see
            `torch_nhwc.running.comparison.TOLERANCES`, also for the whole model, whose gradients are compared in
            float32 and float64 only.
        atol: What is added to that.

    Returns:
        A row for everything that was compared; true where nothing differs.

    Raises:
        TypeError: One of the models is not a module.
        ValueError: Both are the same model, have different modules or parameters, are in different modes, have lazy
            layers or are on the meta device, or the model of the report no longer exists.
        Exception: Whatever the reference raises on the example inputs.

    Example:
        >>> import copy
        >>> before = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
        >>> model = copy.deepcopy(before)
        >>> report = torch_nhwc.convert_(model, preserve=False)
        >>> verification = torch_nhwc.verify(before, report, torch.randn(2, 3, 8, 8))
        >>> verification.first.layer, verification.first.inputs
        ('GroupNorm', 'a large mean, channels-last')
    """
    start = time.perf_counter()
    is_module = isinstance(after_or_report, nn.Module) or not hasattr(after_or_report, "model")
    after = after_or_report if is_module else after_or_report.model
    _expect_comparable(before, after)
    inputs = Inputs(*arguments_of(before, copy_inputs(example_inputs)))
    options = _Options(backward, rtol, atol or 0.0)
    with repeatable(before, after):
        calls = _layer_calls(before, inputs)
        layers = {path for path, _ in calls}
        rows = _parameter_rows(before, after)
        theirs = _modules(after)
        for path, given in calls:
            rows += _compare_module(path, before.get_submodule(path), theirs[path], given, options)
        rows += _compare_module("", before, after, inputs, options, is_model=True)
    not_run = tuple(
        path for path, module in _modules(before).items() if module._parameters and layers.isdisjoint(_and_above(path))
    )
    return Verification(_in_order(rows, calls), not_run, time.perf_counter() - start)


def _expect_comparable(before: Any, after: Any) -> None:
    """Raise where two models cannot be compared."""
    if after is None:
        raise ValueError("verify: the model of the report no longer exists: keep it, or give the model itself")
    for model in (before, after):
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: expected two modules, or a module and a report, got {type(model).__name__}")
    if before is after:
        raise ValueError("verify: before and after are the same model: give a deep copy made before the conversion")
    ours, theirs = _description(before), _description(after)
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            both = f"{ours.get(name, 'absent')} in one, {theirs.get(name, 'absent')} in the other"
            raise ValueError(f"verify: the models do not have the same {name}: {both}")


def _description(model: nn.Module) -> dict[str, str]:
    """Return what two models that can be compared have in common."""
    described = {}
    for path, module in _modules(model).items():
        described[f"module {path!r}"] = "training" if getattr(module, "training", False) else "evaluation"
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(f"verify: {name!r} has no values yet: run the model once, or load its weights")
        described[f"parameter {name!r}"] = f"{tuple(parameter.shape)}, requires_grad={parameter.requires_grad}"
    return described


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by path; those that compute a parametrized weight count as part of their layer."""
    return {path: module for path, module in model.named_modules() if "parametrizations" not in path.split(".")}


def _and_above(path: str) -> list[str]:
    """Return a path and those of the modules around it."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names), -1, -1)]


def _layer_calls(model: nn.Module, inputs: Inputs) -> list[tuple[str, Inputs]]:
    """Run the model and return the calls of its layers, the modules that call no other module, with their inputs."""
    calls: list[tuple[str, Inputs]] = []
    containers: set[str] = set()

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        containers.update(outer.path for outer in stack.running[:-1])
        calls.append((stack.path, Inputs(args, kwargs).mapped(Tensor.clone)))  # before the module writes to them

    stack = ModuleStack(model)
    # A TorchScript module refuses hooks, but calls those that it has.
    handles = [
        nn.Module.register_forward_pre_hook(module, note, with_kwargs=True) for module in _modules(model).values()
    ]
    try:
        with repeatable(model), stack:
            given = inputs.mapped(Tensor.clone)
            model(*given.args, **given.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return [(path, given) for path, given in calls if path not in containers]


def _parameter_rows(before: nn.Module, after: nn.Module) -> list[VerificationRow]:
    """Return the rows of the parameters, which have to be equal bit for bit unless their dtype changes."""
    modules, theirs = _modules(before), dict(after.named_parameters())
    rows = []
    for name, parameter in before.named_parameters():
        path, other = next(each for each in _and_above(name) if each in modules), theirs[name]
        rtol = 0.0 if parameter.dtype == other.dtype else tolerance_of((parameter.dtype, other.dtype)).layer
        error, size = distances(other, parameter).item(), magnitudes(parameter).item()
        row = VerificationRow(path, type(modules[path]).__name__, name.removeprefix(f"{path}."), error)
        verdict = Verdict.DIFFERS if error > rtol * size else Verdict.EQUAL
        rows.append(row._replace(tolerance=rtol * size, largest=size, verdict=verdict))
    return rows


_AS_GIVEN, _LARGE_MEAN = "as given", "a large mean"


def _compare_module(
    path: str, before: nn.Module, after: nn.Module, inputs: Inputs, options: _Options, is_model: bool = False
) -> Iterator[VerificationRow]:
    """Iterate over rows for everything that a module computes, for each change of the inputs and in each format.

    Args:
        path: The module's path in the model.
        before: The reference's module.
        after: The module to be compared.
        inputs: What the reference's module gets.
        options: The arguments of `verify`.
        is_model: Whether it is the whole model, with the tolerance of one, and with inputs that only change in batch:
            the first layers would hide other changes.
    """
    named = partial(VerificationRow, path, type(before).__name__)
    has_images = any(is_image(tensor) for _, tensor in inputs.named())
    for label, changed in _variants(inputs, is_model):
        reference = _Reference.of(before, changed, options, is_model, label == _LARGE_MEAN)
        if reference is None:
            if label == _AS_GIVEN:
                note = "the reference raises when it is called again, by itself"
                yield named("output", inputs=label, verdict=Verdict.UNREPEATABLE, note=note)
                return
            continue
        if not any(name.startswith("output") for name in reference.results):
            note = "no tensor is found in what it returns"
            yield named("output", inputs=label, verdict=Verdict.NOT_COMPARED, note=note)
        formats: tuple[Formats, ...] = (BOTH_CHANNELS_LAST,) if has_images else (BOTH_CONTIGUOUS,)
        if has_images and label == _AS_GIVEN:
            formats = (BOTH_CONTIGUOUS, BOTH_CHANNELS_LAST) if is_model else LAYER_FORMATS
        for each in formats:
            where, own = f"{label}{each}", cache(partial(reference.in_formats, each))
            try:
                results, _ = run_module(after, changed, each, reference.backward)
            except Exception as error:
                note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                differs = named("forward", torch.inf, inputs=where, verdict=Verdict.DIFFERS, note=note)
                yield differs._replace(before_differs=own() is None)
                continue
            for what in dict.fromkeys((*reference.results, *results)):
                if what not in reference.left_out:
                    row = named(what, inputs=where)
                    yield reference.judge(row, results.get(what), own, always_repeats=label == _AS_GIVEN)


def _variants(inputs: Inputs, is_model: bool) -> Iterator[tuple[str, Inputs]]:
    """Iterate over the inputs as they are, and changed so that they show what ordinary inputs hide.

    A large mean shows a variance that is computed as a difference of squares, a constant channel shows a division by
    a deviation, and batches of 1 and 2 show code for special cases.
    """
    yield _AS_GIVEN, inputs
    images = [tensor for _, tensor in inputs.named() if is_image(tensor) and tensor.is_floating_point()]
    if not images or not all(tensor.numel() for tensor in images):
        return
    if not is_model:
        yield _LARGE_MEAN, inputs.mapped(_with_large_mean)
        yield "a constant channel", inputs.mapped(_with_constant_channel)
    batch = images[0].size(0)
    for size in (1, 2):
        if batch != size:
            yield f"a batch of {size}", inputs.mapped(partial(_of_batch, batch, size))


def _with_large_mean(tensor: Tensor) -> Tensor:
    """Return an image with a mean of a thousand deviations, or as many as leave a twentieth of one after rounding."""
    if not (is_image(tensor) and tensor.is_floating_point()):
        return tensor
    deviation = tensor.float().std(correction=0).nan_to_num(1.0, 1.0, 1.0)
    count = min(1000.0, 0.05 / torch.finfo(tensor.dtype).eps)
    return tensor + (count * (deviation + (deviation == 0))).to(tensor.dtype)


def _with_constant_channel(tensor: Tensor) -> Tensor:
    if not (is_image(tensor) and tensor.is_floating_point()):
        return tensor
    changed = tensor.clone()
    changed[:, 0] = 1
    return changed


def _of_batch(batch: int, size: int, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.size(0) != batch:
        return tensor
    return tensor[:size] if batch > size else torch.cat([tensor, tensor.roll(1, -1)])


_AFFORDABLE = 2**26  # elements, times a convolution's taps, which a float64 convolution on a CPU spreads out in memory
# The noise floor is a maximum of a few errors only, and the largest possible one is larger.
_FLOORS = 4


class _Reference:
    """What a module of the reference computes on contiguous inputs, and how exact that is."""

    def __init__(
        self, module: nn.Module, inputs: Inputs, options: _Options, backward: bool, is_model: bool, has_large_mean: bool
    ) -> None:
        self.module, self.inputs, self.backward, self.atol = module, inputs, backward, options.atol
        self.results, self.is_random = run_module(module, inputs, BOTH_CONTIGUOUS, backward)
        tensors = chain((each for _, each in inputs.named()), self.results.values(), module.parameters())
        tolerance = tolerance_of(_dtypes(chain(tensors, module.buffers())))
        by_kind = tolerance.model if is_model else tolerance.large_mean if has_large_mean else tolerance.layer
        self.rtol = by_kind if options.rtol is None else options.rtol
        self.gradient_rtol = max(self.rtol, tolerance.model_gradients) if is_model else self.rtol
        self.is_coarse = any(each.element_size() < 4 for each in self.results.values() if can_have_gradient(each))
        self.left_out: set[str] = set()
        if is_model or (has_large_mean and self.is_coarse):  # in 16 bits the variance around a large mean is rounding
            self.left_out |= {name for name, _ in module.named_buffers()}
        if math.isinf(self.gradient_rtol):
            self.left_out |= {name for name in self.results if _is_gradient(name)}
        self.is_model = is_model
        self.weights = {f"gradient of {name}" for name, _ in module.named_parameters()}

    @classmethod
    def of(
        cls, module: nn.Module, inputs: Inputs, options: _Options, is_model: bool, has_large_mean: bool
    ) -> "_Reference | None":
        """Run with gradients where that works; return `None` where the module does not take such inputs."""
        for backward in (True, False) if options.backward else (False,):
            try:
                return cls(module, inputs, options, backward, is_model, has_large_mean)
            except Exception:
                continue
        return None

    def judge(
        self, row: VerificationRow, result: Tensor | None, own: Callable[[], Results | None], always_repeats: bool
    ) -> VerificationRow:
        """Return the row of a result, completed by its comparison with the reference's.

        Args:
            row: The row, without numbers.
            result: The module's result; `None` where it has none of this name.
            own: Returns the reference's results in the same formats; `None` where it raises.
            always_repeats: Whether the reference runs again even where the result is within the tolerance.
        """
        target = reference = self.results.get(row.what)
        is_by_channel = reference is not None and is_image(reference)
        reduce: Callable[[Tensor], Tensor] = partial(
            largest, dim=int(row.what not in self.weights) if is_by_channel else None
        )
        if self.is_model and _is_gradient(row.what):
            reduce = rms
        rtol = self.gradient_rtol if _is_gradient(row.what) else self.rtol
        apart, truth = partial(distances, reduce=reduce), self._truth.get(row.what)
        reference_error = None if truth is None else apart(reference, truth)
        is_wrong = reference_error is not None and bool((reference_error > self._plausible(row.what)).any())
        size = magnitudes(truth if is_wrong else reference, reduce)
        is_real = reference is None or can_have_gradient(reference)
        error, allowed = apart(result, truth if is_wrong else reference), (self.atol + rtol * size) * is_real
        floor, verdict, before_differs = None, Verdict.EQUAL, False
        is_beyond = bool((error > allowed).any())
        repeats = not is_wrong and (always_repeats or is_beyond)
        noise = apart(self._again.get(row.what), reference) if repeats else torch.zeros(1)
        if is_wrong:  # its noise is that of memory that nobody wrote
            target, verdict = truth, Verdict.DIFFERS if is_beyond else Verdict.EQUAL
        elif (noise > allowed).any():
            error, floor, verdict = noise, noise, Verdict.UNREPEATABLE
        elif is_beyond:
            target = reference if truth is None else truth
            error = apart(result, target)
            others = [apart(each.get(row.what), right.get(row.what)) for each, right in self._rounded]
            floor = _noise_floor([noise, apart(reference, target), *others], size)
            allowed = allowed + _FLOORS * floor * is_real
            verdict = Verdict.DIFFERS if (error > allowed).any() else Verdict.EQUAL
        channel = int((error / allowed).nan_to_num_(0, torch.inf).argmax())
        if verdict is Verdict.DIFFERS:
            theirs = own()
            before_differs = theirs is None or bool((apart(theirs.get(row.what), target) > allowed)[channel])
        return row._replace(
            error=_at(error, channel),
            floor=None if floor is None else _at(floor, channel),
            tolerance=_at(allowed, channel),
            largest=_at(size, channel),
            verdict=verdict,
            before_differs=before_differs,
            reference_error=None if reference_error is None else reference_error.max().item(),
            is_reference_wrong=is_wrong,
        )

    def _plausible(self, what: str) -> float:
        """Return how far a result of the reference may be from its float64 run without being plainly wrong.

        That is as far as the largest value of anything of its kind: rounding errors of a result that cancels out may
        be larger than the result, and not as large as what it was computed from.
        """
        alike = [each for name, each in self._truth.items() if _is_gradient(name) == _is_gradient(what)]
        return max((magnitudes(each).max().item() for each in alike), default=torch.inf)

    def in_formats(self, formats: Formats) -> Results | None:
        """Return the reference's results on inputs, or gradients, in channels-last; `None` where it raises."""
        try:
            return run_module(self.module, self.inputs, formats, self.backward)[0]
        except Exception:
            return None

    @cached_property
    def _again(self) -> Results:
        return run_module(self.module, self.inputs, BOTH_CONTIGUOUS, self.backward)[0]

    @cached_property
    def _truth(self) -> Results:
        return self._in_double(self.inputs)

    @cached_property
    def _rounded(self) -> list[tuple[Results, Results]]:
        """Results on inputs that change by a rounding error, with what they are compared with."""
        if not self.is_coarse:
            run = partial(run_module, self.module, self.inputs, BOTH_CONTIGUOUS, self.backward)
            return [(run(change=_rounding(seed))[0], self.results) for seed in (0, 1)]
        # In 16 bits a rounding error is large: the results on changed inputs have a float64 run of their own.
        changed = [self.inputs.mapped(_rounding(seed)) for seed in (0, 1)]
        run = partial(run_module, self.module, formats=BOTH_CONTIGUOUS, backward=self.backward)
        return [(run(inputs=each)[0], truth) for each in changed if (truth := self._in_double(each))]

    def _in_double(self, inputs: Inputs) -> Results:
        """Return the results in float64; none where that is too expensive or impossible."""
        tensors = [tensor for _, tensor in inputs.named() if tensor.is_floating_point()]
        weights = list(self.module.parameters())
        taps = max((math.prod(weight.shape[2:]) for weight in weights), default=1)
        elements = sum(tensor.numel() for tensor in tensors) * taps + sum(weight.numel() for weight in weights)
        if self.is_random or elements > _AFFORDABLE:
            return {}
        try:
            with ExitStack() as stack:
                for device in {tensor.device.type for tensor in (*tensors, *weights)}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                exact = copy_model(self.module).double()
                cast = inputs.mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
                return run_module(exact, cast, BOTH_CONTIGUOUS, self.backward)[0]
        except Exception:
            return {}


def _rounding(seed: int) -> Change:
    """Return a function that changes each element by a few units in its last place."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)

    return change


def _noise_floor(errors: Iterable[Tensor], size: Tensor) -> Tensor:
    """Return how far a reference may be wrong in each channel.

    The errors of a channel may be small by chance: the floor is at least the median channel's, as it is and in
    proportion to the channel's magnitude.
    """
    own = reduce(torch.maximum, errors)
    return own.maximum(own.median()).maximum((own / size).nan_to_num_(0, 0).median() * size)


def _at(by_channel: Tensor, channel: int) -> float:
    """Return the value of a channel, or the only value."""
    return by_channel[min(channel, len(by_channel) - 1)].item()


def _is_gradient(what: str) -> bool:
    return what.startswith("gradient of ")


def _dtypes(tensors: Iterable[Tensor]) -> Iterator[torch.dtype]:
    """Iterate over the dtypes that decide the tolerance: those of the tensors, and of autocast."""
    for tensor in tensors:
        yield tensor.dtype
        if torch.is_autocast_enabled(tensor.device.type):
            yield torch.get_autocast_dtype(tensor.device.type)


def _in_order(rows: list[VerificationRow], calls: list[tuple[str, Inputs]]) -> tuple[VerificationRow, ...]:
    """Return the worst row about each thing: layers as they ran, layers that did not run, and the model."""
    worst: dict[tuple[str, str], VerificationRow] = {}
    for row in rows:
        key = row.path, row.what
        worst[key] = max(worst.get(key, row), row, key=_severity)
    order = {path: index for index, path in reversed([*enumerate(path for path, _ in calls)])}
    last = len(calls)
    return tuple(sorted(worst.values(), key=lambda row: order.get(row.path, last if row.path else last + 1)))


def _severity(row: VerificationRow) -> tuple[int, float]:
    share = row.error / row.tolerance if row.tolerance else row.error and float("inf")
    if row.verdict is Verdict.DIFFERS:
        return 2 + (not row.before_differs), share
    return int(row.verdict is not Verdict.EQUAL), share
