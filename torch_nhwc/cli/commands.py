"""What the commands of `torch-nhwc` do. Their options are in `torch_nhwc_cli`."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.cli.models import Example, import_from_here, load_example
from torch_nhwc.cli.trace_page import write_page
from torch_nhwc.planning.plans import plan_from
from torch_nhwc.rendering import paragraphs
from torch_nhwc.running.calls import call, copy_inputs, copy_model, evaluation_mode
from torch_nhwc.running.comparison import Difference, compare
from torch_nhwc.serialization import write_whole
from torch_nhwc.tracing import Trace, assert_layout
from torch_nhwc.tracing import audit as read_profile
from torch_nhwc.tuning import Tuning
from torch_nhwc.tuning.workload import loss_of, optimizer_named
from torch_nhwc_cli.options import Answer, Limits, ModelOptions, in_options


def trace(
    named: ModelOptions,
    is_training: bool,
    autocast: str | None,
    preserve: bool | None,
    limits: Limits,
    json_output: bool,
    html: Path | None,
) -> Answer:
    """Trace a model, converted first unless `preserve` is `None`."""
    example = load_example(named)
    example.require_inputs()
    example.model.train(is_training)
    if preserve is not None:
        with _converting(example.name):  # `plan` and `convert` say what is refused
            nhwc.convert_(example.model, input_format="channels_last", preserve=preserve, example_inputs=example.inputs)
    region = _region(example, autocast)
    with _showing(f"Tracing {example.name}"), nhwc.trace(example.model) as traced:
        with torch.set_grad_enabled(is_training), region:
            output = call(example.model, example.inputs)
            loss = loss_of(output) if is_training else None
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    layouts = [layout for module in traced.modules for layout in (*module.inputs, *module.outputs)]
    if preserve is None and not any((layout.format or "").startswith("channels_last") for layout in layouts):
        print(
            "torch-nhwc: the model ran contiguous: --convert shows what it would still lose after a conversion, and "
            "--convert --no-preserve what it would lose without replaced layers",
            file=sys.stderr,
        )
    return _answer_of_trace(traced, limits, json_output, html)


def tune(
    named: ModelOptions,
    is_training: bool,
    autocast: str | None,
    budget: float,
    preserve: bool,
    optimizer: str | None,
    compile: bool,
    save: Path | None,
    json_output: bool,
) -> Answer:
    """Tune a model, and keep the decision in a file if one is named."""
    kind = None if optimizer is None else _optimizer(optimizer)
    example = load_example(named)
    example.require_inputs()
    if getattr(example.model, "training", is_training) != is_training:  # a frozen program has no mode
        example.model.train(is_training)
    with _showing(f"Tuning {example.name} for {budget:g} s"), _warnings_as_lines():
        tuning = nhwc.tune(
            example.model,
            example.inputs,
            mode="training" if is_training else "inference",
            budget_seconds=budget,
            preserve=preserve,
            autocast=_dtype(autocast),
            optimizer=kind,
            compile=compile,
        )
    if save is not None:
        with write_whole(save) as temporary:
            temporary.write_text(tuning.to_json())
    return Answer(tuning.to_json() if json_output else f"{tuning}{_advice(tuning, save, example.model)}")


def verify(
    named: ModelOptions,
    is_training: bool,
    autocast: str | None,
    memory_format: str | None,
    preserve: bool,
    each_forward: bool,
    rtol: float | None,
    atol: float | None,
    json_output: bool,
) -> Answer:
    """Convert a copy of a model, and compare it with the model."""
    example = load_example(named)
    example.require_inputs()
    before = example.model.train(is_training)
    after = copy_model(before)
    with _converting(example.name):
        report = nhwc.convert_(
            after, memory_format, preserve=preserve, each_forward=each_forward, example_inputs=example.inputs
        )
    with _showing(f"Verifying {example.name}"), _region(example, autocast):
        verification = nhwc.verify(before, after, example.inputs, backward=is_training, rtol=rtol, atol=atol)
    text = verification.to_json() if json_output else f"{_text_of(report, False)}\n\n{verification}"
    return Answer(text, verification.ok)


def plan(
    named: ModelOptions,
    memory_format: str | None,
    preserve: bool,
    each_forward: bool,
    table: bool,
    json_output: bool,
) -> Answer:
    """Plan the conversion of a model."""
    example = load_example(named)
    inputs = None if example.is_lazy else example.inputs
    with _converting(example.name, "Planning for"):
        planned = nhwc.plan(
            example.model, memory_format, preserve=preserve, each_forward=each_forward, example_inputs=inputs
        )
    return Answer(planned.to_json() if json_output else _text_of(planned, table))


def convert(
    named: ModelOptions,
    memory_format: str | None,
    preserve: bool,
    each_forward: bool,
    from_plan: Path | None,
    strict: bool,
    out: Path | None,
    table: bool,
    json_output: bool,
) -> Answer:
    """Convert a model, compare its outputs, and write it to a file if one is named and they are right."""
    chosen = None if from_plan is None else plan_from(from_plan)
    example = load_example(named)
    before = _outputs(example)
    with _converting(example.name):
        report = nhwc.convert_(
            example.model,
            memory_format,
            preserve=preserve,
            each_forward=each_forward,
            plan=chosen,
            strict=strict,
            example_inputs=None if chosen else example.inputs,
        )
    difference = None if before is None else compare(_outputs(example), before, example.like.dtype)
    is_right = difference is None or difference.is_within
    lines = [_comparison(difference)]
    if is_right and out is not None:
        lines.append(f"Written to {out}: {_write(example.model, out)}.")
    if json_output:
        described = json.loads(report.to_json()) | {"is_right": is_right, "comparison": lines[0]}
        return Answer(json.dumps(described, indent=1), is_right)
    return Answer(f"{_text_of(report, table)}\n{paragraphs(lines)}", is_right)


def convert_file(
    path_in: Path,
    path_out: Path,
    memory_format: str | None,
    input_format: Any,
    allow_pickle: bool,
    strict: bool,
    table: bool,
    json_output: bool,
) -> Answer:
    """Convert a saved model."""
    if allow_pickle:
        import_from_here()  # classes that the file may name
    with _converting(str(path_in)):
        report = nhwc.convert_saved(
            path_in,
            path_out,
            memory_format=memory_format,
            input_format=input_format,
            allow_pickle=allow_pickle,
            strict=strict,
        )
    text = paragraphs([f"Written to {path_out}."])
    return Answer(report.to_json() if json_output else f"{_text_of(report, table)}\n{text}")


def audit(path: Path, limits: Limits, json_output: bool, html: Path | None) -> Answer:
    """Read a profile."""
    with _showing(f"Reading {path}"):
        traced = read_profile(path)
    return _answer_of_trace(traced, limits, json_output, html)


def _answer_of_trace(traced: Trace, limits: Limits, json_output: bool, html: Path | None) -> Answer:
    """Write the page of a trace, and compare the trace with the limits that are given."""
    if html is not None:
        write_page(traced, html)
    losses = len(traced.losses) if limits.losses is None else limits.losses
    mixed = len(traced.mixed) if limits.mixed is None else limits.mixed
    answer = Answer(traced.to_json() if json_output else in_options(str(traced)))
    try:
        assert_layout(traced, losses, mixed, limits.bytes)
    except AssertionError as error:
        print(f"torch-nhwc: {in_options(str(error))}", file=sys.stderr)
        return answer._replace(is_well=False)
    return answer


# The arguments of `convert_` that make the plan of a policy.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "weights only": {"preserve": False},
    "full": {"input_format": "channels_last", "preserve": False},
    "full, preserved": {"input_format": "channels_last"},
}


def _advice(tuning: Tuning, save: Path | None, model: nn.Module) -> str:
    """Return what to do, with the lines of code that do it: by the file of the decision, or else by arguments."""
    policy = tuning.choice.removesuffix(", compiled")
    if not tuning.is_decided:
        advice = "Give it a larger --budget; until then, leave the model as it is."
        return paragraphs([f"Not decided: too few rounds ({tuning.table[0].samples}). {advice}"])
    if policy == "contiguous":
        if not tuning.compile:
            return "Leave the model as it is: no plan is certainly faster here.\n"
        return "Compile the model and convert nothing:\n    import torch\n    model = torch.compile(model)\n"
    options = _ARGUMENTS[policy]
    # Sites that example inputs alone show are not in the plan that arguments make.
    is_same = save is None and nhwc.plan(model, **options).digest == tuning.plan.digest
    given = options if is_same else {"plan": str(save or "tuning.json")}
    arguments = ["model", *(f"{name}={json.dumps(value) if value else value}" for name, value in given.items())]
    arguments += ["optimizer=optimizer"] if tuning.workload["mode"] == "training" else []
    lines = ["import torch_nhwc", f"torch_nhwc.convert_({', '.join(arguments)})"]
    if tuning.compile:
        lines = ["import torch", *lines, "model = torch.compile(model)"]
    text = f"Convert the model by the plan {policy!r}{', then compile it' if tuning.compile else ''}:\n"
    text = text if save or is_same else f"Run this again with --save tuning.json. {text}"
    return text + "".join(f"    {line}\n" for line in lines)


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    kind = optimizer_named(name)
    if kind is None:
        raise ValueError(f"--optimizer: expected a class of torch.optim, such as AdamW, got {name!r}")
    return kind


def _outputs(example: Example) -> Any:
    """Return what the model returns in evaluation mode; `None` without inputs."""
    if example.inputs is None:
        return None
    torch.manual_seed(0)
    with torch.no_grad(), evaluation_mode(example.model):
        return call(example.model, copy_inputs(example.inputs))


def _comparison(difference: Difference | None) -> str:
    if difference is None:
        return "Outputs were not compared: give the model inputs by --input-shape or by the factory."
    return (
        f"Outputs are {'within' if difference.is_within else 'BEYOND'} the tolerance {difference.tolerance:.2g}: the "
        f"largest difference is {difference.largest:.2g}, the largest output {difference.of:.2g}."
    )


def _write(model: nn.Module, path: Path) -> str:
    """Write a TorchScript archive, or the state dict of any other model, and return which it is."""
    with write_whole(path) as temporary:
        if isinstance(model, torch.jit.ScriptModule):
            torch.jit.save(model, str(temporary))  # type: ignore[no-untyped-call, unused-ignore]
            return "TorchScript archive"
        torch.save(model.state_dict(), temporary)
        return "state dict, to be loaded by load_state_dict(..., assign=True)"


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _region(example: Example, autocast: str | None) -> torch.autocast:
    return torch.autocast(example.like.device.type, dtype=_dtype(autocast), enabled=autocast is not None)


@contextmanager
def _converting(name: str, verb: str = "Converting") -> Iterator[None]:
    """Show that a model is converted, and leave out warnings, whose content is in the report."""
    with _showing(f"{verb} {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print the package's warnings at once, as lines of the program."""
    show = warnings.showwarning

    def print_line(message: Warning | str, *rest: Any) -> None:
        text = str(message)
        if text.startswith("torch_nhwc: "):
            print(f"torch-nhwc: {in_options(text.removeprefix('torch_nhwc: '))}", file=sys.stderr)
        else:
            show(message, *rest)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", "torch_nhwc: ")
        warnings.showwarning = print_line  # type: ignore[assignment]
        yield


def _showing(what: str) -> AbstractContextManager[Any]:
    """Show on a terminal what is being done, while it lasts."""
    return Console(stderr=True).status(f"{what} ...")


def _text_of(printed: nhwc.Report | nhwc.Plan, table: bool) -> str:
    """Return a report or a plan with the names of options, and with its table on request."""
    text = in_options(str(printed))
    return (text.replace("(All rows: --table)\n", "") + printed.table() if table else text).rstrip("\n")
