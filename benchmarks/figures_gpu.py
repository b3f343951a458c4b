"""The figures on GPUs, by the benchmarks with `--device cuda`."""

from collections.abc import Callable, Iterable, Sequence

from figures_weights import taps
from tables import Row, at_least, at_most, bars, grouped, markdown, ratio, ratios, span, table

LARGE = 16 << 20
TAPS_OF_THE_BARS = (9, 25, 27, 49)
OVER_COPY = {"float32": 0.9, "bfloat16": 0.9, "uint8": 0.75}
OVER_MODEL_COPY = {"ResNet-50": 1.3, "Stable Diffusion": 1.15}
Column = Callable[[Row], float | None]
Columns = dict[str, Column]
NOTHING = "Nothing has been measured yet."
WALL_JOBS = ("stock", "module.to", "ours one by one", "ours fresh", "ours", "ours, listed")


def weight_bars(points: Sequence[Row]) -> list[list[str]]:
    large = [p for p in points if p["bytes"] >= LARGE and taps(p) in TAPS_OF_THE_BARS]
    moved = [p for p in large if not p["to"]]
    casts = [p for p in large if p["to"] == "bfloat16"]
    text = "weights of 16 MB and more, K = 9, 25, 27, 49, {}: bandwidth over `copy_` in the same layout"
    return [
        *(
            at_least(text.format(dtype), limit, ratios([p for p in moved if p["dtype"] == dtype], "plain_copy", "ours"))
            for dtype, limit in OVER_COPY.items()
        ),
        at_least(
            "... float32 to bfloat16: bandwidth over `copy_` of the same bytes",
            0.85,
            ratios(casts, "plain_copy", "ours"),
        ),
        at_least("... eager `copy_` over ours", 5, ratios(moved, "eager_copy", "ours")),
        at_least("... eager `contiguous` over ours", 5, ratios(moved, "eager_contiguous", "ours_fresh")),
    ]


def model_bars(models: Sequence[Row]) -> list[list[str]]:
    lines = []
    for part, limit in OVER_MODEL_COPY.items():
        chosen = [m for m in models if part in m["model"]]
        for which, text in (("moved", "the weights that move, over a copy"), ("all", "all weights, over a copy")):
            values = ratios([m["device"][which] for m in chosen], "ours", "copy")
            lines.append(at_most(f"{part} in a captured graph, device time: {text}", limit, values))
    resnet = [m["wall"] for m in models if "ResNet-50" in m["model"]]
    for job, text in (("ours", "our converters"), ("ours, listed", "`convert_weights_` of the weights")):
        values = [wall["stock"]["median"] / wall[job]["median"] for wall in resnet]
        lines.append(at_least(f"ResNet-50, wall time with synchronisation: stock converters over {text}", 8, values))
    for job, text in (("convert_weights", "`convert_weights`"), ("ours", "in place"), ("ours fresh", "fresh")):
        lines.append(at_most(f"launches for a model, every model: {text}", 6, [launches(m, job) for m in models]))
    extra = [m["wall"]["ours, listed"]["extra_bytes"] for m in models]
    return [*lines, at_most("in place, every model: extra device memory, bytes", 0, extra)]


def launches(model: Row, job: str) -> int | None:
    """Return the number of kernels and copies."""
    counted = model["launches"][job]
    return counted and counted["kernels"] + counted["copies"]


def norm_bandwidth(row: Row) -> float | None:
    """Return the bandwidth of the bytes that our norm must move, over that of a copy, which moves two for each."""
    of_copy = ratio(row, "copy", "ours")
    return of_copy and of_copy * row["moves"] / 2


def norm_bars(layers: Sequence[Row]) -> list[list[str]]:
    large = [row for row in layers if row["bytes"] >= 64e6]
    round_trips = ratios(layers, "stock_channels_last", "ours")
    return [
        at_least("norms of 64 MB and more: bandwidth over a copy", 0.8, map(norm_bandwidth, large)),
        at_least("norms of any size: PyTorch's round trip through contiguous over ours", 1, round_trips),
    ]


def size_class(row: Row) -> str:
    return "16 MB and more" if row["bytes"] >= LARGE else "less"


def ranges(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]], columns: Columns, head: str) -> str:
    """Return a table with the range of each column over the rows of a key."""
    lines = [
        [*group, len(of_group), *(span(map(value, of_group), missing="") for value in columns.values())]
        for group, of_group in grouped(rows, key).items()
    ]
    return markdown([*head.split(" | "), *columns], lines)


