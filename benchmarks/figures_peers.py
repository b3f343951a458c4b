"""The figures on the other ways to run a model, by `bench_peers.py` and `profile_peers.py`."""

from collections.abc import Callable

from layout_models import MODES
from peers import CONTIGUOUS, FAULTS, PEERS
from tables import Row, grouped, interval, markdown, shape, span, table

# A fault is one of a way if it is that far from float64, and that much farther than the contiguous model.
FAR, FARTHER = 1e-4, 10
NOTHING = "-"


def conditions(measured: Row) -> str:
    """Return the versions of the other libraries, and what was left to choose."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return f"With {versions}; `tune` had {measured['budget']:g} seconds."


def models_of(measured: Row, mode: str) -> dict[str, dict[str, Row]]:
    """Return the rows of a mode by model and way, without the faults."""
    rows = [row for row in measured["results"] if row["mode"] == mode and row["model"] not in FAULTS]
    by_model = grouped(rows, lambda row: row["model"])
    return {model: {row["peer"]: row for row in of_model} for model, of_model in by_model.items()}


def ways(measured: Row, mode: str) -> list[str]:
    """Return the ways of a mode that were measured, but for the contiguous one."""
    found = {peer for by_peer in models_of(measured, mode).values() for peer in by_peer}
    return [name for name in PEERS if name in found and name != CONTIGUOUS]


def best(rows: dict[str, Row]) -> str:
    """Return the fastest way; one that was not timed has no speed."""
    return max(rows, key=lambda peer: rows[peer].get("over", {"ratio": 0})["ratio"])


def speeds(measured: Row, mode: str) -> str:
    """Return the table of the speed-ups over the contiguous model, with their intervals."""

    def cell(by_peer: dict[str, Row], peer: str) -> str:
        row = by_peer.get(peer, {"failure": NOTHING})
        if "over" not in row:
            return row["failure"].split(":")[0]
        ratio, limits = interval(row["over"]).split(" ", 1)
        return f"**{ratio}** {limits}" if peer == best(by_peer) else f"{ratio} {limits}"

    names = ways(measured, mode)
    lines = []
    for model, by_peer in models_of(measured, mode).items():
        base = by_peer[CONTIGUOUS]
        cells = (cell(by_peer, name) for name in names)
        lines.append([model, shape(base), f"{base['times']['median']:.0f}", *cells])
    return markdown(["model", "input", "contiguous, ms", *names], lines)


def costs(measured: Row) -> str:
    """Return the table of the seconds until the first result, and of the memory until then and in later calls."""
    rows = []
    for mode in MODES:
        for name in [CONTIGUOUS, *ways(measured, mode)]:
            found = [by_peer[name] for by_peer in models_of(measured, mode).values() if name in by_peer]
            done = [row for row in found if "over" in row]
            if done:
                rows.append({"way": name, "mode": mode, "models": f"{len(done)} of {len(found)}", "done": done})

    def spanned(key: str, form: str, unit: float = 1) -> Callable[[Row], str]:
        return lambda row: span((each[key] / unit for each in row["done"]), form)

    def farthest(what: str) -> Callable[[Row], str]:
        def of(row: Row) -> str:
            values = [each["differences"][what] for each in row["done"] if what in each["differences"]]
            return f"{max(values):.0e}" if values else NOTHING

        return of

    return table(
        rows,
        "way |  | models | seconds to the first result | MB until then | MB in later calls"
        " | output off float64, at most | gradients",
        "{way} | {mode} | {models} | {seconds} | {preparing} | {running} | {output} | {gradients}",
        seconds=spanned("seconds", ".1f"),
        preparing=spanned("preparing_bytes", ".0f", 1e6),
        running=spanned("running_bytes", ".0f", 1e6),
        output=farthest("output"),
        gradients=farthest("gradients"),
    )


def is_wrong(row: Row, base: Row | None) -> bool:
    """Return whether a way computes a fault wrong, or dies of it."""
    bases = (base or {}).get("differences", {})
    return "failure" in row or not all(
        error <= max(FAR, FARTHER * bases.get(what, 0)) for what, error in row["differences"].items()
    )


def of_faults(measured: Row) -> list[dict[str, Row]]:
    """Return the rows of each fault and mode by their ways."""
    rows = [row for row in measured["results"] if row["model"] in FAULTS]
    by_case = grouped(rows, lambda row: (row["model"], row["mode"]))
    return [{row["peer"]: row for row in of_case} for of_case in by_case.values()]


def faults(measured: Row) -> str:
    """Return the table of the faults of PyTorch, with the error of each way."""

    def cell(by_peer: dict[str, Row], peer: str) -> str:
        row = by_peer.get(peer)
        if row is None:
            return NOTHING
        errors = "; ".join(f"{error:.0e}" for error in row.get("differences", {}).values())
        text = row["failure"].split(":")[0] if "failure" in row else errors
        return f"**{text}**" if is_wrong(row, by_peer.get(CONTIGUOUS)) else text

    cases = of_faults(measured)
    names = [name for name in PEERS if any(name in by_peer for by_peer in cases)]
    lines = []
    for by_peer in cases:
        first = next(iter(by_peer.values()))
        lines.append([first["model"], first["mode"], *(cell(by_peer, name) for name in names)])
    return markdown(["layers", "", *names], lines)


def causes(measured: Row) -> str:
    """Return the table of the milliseconds of a call by cause."""
    names = measured["results"][0]["causes"]
    return table(
        measured["results"],
        " | ".join(["model | ", *names, "together, ms"]),
        " | ".join(["{model} | {peer}", *(f"{{causes[{name}]:.1f}}" for name in names), "{together:.0f}"]),
        together=lambda row: sum(row["causes"].values()),
    )
