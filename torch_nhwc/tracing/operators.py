"""What one call of an operator did to the formats of the activations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_nhwc.finding.convolutions import OPERATORS
from torch_nhwc.tracing.layouts import (
    AMBIGUOUS,
    CHANNELS_LAST_NAMES,
    CONTIGUOUS,
    format_of,
    is_channels_last,
    is_channels_last_of,
)
from torch_nhwc.tracing.places import ForwardPass
from torch_nhwc.tracing.rows import Gain, Loss, MixedConvolution

_is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
_COMPOSITE = "CompositeImplicitAutograd"
# The gradient of a convolution's weight is no activation: its position among the results.
_WEIGHT_GRADIENTS = {"aten::convolution_backward": 1, "aten::convolution_backward_overrideable": 1}


class Operator:
    """What the schema of an operator says, read once."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload  # and with it its id
        schema = overload._schema
        self.name: str = schema.name
        # Not what has a decomposition in Python, which may compute something else.
        self.is_composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _COMPOSITE)
        self.weight_gradient = _WEIGHT_GRADIENTS.get(self.name)
        # Where the input of a convolution stands, before its weight.
        self.convolved = 0 if self.name in OPERATORS else 1 if self.weight_gradient else None
        tensors = [each for each in schema.arguments if "Tensor" in str(each.type)]
        positions = {each.name: index for index, each in enumerate(schema.arguments)}
        self._arguments = [positions[each.name] for each in tensors if not each.kwarg_only]
        self._keywords = [each.name for each in tensors if each.kwarg_only]
        written = [each.alias_info is not None and each.alias_info.is_write for each in schema.returns]
        self.writes_in_place = any(written)
        self.is_overwriting = self.name == "aten::copy_" or any(each.is_out for each in tensors)
        """Whether what it writes in place is not read before."""
        bare = self.name.partition("::")[2]
        is_factory = bare.startswith("new_") or bare.endswith("_like")  # these read no values
        # The results in memory that was written, as far as the schema tells; none that is a weight's gradient.
        self._written = [
            index
            for index, each in enumerate(() if is_factory else schema.returns)
            if written[index] or (each.alias_info is None and index != self.weight_gradient)
        ]
        self._returns_many = len(schema.returns) > 1

    def tensors(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments."""
        count = len(arguments)
        found = flat([arguments[index] for index in self._arguments if index < count])
        return found + flat([keywords.get(name) for name in self._keywords]) if self._keywords else found

    def written(self, result: Any) -> list[Tensor]:
        """The results that were written, and are no views of what was there."""
        return flat(
            [result[index] for index in self._written] if self._returns_many else [result] if self._written else []
        )


class Finding(NamedTuple):
    """What there is to say of a call: the kind of row, and the bytes that it is about."""

    kind: type[Loss] | type[MixedConvolution] | type[Gain]
    bytes: int


def flat(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results, in lists as well."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None and isinstance(value, (list, tuple)):
            found += flat(value)
    return found


def findings(
    operator: Operator, arguments: Any, activations: list[Tensor], result: Any, forward: ForwardPass | None
) -> Sequence[Finding]:
    """What there is to say of a call.

    Args:
        operator: that was called.
        arguments: positional ones.
        activations: the tensors among all arguments, less the weights; in backward the gradients alone.
        result: of the call.
        forward: that the call is a part of; `None` in backward.
    """
    found: list[Finding] = []
    formats = [format_of(each) for each in activations]
    if not CHANNELS_LAST_NAMES.isdisjoint(formats):
        if forward is not None:
            forward.has_channels_last = True
        lost = _lost(operator, activations, formats, result, forward is None)
        if lost:
            found.append(Finding(Loss, lost))
    elif forward is not None and not forward.has_channels_last and AMBIGUOUS not in formats:
        gained = sum(each.nbytes for each in flat([result]) if is_channels_last(format_of(each)))
        if gained:
            forward.has_channels_last = True
            found.append(Finding(Gain, gained))
    if operator.convolved is not None:
        operands = arguments[operator.convolved : operator.convolved + 2]
        formats = [format_of(each) for each in operands]
        if CONTIGUOUS in formats and not CHANNELS_LAST_NAMES.isdisjoint(formats):
            copied = sum(each.nbytes for each, name in zip(operands, formats) if name == CONTIGUOUS)
            found.append(Finding(MixedConvolution, copied))
    return found


def _lost(operator: Operator, read: list[Tensor], formats: list[str | None], result: Any, is_backward: bool) -> int:
    """The bytes that were written in another format than that of a channels-last input of the same rank."""
    bytes_lost = 0
    for each in operator.written(result):
        name = format_of(each)
        if name is None or name == AMBIGUOUS or is_channels_last(name):
            continue
        # Where gradients of two formats meet, one had lost it before: pools over whole planes return contiguous ones.
        if is_backward and any(name == own for other, own in zip(read, formats) if other is not each):
            continue
        has_read = any(is_channels_last_of(own, each) for own in formats)
        # A schema may be silent on results that are views.
        if has_read and (operator.writes_in_place or not any(_is_alias_of(each, other) for other in read)):
            bytes_lost += each.nbytes
    return bytes_lost
