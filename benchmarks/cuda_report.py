"""The section on GPUs, from the results whose names end in `-cuda.json`: the bars, and the figures for them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tables import Point, at_least, at_most, name, ratio, spanned, table, taps

LARGE = 16 << 20
TAPS_OF_THE_BARS = (9, 25, 27, 49)
OVER_COPY = {"float32": 0.9, "bfloat16": 0.9, "uint8": 0.75}
OVER_MODEL_COPY = {"ResNet-50": 1.3, "Stable Diffusion": 1.15}


def load(folder: Path, which: str) -> dict:
    """Return what a script measured; no results if it did not run."""
    file = folder / f"{which}-cuda.json"
    return json.loads(file.read_text()) if file.exists() else {"results": []}


def over(point: Point, longer: str, shorter: str) -> float | None:
    """Return the ratio of two jobs, or `None` if one of them failed."""
    return ratio(point, longer, shorter) if {longer, shorter} <= point["times"].keys() else None


def weight_bars(points: Sequence[Point]) -> list[list[str]]:
    large = [p for p in points if p["bytes"] >= LARGE and taps(p) in TAPS_OF_THE_BARS]
    moved = [p for p in large if not p["to"]]
    casts = [over(p, "plain_copy", "ours") for p in large if p["to"] == "bfloat16"]
    return [
        *(
            at_least(
                f"weights of 16 MB and more, K = 9, 25, 27, 49, {dtype}: bandwidth over `copy_` in the same layout",
                limit,
                [over(p, "plain_copy", "ours") for p in moved if p["dtype"] == dtype],
            )
            for dtype, limit in OVER_COPY.items()
        ),
        at_least("... float32 to bfloat16: bandwidth over `copy_` of the same bytes", 0.85, casts),
        at_least("... eager `copy_` over ours", 5, [over(p, "eager_copy", "ours") for p in moved]),
        at_least("... eager `contiguous` over ours", 5, [over(p, "eager_contiguous", "ours_fresh") for p in moved]),
    ]


def model_bars(models: Sequence[Point]) -> list[list[str]]:
    rows = []
    for part, limit in OVER_MODEL_COPY.items():
        chosen = [m for m in models if part in m["model"]]
        for which, text in (("moved", "the weights that move, over a copy"), ("all", "all weights, over a copy")):
            values = [over(m["device"][which], "ours", "copy") for m in chosen]
            rows.append(at_most(f"{part} in a captured graph, device time: {text}", limit, values))
    resnet = [m["wall"] for m in models if "ResNet-50" in m["model"]]
    for job, text in (("ours", "our converters"), ("ours, listed", "`convert_weights_` of the weights")):
        values = [wall["stock"]["median"] / wall[job]["median"] for wall in resnet]
        rows.append(at_least(f"ResNet-50, wall time with synchronisation: stock converters over {text}", 8, values))
    for job, text in (("convert_weights", "`convert_weights`"), ("ours", "in place"), ("ours fresh", "fresh")):
        rows.append(at_most(f"launches for a model, every model: {text}", 6, [launches(m, job) for m in models]))
    extra = [m["wall"]["ours, listed"]["extra_bytes"] for m in models]
    return [*rows, at_most("in place, every model: extra device memory, bytes", 0, extra)]


def launches(model: Point, job: str) -> int | None:
    """Return the number of kernels and copies."""
    counted = model["launches"][job]
    return counted and counted["kernels"] + counted["copies"]


def norm_bandwidth(row: Point) -> float | None:
    """Return the bandwidth of the bytes that our norm must move, over that of a copy, which moves two for each."""
    of_copy = over(row, "copy", "ours")
    return of_copy and of_copy * row["moves"] / 2


def norm_bars(layers: Sequence[Point]) -> list[list[str]]:
    large = [row for row in layers if row["bytes"] >= 64e6]
    round_trips = [over(row, "stock_channels_last", "ours") for row in layers]
    return [
        at_least("norms of 64 MB and more: bandwidth over a copy", 0.8, map(norm_bandwidth, large)),
        at_least("norms of any size: PyTorch's round trip through contiguous over ours", 1, round_trips),
    ]


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def speed(point: Point, job: str) -> float | None:
    """Return the TB/s of bytes read and written."""
    return 2 * point["copied_bytes"] / 1e6 / point["times"][job]["median"] if job in point["times"] else None


def weights(points: Sequence[Point]) -> str:
    """Return the table of weights that become channels-last."""
    rows = []
    for p in points:
        if p["back"]:
            continue
        values = [speed(p, "plain_copy"), speed(p, "ours"), over(p, "plain_copy", "ours")]
        values += [over(p, "eager_copy", "ours"), over(p, "eager_contiguous", "ours_fresh")]
        values += [over(p, "eager_two_steps", "ours"), over(p, "compiled_clone", "ours_fresh")]
        rows.append([name(p), f"{p['bytes'] / 1e6:.1f}", *map(cell, values)])
    head = ["weight", "MB", "`copy_`, TB/s", "ours, TB/s", "`copy_` / ours"]
    head += ["eager `copy_` / ours", "eager `contiguous` / `convert_weight`", "eager cast, then `copy_` / ours"]
    return table(head + ["`torch.compile` of the clone / `convert_weight`"], rows)


def models(measured: Sequence[Point]) -> str:
    rows = []
    for m in measured:
        device, wall = m["device"], m["wall"]
        ratios = [
            over(device[which], *jobs) if which in device else None
            for which in ("moved", "all")
            for jobs in (("ours", "copy"), ("eager", "ours"))
        ]
        jobs = ("stock", "module.to", "ours one by one", "ours fresh", "ours", "ours, listed")
        rows.append(
            [m["model"], m["dtype"], f"{device['all']['bytes'] / 1e6:.0f}"]
            + [cell(value) for value in ratios]
            + [f"{wall[job]['median'] / 1e3:.2f}" if job in wall else "raises" for job in jobs]
            + [f"{wall[job]['extra_bytes'] / 1e6:.1f}" for job in ("stock", "ours")]
            + [f"{launches(m, 'stock')} / {launches(m, 'ours')}"]
        )
    head = ["model", "dtype", "MB", "graph, what moves: ours / a copy", "eager / ours", "graph, all: ours / a copy"]
    head += ["eager / ours", "wall, ms: `torch.nn.utils`", "`module.to`", "ours one by one", 'ours, `storage="fresh"`']
    return table([*head, "ours", "`convert_weights_`", "its extra MB", "our extra MB", "launches"], rows)


def layers(measured: Sequence[Point]) -> str:
    """Return the table of norms, without float16, which takes as long as bfloat16."""
    rows = []
    for row in measured:
        if row["dtype"] == "float16":
            continue
        values = [norm_bandwidth(row), over(row, "stock_channels_last", "ours"), over(row, "contiguous", "ours")]
        shape, ours = "x".join(map(str, row["shape"])), row["times"].get("ours")
        rows.append(
            [f"`{row['layer']}`, {row['arguments']}", shape, row["dtype"], row["mode"], f"{row['bytes'] / 1e6:.1f}"]
            + [f"{ours['median']:.0f}" if ours else "fails", *map(cell, values)]
        )
    head = ["norm", "shape", "dtype", "pass", "MB", "ours, us", "bandwidth / `copy_`", "PyTorch's round trip / ours"]
    return table([*head, "PyTorch on contiguous / ours"], rows)


def layouts(measured: Sequence[Point]) -> str:
    names = {"contiguous": "contiguous", "full": "channels-last", "preserved": "ours", "compiled": "compiled"}
    rows = []
    for row in measured:
        contiguous = row["times"]["contiguous"]["median"]
        cells = [
            f"{times['median']:.1f} ms ({contiguous / times['median']:.2f}x), {row['extra_bytes'][layout] / 1e9:.2f} GB"
            if (times := row["times"].get(layout))
            else "fails"
            for layout in names
        ]
        rows.append([f"`{row['model']}`", "x".join(map(str, row["shape"])), row["mode"], *cells])
    return table(["model, bfloat16 autocast", "input", "", *names.values()], rows)


def gains(folder: Path) -> str:
    """Return the gains of whole models as a sentence."""
    measured = load(folder, "layouts")
    over: dict[str, list[float]] = {}
    for row in measured["results"]:
        ms = {layout: times["median"] for layout, times in row["times"].items()}
        for layout in ("preserved", "full", "compiled"):
            over.setdefault(layout, []).append(ms["contiguous"] / ms[layout])
    ours, plain, compiled = (f"{spanned(values)} times" for values in over.values())
    models = ", ".join(dict.fromkeys(f"`{row['model']}`" for row in measured["results"]))
    on = f"{measured['gpu']['name']}, torch {measured['machine']['environment']['torch']}, bfloat16 autocast"
    return (
        f"On a GPU ({on}), inference and training of {models}: converted **{ours}** as fast as contiguous, plain "
        f"channels-last {plain}, `torch.compile` of the contiguous model {compiled}. "
        "[Details](docs/performance.md#on-a-gpu)."
    )


def origin(measured: dict) -> str:
    gpu, machine = measured["gpu"], measured["machine"]
    return (
        f"`{measured['command']}`: {gpu['name']}, driver {gpu['driver']}, CUDA {gpu['CUDA']}, torch "
        f"{machine['environment']['torch']}, commit {machine['commit']}."
    )


def failures(files: dict[str, dict]) -> set[str]:
    """Return the texts of all errors."""
    measured = files["weights"]["results"] + [each for m in files["models"]["results"] for each in m["device"].values()]
    measured += files["layers"]["results"] + files["layouts"]["results"]
    return {f"{job}: {error}" for each in measured for job, error in each["errors"].items()}


def section(folder: Path) -> str:
    """Return the section of docs/performance.md."""
    files = {which: load(folder, which) for which in ("weights", "models", "layers", "layouts")}
    results = {which: measured["results"] for which, measured in files.items()}
    if not any(results.values()):
        return "Nothing has been measured yet."
    bars = [*weight_bars(results["weights"]), *model_bars(results["models"]), *norm_bars(results["layers"])]
    parts = [origin(measured) for measured in files.values() if measured["results"]]
    parts += [table(["case, medians", "bar", "measured", "met"], bars)]
    parts += [f"Failed: {error}" for error in sorted(failures(files))]
    tables = {"layouts": layouts, "layers": layers, "models": models, "weights": weights}
    parts += [make(results[which]) for which, make in tables.items() if results[which]]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(section(Path(__file__).parent / "results"))
