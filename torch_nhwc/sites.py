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
# The channels-last format of a rank.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
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
    # Asked once for each class, since a model has few, and by its bases: quantized layers have an abstract base, for
    # which issubclass looks through all of its subclasses.
    kinds: dict[type, tuple[type, ...]] = {}
    for path, module in model.named_modules():
        module_type = type(module)
        kind = kinds.get(module_type)
        if kind is None:
            families = (torch.jit.ScriptModule,), LAYERS[rank], quantized
            bases = module_type.__mro__
            kind = kinds[module_type] = next((each for each in families if any(base in each for base in bases)), ())
        if not kind:
            continue
        layer = module_type.__name__
        if kind is LAYERS[rank]:
            weight, reason = _plain_weight(module, f"{path!r} ({layer})")
            yield Site(path, layer, weight, reason)
        elif kind is quantized:
            yield Site(path, layer, None, Reason.PACKED)
        elif isinstance(module, torch.jit.ScriptModule):
            yield from _scripted_site(path, module, rank, names)


def _scripted_site(path: str, module: torch.jit.ScriptModule, rank: int, names: set[str]) -> Iterator[Site]:
    # A class keeps its name through scripting and tracing; a subclass shows by the constants of a convolution, which
    # only scripting keeps; oneDNN's namesakes are scripted always.
    layer = module.original_name
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.layout == torch.strided:
        if weight.dim() == rank and (layer in names or hasattr(module, "output_padding")):
            yield Site(path, layer, weight, Reason.SCRIPTED)
    elif layer.removeprefix("Mkldnn") in names and (weight is not None or hasattr(module, "_packed_params")):
        yield Site(path, layer, None, Reason.PACKED)


def _plain_weight(module: nn.Module, name: str) -> tuple[Tensor | None, Reason | None]:
    parameter = module._parameters.get("weight")
    # A computed weight is not even read: reading runs the parametrization, which may update its own state.
    if parameter is None and (
        parametrize.is_parametrized(module, "weight") or any(each in module._parameters for each in _ORIGINALS)
    ):
        return None, Reason.COMPUTED
    weight: object = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"torch_nhwc: expected the weight of {name} to be a tensor, got {type(weight).__name__}")
    if is_lazy(weight):
        return None, Reason.LAZY
    # A property may compute its value without autograd's knowledge; a stored tensor is the same one every time.
    is_stored = weight is parameter or (weight.is_leaf and weight is module.weight)
    return (weight, None) if is_stored else (None, Reason.COMPUTED)