def weights(points: Iterable[Row]) -> str:
    """Return the table of weights that become channels-last; TB/s are of bytes read and written."""
    columns: Columns = {
        "`copy_`, TB/s": speed("plain_copy"),
        "ours, TB/s": speed("ours"),
        "`copy_` / ours": over("plain_copy", "ours"),
        "eager `copy_` / ours": over("eager_copy", "ours"),
        "eager `contiguous` / `convert_weight`": over("eager_contiguous", "ours_fresh"),
        "eager cast, then `copy_` / ours": over("eager_two_steps", "ours"),
        "`torch.compile` of the clone / `convert_weight`": over("compiled_clone", "ours_fresh"),
    }
    moved = (point for point in points if not point["back"])
    return ranges(moved, lambda point: (dtypes(point), size_class(point)), columns, "dtype | a weight | weights")


def dtypes(point: Row) -> str:
    return f"{point['dtype']} to {point['to']}" if point["to"] else point["dtype"]


def speed(job: str) -> Column:
    def value(point: Row) -> float | None:
        return 2 * point["copied_bytes"] / 1e6 / point["times"][job]["median"] if job in point["times"] else None

    return value


def over(slower: str, faster: str) -> Column:
    return lambda row: ratio(row, slower, faster)


def models(measured: Iterable[Row]) -> str:
    return table(
        ({**row, **row["device"]} for row in measured),
        "model | dtype | MB | graph, what moves: ours / a copy | eager / ours | graph, all: ours / a copy"
        " | eager / ours | wall, ms: `torch.nn.utils` | `module.to` | ours one by one"
        ' | ours, `storage="fresh"` | ours | `convert_weights_` | its extra MB | our extra MB | launches',
        "{model} | {dtype} | {all[bytes]:.0fM} | {ours / copy in moved:.2f} | {eager / ours in moved:.2f}"
        " | {ours / copy in all:.2f} | {eager / ours in all:.2f} | {milliseconds}"
        " | {wall[stock][extra_bytes]:.1fM} | {wall[ours][extra_bytes]:.1fM} | {launched}",
        milliseconds=lambda row: " | ".join(
            f"{row['wall'][job]['median'] / 1e3:.2f}" if job in row["wall"] else "raises" for job in WALL_JOBS
        ),
        launched=lambda row: f"{launches(row, 'stock')} / {launches(row, 'ours')}",
    )


def layers(measured: Iterable[Row]) -> str:
    """Return the table of norms, without float16, which takes as long as bfloat16."""
    columns: Columns = {
        "bandwidth / `copy_`": norm_bandwidth,
        "PyTorch's round trip / ours": over("stock_channels_last", "ours"),
        "PyTorch on contiguous / ours": over("contiguous", "ours"),
    }
    shown = (row for row in measured if row["dtype"] != "float16")
    return ranges(
        shown,
        lambda row: (f"`{row['layer']}`", size_class(row), row["dtype"], row["mode"]),
        columns,
        "norm | an activation | dtype | pass | cases",
    )


def layouts(measured: Iterable[Row]) -> str:
    names = {"contiguous": "contiguous", "full": "channels-last", "preserved": "ours", "compiled": "compiled"}

    def figures(row: Row) -> str:
        times, extra = row["times"], row["extra_bytes"]
        return " | ".join(
            f"{times[name]['median']:.1f} ms ({ratio(row, 'contiguous', name):.2f}x), {extra[name] / 1e9:.2f} GB"
            if name in times
            else "fails"
            for name in names
        )

    head = " | ".join(["model, bfloat16 autocast", "input", "", *names.values()])
    return table(measured, head, "`{model}` | {shape} | {mode} | {figures}", figures=figures)


def origin(measured: Row) -> str:
    gpu, machine = measured["gpu"], measured["machine"]
    return (
        f"`{measured['command']}`: {gpu['name']}, driver {gpu['driver']}, CUDA {gpu['CUDA']}, torch "
        f"{machine['environment']['torch']}, commit {machine['commit']}."
    )


def whole_models(measured: Row) -> str:
    """Return the table of whole models, and where it comes from."""
    rows = measured["results"]
    return f"{origin(measured)}\n\n{layouts(rows)}" if rows else NOTHING


def section(*measured: Row) -> str:
    """Return the section of docs/measurements.md, from the results on weights, models and layers."""
    of_weights, of_models, of_layers = found = [each["results"] for each in measured]
    if not any(found):
        return NOTHING
    jobs = [*of_weights, *of_layers, *(each for m in of_models for each in m["device"].values())]
    failures = {f"Failed: {job}: {error}" for each in jobs for job, error in each["errors"].items()}
    parts = [
        *(origin(each) for each in measured if each["results"]),
        bars("case, medians", [*weight_bars(of_weights), *model_bars(of_models), *norm_bars(of_layers)]),
        *sorted(failures),
    ]
    tables = ((layers, of_layers), (models, of_models), (weights, of_weights))
    return "\n\n".join([*parts, *(make(results) for make, results in tables if results)])
