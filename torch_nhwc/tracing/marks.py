"""Remembering what a tensor is, as long as it lives."""

from functools import partial
from weakref import ref

from torch import Tensor, nn


class Marks:
    """Tensors that have something in common, by their identity; none is held."""

    def __init__(self) -> None:
        self._marked: dict[int, ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Marks a tensor."""
        key = id(tensor)
        self._marked[key] = ref(tensor, partial(self._forget, key))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is marked."""
        marked = self._marked.get(id(tensor))
        return marked is not None and marked() is tensor

    def among(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of some tensors that are marked."""
        return [each for each in tensors if id(each) in self._marked and self.has(each)]

    def _forget(self, key: int, gone: "ref[Tensor]") -> None:
        if self._marked.get(key) is gone:
            del self._marked[key]


class Weights(Marks):
    """The parameters and buffers of a model, parameters of others, and all that is computed from nothing but such."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._activations = Marks()
        for tensor in (*model.parameters(), *model.buffers()):
            self.add(tensor)

    def has(self, tensor: Tensor) -> bool:
        marked = self._marked.get(id(tensor))
        is_marked = marked is not None and marked() is tensor
        if is_marked or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)):
            return not self._activations.has(tensor)
        return False

    def others(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of some tensors that are none."""
        marked = self._marked
        return [each for each in tensors if (type(each) is Tensor and id(each) not in marked) or not self.has(each)]

    def use(self, tensor: Tensor) -> None:
        """Takes for an activation what is given to the model, or convolved, though it be a parameter or a buffer."""
        self._activations.add(tensor)
