"""The tables on the other ways to run a model, from `peers-cpu.json`."""

from collections.abc import Iterable
from typing import NamedTuple

from layout_models import MODES
from peers import CONTIGUOUS, FAULTS, PEERS
from report_layers import gathered, warning
from report_tune import mean
from tables import span, table

from torch_nhwc.rendering import several

Row = dict
# A fault is one of a way if it is that far from float64, and that much farther than the contiguous model.
FAR, FARTHER = 1e-4, 10
NOTHING = "-"


class Way(NamedTuple):
    """What the documents name as one way: its variants, the one first whose figures are shown, and facts on it."""

    variants: list[str]
    converts: str
    skips: str
    optimizers: str
    refuses: str
    report: str
    undo: str


GRAPH_BREAKS, UNCHANGED = "code that breaks the graph, without `fullgraph=True`", "the model is unchanged"
NO_FUNCTIONS, REFUSED = "functions that are no layers", "refused, with the reason and what to do"
EXPORTED, NO_CHECK = "a copy, which it exports", "no check"
WAYS = {
    "`model.to(memory_format=...)`, `torch.nn.utils`": Way(
        ["model.to", "torch.nn.utils"],
        "all parameters and buffers of one rank; raises if there are two; `torch.nn.utils` convolutions of one rank",
        "weights that are computed, layers that lose the format, optimizer state; `torch.nn.utils` gradients, too",
        *("step wrong, silently", NO_CHECK, "no", "no"),
    ),
    "`torch.compile`": Way(
        [name for name in PEERS if name.startswith("compile")],
        "code that it traces",
        *(GRAPH_BREAKS, "step right", "rules of its own", "logs", UNCHANGED),
    ),
    "OpenVINO": Way(
        ["OpenVINO"],
        EXPORTED,
        "nothing: what it cannot convert raises; it warns of branches",
        *(NOTHING, NOTHING, "no", UNCHANGED),
    ),
    "ONNX Runtime": Way(
        ["ONNX Runtime"],
        EXPORTED,
        "nothing: what it cannot export raises",
        *(NOTHING, NOTHING, "of the export", UNCHANGED),
    ),
    "`torch_nhwc.convert_`": Way(
        ["ours"],
        "convolution weights, 2D and 3D, with gradients and optimizer state, and layers that lose the format",
        *(NO_FUNCTIONS, "step right", REFUSED, "yes", "exact"),
    ),
    "`torch_nhwc.tune`, then `convert_`": Way(
        ["ours by tune"],
        "of these what it measured to be the fastest",
        *(NO_FUNCTIONS, "step right", REFUSED, "yes", "exact"),
    ),
    "`convert_`, then `torch.compile`": Way(
        ["ours, compiled"],
        "the same, and code that is traced",
        f"the same, and {GRAPH_BREAKS}",
        *("step right", "refused, the same", "yes", "exact, of the model"),
    ),
}


