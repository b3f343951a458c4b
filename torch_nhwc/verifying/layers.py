"""Comparing one layer with the reference's, on the reference's input, changed inputs and both formats."""

import copy
import math
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.verifying.alone import CHANNELS_LAST, CONTIGUOUS, IMAGE_FORMATS, Formats, Results, run_layer
from torch_nhwc.verifying.differences import (
    FLOORS,
    at,
    can_have_gradient,
    channel_dim,
    distances,
    magnitudes,
    noise_floor,
    rtol_for,
    worst_channel,
)
from torch_nhwc.verifying.inputs import AS_GIVEN, LARGE_MEAN, ROUNDINGS, Inputs, is_image, variants
from torch_nhwc.verifying.verification import Verdict, VerificationRow

_AFFORDABLE = 2**26  # elements, times a convolution's taps, which a float64 convolution on a CPU spreads out in memory


class Options(NamedTuple):
    """What the caller of `verify` asks for."""

    backward: bool
    rtol: float | None
    atol: float


def compare_layer(
    path: str, before: nn.Module, after: nn.Module, inputs: Inputs, options: Options
) -> Iterator[VerificationRow]:
    """A row for everything that a layer computes, for every change of the inputs and format."""
    kind = type(before).__name__
    for label, changed in variants(inputs):
        reference = Reference.of(before, changed, options, label == LARGE_MEAN)
        if reference is None:
            if label == AS_GIVEN:
                note = "the reference raises when it is called once more, by itself"
                yield uncompared(Place(path, kind, "output", label), Verdict.UNREPEATABLE, note)
                return
            continue
        has_images = any(is_image(tensor) for _, tensor in inputs.named())
        # As given in all formats; what kernels make of special inputs shows in channels-last.
        for formats in (IMAGE_FORMATS if label == AS_GIVEN else [CHANNELS_LAST]) if has_images else [CONTIGUOUS]:
            where, own = f"{label}{formats}", cache(partial(reference.on, formats))
            try:
                results, _ = run_layer(after, changed, formats, reference.backward)
            except Exception as error:
                yield raised(path, kind, where, error)._replace(before_differs=own() is None)
                continue
            for what in dict.fromkeys((*reference.results, *results)):
                if what in reference.left_out:
                    continue
                place = Place(path, kind, what, where)
                yield reference.judge(place, what, results.get(what), own, always_repeats=label == AS_GIVEN)


def raised(path: str, kind: str, where: str, error: Exception) -> VerificationRow:
    """The row of a layer, or of code between layers, that raises where the reference does not."""
    text = " ".join(str(error).split())
    note = f"{type(error).__name__}: {text[:200]}"
    return VerificationRow(path, kind, "forward", torch.inf, None, 0.0, 0.0, where, Verdict.DIFFERS, note=note)


class Place(NamedTuple):
    """What a row is about."""

    path: str
    layer: str
    what: str
    inputs: str


def uncompared(place: Place, verdict: Verdict, note: str) -> VerificationRow:
    """The row of what could not be compared."""
    path, kind, what, where = place
    return VerificationRow(path, kind, what, 0.0, None, 0.0, 0.0, where, verdict, note=note)


class Noise:
    """Results of a reference, and how far they are to be trusted; what costs another run is found when it is asked."""

    def __init__(self, results: Results, weights: Container[Any], rtol: float, atol: float) -> None:
        self.results, self.weights, self.rtol, self.atol = results, weights, rtol, atol

    def again(self) -> Results:
        """The results of another run; the same where they are no results of one."""
        return self.results

    def after_rounding(self) -> list[tuple[Results, Results]]:
        """Results on inputs that are changed by a rounding, and what these are to be held against."""
        return []

    @property
    def truth(self) -> Results:
        """The results in float64, as far as they can be had."""
        return {}

    @cached_property
    def _repeated(self) -> Results:
        return self.again()

    @cached_property
    def _rounded(self) -> list[tuple[Results, Results]]:
        return self.after_rounding()

    def judge(
        self,
        place: Place,
        key: Any,
        result: Tensor | None,
        own: Callable[[], Results | None] | None = None,
        always_repeats: bool = False,
    ) -> VerificationRow:
        """The row of a result.

        Args:
            place: what the row is about.
            key: of the reference's result that it is to be compared with.
            result: that of the layer, if there is one.
            own: gives what the reference makes of the formats that the layer had; `None` where it raises then.
            always_repeats: whether the reference runs again in any case.
        """
        reference = self.results.get(key)
        dim = channel_dim(reference, is_weight=key in self.weights)
        size, apart = magnitudes(reference, dim), partial(distances, dim=dim)
        is_real = reference is None or can_have_gradient(reference)
        error, allowed = apart(result, reference), (self.atol + self.rtol * size) * is_real
        floor, verdict, before_differs = None, Verdict.EQUAL, False
        is_beyond = bool((error > allowed).any())
        own_noise = apart(self._repeated.get(key), reference) if always_repeats or is_beyond else torch.zeros(1)
        if (own_noise > allowed).any():
            floor, verdict = own_noise, Verdict.UNREPEATABLE
        elif is_beyond:
            target = self.truth.get(key, reference)
            error = apart(result, target)
            pairs = [(self._repeated, self.results), *self._rounded]
            others = [apart(each.get(key), right.get(key)) for each, right in pairs]
            floor = noise_floor([apart(reference, target), *others], size)
            allowed = allowed + FLOORS * floor * is_real
            verdict = Verdict.DIFFERS if (error > allowed).any() else Verdict.EQUAL
        channel = worst_channel(own_noise if verdict is Verdict.UNREPEATABLE else error, allowed)
        if verdict is Verdict.DIFFERS and own is not None:
            theirs = own()
            before_differs = theirs is None or bool((apart(theirs.get(key), target) > allowed)[channel])
        path, kind, what, where = place
        noise = None if floor is None else at(floor, channel)
        numbers = at(error, channel), noise, at(allowed, channel), at(size, channel)
        return VerificationRow(path, kind, what, *numbers, where, verdict, before_differs)


