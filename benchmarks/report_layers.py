"""The tables on layers and whole models in channels-last, from `layers-cpu.json` and `layouts-cpu.json`."""

from collections.abc import Callable, Iterable

from tables import NOT_MEASURED, at_least, at_most, spanned, table

Row = dict
GROUPS = {
    "group_norm": "group norm",
    "instance_norm": "instance norm",
    "batch_norm": "batch norm in training",
    "avg_pool3d": "3D pools",
    "adaptive_avg_pool3d": "3D pools",
    "adaptive_max_pool3d": "3D pools",
    "softmax": "softmax and log-softmax",
    "log_softmax": "softmax and log-softmax",
    "cross_entropy": "cross entropy",
    "gelu": "GELU",
    "pad": "circular padding",
    "interpolate": "nearest upsampling 3D",
    "1x1x1": "3D convolution 1x1x1",
    "1x3x3": "3D convolution of one tap along depth",
    "3x1x1": "3D convolution of one tap in the plane",
}
# Layers that were measured at a commit at which kernels computed them that no longer exist.
REPLACED_SINCE = {"fba2a95": ("softmax", "log_softmax", "cross_entropy", "lp_pool3d")}
COMPARED = {
    "over_contiguous": "over PyTorch's on contiguous",
    "stock_over_ours": "PyTorch's on channels-last over ours",
}
WAYS = {"contiguous": "contiguous", "stock_channels_last": "channels-last, PyTorch's", "ours": "ours"}
MODES = ("forward", "forward with backward")
WORTH_A_THREAD = 1.6
QUICK = "A quick run, for the form of the tables alone: its figures mean nothing."


def current(measured: dict) -> dict:
    """Return results without the rows of layers that are computed in another way since they were measured."""
    replaced = REPLACED_SINCE.get(measured["machine"]["commit"], ())
    kept = {
        name: [row for row in measured[name] if row["layer"] not in replaced]
        for name in ("results", "accuracy", "two_threads")
    }
    return {**measured, **kept}


def group(row: Row) -> str:
    """Return the group of a layer, as the bars name it."""
    return GROUPS[row["arguments"].split(", ")[-1] if row["layer"] == "conv3d" else row["layer"]]


def warning(measured: dict) -> str:
    """Return what precedes figures of a quick run."""
    return f"**{QUICK}**\n\n" if measured["quick"] else ""


def amx(measured: dict) -> str:
    return "with AMX" if measured["machine"]["AMX"] else "without AMX"


def cell(times: dict | None) -> str:
    return f"{times['min']:.2f}" if times else "raises"


def times_cell(value: float | None) -> str:
    return f"{value:.2f}" if value else ""


def gathered(rows: Iterable[Row], key: Callable[[Row], object]) -> dict:
    """Return the rows by a key, in the order in which the keys come."""
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def bar_title(row: Row, ratio: str) -> str:
    """Return the title of a bar, which all its rows share."""
    size = ""
    if row["layer"] == "group_norm" and row["dtype"] == "float32" and ratio == "over_contiguous":
        size = ", a sample within the second-level cache" if row["is_small"] else ", larger samples"
    return f"{group(row)} {row['dtype']}{size}, {row['mode']}: {COMPARED[ratio]}"


def layer_bars(measured: dict) -> list[list[str]]:
    points = [(row, ratio, limit) for row in measured["results"] for ratio, limit in row["bars"].items()]
    by_title: dict[tuple[str, str, float], list] = {}
    for row, ratio, limit in points:
        by_title.setdefault((bar_title(row, ratio), ratio, limit), []).append(row["ratios"][ratio])
    rows = [
        (at_most if ratio == "over_contiguous" else at_least)(title, limit, values)
        for (title, ratio, limit), values in by_title.items()
    ]
    for (layer, dtype), errors in gathered(measured["accuracy"], lambda row: (row["layer"], row["dtype"])).items():
        worst = [max(row["over_contiguous"].values()) for row in errors]
        title = f"{GROUPS[layer]} {dtype}: the largest error over that of PyTorch's on contiguous"
        rows.append(at_most(title, errors[0]["limit"], worst))
    gains = [row["gains"]["ours"] for row in measured["two_threads"] if row["gains"]["copy"] >= WORTH_A_THREAD]
    return [*rows, at_least("one thread over two, where a plain copy gains as much", WORTH_A_THREAD, gains)]


