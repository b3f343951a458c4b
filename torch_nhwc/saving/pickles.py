"""Files of torch.save: state dicts, alone or in a checkpoint with others, and whole models."""

import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from torch_nhwc.converting.report import Report
from torch_nhwc.finding.held import Contents, StateDict
from torch_nhwc.memory import place_of
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.planning.planner import plan
from torch_nhwc.reasons import Reason
from torch_nhwc.rendering import first_of
from torch_nhwc.saving.files import Kind, expect_trusted, reading

Convert = Callable[..., Report]

_ASSIGN = (
    "a model takes the strides of a state dict by load_state_dict(..., assign=True) alone; otherwise it keeps its own"
)
_OPTIMIZER = (
    "the optimizer state in the file lies as its weights: load them by assign=True, or into a model that is in "
    "channels-last, since a fused optimizer on a CPU steps silently wrong where weights and state differ"
)
# What a conversion would put code of this package into, which the file would then need.
_NEEDS_PACKAGE = (Reason.LAZY, Reason.COPIED_EACH_FORWARD)


def convert_pickle(path: Path, output: IO[bytes], kind: Kind, allow_pickle: bool, convert: Convert) -> Report:
    """Converts what is in one file into another.

    Args:
        path: of the file to read.
        output: what to write to.
        kind: of both.
        allow_pickle: whether to load more than tensors and plain data.
        convert: called with a model and options of `convert_`.
    """
    content = _load(path, kind, allow_pickle)
    with reading(path, kind.value):  # what is in a file may go round in a circle
        root, state = _root_of(content), list(_state_of_optimizers(content))
    left = list(dict.fromkeys(row.path for row in plan(root).rows if row.reason in _NEEDS_PACKAGE))
    optimizers = _optimizers_over(root) if _may_hold_optimizers(allow_pickle) else []
    report = convert(root, filter_fn=lambda _, path: path not in left, optimizer=optimizers)
    remarks = list(report.remarks)
    if any(row.layer == StateDict.layer for row in report.rows):
        remarks.append(_ASSIGN)
    if left:
        remarks.append(f"{first_of(left)}: left as it is, since the file would need torch_nhwc where it is loaded")
    if _lay_out_state(path, state, root, report):
        remarks.append(_OPTIMIZER)
    torch.save(content, output, _use_new_zipfile_serialization=kind is Kind.TORCH_SAVE)
    return replace(report, remarks=tuple(remarks))


def _load(path: Path, kind: Kind, allow_pickle: bool) -> Any:
    try:
        # The open file: of a path, torch.load goes by the name.
        with reading(path, kind.value), open(path, "rb") as file:
            return torch.load(file, weights_only=not allow_pickle)
    except ValueError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            why = (
                "torch.load refuses it as tensors and plain data, and loading anything more may run code that is in it"
            )
            expect_trusted(path, allow_pickle, why)
        raise


def _root_of(content: Any) -> nn.Module:
    """A module that holds all models and state dicts of a file."""
    parts = dict(_parts(content))
    if [*parts] == [""]:
        return parts[""]
    return Contents(parts)


def _parts(content: Any, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(content, nn.Module):
        yield path, content
    elif isinstance(content, (Mapping, list, tuple)) and not _is_of_optimizer(content):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        named = [(str(name), each) for name, each in items]
        tensors = {name: each for name, each in named if isinstance(each, Tensor)}
        if tensors:
            yield path, StateDict(tensors)
        for name, each in named:
            yield from _parts(each, f"{path}.{name}" if path else name)


def _may_hold_optimizers(allow_pickle: bool) -> bool:
    """Whether an optimizer could have been loaded as an object; to look for it takes a tenth of a second."""
    safe = torch.serialization.get_safe_globals()
    return allow_pickle or any(isinstance(each, type) and issubclass(each, torch.optim.Optimizer) for each in safe)


def _optimizers_over(root: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that a file holds as objects, whatever there has them: a container, a module, a scheduler."""
    places = {place_of(tensor) for tensor in (*root.parameters(), *root.buffers())}
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        each
        for each in optimizers
        if any(
            place_of(parameter) in places
            for group in getattr(each, "param_groups", ())  # none, where it was not made to the end
            for parameter in group["params"]
        )
    ]


def _is_of_optimizer(content: Any) -> bool:
    return isinstance(content, Mapping) and content.keys() >= {"state", "param_groups"}


def _lay_out_state(path: Path, state: list[Tensor], root: nn.Module, report: Report) -> bool:
    """Has optimizer state lie as the weights of its shapes; whether there is any.

    Raises:
        ValueError: a shape is that of a weight which is converted, and of a tensor which is not.
    """
    strides = {row.shape: row.target_strides for row in report.rows if row.target_strides is not None}
    state = [each for each in state if tuple(each.shape) in strides]
    if not state:
        return False
    names = {row.full_name for row in report.rows if row.target_strides is not None}
    tensors = *root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)
    others = {tuple(tensor.shape) for name, tensor in tensors if name not in names}
    for shape in (tuple(each.shape) for each in state):
        if shape in others:
            raise ValueError(
                f"{path}: optimizer state of shape {shape} may be that of a weight that is converted, or of a "
                "parameter that is not: convert the model and its optimizer once they are loaded"
            )
    lay_out_weights_(state, [strides[tuple(each.shape)] for each in state], storage="detach")
    return True


def _state_of_optimizers(content: Any, is_inside: bool = False) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        if is_inside:
            yield content
    elif isinstance(content, (Mapping, list, tuple)):
        for each in content.values() if isinstance(content, Mapping) else content:
            yield from _state_of_optimizers(each, is_inside or _is_of_optimizer(content))
