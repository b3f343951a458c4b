"""The figures on GPUs, by the benchmarks with `--device cuda`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from figures_weights import taps
from tables import Row, at_least, at_most, bars, commits, grouped, markdown, ratio, ratios, span, table

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
    alone = [row for row in layers if row["layer"] in ("group_norm", "instance_norm") and not activation(row)]
    large = [row for row in alone if row["bytes"] >= 64e6]
    round_trips = ratios(alone, "stock_channels_last", "ours")
    batch = [row for row in layers if row["layer"] == "batch_norm" and not activation(row) and row["bytes"] >= LARGE]
    return [
        at_least("norms of 64 MB and more: bandwidth over a copy", 0.8, map(norm_bandwidth, large)),
        at_least("norms of any size: PyTorch's round trip through contiguous over ours", 1, round_trips),
        *(
            at_least(
                f"batch norm in bfloat16 of 16 MB and more, {axes}D: PyTorch's over ours",
                limit,
                ratios([row for row in batch if len(row["shape"]) == axes + 2], "stock_channels_last", "ours"),
            )
            for axes, limit in ((2, 1.1), (3, 2))
        ),
    ]


def activation(row: Row) -> str:
    """Return the activation after a norm, or nothing."""
    return next((name for name in ("leaky_relu", "relu", "silu") if name in row["arguments"]), "")


SIZES = ("16 MB and more", "less")


def size_class(row: Row) -> str:
    return SIZES[0] if row["bytes"] >= LARGE else SIZES[1]


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
    moved = (
        point for point in points if not point["back"] and not {point["dtype"], point["to"]} & {"float16", "float64"}
    )
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
    """Return the table of norms, without float16, which takes as long as bfloat16, and small ones alone."""
    columns: Columns = {
        "bandwidth / `copy_`": norm_bandwidth,
        "PyTorch's round trip / ours": over("stock_channels_last", "ours"),
        "PyTorch on contiguous / ours": over("contiguous", "ours"),
    }
    small = ("group_norm", "instance_norm")
    shown = (
        row
        for row in measured
        if row["dtype"] != "float16"
        and (size_class(row) == SIZES[0] or (row["layer"] in small and not activation(row)))
    )
    return ranges(
        shown,
        lambda row: (
            "any, and an activation" if activation(row) else f"`{row['layer']}`",
            size_class(row),
            row["mode"],
        ),
        columns,
        "norm | of | pass | cases",
    )


def layouts(measured: Iterable[Row]) -> str:
    names = {"contiguous": "contiguous", "full": "channels-last", "preserved": "ours", "compiled": "compiled"}
    names |= {"preserved, compiled": "ours, compiled"}

    def figure(row: Row, name: str) -> str:
        if name not in row["times"]:
            return "fails" if name in row["errors"] else ""
        of = f", {row['compiled_commit']}" if name == "compiled" and "compiled_commit" in row else ""
        speed = ratio(row, "contiguous", name)
        return f"{row['times'][name]['median']:.1f} ms ({speed:.2f}x), {row['extra_bytes'][name] / 1e9:.2f} GB{of}"

    def figures(row: Row) -> str:
        return " | ".join(figure(row, name) for name in names)

    head = " | ".join(["model, bfloat16 autocast", "input", "", *names.values()])
    return table(measured, head, "`{model}` | {shape} | {mode} | {figures}", figures=figures)


def operators(measured: Iterable[Row]) -> str:
    """Return the table of the other operators that have kernels of ours, in bfloat16."""
    ways = {"stock_channels_last": "PyTorch / ours", "contiguous": "contiguous / ours"}
    columns: Columns = {
        f"{mode}: {text}": partial(of_mode, mode, way) for mode in ("forward", "backward") for way, text in ways.items()
    }
    columns |= {f"{mode}: ours / a copy": partial(over_copy, mode) for mode in ("forward", "backward")}
    return ranges(
        (row for row in measured if "ours" in row["times"]),
        lambda row: (f"`{row['layer']}`", kind_of(row), f"{len(row['shape']) - 2}D"),
        columns,
        "operator |  |  | passes",
    )


def kind_of(row: Row) -> str:
    """Return what rows of the table have in common."""
    if row["layer"] == "pad":
        return "reflect, replicate, circular"
    return "depthwise 3 to 7" if "depthwise" in row["arguments"] else row["arguments"].removeprefix("2, ").strip('"')


def of_mode(mode: str, way: str, row: Row) -> float | None:
    return ratio(row, way, "ours") if row["mode"] == mode else None


def over_copy(mode: str, row: Row) -> float | None:
    return ratio(row, "ours", "copy") if row["mode"] == mode else None


def origin(measured: Row) -> str:
    gpu, machine = measured["gpu"], measured["machine"]
    return (
        f"`{measured['command']}`: {gpu['name']}, driver {gpu['driver']}, CUDA {gpu['CUDA']}, torch "
        f"{machine['environment']['torch']}, {commits(measured)}."
    )


def whole_models(measured: Row) -> str:
    """Return the table of whole models, and where it comes from."""
    rows = measured["results"]
    return f"{origin(measured)}\n\n{layouts(rows)}" if rows else NOTHING


def section(*measured: Row) -> str:
    """Return the section of docs/measurements.md, from the results on weights, models, layers and operators."""
    of_weights, of_models, of_layers, of_operators = found = [each["results"] for each in measured]
    if not any(found):
        return NOTHING
    jobs = [*of_weights, *of_layers, *of_operators, *(each for m in of_models for each in m["device"].values())]
    of_whole = model_bars(of_models) if of_models else []
    failures = {f"Failed: {job}: {error}" for each in jobs for job, error in each["errors"].items()}
    parts = [
        *(origin(each) for each in measured if each["results"]),
        bars("case, medians", [*weight_bars(of_weights), *of_whole, *norm_bars(of_layers)]),
        *sorted(failures),
    ]
    tables = ((layers, of_layers), (operators, of_operators), (models, of_models), (weights, of_weights))
    return "\n\n".join([*parts, *(make(results) for make, results in tables if results)])
