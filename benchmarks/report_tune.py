"""The tables on what `tune` decides, from `tune-cpu.json`."""

import math
from collections.abc import Iterable

from report_layers import gathered, warning
from tables import table

LEAST = 0.97
BUDGET = 60


def cell(over: dict | None) -> str:
    return "" if over is None else f"{over['ratio']:.2f} ({over['low']:.2f} to {over['high']:.2f})"


def level_of(measured: dict) -> int:
    """Return the level of the intervals; results that do not say it were taken with 95 %."""
    return measured.get("level", 95)


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def decisions(measured: dict) -> str:
    """Return the table of decisions, with their speed over each policy."""
    policies = list(dict.fromkeys(policy for row in measured["results"] for policy in row["over"]))
    rows = [
        [row["model"], row["dtype"], row["mode"], row["choice"], f"{row['seconds']:.0f}"]
        + [cell(row["over"].get(policy)) for policy in policies]
        for row in measured["results"]
    ]
    head = ["model", "dtype", "mode", "decision", "seconds"]
    columns = [f"over {policy} ({level_of(measured)} % interval)" for policy in policies]
    return warning(measured) + table([*head, *columns], rows)


def bars(measured: dict) -> str:
    """Return the table of the bars for decisions."""
    results = measured["results"]
    below = [row for row in results if row["over"][row["best"]]["high"] < LEAST]
    names = ", ".join(f"{row['model']} {row['dtype']} {row['mode']}" for row in below)
    rows = [
        [
            f"{len(results)} cases: {level_of(measured)} % intervals over the best policy, wholly below {LEAST}",
            *("none", names or "none", "no" if below else "yes"),
        ]
    ]
    by_policy = gathered(
        [(policy, over["ratio"]) for row in results for policy, over in row["over"].items()], lambda pair: pair[0]
    )
    for policy, pairs in by_policy.items():
        value = mean(ratio for _, ratio in pairs)
        title = f"geometric mean of the speed over {policy}, {len(pairs)} cases"
        rows.append([title, "at least 1", f"{value:.3f}", "yes" if value >= 1 else "no"])
    longest = max(row["seconds"] for row in results)
    met = "yes" if longest <= 1.1 * BUDGET else "no"
    rows.append(["seconds that a decision took", f"{BUDGET}", f"{longest:.0f} and less", met])
    return warning(measured) + table(["case, one thread", "bar", "measured", "met"], rows)
