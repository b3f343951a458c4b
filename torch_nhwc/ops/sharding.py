"""The sharding rule of DTensor for conversions."""

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_DTENSOR = "torch.distributed.tensor"


def register_sharding_rule() -> None:
    """Register the sharding rule of `nhwc::convert_weight`.

    A conversion commutes with splitting a weight along any dimension: every shard converts where it is, and the result
    has the weight's placement.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.nhwc.convert_weight.default)  # type: ignore[untyped-decorator, unused-ignore]
    def _(weight: Any, memory_format: Any = None, *, dtype: Any = None) -> list[Any]:
        placements = [Replicate(), *(Shard(dimension) for dimension in range(weight.ndim))]
        return [([placement], [placement, None]) for placement in placements]


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Registers the rule when DTensor is first imported, since an import here would slow down every start."""

    _is_searching = False  # the search below calls this finder again

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _DTENSOR or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                try:
                    register_sharding_rule()
                except Exception as error:  # the user's import must not fail because of this package
                    warnings.warn(f"torch_nhwc: DTensor has no sharding rule: {error}", stacklevel=2)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register the sharding rule now, or when DTensor is imported."""
    if not torch.distributed.is_available():
        return
    if _DTENSOR in sys.modules:
        register_sharding_rule()
    else:
        sys.meta_path.insert(0, _RegisterOnImport())
