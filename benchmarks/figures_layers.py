"""The figures on layers, calls, batches and whole models in channels-last, on a CPU."""

import itertools
from collections.abc import Callable

from tables import Row, at_least, bar, grouped, markdown, mean, ratio, shape, span, table
from tables import bars as table_of_bars

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
    "normalize": "RMS norm over channels, with SiLU",
}
# How a ratio is named in a bar, and what it must be.
COMPARED = {
    "over_contiguous": ("over PyTorch's on contiguous", "at most"),
    "stock_over_ours": ("PyTorch's on channels-last over ours", "at least"),
}
DTYPES = ("float32", "bfloat16")
MODES = ("forward", "forward with backward")
STEPS = ("inference", "training")
PASSES = ("forward", "input gradient", "weight gradient")
MOST_OVER_READING = 1.4
RESULTS_OF_CALL = ("output", "input gradient", "weight gradient")
LEAST_GAIN = 0.98
LEAST_OF_TUNE, BUDGET_OF_TUNE = 0.97, 60
# What the README shows: what people do with models of several kinds.
SHOWN = {
    ("segresnet3d", "training"): "train SegResNet of MONAI, 3D",
    ("plain_conv_unet3d", "training"): "train PlainConvUNet of nnU-Net, 3D",
    ("vae_kl", "inference"): "run an autoencoder of diffusers",
    ("resnet50", "training"): "train ResNet-50",
}
SHOWN_ON_A_GPU = ("dynunet3d", "training"), "train DynUNet of MONAI, 3D, in bfloat16"
# How a call's figure is written, by what its bar is for.
TEXTS = {"more": "{:+.1f} us", "times": "{:.2f}x", "replaced": "{:.0f} us"}
Case = tuple[str, str]


def instructions(measured: Row) -> str:
    """Return the instructions that a machine was measured with."""
    capability: str = measured["machine"]["capability"]
    return "AVX-512" if capability.startswith("avx512") else capability.upper()


# Single layers


def group(row: Row) -> str:
    """Return the group of a layer, as the bars name it."""
    return GROUPS[row["layer"]]


def bar_title(row: Row, which: str) -> str:
    """Return the title of a bar, which all its rows share."""
    size = ""
    if row["layer"] == "group_norm" and row["dtype"] == "float32" and which == "over_contiguous":
        size = ", a sample within the second-level cache" if row["is_small"] else ", larger samples"
    return f"{group(row)} {row['dtype']}{size}: {COMPARED[which][0]}"


def bars(layers: Row, *layouts: Row) -> str:
    """Return the bars of single layers, and those of whole models in float32 on each machine."""
    points = [(row, which, limit) for row in layers["results"] for which, limit in row["bars"].items()]
    of_layers = []
    for (title, which), of_title in grouped(points, lambda point: (bar_title(*point[:2]), point[1])).items():
        cells = [title]
        for mode in MODES:
            chosen = [(row["ratios"][which], limit) for row, _, limit in of_title if row["mode"] == mode]
            if not chosen:
                cells += [""] * 3
                continue
            values, limits = zip(*chosen)
            (limit,) = set(limits)
            cells += bar(title, COMPARED[which][1], limit, values)[1:]
        of_layers.append(cells)
    lines = []
    ways = {"contiguous": "gain over contiguous", "full": "gain over channels-last without replaced layers"}
    for measured, (over, title) in itertools.product(layouts, ways.items()):
        case = f"whole models float32, {instructions(measured)}: {title}"
        lines.append(at_least(case, LEAST_GAIN, [gain(row, over) for row in by_case(measured).values()]))
    head = ["layer, least times", *itertools.chain(*([f"{mode}: bar", "measured", "met"] for mode in MODES))]
    return markdown(head, of_layers) + "\n\n" + table_of_bars("case, one thread, least times", lines)


