"""Finding the sites of a model: the weights of its convolution layers."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from torch_nhwc.reasons import Reason

# The layers whose weight has this rank. Each has a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
# Parameters that the older weight_norm, spectral_norm and pruning compute `weight` from.
_ORIGINALS = ("weight_g", "weight_v", "weight_orig")


@dataclass(frozen=True)
class Site:
    """A convolution layer and its weight, or the reason why there is none to convert.

    Attributes:
        path: of the layer in the model, as in `named_modules`; empty for the model itself.
        layer: the layer's class.
        weight: the tensor, `None` where `reason` says that there is none.
        reason: why the layer is left as it is, `None` where it can be converted.
    """

    path: str
    layer: str
    weight: Tensor | None
    reason: Reason | None

    def __str__(self) -> str:
        return f"{self.path!r} ({self.layer})" if self.path else f"the module itself ({self.layer})"


def find_sites(model: nn.Module, rank: int) -> Iterator[Site]:
    """The convolution layers of a model whose weights have `rank` dimensions, each layer once, in the model's order.

    Raises:
        TypeError: a layer's weight is not a tensor.
    """
    names = {layer.__name__ for layer in LAYERS[rank]}
    quantized_module = sys.modules.get("torch.ao.nn.quantized")
    quantized = tuple(getattr(quantized_module, name) for name in names) if quantized_module else ()
    for path, module in model.named_modules():
        layer = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            if module.original_name in names:
                yield Site(path, module.original_name, module.weight, Reason.SCRIPTED)
        elif isinstance(module, LAYERS[rank]):
            weight, reason = _plain_weight(module)
            if reason is None and not isinstance(weight, Tensor):
                raise TypeError(
                    f"torch_nhwc: expected the weight of {path!r} ({layer}) to be a tensor, got {type(weight).__name__}"
                )
            yield Site(path, layer, weight, reason)
        elif isinstance(module, quantized):
            yield Site(path, layer, None, Reason.QUANTIZED)


def _plain_weight(module: nn.Module) -> tuple[Tensor | None, Reason | None]:
    # A computed weight is not even read: reading runs the parametrization, which may update its own state.
    if parametrize.is_parametrized(module, "weight") or any(name in module._parameters for name in _ORIGINALS):
        return None, Reason.COMPUTED
    weight = module.weight
    if is_lazy(weight):
        return None, Reason.LAZY
    stored = any("weight" in place for place in (module._parameters, module._buffers, module.__dict__))
    if isinstance(weight, Tensor) and not (stored and weight.is_leaf):
        return None, Reason.COMPUTED
    return weight, None  # type: ignore[return-value, unused-ignore]
