"""The figures on the conversion of weights, by `bench_weights.py` and `bench_models.py` on a CPU."""

import math
from collections.abc import Iterable

from tables import Row, at_least, at_most, markdown, ratio, ratios, span, table
from tables import bars as table_of_bars
from tables import shape as shape_of

LEAST_L2, MOST_L2 = 100 << 10, 640 << 10  # bytes of weights that a second-level cache holds


def name(point: Row) -> str:
    cast = f" to {point['to']}" if point["to"] else ""
    return f"{shape_of(point)} {point['dtype']}{cast}{' back' if point['back'] else ''}"


def taps(point: Row) -> int:
    return math.prod(point["shape"][2:])


def threes(points: Iterable[Row]) -> list[Row]:
    """Return 3x3 weights of many channels, converted to channels-last without a cast."""
    return [p for p in points if p["shape"][2:] == [3, 3] and p["shape"][1] >= 64 and not p["to"] and not p["back"]]


def both_ways(points: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Return each point together with its way back, if that was measured."""
    points = list(points)
    back = {name({**p, "back": False}): p for p in points if p["back"]}
    return [(p, back[name(p)]) for p in points if not p["back"] and name(p) in back]


def bars(weights: Row) -> str:
    copies = [p for p in weights["results"] if not p["to"]]
    casts = [p for p in weights["results"] if p["to"] in ("bfloat16", "float16") and not p["back"]]
    forward = threes(copies)
    small = [p for p in forward if LEAST_L2 <= p["bytes"] <= MOST_L2]
    lines: list[list[str]] = []

    def over_memcpy(case: str, limit: float, chosen: Iterable[Row]) -> None:
        lines.append(at_most(f"{case} over memcpy", limit, ratios(chosen, "ours", "memcpy")))

    def over_ours(case: str, limit: float, chosen: Iterable[Row]) -> None:
        lines.append(at_least(f"{case}, eager `copy_` over ours", limit, ratios(chosen, "eager_copy", "ours")))

    def of(dtype: str) -> list[Row]:
        return [p for p in small if p["dtype"] == dtype]

    for dtype, limit in (("float32", 1.45), ("bfloat16", 1.6), ("uint8", 1.85), ("float64", 1.25)):
        over_memcpy(f"L2-size 3x3 {dtype}, time", limit, of(dtype))
    other = [p for p in copies if p["dtype"] == "float32" and p["shape"][1] >= 64 and not p["back"]]
    other = [p for p in other if LEAST_L2 <= p["bytes"] <= MOST_L2]
    for ks, limit in (((2, 4), 1.1), ((25, 27), 1.6), ((49,), 1.8)):
        chosen = [p for p in other if taps(p) in ks]
        over_memcpy(f"L2-size K = {', '.join(map(str, ks))} float32, time", limit, chosen)
    for dtype, limit in (("float32", 5.0), ("bfloat16", 5.0), ("uint8", 8.5), ("float64", 3.0)):
        over_ours(f"L2-size 3x3 {dtype}", limit, of(dtype))
    middle = [p for p in forward if 2e6 <= p["bytes"] <= 10e6 and p["dtype"] in ("float32", "bfloat16")]
    over_ours("2 to 10 MB", 4.5, middle)
    large = [p for p in forward if p["bytes"] > 16e6]
    over_memcpy("more than 16 MB preallocated, time", 0.65, large)
    over_ours("more than 16 MB preallocated", 3.0, large)
    huge = ratios([p for p in forward if p["bytes"] > 32e6], "eager_clone", "ours_fresh")
    lines.append(at_least("more than 32 MB, eager `clone` over `convert_weight`", 2.5, huge))
    small_casts = [p for p in casts if LEAST_L2 <= p["bytes"] <= MOST_L2]
    lines.append(
        at_most(
            "L2-size cast of float32 to 16 bits, time over memcpy of the float32",
            1.0,
            ratios(small_casts, "ours", "memcpy"),
        )
    )
    over_memcpy("larger cast of float32 to 16 bits, time", 0.75, [p for p in casts if p["bytes"] > MOST_L2])
    in_one, in_two = (ratios(casts, f"eager_{steps}", "ours") for steps in ("one_step", "two_steps"))
    lines.append(at_least("casts, the faster of torch's two ways over ours", 4.0, map(min, in_one, in_two)))
    backs = [ratio(back, "ours", "memcpy") / ratio(p, "ours", "memcpy") for p, back in both_ways(copies) if p in small]
    lines.append(at_most("L2-size 3x3, back conversion over forward", 1.1, backs))
    return table_of_bars("case, one thread, medians", [*lines, bar_of_every_point(copies)])


def bar_of_every_point(copies: list[Row]) -> list[str]:
    """Return the bar that PyTorch's copy is never faster; of what takes no time, by no more than the noise."""
    values = ratios(copies, "eager_copy", "ours")
    slower = [p for p, value in zip(copies, values) if value < (1 / 1.1 if p["bytes"] < 16 << 10 else 1.0)]
    least, where = min(zip(values, copies), key=lambda pair: pair[0])
    case = f"every point, eager `copy_` over ours ({len(copies)} points; least: {name(where)})"
    return [case, "at least 1", f"{least:.2f} and more", f"no: {len(slower)} points" if slower else "yes"]


def sizes(weights: Row) -> str:
    return table(
        (row for row in threes(weights["results"]) if row["dtype"] in ("float32", "bfloat16")),
        "weight | MB | memcpy, us | ours / memcpy | eager `copy_` / ours"
        " | page faults: plain `clone` / memcpy | eager `clone` / `convert_weight`",
        "{name} | {bytes:.2fM} | {times[memcpy][median]:.0f} | {ours / memcpy:.2f} | {eager_copy / ours:.1f}"
        " | {plain_clone / memcpy:.1f} | {eager_clone / ours_fresh:.1f}",
        name=name,
    )


def large_filters(*levels: Row) -> str:
    lines = []
    for measured in levels:
        for pair in both_ways(measured["results"]):
            limit = 2.1 if pair[0]["dtype"] == "bfloat16" else 1.8
            case = f"{name(pair[0])}, `{measured['machine']['capability']}`"
            others = (span(ratios(pair, *jobs)) for jobs in (("in_place", "memcpy"), ("eager_copy", "ours")))
            lines.append([*at_most(case, limit, ratios(pair, "ours", "memcpy")), *others])
    head = ["weight, to channels-last and back; level", "bar", "copied / memcpy", "met"]
    return markdown([*head, "in place / memcpy", "eager `copy_` / copied"], lines)


def models(measured: Row) -> str:
    return table(
        measured["results"],
        "model | weights from | MB (share that moves) | memcpy, ms | `torch.nn.utils` | `module.to`"
        ' | ours, `storage="fresh"` | ours | `torch.nn.utils` / ours | its extra MB | our extra MB',
        "{model} | {source} | {bytes:.0fM} ({share:.0f} %) | {jobs[memcpy][ms]:.1f} | {jobs[stock][ms]:.1f}"
        " | {jobs[module.to][ms]:.1f} | {jobs[ours fresh][ms]:.1f} | {jobs[ours][ms]:.1f} | {gain:.1f}x"
        " | {jobs[stock][extra_bytes]:.1fM} | {jobs[ours][extra_bytes]:.1fM}",
        missing="raises",
        share=lambda row: 100 * row["moved_bytes"] / row["bytes"],
        gain=model_gain,
    )


def model_gain(row: Row) -> float:
    return row["jobs"]["stock"]["ms"] / row["jobs"]["ours"]["ms"]


def gain(measured: Row) -> str:
    """Return the gains of whole models as a sentence."""
    rows = measured["results"]
    by_model = ", ".join(f"{row['model']} {model_gain(row):.1f}x" for row in rows if row["source"] == "made")
    loaded = [model_gain(row) for row in rows if row["source"] in ("torch.load", "assign=True")]
    mapped = [model_gain(row) for row in rows if row["source"] == "from_pretrained"]
    return (
        f"On one thread of an {measured['machine']['processor']}, each in a fresh process, models convert faster "
        f"than with `torch.nn.utils`: {by_model}; after `torch.load`, by itself or "
        f"with `assign=True`, {min(loaded):.1f}x to {max(loaded):.1f}x; after `from_pretrained`, where new memory is "
        f"needed, {min(mapped):.1f}x to {max(mapped):.1f}x (medians)."
    )
