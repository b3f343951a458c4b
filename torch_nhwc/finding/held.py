"""Tensors that lie in no module, as a walk takes them: in a state dict, in an exported program."""

from collections.abc import Mapping

from torch import Tensor, nn

from torch_nhwc.finding.site import Site


class Held(nn.Module):
    """Tensors under their names, which may have dots in them, and the sites among them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.hold(tensors)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes these in the place of others."""
        is_parameter = {name: isinstance(tensor, nn.Parameter) for name, tensor in tensors.items()}
        self.__dict__["_parameters"] = {name: each for name, each in tensors.items() if is_parameter[name]}
        self.__dict__["_buffers"] = {name: each for name, each in tensors.items() if not is_parameter[name]}

    def sites(self, prefix: str) -> list[Site]:
        """The sites among the tensors; `prefix` is the path of this in the model."""
        raise NotImplementedError


class StateDict(Held):
    """The tensors of a state dict. What is called weight, floating, and of the rank of a convolution's, is a site."""

    layer = "state dict"

    def sites(self, prefix: str) -> list[Site]:
        return [
            # How many groups there are is not known: with one channel in a filter, it may be the one.
            Site(path, "weight", self.layer, tensor.dim(), 1 if tensor.shape[1] == 1 else 0, self, tensor, None)
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if tensor.dim() in (4, 5) and tensor.is_floating_point()
            for path, _, last in [".".join(filter(None, (prefix, name))).rpartition(".")]
            if last == "weight"
        ]


class Contents(nn.Module):
    """The models and the state dicts of a file, under their paths in it."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(parts)