def losses(measured: Row) -> str:
    """Return what each group of layers costs on channels-last over contiguous: PyTorch's, and ours."""

    def cell(of_group: list[Row], dtype: str, mode: str) -> str:
        chosen = [row["ratios"] for row in of_group if (row["dtype"], row["mode"]) == (dtype, mode)]
        stock, ours = (
            span((each[which] for each in chosen), missing="-")
            for which in ("stock_over_contiguous", "over_contiguous")
        )
        return f"{stock}; **{ours}**"

    columns = list(itertools.product(DTYPES, MODES))
    lines = [
        [title, *(cell(of_group, *column) for column in columns)]
        for title, of_group in grouped(measured["results"], group).items()
    ]
    return markdown(["layer", *map(", ".join, columns)], lines)


def passes(*machines: Row) -> str:
    """Return what the passes gain that our kernels compute, for each kind of layer, pass and machine."""
    columns = [
        (measured, dtype)
        for measured in machines
        for dtype in DTYPES
        if any(row["dtype"] == dtype for row in measured["results"])
    ]

    def cell(case: Case, measured: Row, dtype: str) -> str:
        found = [row for row in measured["results"] if (row["kind"], row["pass"], row["dtype"]) == (*case, dtype)]
        ours = [row for row in found if row["way"] == "winograd" or row["way"].startswith("kernels")]
        gains = (span(row[f"over {layout}"] for row in ours) for layout in ("channels-last", "contiguous"))
        return f"{len(ours)} of {len(found)}: {'; '.join(gains)}" if ours else "PyTorch's"

    kinds = dict.fromkeys(row["kind"] for row in machines[0]["results"])
    lines = [[*case, *(cell(case, *column) for column in columns)] for case in itertools.product(kinds, PASSES)]
    head = ["layers", "pass", *(f"{instructions(measured)}, {dtype}" for measured, dtype in columns)]
    return markdown(head, (line for line in lines if {*line[2:]} != {"PyTorch's"}))


def errors(*machines: Row) -> str:
    """Return the errors over those of PyTorch on contiguous memory, the span over the kinds of inputs."""

    def case(row: Row) -> str:
        return ", ".join(filter(None, (shape(row), row["layer"])))

    rows = [grouped(measured["results"], case) for measured in machines]

    def cells(found: list[Row]) -> list[str]:
        return [span(row["over contiguous"][name] for row in found) for name in RESULTS_OF_CALL]

    lines = [[each, *itertools.chain(*(cells(of.get(each, [])) for of in rows))] for each in rows[0]]
    head = [f"{instructions(measured)}: {name}" for measured in machines for name in RESULTS_OF_CALL]
    return markdown(["input", *head], lines)


def memory(measured: Row) -> str:
    """Return what a call or a step takes with each setting of the process' allocator, and its page faults."""
    lines = [
        [row["model"], shape(row), row["mode"], setting if setting == "as it is" else f"`{setting}`", *figures(found)]
        for row in measured["results"]
        for setting, found in row["settings"].items()
    ]
    return markdown(["model", "input", "", "Python started", "ms", "page faults", "memory, MB"], lines)


def figures(found: Row) -> list[str]:
    return [f"{found['ms']:.0f}", f"{found['faults']:,}", f"{found['bytes'] / 1e6:.0f}"]


def overhead(measured: Row) -> str:
    """Return the microseconds of a layer's call, and how many more the replacement takes."""
    by_layer = grouped((row for row in measured["results"] if "layer" in row), lambda row: row["layer"])
    lines = [
        [layer, shape(rows[0]), *(cell for row in rows for cell in (f"{row['stock']:.0f}", f"{row['more']:+.0f}"))]
        for layer, rows in by_layer.items()
    ]
    head = [cell for mode in MODES for cell in (f"{mode}: PyTorch's, us", "ours, more")]
    return markdown(["layer", "input", *head], lines)


