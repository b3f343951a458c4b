"""What the command `convert` does: convert a model, compare its outputs with those from before, write it to a file."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torch_nhwc.cli.models import Example
from torch_nhwc.converting.conversion import convert_
from torch_nhwc.converting.report import Report
from torch_nhwc.planning.plans import Plan
from torch_nhwc.running.inputs import call
from torch_nhwc.running.modes import in_evaluation
from torch_nhwc.running.outputs import Difference, difference_of, tensors_of
from torch_nhwc.saving.files import replacing
from torch_nhwc.tuning.tunings import Tuning


class Converted(NamedTuple):
    """What came of a conversion."""

    report: Report
    differences: list[Difference] | None
    """Of each floating tensor that the model returns; `None` where it was not run, without inputs."""

    @property
    def is_right(self) -> bool:
        """Whether the outputs are within the tolerance, as far as they were compared."""
        return all(each.is_within for each in self.differences or ())

    @property
    def comparison(self) -> str:
        """How the outputs compare, in a sentence."""
        if self.differences is None:
            return "Outputs were not compared: the model has no inputs here, which --input-shape or a factory gives."
        if not self.differences:
            return "Outputs were not compared: the model returns no floating tensor."
        worst = min(self.differences, key=lambda each: (each.is_within, -each.largest / (each.of or 1)))
        return (
            f"Outputs are {'within' if worst.is_within else 'BEYOND'} the tolerance {worst.tolerance:.2g}: the largest "
            f"difference is {worst.largest:.2g}, the largest output {worst.of:.2g}."
        )


def convert_and_compare(example: Example, **options: Any) -> Converted:
    """Converts a model in place. With inputs it runs before and afterwards, in evaluation mode.

    Args:
        example: the model, with its inputs.
        options: of `convert_`; without a plan the inputs are among them.
    """
    model, inputs = example.model, example.inputs
    before = None if inputs is None else _outputs(model, inputs)
    if not all(each.isfinite().all() for each in before or ()):
        raise ValueError("outputs cannot be compared: the model returns NaN or infinity before the conversion already")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says as much
        report = convert_(model, example_inputs=None if options.get("plan") else inputs, **options)
    if before is None:
        return Converted(report, None)
    after = _outputs(model, inputs)
    if len(after) != len(before):
        raise ValueError(
            f"outputs cannot be compared: the model returned {len(before)} floating tensors in one call and "
            f"{len(after)} in the next"
        )
    return Converted(report, [difference_of(*pair, example.like.dtype) for pair in zip(after, before)])


def read_plan(path: Path) -> Plan:
    """The plan in a file that `tune --save` or `plan --json` wrote; a ValueError where there is none."""
    try:
        text = path.read_text()
        is_tuning = "choice" in json.loads(text)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--plan: {path} cannot be read: {error}") from error
    return Tuning.from_json(text).plan if is_tuning else Plan.from_json(text)


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The floating tensors that a model returns, in evaluation mode, which it leaves again."""
    torch.manual_seed(0)
    with torch.no_grad(), in_evaluation(model):
        output = call(model, tree_map_only(Tensor, torch.clone, inputs))  # a model may write to its inputs
    return [each for each in tensors_of(output) if each.is_floating_point()]


def write(model: nn.Module, path: Path) -> str:
    """Writes a TorchScript archive, or the state dict of any other model, whole or not at all; says which it is."""
    with replacing(path) as output:
        if isinstance(model, torch.jit.ScriptModule):
            torch.jit.save(model, output)  # type: ignore[no-untyped-call, unused-ignore]
        else:
            torch.save(model.state_dict(), output)
    is_archive = isinstance(model, torch.jit.ScriptModule)
    return "TorchScript archive" if is_archive else "state dict, to be loaded by load_state_dict(..., assign=True)"