def model_bars(measured: dict) -> list[list[str]]:
    rows = []
    titles = {
        "preserved": "whole models where layers are replaced: gain over contiguous",
        "preserved_over_full": "whole models where layers are replaced: gain over weights and input alone",
    }
    for ratio, title in titles.items():
        chosen = [row for row in measured["results"] if ratio in row["bars"]]
        for limit, rows_of in gathered(chosen, lambda row, ratio=ratio: row["bars"][ratio]).items():
            values = [row["gains"]["preserved"] if ratio == "preserved" else row[ratio] for row in rows_of]
            names = sorted({f"{row['model']} {row['dtype']} {row['mode']}" for row in rows_of})
            special = f" ({', '.join(names)})" if ratio == "preserved" and limit > 1 else ""
            rows.append(at_least(title + special, limit, values))
    return rows


def bars(layers: dict, layouts: dict) -> str:
    head = [f"case, one thread, least times, {amx(layers)}", "bar", "measured", "met"]
    return warning(layers) + table(head, [*layer_bars(layers), *model_bars(layouts)])


def losses(measured: dict) -> str:
    """Return what each group of layers costs on channels-last over contiguous: PyTorch's, and ours."""
    rows = []
    for title, of_group in gathered(measured["results"], group).items():
        cells = []
        for dtype in ("float32", "bfloat16"):
            for mode in MODES:
                chosen = [row for row in of_group if (row["dtype"], row["mode"]) == (dtype, mode)]
                both = ("stock_over_contiguous", "over_contiguous")
                stock, ours = (ranged([row["ratios"][name] for row in chosen]) for name in both)
                cells.append(f"{stock}; **{ours}**")
        rows.append([title, *cells])
    return table(["layer", *(f"{dtype}, {mode}" for dtype in ("float32", "bfloat16") for mode in MODES)], rows)


def ranged(values: Iterable[float | None]) -> str:
    text = spanned(values)
    return "-" if text == NOT_MEASURED else text


def layers(measured: dict) -> str:
    """Return the table of all cases, in milliseconds."""
    key = ("layer", "arguments", "shape", "dtype")
    rows = []
    for of_case in gathered(measured["results"], lambda row: str([row[name] for name in key])).values():
        first = of_case[0]
        by_mode = {row["mode"]: row for row in of_case}
        cells = [f"{first['layer']}({first['arguments']})", "x".join(map(str, first["shape"])), first["dtype"]]
        for mode in MODES:
            cells += [cell(by_mode[mode]["times"][way]) for way in WAYS]
            cells += [times_cell(by_mode[mode]["ratios"]["over_contiguous"])]
        rows.append(cells)
    columns = [f"{mode}: {column}" for mode in MODES for column in (*(f"{way}, ms" for way in WAYS.values()), "ratio")]
    return warning(measured) + table(["layer", "input", "dtype", *columns], rows)


def accuracy(measured: dict) -> str:
    """Return the table of the largest errors of all shapes, with and without a corner at zero."""
    rows = []
    keys = ("layer", "dtype", "mean_over_deviation")
    for (layer, dtype, mean), of_mean in gathered(measured["accuracy"], lambda r: tuple(r[k] for k in keys)).items():
        worst = [max(row["errors"][way][name] for row in of_mean) for name in ("out", "dx") for way in WAYS]
        ratio = max(max(row["over_contiguous"].values()) for row in of_mean)
        rows.append([GROUPS[layer], dtype, f"{mean}", *(f"{value:.0e}" for value in worst), f"{ratio:.2f}"])
    head = ["layer", "dtype", "mean over deviation"]
    head += [f"{what}{way}" for what in ("output: ", "input's gradient: ") for way in WAYS.values()]
    return table([*head, "ours over contiguous at most, parameters' gradients included"], rows)