class Reference(Noise):
    """What the reference's layer gives on one input, contiguous."""

    def __init__(
        self, layer: nn.Module, inputs: Inputs, backward: bool, options: Options, has_large_mean: bool
    ) -> None:
        results, self.is_random = run_layer(layer, inputs, CONTIGUOUS, backward)
        tensors = chain((each for _, each in inputs.named()), results.values(), layer.parameters(), layer.buffers())
        rtol = rtol_for(tensors, has_large_mean) if options.rtol is None else options.rtol
        # In 16 bit a mean of a thousand deviations is rounded by several, and a variance around it off by their square.
        self.is_coarse = any(each.element_size() < 4 for each in results.values() if can_have_gradient(each))
        self.left_out = {name for name, _ in layer.named_buffers()} if has_large_mean and self.is_coarse else set()
        weights = {f"gradient of {name}" for name, _ in layer.named_parameters()}
        super().__init__(results, weights, rtol, options.atol)
        self.layer, self.inputs, self.backward = layer, inputs, backward

    @classmethod
    def of(cls, layer: nn.Module, inputs: Inputs, options: Options, has_large_mean: bool) -> "Reference | None":
        """With gradients where there are any; `None` where the layer does not take such inputs."""
        for backward in (True, False) if options.backward else (False,):
            try:
                return cls(layer, inputs, backward, options, has_large_mean)
            except Exception:
                continue
        return None

    def again(self) -> Results:
        """The results of another run."""
        return run_layer(self.layer, self.inputs, CONTIGUOUS, self.backward)[0]

    def after_rounding(self) -> list[tuple[Results, Results]]:
        """Those on what is changed by a rounding. In 16 bit that is much: inputs alone, and beside their own truth."""
        run = partial(run_layer, self.layer, formats=CONTIGUOUS, backward=self.backward)
        if not self.is_coarse:
            return [(run(inputs=self.inputs, change=change)[0], self.results) for change in ROUNDINGS]
        changed = [self.inputs.mapped(change) for change in ROUNDINGS]
        return [(run(inputs=each)[0], truth) for each in changed if (truth := self._in_double(each))]

    @cached_property
    def truth(self) -> Results:
        """The results in float64; nothing where that is not affordable, or not possible."""
        return self._in_double(self.inputs)

    def _in_double(self, inputs: Inputs) -> Results:
        tensors = [tensor for _, tensor in inputs.named() if tensor.is_floating_point()]
        weights = list(self.layer.parameters())
        taps = max((math.prod(weight.shape[2:]) for weight in weights), default=1)
        elements = sum(tensor.numel() for tensor in tensors) * taps + sum(weight.numel() for weight in weights)
        if self.is_random or elements > _AFFORDABLE:
            return {}
        try:
            with ExitStack() as stack:
                for device in {tensor.device.type for tensor in (*tensors, *weights)}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                exact = copy.deepcopy(self.layer).double()
                cast = inputs.mapped(lambda _, each: each.double() if each.is_floating_point() else each)
                return run_layer(exact, cast, CONTIGUOUS, self.backward)[0]
        except Exception:
            return {}

    def on(self, formats: Formats) -> Results | None:
        """What the layer itself gives where its input, or a gradient, comes in channels-last; `None` if it raises."""
        try:
            return run_layer(self.layer, self.inputs, formats, self.backward)[0]
        except Exception:
            return None
