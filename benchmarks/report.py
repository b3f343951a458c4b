"""Puts the figures of the results into the documents: tables between marks.

    python benchmarks/report.py

The documents say nothing about speed that does not come from here.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import bench_collate
import bench_convolutions
import bench_overhead
import cuda_report
import profile_peers
import report_layers
import report_peers
import report_tune
from layout_models import MODES
from machine import RESULTS, ROOT
from tables import Point, at_least, at_most, name, ratio, spanned, table, taps

PERFORMANCE = ROOT / "docs/performance.md"
PRESERVING = ROOT / "docs/preserving.md"
DECIDING = ROOT / "docs/deciding.md"
HOW_IT_WORKS = ROOT / "docs/how-it-works.md"
INPUT_PIPELINES = ROOT / "docs/input-pipelines.md"
README = ROOT / "README.md"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}-cpu.json").read_text())


def commits(measured: dict) -> str:
    """Return at which commits results were taken: of rows that do not say it, that of the file."""
    last = measured["machine"]["commit"]
    rows = measured["results"]
    counted = Counter(row.get("commit", last) for row in rows)
    if len(counted) == 1:
        return f"commit {next(iter(counted))}"
    return "commits " + ", ".join(f"{commit} ({count} of {len(rows)} rows)" for commit, count in counted.most_common())


def machine(measured: dict) -> str:
    m = measured["machine"]
    caches = ", ".join(
        f"{level.split()[0]} {size}" for level, size in m["caches"].items() if "Instruction" not in level
    )
    bounds = f", held to {m['capability']}" if m.get("bounds") else ""
    return (
        f"{m['processor']}{bounds}, {m['cores']} cores, {caches} a core or shared; level `{m['capability']}`; "
        f"huge pages: {m['huge pages']}; torch {m['environment']['torch']}; {commits(measured)}."
    )


def is_l2_size(point: Point) -> bool:
    return 100 << 10 <= point["bytes"] <= 640 << 10


def threes(points: Iterable[Point]) -> list[Point]:
    """3x3 weights of many channels, converted to channels-last without a cast."""
    return [p for p in points if p["shape"][2:] == [3, 3] and p["shape"][1] >= 64 and not p["to"] and not p["back"]]


def both_ways(points: Iterable[Point]) -> list[tuple[Point, Point]]:
    """Return each point together with its way back, if that was measured."""
    points = list(points)
    back = {name({**p, "back": False}): p for p in points if p["back"]}
    return [(p, back[name(p)]) for p in points if not p["back"] and name(p) in back]


def bars(weights: dict) -> str:
    """Return the table of the bars for single weights."""
    points = weights["results"]
    copies = [p for p in points if not p["to"]]
    forward = threes(points)
    rows: list[list[str]] = []

    def over_memcpy(text: str, limit: float, chosen: Iterable[Point]) -> None:
        rows.append(at_most(text, limit, [ratio(p, "ours", "memcpy") for p in chosen]))

    def over_ours(text: str, limit: float, chosen: Iterable[Point], job: str, ours: str = "ours") -> None:
        rows.append(at_least(text, limit, [ratio(p, job, ours) for p in chosen]))

    for dtype, limit in (("float32", 1.45), ("bfloat16", 1.6), ("uint8", 1.85), ("float64", 1.25)):
        chosen = [p for p in forward if p["dtype"] == dtype and is_l2_size(p)]
        over_memcpy(f"L2-size 3x3 {dtype}, time over memcpy", limit, chosen)
    for ks, limit in (((2, 4), 1.1), ((25, 27), 1.6), ((49,), 1.8)):
        chosen = [
            p
            for p in copies
            if taps(p) in ks and p["dtype"] == "float32" and not p["back"] and is_l2_size(p) and p["shape"][1] >= 64
        ]
        over_memcpy(f"L2-size K = {', '.join(map(str, ks))} float32, time over memcpy", limit, chosen)
    for dtype, limit in (("float32", 5.0), ("bfloat16", 5.0), ("uint8", 8.5), ("float64", 3.0)):
        chosen = [p for p in forward if p["dtype"] == dtype and is_l2_size(p)]
        over_ours(f"L2-size 3x3 {dtype}, eager `copy_` over ours", limit, chosen, "eager_copy")
    middle = [p for p in forward if 2e6 <= p["bytes"] <= 10e6 and p["dtype"] in ("float32", "bfloat16")]
    over_ours("2 to 10 MB, eager `copy_` over ours", 4.5, middle, "eager_copy")
    large = [p for p in forward if p["bytes"] > 16e6]
    over_memcpy("more than 16 MB preallocated, time over memcpy", 0.65, large)
    over_ours("more than 16 MB preallocated, eager `copy_` over ours", 3.0, large, "eager_copy")
    huge = [p for p in forward if p["bytes"] > 32e6]
    over_ours("more than 32 MB, eager `clone` over `convert_weight`", 2.5, huge, "eager_clone", "ours_fresh")
    casts = [p for p in points if p["to"] in ("bfloat16", "float16") and not p["back"]]
    small_casts = [p for p in casts if is_l2_size(p)]
    over_memcpy("L2-size cast of float32 to 16 bits, time over memcpy of the float32", 1.0, small_casts)
    large_casts = [p for p in casts if p["bytes"] > 640 << 10]
    over_memcpy("larger cast of float32 to 16 bits, time over memcpy", 0.75, large_casts)
    for p in casts:
        times = p["times"]
        times["faster_eager"] = min(times["eager_one_step"], times["eager_two_steps"], key=lambda t: t["median"])
    over_ours("casts, the faster of torch's two ways over ours", 4.0, casts, "faster_eager")
    backs = [
        ratio(back, "ours", "memcpy") / ratio(p, "ours", "memcpy")
        for p, back in both_ways(copies)
        if p in forward and is_l2_size(p)
    ]
    rows.append(at_most("L2-size 3x3, back conversion over forward", 1.1, backs))
    slowest = [(ratio(p, "eager_copy", "ours"), p) for p in copies]
    least, where = min(slowest, key=lambda pair: pair[0])
    slower = [p for value, p in slowest if value < (1 / 1.1 if p["bytes"] < 16 << 10 else 1.0)]
    every = f"every point, eager `copy_` over ours ({len(copies)} points; least: {name(where)})"
    met = "yes" if not slower else f"no: {len(slower)} points"
    rows.append([every, "at least 1", f"{least:.2f} and more", met])
    return table(["case, one thread, medians", "bar", "measured", "met"], rows)


def sizes(weights: dict) -> str:
    rows = []
    for p in threes(weights["results"]):
        rows.append(
            [name(p), f"{p['bytes'] / 1e6:.2f}", f"{p['times']['memcpy']['median']:.0f}"]
            + [f"{ratio(p, 'ours', 'memcpy'):.2f}", f"{ratio(p, 'eager_copy', 'ours'):.1f}"]
            + [f"{ratio(p, 'plain_clone', 'memcpy'):.1f}", f"{ratio(p, 'eager_clone', 'ours_fresh'):.1f}"]
        )
    head = ["weight", "MB", "memcpy, us", "ours / memcpy", "eager `copy_` / ours"]
    return table(head + ["page faults: plain `clone` / memcpy", "eager `clone` / `convert_weight`"], rows)


def large_filters(*levels: dict) -> str:
    rows = []
    for measured in levels:
        for pair in both_ways(measured["results"]):
            limit = 2.1 if pair[0]["dtype"] == "bfloat16" else 1.8
            case = f"{name(pair[0])}, `{measured['machine']['capability']}`"
            in_place, eager = (
                spanned(ratio(p, *jobs) for p in pair) for jobs in (("in_place", "memcpy"), ("eager_copy", "ours"))
            )
            rows.append([*at_most(case, limit, [ratio(p, "ours", "memcpy") for p in pair]), in_place, eager])
    head = ["weight, to channels-last and back; level", "bar", "copied / memcpy", "met"]
    return table([*head, "in place / memcpy", "eager `copy_` / copied"], rows)


def models(measured: dict) -> str:
    rows = []
    for r in measured["results"]:
        jobs = r["jobs"]
        ms = {job: "raises" if each["ms"] is None else f"{each['ms']:.1f}" for job, each in jobs.items()}
        rows.append(
            [r["model"], r["source"], f"{r['bytes'] / 1e6:.0f} ({100 * r['moved_bytes'] / r['bytes']:.0f} %)"]
            + [ms[job] for job in ("memcpy", "stock", "module.to", "ours fresh", "ours")]
            + [f"{jobs['stock']['ms'] / jobs['ours']['ms']:.1f}x", f"{jobs['stock']['extra_bytes'] / 1e6:.1f}"]
            + [f"{jobs['ours']['extra_bytes'] / 1e6:.1f}"]
        )
    head = ["model", "weights from", "MB (share that moves)", "memcpy, ms", "`torch.nn.utils`", "`module.to`"]
    head += ['ours, `storage="fresh"`', "ours", "`torch.nn.utils` / ours", "its extra MB", "our extra MB"]
    return table(head, rows)


def gain(measured: dict) -> str:
    """Return the gains of whole models as a sentence."""
    gains = [(r["model"], r["source"], r["jobs"]["stock"]["ms"] / r["jobs"]["ours"]["ms"]) for r in measured["results"]]
    loaded = [value for _, source, value in gains if source in ("torch.load", "assign=True")]
    mapped = [value for _, source, value in gains if source == "from_pretrained"]
    by_model = ", ".join(f"{model} {value:.1f}x" for model, source, value in gains if source == "made")
    return (
        f"On one thread of an {measured['machine']['processor']}, each in a fresh process, models convert faster "
        f"than with `torch.nn.utils`: {by_model}; after `torch.load`, by itself or "
        f"with `assign=True`, {min(loaded):.1f}x to {max(loaded):.1f}x; after `from_pretrained`, where new memory is "
        f"needed, {min(mapped):.1f}x to {max(mapped):.1f}x (medians)."
    )


def documents() -> dict[Path, dict[str, str]]:
    """Return the figures between the marks of each document."""
    weights, of_models, overhead = load("weights"), load("models"), load("overhead")
    large = load("weights-large-avx2"), load("weights-large")
    layers, layouts = load("layers"), [load("layouts"), load("layouts-avx2")]
    tuned, collated = load("tune"), load("collate")
    passes = load("passes"), load("passes-avx2")
    peers, causes = load("peers"), load("peers-profile")
    return {
        README: {
            "gains": report_layers.gains(*layouts),
            "gpu": cuda_report.gains(RESULTS),
            "peers": report_peers.compared(peers),
        },
        PRESERVING: {
            "preserving machine": machine(layers),
            "losses": report_layers.losses(layers),
            "preserving bars": report_layers.bars(layers, *layouts),
        },
        DECIDING: {
            "tuning machine": machine(tuned),
            "tuning bars": report_tune.bars(tuned),
            "decisions": report_tune.decisions(tuned),
        },
        HOW_IT_WORKS: {"causes machine": machine(causes), "causes": profile_peers.as_table(causes)},
        INPUT_PIPELINES: {"batching machine": machine(collated), "batches": bench_collate.as_table(collated)},
        PERFORMANCE: {
            "gain": gain(of_models),
            "machine": "\n\n".join(
                f"{what}: {machine(measured)}"
                for what, measured in (
                    ("The bars, and one weight", weights),
                    ("Filters larger than the first cache", large[1]),
                    ("The conversion of whole models", of_models),
                    ("Whole models, and half precision", layouts[0]),
                    ("The same held to AVX2", layouts[1]),
                    ("The passes of convolutions", passes[0]),
                    ("The same held to AVX2", passes[1]),
                    ("The call of a replaced layer", overhead),
                    ("The other ways to run a model", peers),
                )
            ),
            "layouts": report_layers.layouts(*layouts),
            "halves": report_layers.halves(*layouts),
            "conditions of peers": report_peers.conditions(peers),
            **{f"peers in {mode}": report_peers.speeds(peers, mode) for mode in MODES},
            "costs of peers": report_peers.costs(peers),
            "failures of peers": report_peers.failures(peers),
            "faults of peers": report_peers.faults(peers),
            "facts on peers": report_peers.facts(),
            "passes": bench_convolutions.as_table(*passes),
            "overhead": bench_overhead.as_table(overhead),
            "calls": bench_overhead.as_table_of_calls(overhead),
            "bars": bars(weights),
            "sizes": sizes(weights),
            "large filters": large_filters(*large),
            "models": models(of_models),
            "cuda": cuda_report.section(RESULTS),
        },
    }


def main() -> None:
    for document, sections in documents().items():
        text = document.read_text()
        for mark, figures in sections.items():
            pattern = re.compile(rf"(<!-- figures: {mark} -->\n).*?(<!-- end of figures -->)", re.DOTALL)
            assert pattern.search(text), (document, mark)
            text = pattern.sub(lambda match, figures=figures: f"{match[1]}{figures}\n{match[2]}", text)
        document.write_text(text)


if __name__ == "__main__":
    main()