def threads(measured: dict) -> str:
    rows = [
        [f"{row['layer']}({row['arguments']})", "x".join(map(str, row["shape"])), row["dtype"], row["mode"]]
        + [times_cell(row["gains"][name]) for name in ("ours", "copy")]
        for row in measured["two_threads"]
    ]
    return table(["layer", "input", "dtype", "", "ours, one thread over two", "a plain copy"], rows)


def layouts(measured: dict) -> str:
    """Return the table of all models and layouts."""
    rows = []
    for row in measured["results"]:
        times, gains = row["times"], row["gains"]
        replaced = ", ".join(f"{number} {name}" for name, number in row["exchanged"].items())
        rows.append(
            [row["model"], str(row["shape"][0]), row["dtype"], row["mode"]]
            + [f"{times[layout]['min']:.1f}" for layout in ("contiguous", "preserved")]
            + [f"{gains[layout]:.2f}" for layout in ("weights", "full", "preserved")]
            + [f"{row['preserved_over_full']:.2f}", replaced or "nothing", f"{row['differences']['preserved']:.0e}"]
        )
    head = ["model", "batch", "dtype", "", "contiguous, ms", "preserved, ms", "gain: weights", "weights and input"]
    return warning(measured) + table([*head, "preserved", "preserved over full", "replaced", "difference"], rows)


def peers(measured: dict) -> str:
    """Return the table of the models that were compiled."""
    rows = []
    for row in (row for row in measured["results"] if row["compile_seconds"] or row["errors"]):
        taken, gains = row["compile_seconds"], row["gains"]
        rows.append([row["model"], row["dtype"], row["mode"], f"{gains['preserved']:.2f}"])
        for layout in ("compiled contiguous", "compiled preserved"):
            rows[-1].append(f"{gains[layout]:.2f} ({taken[layout]:.0f} s)" if layout in gains else "raises")
    if not rows:
        return "Nothing has been measured yet."
    head = ["model", "dtype", "", "gain: preserved", "compiled contiguous (its first call)"]
    return table([*head, "compiled preserved"], rows)


# What the README shows: models of several kinds, those that gain most and those that lose most among them.
SHOWN = {
    "dynunet3d": "nnU-Net's DynUNet, 3D (monai)",
    "segresnet3d": "SegResNet, 3D (monai)",
    "efficientnet_b0": "EfficientNet-B0 (transformers)",
    "resnet50": "ResNet-50 (transformers)",
    "unet2d_condition": "Stable Diffusion's UNet, a small one (diffusers)",
    "vae_kl": "Stable Diffusion's autoencoder (diffusers)",
}


def gains(measured: dict) -> str:
    """Return the README's table: the time of a step, contiguous and preserved."""
    kinds = [(dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("inference", "training")]
    by_kind = {(row["model"], row["dtype"], row["mode"]): row for row in measured["results"]}
    kinds = [kind for kind in kinds if any(key[1:] == kind for key in by_kind)]
    rows = []
    for model, shown in SHOWN.items():
        cells = []
        for kind in kinds:
            row = by_kind.get((model, *kind))
            before, after = ("contiguous", "preserved")
            cells.append(
                f"{row['times'][before]['min']:.0f} → {row['times'][after]['min']:.0f} ms, "
                f"**{row['gains'][after]:.2f}x** ({row['gains']['full']:.2f}x)"
                if row
                else ""
            )
        rows.append([shown, *cells])
    where = f"{measured['machine']['processor']} {amx(measured)}, torch {measured['machine']['environment']['torch']}"
    head = ["model", *(" ".join(kind) for kind in kinds)]
    note = (
        "Milliseconds contiguous → converted with `preserve=True`, and the gain, in brackets without replaced layers; "
        f"on one thread of an {where}. [Preserving](docs/preserving.md) has all models."
    )
    return f"{warning(measured)}{table(head, rows)}\n\n{note}"