def conditions(measured: dict) -> str:
    """Return the versions of the other libraries, and what was left to choose."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return f"With {versions}; `tune` had {measured['budget']:g} seconds."


def models_of(measured: dict, mode: str) -> dict[str, dict[str, Row]]:
    """Return the rows of a mode by model and way, without the faults."""
    rows = [row for row in measured["results"] if row["mode"] == mode and row["model"] not in FAULTS]
    return {
        model: {row["peer"]: row for row in of_model}
        for model, of_model in gathered(rows, lambda row: row["model"]).items()
    }


def speed(row: Row | None) -> float | None:
    """Return how many times as fast as the contiguous model a way is, if it was timed."""
    return row["over"]["ratio"] if row and "over" in row else None


def cell(row: Row | None, is_best: bool) -> str:
    if row is None:
        return NOTHING
    if "over" not in row:
        return row["failure"].split(":")[0]
    over = row["over"]
    ratio = f"{over['ratio']:.2f}"
    return f"{f'**{ratio}**' if is_best else ratio} ({over['low']:.2f} to {over['high']:.2f})"


def ways(measured: dict, mode: str) -> list[str]:
    """Return the ways of a mode that were measured, but for the contiguous one."""
    found = {row["peer"] for row in measured["results"] if row["mode"] == mode and row["model"] not in FAULTS}
    return [name for name in PEERS if name in found and name != CONTIGUOUS]


def best(rows: dict[str, Row]) -> str:
    return max(rows, key=lambda peer: speed(rows[peer]) or 0)


def speeds(measured: dict, mode: str) -> str:
    """Return the table of the speed-ups over the contiguous model, with their intervals."""
    rows = []
    for model, by_peer in models_of(measured, mode).items():
        base = by_peer[CONTIGUOUS]
        cells = [cell(by_peer.get(name), name == best(by_peer)) for name in ways(measured, mode)]
        rows.append([model, "x".join(map(str, base["shape"])), f"{base['times']['median']:.0f}", *cells])
    return warning(measured) + table(["model", "input", "contiguous, ms", *ways(measured, mode)], rows)


def costs(measured: dict) -> str:
    """Return the table of the seconds until the first result, and of the memory until then and in later calls."""
    rows = []
    for mode in MODES:
        for name in [CONTIGUOUS, *ways(measured, mode)]:
            found = [by_peer[name] for by_peer in models_of(measured, mode).values() if name in by_peer]
            done = [row for row in found if "over" in row]
            if not done:
                continue
            cells = [ranged((row["seconds"] for row in done), ".1f")]
            cells += [ranged((row[s] / 1e6 for row in done), ".0f") for s in ("preparing_bytes", "running_bytes")]
            cells += [farthest(done, what) for what in ("output", "gradients")]
            rows.append([name, mode, f"{len(done)} of {len(found)}", *cells])
    head = ["way", "", "models", "seconds to the first result", "MB until then", "MB in later calls"]
    return warning(measured) + table([*head, "output off float64, at most", "gradients"], rows)


def ranged(values: Iterable[float], form: str) -> str:
    least, *_, most = sorted([*values] * 2)
    return f"{least:{form}} to {most:{form}}" if f"{least:{form}}" != f"{most:{form}}" else f"{least:{form}}"


def farthest(rows: list[Row], what: str) -> str:
    values = [row["differences"][what] for row in rows if what in row["differences"]]
    return f"{max(values):.0e}" if values else NOTHING


def failures(measured: dict) -> str:
    """Return the table of the ways that failed, with the reason."""
    rows = [[row["model"], row["mode"], row["peer"], row["failure"]] for row in measured["results"] if "failure" in row]
    return table(["model", "", "way", "reason"], rows) if rows else "Every way ran every model."


def is_wrong(row: Row, base: Row | None) -> bool:
    """Return whether a way computes a fault wrong, or dies of it."""
    if "failure" in row:
        return True

    def is_far(what: str, error: float) -> bool:
        bases = base["differences"] if base and "differences" in base else {}
        return not error <= max(FAR, FARTHER * bases.get(what, 0))

    return any(is_far(what, error) for what, error in row["differences"].items())


def faults(measured: dict) -> str:
    """Return the table of the faults of PyTorch, with the error of each way."""
    rows = []
    of_faults = [row for row in measured["results"] if row["model"] in FAULTS]
    names = [name for name in PEERS if any(row["peer"] == name for row in of_faults)]
    for (fault, mode), found in gathered(of_faults, lambda row: (row["model"], row["mode"])).items():
        by_peer = {row["peer"]: row for row in found}
        cells = [fault_cell(by_peer.get(name), by_peer.get(CONTIGUOUS)) for name in names]
        rows.append([fault, mode, *cells])
    return table(["layers", "", *names], rows)


def fault_cell(row: Row | None, base: Row | None) -> str:
    if row is None:
        return NOTHING
    if "failure" in row:
        return f"**{row['failure'].split(':')[0]}**"
    text = "; ".join(f"{error:.0e}" for error in row["differences"].values())
    return f"**{text}**" if is_wrong(row, base) else text


def compared(measured: dict) -> str:
    """Return the README's table: figures of each way, then what no figure says."""
    rows = [
        [name, *(speeds_of(measured, mode, way.variants[0]) for mode in MODES)]
        + [firsts(measured, way.variants), seconds_of(measured, way.variants[0]), wrong_of(measured, way.variants)]
        + [way.skips, way.report, way.undo]
        for name, way in WAYS.items()
    ]
    head = ["", *MODES, "fastest of all in", "seconds to the first result", "wrong where PyTorch has faults"]
    return warning(measured) + table([*head, "skips without a word", "report", "undo"], rows)


def facts() -> str:
    """Return the table of what no figure says."""
    head = ["", "converts", "skips without a word", "fused CPU optimizers with state then"]
    head += ["models in DDP or FSDP, quantized models", "report", "undo"]
    return table(head, [[name, *way[1:]] for name, way in WAYS.items()])


def speeds_of(measured: dict, mode: str, way: str) -> str:
    """Return the mean and the span of a way over the models."""
    found = [speed(by_peer.get(way)) for by_peer in models_of(measured, mode).values()]
    values = [each for each in found if each]
    return f"**{mean(values):.2f}** ({span(values)}; {several(len(values), 'model')})" if values else NOTHING


def firsts(measured: dict, names: list[str]) -> str:
    """Return in which models some of these ways is the fastest of all."""
    found = [
        f"{model} ({mode})"
        for mode in MODES
        for model, by_peer in models_of(measured, mode).items()
        if best(by_peer) in names
    ]
    return ", ".join(found) or NOTHING


def seconds_of(measured: dict, way: str) -> str:
    rows = [row for row in measured["results"] if row["peer"] == way and "over" in row]
    return ranged((row["seconds"] for row in rows), ".1f") if rows else NOTHING


def wrong_of(measured: dict, names: list[str]) -> str:
    """Return how many of the faults these ways have in some mode."""
    of_faults = [row for row in measured["results"] if row["model"] in FAULTS]
    bases = {(row["model"], row["mode"]): row for row in of_faults if row["peer"] == CONTIGUOUS}
    rows = [row for row in of_faults if row["peer"] in names]
    wrong = {row["model"] for row in rows if is_wrong(row, bases.get((row["model"], row["mode"])))}
    total = len({row["model"] for row in rows})
    return f"{len(wrong)} of {total}" if total else NOTHING
