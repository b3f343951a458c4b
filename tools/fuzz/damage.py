"""Damaged plans, tunings, traces, verifications, reports and saved models: one clear error, or what the text says."""

import copy
import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from drawing import expect
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torch_nhwc as nhwc
from torch_nhwc.tracing import Trace
from torch_nhwc.tuning import Tuning
from torch_nhwc.verifying import Verification

TEXTS: dict[str, Any] = {
    "Plan": nhwc.Plan,
    "Report": nhwc.Report,
    "Trace": Trace,
    "Tuning": Tuning,
    "Verification": Verification,
}
FILES = ["state dict", "older format", "whole model", "archive", "program"]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    1 << 70,
    -(1 << 63),
    0.5,
    1e308,
    "",
    "x",
    "nan",
    "1",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
]
ERRORS = (ValueError, TypeError, RuntimeError)


def draw(random: Random) -> dict[str, Any]:
    what = random.choice([*TEXTS, *TEXTS, *FILES[:4], "archive", random.choice(FILES)])
    # What is done is drawn from a seed of its own, since it depends on what is there.
    return {"what": what, "in_data": random.random() < 0.7, "seed": random.getrandbits(60)}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 4, 3, groups=2),
        nn.Softmax2d(),
    )
    return nn.Sequential(*layers)


@functools.cache
def _text(what: str) -> str:
    x, own = torch.ones(2, 3, 8, 8), model()
    if what == "Plan":
        return nhwc.plan(own, preserve=True, input_format="channels_last").to_json()
    if what == "Tuning":
        return nhwc.tune(own, x, budget_seconds=0.1).to_json()
    before = copy.deepcopy(own)
    own(x).sum().backward()
    report = nhwc.convert_(own, optimizer=())
    if what == "Verification":
        own[3].weight.data.mul_(1.1)  # so that there is something to see
        return nhwc.verify(before, report, x).to_json()
    if what == "Trace":
        with nhwc.trace(own) as trace:
            own(x).sum().backward()
        return trace.to_json()
    return report.to_json()


@functools.cache
def _file(what: str) -> bytes:
    output, own = io.BytesIO(), model()
    if what == "archive":
        torch.jit.save(torch.jit.script(own), output)
    elif what == "program":
        torch.export.save(torch.export.export(own, (torch.ones(2, 3, 8, 8),)), output)
    else:
        content = own if what == "whole model" else {"model": own.state_dict(), "epoch": 3}
        torch.save(content, output, _use_new_zipfile_serialization=what != "older format")
    return output.getvalue()


def _damaged(data: bytes, random: Random) -> bytes:
    """Return bytes that are cut, overwritten, left out or repeated somewhere."""
    start = random.randrange(len(data))
    stop = min(len(data), start + random.choice((1, 1, 2, 16, 100, 1000)))
    return random.choice(
        (
            data[:start],
            data[start:],
            data[:start] + data[stop:],
            data[:stop] + data[start:],
            data[:start] + bytes(stop - start) + data[stop:],
            data[:start] + bytes([data[start] ^ 1 << random.randrange(8)]) + data[start + 1 :],
            data[:start] + random.randbytes(stop - start) + data[stop:],
        )
    )


def _changed(data: Any, random: Random) -> None:
    """Change one value of JSON data, at any depth: replace, delete, repeat or add it."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(each, (dict, list)):
                collect(each)

    collect(data)
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, list):
        holder.append(holder[key])
    elif kind < 0.4:
        holder[key] = [holder[key]]
    elif kind < 0.5:
        other, name = random.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif kind < 0.75:  # another value of its type
        alike = [other[name] for other, name in places if type(other[name]) is type(holder[key])]
        holder[key] = copy.deepcopy(random.choice(alike))
    else:
        holder[key] = random.choice(VALUES)


def check(case: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    random, what = Random(case["seed"]), case["what"]
    result = _check_text(what, random, case["in_data"]) if what in TEXTS else _check_file(what, random)
    return {f"{what}: {result}": 1}


def _expect_sentence(error: Exception) -> None:
    """Expect an error's text to be one line that says something, and no longer than a few of the terminal."""
    text = str(error)
    expect(text.strip() and "\n" not in text.strip() and len(text) < 1000, f"not one sentence: {error!r}")


