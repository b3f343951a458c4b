"""Ratios, names and tables, of which reports are made."""

from collections.abc import Iterable

Point = dict


def ratio(point: Point, over: str, under: str, statistic: str = "median") -> float:
    """How many times longer the one job took than the other."""
    return point["times"][over][statistic] / point["times"][under][statistic]


def name(point: Point) -> str:
    shape = "x".join(map(str, point["shape"]))
    cast = f" to {point['to']}" if point["to"] else ""
    return f"{shape} {point['dtype']}{cast}{' back' if point['back'] else ''}"


def taps(point: Point) -> int:
    product = 1
    for size in point["shape"][2:]:
        product *= size
    return product


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def span(values: Iterable[float]) -> str:
    """The least and the greatest value, or the only one."""
    texts = sorted({f"{value:.2f}" for value in values}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
