"""The tables on layers and whole models in channels-last, from `layers-cpu.json` and `layouts*-cpu.json`."""

import math
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
}
COMPARED = {
    "over_contiguous": "over PyTorch's on contiguous",
    "stock_over_ours": "PyTorch's on channels-last over ours",
}
MODES = ("forward", "forward with backward")
LEAST_GAIN = 0.98
QUICK = "A quick run, for the form of the tables alone: its figures mean nothing."


def group(row: Row) -> str:
    """Return the group of a layer, as the bars name it."""
    return GROUPS[row["layer"]]


def warning(measured: dict) -> str:
    """Return what precedes figures of a quick run."""
    return f"**{QUICK}**\n\n" if measured["quick"] else ""


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
    return rows


def model_bars(measured: dict) -> list[list[str]]:
    """Return the rows of a machine's whole models, in float32."""
    ways = {"contiguous": "gain over contiguous", "full": "gain over channels-last without replaced layers"}
    return [
        at_least(
            f"whole models float32, {kind(measured)}: {title}",
            LEAST_GAIN,
            [gain(row, over) for row in float32(measured)],
        )
        for over, title in ways.items()
    ]


def bars(layers: dict, *layouts: dict) -> str:
    head = ["case, one thread, least times", "bar", "measured", "met"]
    of_models = [row for measured in layouts for row in model_bars(measured)]
    return warning(layers) + table(head, [*layer_bars(layers), *of_models])


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


def kind(measured: dict) -> str:
    """Return the instructions that a machine was measured with."""
    return (
        "AVX-512"
        if measured["machine"]["capability"].startswith("avx512")
        else measured["machine"]["capability"].upper()
    )


def float32(measured: dict) -> list[Row]:
    return [row for row in measured["results"] if row["dtype"] == "float32"]


def gain(row: Row, over: str = "contiguous", of: str = "preserved") -> float:
    return row["times"][over]["min"] / row["times"][of]["min"]


def milliseconds(row: Row, layout: str) -> str:
    return f"{row['times'][layout]['min']:.0f}" if layout in row["times"] else ""


def layouts(*machines: dict) -> str:
    """Return the table of the models in float32, one machine next to the other."""
    rows = []
    by_case = [{(row["model"], row["mode"]): row for row in float32(measured)} for measured in machines]
    for (model, mode), first in by_case[0].items():
        found = [of_machine[model, mode] for of_machine in by_case if (model, mode) in of_machine]
        cells = [model, "x".join(map(str, first["shape"])), mode]
        for row in found:
            times = " → ".join(milliseconds(row, layout) for layout in ("contiguous", "preserved"))
            cells += [times, f"**{gain(row):.2f}x**", f"{gain(row, of='full'):.2f}x"]
        rows.append([*cells, f"{max(row['differences']['preserved'] for row in found):.0e}"])
    head = ["model", "input", ""]
    for measured in machines:
        head += [f"{kind(measured)}: ms", "gain", "without replaced layers"]
    return warning(machines[0]) + table([*head, "difference"], rows)


def halves(*machines: dict) -> str:
    """Return the table of the models in bfloat16."""
    columns = ("contiguous float32", "preserved float32", "contiguous", "preserved")
    rows = [
        [row["model"], row["mode"], kind(measured) + (" with AMX" if measured["machine"]["AMX"] else "")]
        + [milliseconds(row, layout) for layout in columns]
        + [f"{gain(row, 'preserved', 'preserved float32'):.2f}"]
        for measured in machines
        for row in measured["results"]
        if row["dtype"] == "bfloat16"
    ]
    head = ["model", "", "instructions", "contiguous, float32, ms", "converted, float32", "contiguous, bfloat16"]
    return table([*head, "converted, bfloat16", "bfloat16 over float32"], rows)


# What the README shows: models of several kinds, in the step that people convert them for.
SHOWN = {
    ("mednext3d_k5", "training"): "MedNeXt with kernels of 5, 3D (monai)",
    ("segresnet3d", "inference"): "SegResNet, 3D (monai)",
    ("plain_conv_unet3d", "training"): "nnU-Net's PlainConvUNet, 3D",
    ("efficientnet_b0", "training"): "EfficientNet-B0 (transformers)",
    ("resnet50", "inference"): "ResNet-50 (transformers)",
}
# What gains less than this on one of the CPUs is left contiguous: so much is noise.
WORTH = 1.03


def gains(*machines: dict) -> str:
    """Return the README's table, the largest gain first, and last the model of all that gains least."""
    by_case = [{(row["model"], row["mode"]): row for row in float32(measured)} for measured in machines]
    found = {
        case: [of_machine[case] for of_machine in by_case]
        for case in by_case[0]
        if all(case in of_machine for of_machine in by_case)
    }
    order = sorted(found, key=lambda case: -math.prod(map(gain, found[case])))
    least = min((case for case in found if case not in SHOWN), key=lambda case: min(map(gain, found[case])))
    rows = []
    for case in [*(case for case in order if case in SHOWN), least]:
        cells = [
            f"{milliseconds(row, 'contiguous')} → {milliseconds(row, 'preserved')} ms, **{gain(row):.2f}x** "
            f"({gain(row, of='full'):.2f}x)"
            for row in found[case]
        ]
        slow = [kind(measured) for measured, row in zip(machines, found[case], strict=True) if gain(row) < WORTH]
        answer = "leave it contiguous" if slow else "convert it"
        if 0 < len(slow) < len(machines):
            answer += f" with {slow[0]}"
        rows.append([SHOWN.get(case, f"`{case[0]}`, the least gain of all"), case[1], *cells, answer])
    cpus = [
        f"{measured['machine']['processor']}{' held to' if measured['machine']['bounds'] else ','} {kind(measured)}"
        for measured in machines
    ]
    return warning(machines[0]) + table(["model", "", *cpus, "what to do"], rows)
