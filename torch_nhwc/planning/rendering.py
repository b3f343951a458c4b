"""Plans and reports as text for people: how many weights become what, and what needs a look; or all, as tables."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.rows import Action, LayerRow, PlanRow
from torch_nhwc.reasons import Kind, Reason
from torch_nhwc.rendering import amount, first_of, paragraphs, table

SEEN_BY_EXAMPLE = (
    "Layers that call torch.nn.functional.conv2d and its kin themselves, as those from torch.export do, show "
    "only where the model runs: give example_inputs"
)
NOTHING_IN_A_FILE = (
    "there is no convolution, and in a state dict no floating tensor with four or five dimensions that is called weight"
)
# What the summary has words for. Any other reason needs a look: its sites are named, below its sentence.
_IN_WORDS: dict[Reason | None, str] = {
    Reason.IN_FORMAT: "in format",
    Reason.META: "on meta",
    Reason.LAZY: "later",
    Reason.IN_EACH_FORWARD: "in each forward",
    Reason.FILTERED: "filtered",
    Reason.OTHER_RANK: "other rank",
    Reason.FAKE: "fake",
    Reason.TIED: "tied",
}
_BY_ACTION = {
    Action.CONVERT: "moved",
    Action.RESTRIDE: "restrided",
    Action.REFUSE: "refused",
    Action.EACH_FORWARD: "each forward",
}
_MOST = 10  # sites that are named for one reason
# How a report has it that bytes were moved, and where to.
_STORAGE: dict[Outcome | None, str] = {
    Outcome.REUSED: "in place",
    Outcome.FRESH: "to new",
    Outcome.FRESH_HELD: "to new: held",
    Outcome.FRESH_FOREIGN: "to new: foreign",
    Outcome.FRESH_SHARED: "to new: shared",
}


def render(
    rows: Sequence[PlanRow],
    layers: Sequence[LayerRow],
    memory_format: str | None,
    is_done: bool,
    observed: bool,
    lines: Sequence[str] = (),
) -> str:
    """The summary, the sites that need a look, the layers that lose, and what else is to say, within the terminal.

    Args:
        rows: of a plan.
        layers: its rows of layers.
        memory_format: the plan's.
        is_done: whether it has been carried out.
        observed: whether the model ran on example inputs.
        lines: what else is to say.
    """
    hint = "" if rows or observed else f" {SEEN_BY_EXAMPLE}."
    text = paragraphs([f"{summary(rows, memory_format, is_done)}.{hint}"])
    alike: dict[tuple[str, Reason], list[PlanRow]] = {}
    for row in rows:
        if row.reason is not None and row.reason not in _IN_WORDS:
            fate = _fate(row)
            fate = fate if fate in ("refused", "kept", "contiguous") else "with a remark"
            alike.setdefault((fate, row.reason), []).append(row)
    for (what, reason), of_reason in alike.items():
        text += paragraphs([f"{len(of_reason)} {what}, {reason.name}: {reason.value}"])
        text += table(_cells(of_reason, rows), indent="  ", most=_MOST)
    every = ["(Every row: .table())"] if rows or layers else []
    return text + paragraphs([*_layer_lines(layers, is_done), *lines, *every])


def summary(rows: Sequence[PlanRow], memory_format: str | None, is_done: bool) -> str:
    """How many weights become what: each row is counted once."""
    if not rows:
        return "No 2D or 3D convolution was found"
    counts = Counter(map(_fate, rows))
    moved = amount(sum(row.bytes_to_move for row in rows))
    wanted = "contiguous" if memory_format == "contiguous_format" else "channels-last"
    changed = {
        "moved": f"{'moved' if is_done else 'to move'} ({moved})",
        "restrided": "needed new strides only" if is_done else "to get new strides only",
        "on meta": "on the meta device, where only strides change",
        "in format": f"in format {'before' if is_done else 'already'}",
    }
    left = {
        "refused": "refused",
        "filtered": "left out by the filter",
        "other rank": f"of {'3D' if memory_format == 'channels_last' else '2D'} convolutions, which were not asked for",
        "fake": "fake, since a plan is for the real ones",
    }
    stayed = "stayed" if is_done else "would stay"
    later = "contiguous" if wanted == "contiguous" else "converted"
    sentences: list[str] = []
    for fates, sentence in (
        (changed, f"{{will}} {wanted}: {{parts}}"),
        ({"contiguous": ""}, "{will} contiguous by new strides, since {their} filters have one channel"),
        ({"kept": ""}, f"{stayed} contiguous, since {{their}} filters have one channel"),
        ({"each forward": ""}, "{will} converted in each forward"),
        ({"in each forward": ""}, "{are} converted in each forward already"),
        ({"later": ""}, f"{{have}} no shape yet, and {{will}} {later} when {{they_get}} one"),
        (left, "{were} left as {they_are}: {parts}"),
        ({"tied": ""}, "more {are} tied to another"),
    ):
        count = sum(counts[fate] for fate in fates)
        if count:
            parts = ", ".join(f"{counts[fate]} {text}" for fate, text in fates.items() if counts[fate])
            words = _ONE if count == 1 else _SEVERAL
            will = words["are"] if is_done else "would be"
            were = words["were"] if is_done else "would be"
            noun = "" if sentences else f" weight{'s' * (count > 1)}"
            sentences.append(f"{count}{noun} {sentence.format(parts=parts, **words | {'will': will, 'were': were})}")
    if not any(counts[fate] for fate in left):
        sentences[0] += ", 0 left"
    return ". ".join(sentences)


_ONE = {"are": "is", "were": "was", "have": "has", "they_are": "it is", "their": "its", "they_get": "it gets"}
_SEVERAL = {
    "are": "are",
    "were": "were",
    "have": "have",
    "they_are": "they are",
    "their": "their",
    "they_get": "they get",
}


def full_table(rows: Sequence[PlanRow], layers: Sequence[LayerRow]) -> str:
    """A line for every row, within the terminal, and what the reasons in them mean."""
    text = ""
    if rows:
        what = [[done(row), _name(row.reason)] for row in rows]
        cells = [[*site, *done] for site, done in zip(_cells(rows, rows), what)]
        text += table(cells, ["site", "layer", "shape", "dtype", "action", "reason"])
    if layers:
        cells = [[row.path or "(the model itself)", row.layer, row.action.value, _name(row.reason)] for row in layers]
        text += table(cells, ["layer that loses", "class", "action", "reason"])
    # The sentence on lazy weights is of those that are not kept.
    reasons = [row.reason for row in rows if not (row.reason is Reason.LAZY and row.action is Action.KEEP)]
    reasons += [row.reason for row in layers]
    return text + paragraphs(f"{reason.name}: {reason.value}" for reason in dict.fromkeys(reasons) if reason)


def _fate(row: PlanRow) -> str:
    """What the summary counts a row as."""
    if row.reason in _IN_WORDS:
        return _IN_WORDS[row.reason]
    if row.action is Action.KEEP:  # with a remark, a weight is in the format
        return "in format" if row.reason is None or row.reason.kind is Kind.REMARK else "kept"
    return "contiguous" if row.reason is Reason.ONE_CHANNEL else _BY_ACTION[row.action]


def done(row: PlanRow) -> str:
    """What the table says is done to a weight."""
    return "to contiguous" if _fate(row) == "contiguous" else _STORAGE.get(row.outcome, row.action.value)


def _name(reason: Reason | None) -> str:
    return reason.name if reason else ""


def _cells(some: Sequence[PlanRow], rows: Sequence[PlanRow]) -> list[list[str]]:
    """What says which site it is, for some of the rows; the dtype, where it is not that of all."""
    has_dtypes = len({row.dtype for row in rows if row.dtype}) > 1
    return [
        [
            row.full_name.removesuffix(".weight"),
            row.layer,
            "x".join(map(str, row.shape or ())),
            (row.dtype or "").removeprefix("torch.") if has_dtypes else "",
        ]
        for row in some
    ]


def _layer_lines(layers: Sequence[LayerRow], is_done: bool) -> Iterator[str]:
    """What becomes of the layers that lose, by their class; of those that stay, where the first ones are."""
    alike: dict[tuple[str, str, Reason | None], list[str]] = {}
    for row in layers:
        alike.setdefault((row.layer, row.loses, row.reason), []).append(row.path or "the model itself")
    for (layer, loses, reason), paths in alike.items():
        if reason is None:
            yield f"{len(paths)} {layer} {'exchanged' if is_done else 'to exchange'}: on channels-last it loses {loses}"
        elif reason is Reason.EXCHANGED:
            yield f"{len(paths)} {layer} kept: {reason.value}"
        else:
            yield f"{len(paths)} {layer} kept ({first_of(paths)}): {reason.value}; on channels-last it loses {loses}"
