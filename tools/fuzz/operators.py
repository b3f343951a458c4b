"""The operators on weights of any shape, strides, dtype and storage, compared with plain torch bit by bit."""

import itertools
from random import Random
from typing import Any

import torch
from drawing import expect, has_bits_of, in_order, order_of_dims, strides_of
from reference import FORMATS, bits, canonical_strides, convert_weight, random_weight
from torch import Tensor

from torch_nhwc.ops import Outcome

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATING += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
OTHERS = [torch.uint8, torch.int8, torch.bool, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
OTHERS += [torch.uint64, torch.complex32, torch.complex64, torch.complex128]
OPERATORS = ["convert_weight", "convert_weights", "convert_weight_", "convert_weights_", "set_strides_", "copy_weight_"]
STORAGES = ["auto", "fresh", "reuse", "detach"]
SIZES = [0, 1, 1, 1, 2, 3, 3, 4, 5, 7, 8, 9, 16, 17, 33]


def draw(random: Random) -> dict[str, Any]:
    operator = random.choice(OPERATORS)
    count = random.choice((1, 2, 3)) if "s_" in operator or operator.endswith("s") else 1
    is_in_place = operator.endswith("_") and operator != "copy_weight_"
    rank = random.choice((4, 5))
    # A format fits one rank only, or None and contiguous both.
    ranks = [random.randint(0, 6) if operator == "set_strides_" else random.choice((rank, rank, 4, 5))] * count
    weights = [_draw_weight(random, each, is_in_place) for each in ranks]
    if is_in_place and count > 1 and random.random() < 0.2:
        weights[1] = {"alias_of": 0}
    return {
        "operator": operator,
        "weights": weights,
        "format": random.choice([None, "contiguous_format"] * 2 + ["channels_last", "channels_last_3d"]),
        "dtype": _draw_dtype(random, random.random() < 0.95) if not is_in_place and random.random() < 0.5 else None,
        "storage": random.choice(STORAGES),
        "out_offset": random.choice((0, 0, 1, 3, 17)),
        "threads": random.choice((1, 1, 2)),
        "seed": random.getrandbits(60),
    }


def _draw_dtype(random: Random, is_floating: bool) -> torch.dtype:
    return random.choice(FLOATING[:4] if random.random() < 0.6 else FLOATING) if is_floating else random.choice(OTHERS)


def _draw_weight(random: Random, rank: int, is_in_place: bool) -> dict[str, Any]:
    shape = [random.choice(SIZES) for _ in range(rank)]
    if rank > 1 and random.random() < 0.03:  # enough for several threads
        shape[0], shape[1] = random.choice((64, 130)), random.choice((65, 128))
    while torch.Size(shape).numel() > 150_000:
        shape[shape.index(max(shape))] = random.choice((1, 2, 3))
    order, dims = order_of_dims(random, rank), [*range(rank)]
    is_whole = random.random() < 0.5
    steps = [1 if is_whole or random.random() < 0.8 else random.choice((2, 3)) for _ in dims]
    expanded = [] if random.random() < 0.9 else random.sample(dims, random.randint(0, rank))
    target = order_of_dims(random, rank)
    strides = list(strides_of(shape, target))
    if random.random() < 0.15:
        strides = [random.choice((0, 1, 2, 3, 4, 6, 12, 27, -1)) for _ in dims]
    dtype = _draw_dtype(random, random.random() < 0.75)
    can_have_gradient = is_in_place and (dtype.is_floating_point or dtype.is_complex)
    return {
        "shape": shape,
        "strides": strides_of(shape, order, steps, expanded),
        "offset": 0 if is_whole else random.choice((0, 1, 2, 5, 64)),
        "tail": 0 if is_whole else random.choice((0, 0, 3, 30)),
        "dtype": dtype,
        "is_held": random.random() < 0.4,
        "is_conjugate": dtype in (torch.complex64, torch.complex128) and random.random() < 0.2,
        "gradient": order_of_dims(random, rank) if can_have_gradient and random.random() < 0.3 else None,
        "target": strides,
    }


class Weight:
    """A weight, the memory that it is in, and what both were before."""

    def __init__(self, drawn: dict[str, Any], others: list["Weight"]) -> None:
        if "alias_of" in drawn:
            alias = others[drawn["alias_of"]]
            self.drawn, self.base = alias.drawn | {"gradient": None}, alias.base
            source = alias.tensor
            self.tensor = torch.empty(0, dtype=source.dtype)
            self.tensor.set_(source.detach().untyped_storage(), source.storage_offset(), source.shape, source.stride())
            self.base_before = alias.base_before
        else:
            self.drawn, shape, strides = drawn, drawn["shape"], drawn["strides"]
            last = sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else -1
            base = random_weight((drawn["offset"] + last + 1 + drawn["tail"],), drawn["dtype"])
            self.base_before = bits(base).clone()
            self.tensor = torch.empty(0, dtype=base.dtype)
            # Not as_strided, whose result holds the tensor that it is a view of.
            self.tensor.set_(base.untyped_storage(), drawn["offset"], shape, strides)
            self.base = base if drawn["is_held"] else None
            if drawn["is_conjugate"]:
                self.tensor = self.tensor.conj()
        self.gradient: Tensor | None = None
        if self.drawn["gradient"] is not None:
            self.tensor.requires_grad_()
            self.gradient = in_order(random_weight(self.tensor.shape, self.tensor.dtype), self.drawn["gradient"])
            self.tensor.grad = self.gradient
            self.gradient_before = self.gradient.clone()
        self.before = self.tensor.detach().clone()
        self.was_at, self.old_strides = self.tensor.data_ptr(), self.tensor.stride()

    @property
    def is_plain(self) -> bool:
        """Return whether nothing stands against a conversion in place."""
        is_dense = sorted(self.drawn["strides"]) == sorted(strides_of(self.drawn["shape"], self._order()))
        is_whole = not (self.drawn["offset"] or self.drawn["tail"] or self.drawn["is_conjugate"])
        return is_dense and is_whole and self.base is None and 0 not in self.drawn["shape"]

    def _order(self) -> list[int]:
        strides = self.drawn["strides"]
        return sorted(range(len(strides)), key=lambda dim: (-strides[dim], -self.drawn["shape"][dim]))

    def expect_unchanged(self) -> None:
        expect(self.tensor.stride() == self.old_strides, "a refused weight has other strides")
        expect(self.tensor.data_ptr() == self.was_at, "a refused weight has other memory")
        self.expect_same_values()

    def expect_same_values(self) -> None:
        expect(has_bits_of(self.tensor, self.before), "the values have changed")
        self.expect_base_untouched()
        if self.gradient is not None:
            expect(self.tensor.grad is self.gradient, "the gradient is another object")
            expect(has_bits_of(self.gradient, self.gradient_before), "the gradient's values have changed")

    def expect_converted(self, strides: tuple[int, ...], outcome: Outcome) -> None:
        expect(self.tensor.stride() == strides, f"strides {self.tensor.stride()}, not {strides}")
        self.expect_same_values()
        if not self.tensor.numel():
            return
        is_in_place = outcome in (Outcome.UNCHANGED, Outcome.RESTRIDED, Outcome.IN_PLACE)
        expect(is_in_place == (self.tensor.data_ptr() == self.was_at), f"{outcome!r}, but not by its memory")
        if self.gradient is not None:
            own = self.gradient.stride()
            follows = all(size < 2 or one == other for size, one, other in zip(self.tensor.shape, own, strides))
            expect(follows, f"the gradient has strides {own}, not {strides}")

    def expect_base_untouched(self) -> None:
        if self.base is not None:
            expect(torch.equal(bits(self.base), self.base_before), "the storage that the weight was in has changed")


def check(case: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(case["seed"])
    torch.set_num_threads(case["threads"])
    weights: list[Weight] = []
    for drawn in case["weights"]:
        weights.append(Weight(drawn, weights))
    case = case | {"format": case["format"] and getattr(torch, case["format"])}
    operator = case["operator"]
    if operator.endswith("_") and operator != "copy_weight_":
        result = _check_in_place(case, weights)
    else:
        result = _check_copy(case, weights) if operator == "copy_weight_" else _check_clones(case, weights)
    return {f"{operator}: {result}": 1}


def _format_fits(case: dict[str, Any], weight: Weight) -> bool:
    return case["format"] in (None, torch.contiguous_format, FORMATS.get(weight.tensor.dim()))


def _refusal_of(case: dict[str, Any], weights: list[Weight]) -> type[Exception] | None:
    """Return the error that a call has to raise for its format or its cast."""
    if not all(_format_fits(case, weight) for weight in weights):
        return RuntimeError
    dtypes = {weight.tensor.dtype for weight in weights} - {case["dtype"]}
    is_cast = case["dtype"] is not None and dtypes
    return TypeError if is_cast and not all(each.is_floating_point for each in {case["dtype"], *dtypes}) else None


def _canonical_strides(case: dict[str, Any], weight: Weight) -> tuple[int, ...]:
    return canonical_strides(weight.tensor.shape, case["format"] or FORMATS[weight.tensor.dim()])


def _check_clones(case: dict[str, Any], weights: list[Weight]) -> str:
    tensors, refusal = [each.tensor for each in weights], _refusal_of(case, weights)
    call: Any = getattr(torch.ops.nhwc, case["operator"])
    given = tensors if case["operator"] == "convert_weights" else tensors[0]
    try:
        results = call(given, case["format"], dtype=case["dtype"])
    except (RuntimeError, TypeError) as error:
        expect(refusal is not None, f"refused: {error}")
        return "refused"
    expect(refusal is None, f"expected a {refusal}")
    for weight, result in zip(weights, results if isinstance(results, list) else [results]):
        expected = convert_weight(weight.tensor, case["format"], case["dtype"])
        expect(result.stride() == expected.stride(), f"strides {result.stride()}, not {expected.stride()}")
        expect(has_bits_of(result, expected), "other values than plain torch's")
        weight.expect_unchanged()
    return "done"


def _check_copy(case: dict[str, Any], weights: list[Weight]) -> str:
    (weight,) = weights
    shape, dtype = weight.tensor.shape, case["dtype"] or weight.tensor.dtype
    # There is an output of any format that the weight can have.
    case["format"] = case["format"] if _format_fits(case, weight) else None
    around = random_weight((shape.numel() + 40,), dtype)
    before, start = around.clone(), case["out_offset"]
    out = around.as_strided(shape, _canonical_strides(case, weight), start)
    refusal = _refusal_of(case, weights)
    try:
        torch.ops.nhwc.copy_weight_(out, weight.tensor)
    except TypeError as error:
        expect(refusal is TypeError, f"refused: {error}")
        expect(torch.equal(bits(around), bits(before)), "refused, and wrote")
        return "refused"
    expect(refusal is None, f"expected a {refusal}")
    expected = convert_weight(weight.tensor, case["format"], case["dtype"])
    expect(has_bits_of(out, expected), "other values than plain torch's")
    for part in (slice(0, start), slice(start + shape.numel(), None)):
        expect(torch.equal(bits(around[part]), bits(before[part])), "wrote outside of the output")
    weight.expect_unchanged()
    return "done"


def _check_in_place(case: dict[str, Any], weights: list[Weight]) -> str:
    tensors, storage, operator = [each.tensor for each in weights], case["storage"], case["operator"]
    call, forecast = getattr(torch.ops.nhwc, operator), None
    targets = [tuple(each.drawn["target"]) for each in weights]
    if operator == "set_strides_":
        arguments: Any = (tensors, list(itertools.chain(*targets)))
        is_invalid = any(_overlaps(each.tensor.shape, target) for each, target in zip(weights, targets))
    else:
        arguments = (tensors if operator == "convert_weights_" else tensors[0], case["format"])
        is_invalid = _refusal_of(case, weights) is not None
        if not is_invalid:
            targets = [_canonical_strides(case, each) for each in weights]
            forecast = torch.ops.nhwc.plan_weights(tensors, case["format"], storage=storage)
    is_refused = is_invalid or any(Outcome(each).is_refusal for each in forecast or ())
    # The bytes of a plain weight can be permuted, but strides with gaps need other storage.
    is_easy = len(weights) == 1 and weights[0].is_plain and (operator != "set_strides_" or storage != "reuse")
    expect(is_invalid or not (is_easy and is_refused), f"the forecast of a plain weight is {forecast}")
    try:
        outcomes = call(*arguments, storage=storage)
    except RuntimeError as error:
        for weight in weights:
            weight.expect_unchanged()
        expect(is_refused or (operator == "set_strides_" and not is_easy), f"refused: {error}")
        return "refused"
    expect(not is_refused, f"expected a refusal; the forecast was {forecast}")
    outcomes = outcomes if isinstance(outcomes, list) else [outcomes]
    expect(forecast in (None, outcomes), f"the forecast was {forecast}, the outcomes are {outcomes}")
    for weight, target, outcome in zip(weights, targets, map(Outcome, outcomes)):
        weight.expect_converted(target, outcome)
    if any("alias_of" in drawn for drawn in case["weights"]):
        expect(tensors[0].data_ptr() == tensors[1].data_ptr(), "aliases were separated")
    return Outcome(outcomes[0]).name.lower()


def _overlaps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether strides are negative, or a dimension does not reach over all elements of the ones inside it.

    Some strides of the latter kind put no two elements at one place. The operators refuse them, too.
    """
    if any(stride < 0 for stride in strides):
        return True
    last = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride <= last:
            return shape.numel() > 0
        last += stride * (size - 1)
    return False