def calls(measured: Row) -> str:
    """Return the table of the other calls, with their bars."""

    def met(row: Row) -> str:
        return "" if row["bar"] is None else "yes" if row[row["of"]] <= row["bar"] else "no"

    def text(which: str) -> Callable[[Row], str]:
        return lambda row: "" if row[which] is None else TEXTS[row["of"]].format(row[which])

    return table(
        (row for row in measured["results"] if "call" in row),
        "call | PyTorch's, us | ours, us | measured | bar | met",
        "{call} | {theirs} | {replaced:.0f} | {measured} | {limit} | {met}",
        theirs=lambda row: "" if row["of"] == "replaced" else f"{row['stock']:.0f}",
        measured=lambda row: TEXTS[row["of"]].format(row[row["of"]]),
        limit=text("bar"),
        met=met,
    )


def batches(measured: Row) -> str:
    def cell(where: str) -> Callable[[Row], str]:
        form = "{stock[median]:.2f} → {ours[median]:.2f} ms, **{ratio:.2f}x**"
        return lambda row: form.format(**row["ms"][where], ratio=row["ratios"][where]) if where in row["ms"] else ""

    return table(
        measured["results"],
        "a batch | in one process | in workers | bar",
        "{samples} of {case} | {here} | {workers} | {bar:.1f}x",
        here=cell("here"),
        workers=cell("workers"),
    )


# Whole models


def by_case(measured: Row, dtype: str = "float32") -> dict[Case, Row]:
    """Return the rows in a dtype by model and mode."""
    return {(row["model"], row["mode"]): row for row in measured["results"] if row["dtype"] == dtype}


def gain(row: Row, over: str = "contiguous", of: str = "preserved") -> float:
    value = ratio(row, over, of, "min")
    assert value is not None
    return value


def milliseconds(row: Row, layout: str) -> str:
    return f"{row['times'][layout]['min']:.0f}" if layout in row["times"] else ""


def one_image(*machines: Row) -> str:
    """Return the table of a batch of one image, by its pixels: over contiguous, and over unreplaced layers."""
    cases = [by_case(measured) for measured in machines]
    sizes = dict.fromkeys(model.rpartition("_")[2] for model, _ in cases[0])
    lines = []
    for name in dict.fromkeys(model.rpartition("_")[0] for model, _ in cases[0]):
        rows = [case[f"{name}_{size}", "inference"] for case in cases for size in sizes]
        lines.append([name, *(f"**{gain(row):.2f}x** ({gain(row, 'full'):.2f}x)" for row in rows)])
    head = [f"{instructions(measured)}: {size}" for measured in machines for size in sizes]
    return markdown(["model", *head], lines)


def layouts(*machines: Row) -> str:
    """Return the table of the models in float32, one machine next to the other."""
    lines = []
    cases = [by_case(measured) for measured in machines]
    for (model, mode), first in cases[0].items():
        found = [of_machine[model, mode] for of_machine in cases if (model, mode) in of_machine]
        cells = [model, shape(first), mode]
        for row in found:
            times = " → ".join(milliseconds(row, layout) for layout in ("contiguous", "preserved"))
            cells += [times, f"**{gain(row):.2f}x**", f"{gain(row, of='full'):.2f}x"]
        lines.append([*cells, f"{max(row['differences']['preserved'] for row in found):.0e}"])
    head = ["model", "input", ""]
    for measured in machines:
        head += [f"{instructions(measured)}: ms", "gain", "without replaced layers"]
    return markdown([*head, "difference"], lines)