def _refused(call: Callable[[], object]) -> bool:
    """Return whether a call raises one clear error; errors of other types pass through."""
    try:
        call()
    except ERRORS as error:
        _expect_sentence(error)
        return True
    return False


def _check_text(what: str, random: Random, in_data: bool) -> str:
    text = _text(what)
    if in_data:
        data = json.loads(text)
        _changed(data, random)
        damaged = json.dumps(data)
    else:
        damaged = _damaged(text.encode(), random).decode("utf-8", "replace")
    try:
        loaded = TEXTS[what].from_json(damaged)
    except ValueError as error:
        _expect_sentence(error)
        return "refused"
    _expect_contained(json.loads(damaged), json.loads(loaded.to_json()), what)
    for show in (str, repr, lambda each: each.table() if callable(getattr(each, "table", None)) else ""):
        show(loaded)
    plan = loaded if what == "Plan" else getattr(loaded, "plan", None)
    if plan is not None:
        _check_plan(plan)
    return "loaded"


def _check_plan(plan: Any) -> None:
    """Apply a plan to a model: all or nothing, and the same numbers."""
    own, expected = model(), model()
    strides = [each.stride() for each in own.parameters()]
    if _refused(lambda: nhwc.convert_(own, plan=plan).revert()):
        expect([each.stride() for each in own.parameters()] == strides, "a refused plan has changed the model")
    for each, other in zip(own.parameters(), expected.parameters()):
        expect(torch.equal(each, other), "a plan has changed the values")


def _expect_contained(given: Any, loaded: Any, where: str) -> None:
    """Expect what was loaded to say what the text says; it may also have defaults that the text does not have."""
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key, each in given.items():
            expect(key in loaded, f"{where}.{key} was lost")
            _expect_contained(each, loaded[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(loaded, list):
        expect(len(given) == len(loaded), f"{where} has {len(loaded)} values, not {len(given)}")
        for index, (each, other) in enumerate(zip(given, loaded)):
            _expect_contained(each, other, f"{where}[{index}]")
    else:
        same = given == loaded and (isinstance(given, bool) == isinstance(loaded, bool))
        expect(same or str(given).lower() == str(loaded).lower(), f"{where} is {loaded!r}, not {given!r}")


def _load(what: str, path: Path) -> list[Tensor]:
    """Return the tensors that PyTorch itself reads from a file."""
    if what == "archive":
        loaded: Any = torch.jit.load(path)
        return list(loaded.state_dict().values())
    if what == "program":
        return [*torch.export.load(path).state_dict.values()]
    content = torch.load(path, weights_only=what != "whole model")
    content = content.state_dict() if isinstance(content, nn.Module) else content
    return [each for each in tree_leaves(content) if isinstance(each, Tensor)]


def _check_file(what: str, random: Random) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "in.pt"), Path(folder, "out.pt")
        damaged = _damaged(_file(what), random)
        path.write_bytes(damaged)
        if _refused(lambda: nhwc.convert_saved(path, output, allow_pickle=what in ("whole model", "program"))):
            expect({each.name for each in path.parent.iterdir()} == {path.name}, "refused, and something was written")
            result = "refused"
        else:
            here, there = _load(what, path), _load(what, output)
            expect(len(here) == len(there), "tensors were lost")
            for each, other in zip(here, there):
                expect(
                    torch.equal(each, other) or each.isnan().any(), "other numbers than PyTorch reads from the input"
                )
            intact = [each for each in model().state_dict().values()]
            is_intact = len(here) == len(intact) and all(map(torch.equal, here, intact))
            result = "converted" if is_intact else "converted, damaged as PyTorch reads it"
        expect(path.read_bytes() == damaged, "the input has changed")
    return result
