"""What tables of figures are made of: lines, ratios, and bars with their verdicts."""

import math
import operator
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]
Values = Iterable[float | None]  # None where a job failed
NOT_MEASURED = "not measured"
SIGNS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with these cells."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def commits(measured: Row) -> str:
    """Return at which commits results were taken: of rows that do not say it, that of the file."""
    rows = measured["results"]
    counted = Counter(row.get("commit", measured["machine"]["commit"]) for row in rows)
    if len(counted) == 1:
        return f"commit {next(iter(counted))}"
    return "commits " + ", ".join(f"{commit} ({count} of {len(rows)} rows)" for commit, count in counted.most_common())


def shape(row: Row) -> str:
    return "x".join(map(str, row["shape"]))


def interval(over: Row) -> str:
    """Return a ratio with its interval."""
    return f"{over['ratio']:.2f} ({over['low']:.2f} to {over['high']:.2f})"


class Line(string.Formatter):
    """What fills the line of a table: `{a / b}` is the ratio of two jobs, `{a / b in c}` that of a part of the row.

    Sizes of a shape and ratios with their intervals have a text of their own, and numbers may be in units of a million.
    """

    def __init__(self, missing: str, computed: Mapping[str, Callable[[Row], object]]) -> None:
        self.missing, self.computed = missing, computed

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        jobs, _, part = field_name.partition(" in ")
        over, _, under = jobs.partition(" / ")
        if under:
            row = kwargs.get(part) if part else kwargs
            value = ratio(row, over, under) if row else None
            return "" if value is None else value, field_name
        try:
            if field_name in self.computed:
                return self.computed[field_name](kwargs), field_name
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return self.missing
        if isinstance(value, list):
            return shape({"shape": value})
        if isinstance(value, dict):
            return interval(value)
        if isinstance(value, str):
            return value
        if format_spec.endswith("M"):
            value, format_spec = value / 1e6, format_spec[:-1]
        return format(value, format_spec)


def table(rows: Iterable[Row], head: str, line: str, missing: str = "", **computed: Callable[[Row], object]) -> str:
    """Return a table with a line for each row: what the row has fills the line, and what is computed of it.

    What is missing in a row, as the time of a job that failed, has a text of its own.
    """
    text = Line(missing, computed)
    return markdown(head.split(" | "), (text.vformat(line, (), row).split(" | ") for row in rows))


def ratio(row: Row, over: str, under: str, statistic: str = "median") -> float | None:
    """Return how many times longer the one job took than the other, `None` if one of them failed."""
    times = row["times"]
    return times[over][statistic] / times[under][statistic] if {over, under} <= times.keys() else None


def ratios(rows: Iterable[Row], over: str, under: str) -> list[float | None]:
    return [ratio(row, over, under) for row in rows]


def span(values: Values, form: str = ".2f", missing: str = NOT_MEASURED) -> str:
    """Return the least and the greatest value, or the only one."""
    texts = [f"{value:{form}}" for value in sorted(value for value in values if value is not None)]
    if not texts:
        return missing
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def grouped(rows: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list[Any]]:
    """Return the rows by a key, in the order in which the keys come."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def bar(case: str, sign: str, limit: float, values: Values) -> list[str]:
    """Return a line of a table of bars: the case, the limit, what was measured, and whether that is enough."""
    values = list(values)
    met = [value is not None and SIGNS[sign](value, limit) for value in values]
    measured = span(values)
    verdict = "yes" if all(met) else "in part" if any(met) else "no"
    return [case, f"{sign} {limit:g}", measured, measured if measured == NOT_MEASURED else verdict]


def at_least(case: str, limit: float, values: Values) -> list[str]:
    return bar(case, "at least", limit, values)


def at_most(case: str, limit: float, values: Values) -> list[str]:
    return bar(case, "at most", limit, values)


def bars(title: str, lines: Iterable[Iterable[str]]) -> str:
    """Return a table of bars."""
    return markdown([title, "bar", "measured", "met"], lines)