def halves(*machines: Row) -> str:
    """Return the table of the models in bfloat16 that all machines have, one machine next to the other."""
    cases = [by_case(measured, "bfloat16") for measured in machines]
    lines = []
    for model in dict.fromkeys(model for model, _ in cases[-1]):
        cells = [model]
        for row in (of_machine[model, mode] for of_machine in cases for mode in STEPS):
            times = " → ".join(milliseconds(row, layout) or "-" for layout in ("contiguous", "preserved"))
            cells += [times, f"{gain(row, 'preserved', 'preserved float32'):.2f}"]
        lines.append(cells)
    head = ["model"]
    for measured in machines:
        with_amx = " with AMX" if measured["machine"]["AMX"] else ""
        for mode in STEPS:
            head += [f"{instructions(measured)}{with_amx}, {mode}: bfloat16, ms", "over float32"]
    return markdown(head, lines)


def gains(measured: Row, on_a_gpu: Row) -> str:
    """Return the README's table, the last row of a GPU."""
    lines = []
    for (model, mode), task in SHOWN.items():
        row = by_case(measured, "float32")[model, mode]
        before, after = (f"{milliseconds(row, layout)} ms" for layout in ("contiguous", "preserved"))
        lines.append([task, "CPU", before, f"{after}, **{gain(row):.1f}x**"])
    case, task = SHOWN_ON_A_GPU
    row = by_case(on_a_gpu, "bfloat16 autocast")[case]
    before, after, compiled = (f"{milliseconds(row, layout)} ms" for layout in ("contiguous", "preserved", "compiled"))
    device = on_a_gpu["gpu"]["name"].removeprefix("NVIDIA ")
    after += f", **{gain(row):.1f}x** (`torch.compile` alone: {compiled})"
    return markdown(["task", "on", "before", "after"], [*lines, [task, device, before, after]])


def positions(measured: Row) -> str:
    """Return a sentence on each weight that meets few positions."""
    sentences = []
    for weight, rows in grouped(measured["results"], lambda row: row["weight"]).items():
        met = "; ".join(str(row["positions"]) for row in rows)
        times, least = (
            "; ".join(f"{row[key]:.1f}" for row in rows)
            for key in ("over reading", "products at the peak over reading")
        )
        sentences.append(
            f"A weight of {rows[0]['bytes'] / 1e6:.1f} MB ({weight}) that meets {met} positions of one image takes "
            f"{times} times as long as reading it from memory (bar: {MOST_OVER_READING}); its products alone, at the "
            f"peak, {least}."
        )
    return "\n".join(sentences)


# What `tune` decides


def decisions(measured: Row) -> str:
    """Return the table of decisions, with their speed over each policy."""
    policies = dict.fromkeys(policy for row in measured["results"] for policy in row["over"])
    titles = [f"over {policy} ({measured['level']} % interval)" for policy in policies]
    cells = [f"{{over[{policy}]}}" for policy in policies]
    return table(
        measured["results"],
        " | ".join(["model | dtype | mode | decision | seconds", *titles]),
        " | ".join(["{model} | {dtype} | {mode} | {choice} | {seconds:.0f}", *cells]),
    )


def bars_of_decisions(measured: Row) -> str:
    rows = measured["results"]
    below = [row for row in rows if row["over"][row["best"]]["high"] < LEAST_OF_TUNE]
    names = ", ".join(f"{row['model']} {row['dtype']} {row['mode']}" for row in below)
    case = f"{len(rows)} cases: {measured['level']} % intervals over the best policy, wholly below {LEAST_OF_TUNE}"
    lines = [[case, "none", names or "none", "no" if below else "yes"]]
    for policy in dict.fromkeys(policy for row in rows for policy in row["over"]):
        values = [row["over"][policy]["ratio"] for row in rows if policy in row["over"]]
        case = f"geometric mean of the speed over {policy}, {len(values)} cases"
        lines.append([case, "at least 1", f"{mean(values):.3f}", "yes" if mean(values) >= 1 else "no"])
    longest = max(row["seconds"] for row in rows)
    met = "yes" if longest <= 1.1 * BUDGET_OF_TUNE else "no"
    lines.append(["seconds that a decision took", f"{BUDGET_OF_TUNE}", f"{longest:.0f} and less", met])
    return table_of_bars("case, one thread", lines)
