"""A trace as text for people."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch_nhwc.rendering import amount, paragraphs, table
from torch_nhwc.tracing.rows import Gain, Loss, MixedConvolution, Reorder, Seen

_MOST = 20  # rows of each table


def render(seen: Seen) -> str:
    """What a trace has, with totals above, as tables that fit the terminal."""
    lines = [f"Trace: {headline(seen)}"]
    lines += [f"channels-last from {place(gain)} on, by {_short(gain.operator)}" for gain in seen.gained[:_MOST]]
    text = paragraphs(lines)
    if seen.losses:
        text += "\n" + _losses(seen.losses)
    if seen.mixed:
        text += "\n" + _mixed(seen.mixed)
    if seen.reorders:
        text += "\n" + _reorders(seen.reorders)
    return text + paragraphs(f"not seen: {row.path or 'the model'}: {row.why}" for row in seen.unseen)


def place(row: Loss | MixedConvolution | Gain) -> str:
    """Where in the model, or else in the code, a row is from."""
    return row.path or row.source or "the model"


def short_source(source: str | None) -> str:
    """A file by its place below the working directory, or by its last folder, with the line."""
    if source is None:
        return ""
    file, _, line = source.rpartition(":")
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
    return f"{shown}:{line}"


def headline(seen: Seen) -> str:
    """How many operators ran, and what was lost in all."""
    losses, mixed = seen.losses, len(seen.mixed)
    ran = f"{seen.operators['forward']} operators forward, {seen.operators['backward']} backward"
    lost = f"{len(losses)} loss{'es' * (len(losses) != 1)} of {amount(sum(row.bytes for row in losses))}"
    return f"{ran}: {lost if losses else 'no loss'}, {mixed or 'no'} mixed convolution{'s' * (mixed > 1)}"


def _short(operator: str) -> str:
    return operator.removeprefix("aten::")


def _losses(losses: Sequence[Loss]) -> str:
    cells = [
        [
            row.path or "(the model)",
            _short(row.operator),
            row.phase,
            "x".join(map(str, row.outputs[0].shape)),
            row.outputs[0].format,
            amount(row.bytes),
            str(row.count),
            short_source(row.source),
        ]
        for row in losses
    ]
    head = ["loss in", "operator", "phase", "shape", "written", "bytes", "times", "source"]
    counts = Counter(row.advice for row in losses if row.advice)
    advice = [f"{count} of {len(losses)}: {text}" for text, count in counts.items()]
    return table(cells, head, most=_MOST, sizes=[row.bytes for row in losses], name="losses") + paragraphs(advice)


def _mixed(mixed: Sequence[MixedConvolution]) -> str:
    cells = [
        [
            row.path or "(the model)",
            row.phase,
            *([""] if row.phase == "forward" else []),
            *(layout.format for layout in row.inputs),
            amount(row.bytes),
            str(row.count),
            short_source(row.source),
        ]
        for row in mixed
    ]
    head = ["mixed convolution", "phase", "gradient", "input", "weight", "copied", "times", "source"]
    return table(cells, head, most=_MOST, sizes=[row.bytes for row in mixed], name="mixed")


def _reorders(reorders: Sequence[Reorder]) -> str:
    cells = [
        [row.path or "(the model)", row.phase, row.what, f"{row.milliseconds:.2f}", str(row.count)] for row in reorders
    ]
    head = ["reordered inside of", "phase", "from and to", "ms", "times"]
    times = [row.milliseconds for row in reorders]
    return table(cells, head, most=_MOST, sizes=times, name="reorders") + f"reorders: {sum(times):.2f} ms\n"
