"""The tables on the other ways to run a model, from `peers-cpu.json`."""

from collections.abc import Iterable

from peers import CONTIGUOUS, FAULTS, PEERS
from report_layers import gathered, warning
from report_tune import mean
from tables import span, table

from torch_nhwc.rendering import several

Row = dict
# A fault is one of a way if it is that far from float64, and that much farther than the contiguous model.
FAR, FARTHER = 1e-4, 10
NOTHING = "-"
# The columns of the README: the way that each shows first, then its variants.
COLUMNS = {
    "`model.to(memory_format=...)`": ["model.to"],
    "`torch.nn.utils` converters": ["torch.nn.utils"],
    "`torch.compile`": [name for name in PEERS if name.startswith("compile")],
    "OpenVINO": ["OpenVINO"],
    "ONNX Runtime": ["ONNX Runtime"],
    "`torch_nhwc.convert_`": ["ours", "ours by tune"],
    "`convert_`, then `torch.compile`": ["ours, compiled"],
}
THE_SAME, EXPORTED = "the same", "a copy, which it exports"
# What no figure says, in the order of the columns.
FACTS = {
    "converts": [
        "every 4D, or every 5D parameter and buffer; raises if there are both",
        "convolution weights of one rank",
        "code that it traces",
        EXPORTED,
        EXPORTED,
        "convolution weights, 2D and 3D, and layers that lose the format",
        "the same, and code that it traces",
    ],
    "skips without a word": [
        "weights that are computed, layers that lose the format, optimizer state",
        f"{THE_SAME}, and gradients",
        "code that breaks the graph, without `fullgraph=True`",
        "nothing: it warns of branches",
        "nothing: what it cannot export raises",
        "functions that are no layers",
        "the same, and code that breaks the graph",
    ],
    "fused CPU optimizers with state then": [
        *("step wrong, silently", "step wrong, silently", "step right", NOTHING, NOTHING, "step right", "step right")
    ],
    "models in DDP or FSDP, quantized models": [
        "no check",
        "no check",
        "rules of its own",
        NOTHING,
        NOTHING,
        "refused, with the reason and what to do",
        THE_SAME,
    ],
    "report; undo": [
        "no; no",
        "no; no",
        "logs; the model is unchanged",
        "no; the model is unchanged",
        "of the export; the model is unchanged",
        "yes; yes, exactly",
        "yes; yes, of the model",
    ],
}


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
    for mode in ("inference", "training"):
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
        [f"{mode}, times as fast as contiguous", *(speeds_of(measured, mode, names[0]) for names in COLUMNS.values())]
        for mode in ("inference", "training")
    ]
    rows.append(["fastest of all in", *(firsts(measured, names) for names in COLUMNS.values())])
    rows.append(["seconds to the first result", *(seconds_of(measured, names[0]) for names in COLUMNS.values())])
    rows.append(["wrong where PyTorch has faults", *(wrong_of(measured, names) for names in COLUMNS.values())])
    rows += [[fact, *answers] for fact, answers in FACTS.items()]
    return warning(measured) + table(["", *COLUMNS], rows)


def speeds_of(measured: dict, mode: str, way: str) -> str:
    """Return the mean and the span of a way over the models."""
    found = [speed(by_peer.get(way)) for by_peer in models_of(measured, mode).values()]
    values = [each for each in found if each]
    return f"**{mean(values):.2f}** ({span(values)}; {several(len(values), 'model')})" if values else NOTHING


def firsts(measured: dict, names: list[str]) -> str:
    """Return in which models some of these ways is the fastest of all."""
    found = [
        f"{model} ({mode})"
        for mode in ("inference", "training")
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
