"""Ratios, names, bars and tables, of which reports are made."""

import math
from collections.abc import Callable, Iterable, Sequence

Point = dict
Values = Iterable[float | None]  # None where a job failed
NOT_MEASURED = "not measured"


def ratio(point: Point, over: str, under: str, statistic: str = "median") -> float:
    """Return how many times longer the one job took than the other."""
    return point["times"][over][statistic] / point["times"][under][statistic]


def name(point: Point) -> str:
    shape = "x".join(map(str, point["shape"]))
    cast = f" to {point['to']}" if point["to"] else ""
    return f"{shape} {point['dtype']}{cast}{' back' if point['back'] else ''}"


def taps(point: Point) -> int:
    return math.prod(point["shape"][2:])


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def span(values: Iterable[float]) -> str:
    """Return the least and the greatest value, or the only one."""
    texts = sorted({f"{value:.2f}" for value in values}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def verdict(met: Sequence[bool]) -> str:
    return "yes" if all(met) else "in part" if any(met) else "no"


def spanned(values: Values) -> str:
    measured = [value for value in values if value is not None]
    return span(measured) if measured else NOT_MEASURED


def bar(text: str, sign: str, limit: float, values: Values, is_met: Callable[[float], bool]) -> list[str]:
    """Return a row: the case, the limit, what was measured, and whether that is enough."""
    values = list(values)
    met = [value is not None and is_met(value) for value in values]
    measured = spanned(values)
    return [text, f"{sign} {limit:g}", measured, measured if measured == NOT_MEASURED else verdict(met)]


def at_least(text: str, limit: float, values: Values) -> list[str]:
    return bar(text, "at least", limit, values, lambda value: value >= limit)


def at_most(text: str, limit: float, values: Values) -> list[str]:
    return bar(text, "at most", limit, values, lambda value: value <= limit)
