"""The pictures of the documents, as SVG: which layers keep channels-last, and what whole models gain.

GitHub and the site show them as images, on light and on dark pages. A picture has a background of its own, which
changes with the reader's color scheme as its text does, so that it is readable on every page.
"""

from collections.abc import Iterable
from html import escape

from bench_kept import BY_TORCH, OURS
from figures_layers import by_case, gain
from layout_models import CONTIGUOUS, MODES
from tables import Row, grouped

from torch_nhwc.rendering import several
from torch_nhwc.tracing.traces import CHANNELS_LAST_NAMES

STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2024 }
.title { font-size: 17px; font-weight: 600 }
.strong { font-weight: 600 }
.code { font-family: ui-monospace, Menlo, Consolas, monospace }
.faint { font-size: 12px; fill: #60646c }
.end { text-anchor: end }
.middle { text-anchor: middle }
.back { fill: #ffffff; stroke: #d9dce1 }
.kept { fill: #12a594 }
.lost { fill: #d98200 }
.time { fill: #8b98a8 }
.one { stroke: #60646c; stroke-dasharray: 3 2 }
.mark { stroke: #1c2024; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #eceef0 }
  .faint { fill: #9ba1a8 }
  .back { fill: #0d1117; stroke: #34393e }
  .kept { fill: #0fb8a4 }
  .lost { fill: #f0b429 }
  .time { fill: #6b7785 }
  .one { stroke: #9ba1a8 }
  .mark { stroke: #eceef0 }
}
"""
WIDTH, MARGIN = 840, 24
# The models by their names outside of the benchmarks.
TITLES = {
    "resnet50": "ResNet-50",
    "convnext_t": "ConvNeXt-T",
    "mobilenet_v2": "MobileNetV2",
    "regnet_y": "RegNetY",
    "efficientnet_b0": "EfficientNet-B0",
    "poolformer": "PoolFormer",
    "unet2d": "UNet2DModel (diffusers)",
    "unet2d_condition": "UNet2DConditionModel (diffusers)",
    "vae_kl": "AutoencoderKL (diffusers)",
    "vq_model": "VQModel (diffusers)",
    "video_autoencoder": "CogVideoX autoencoder",
    "segresnet3d": "SegResNet (MONAI)",
    "dynunet3d": "DynUNet (MONAI)",
    "unet3d_bn": "UNet with batch norm (MONAI)",
    "basic_unet3d": "BasicUNet (MONAI)",
    "attention_unet3d": "AttentionUnet (MONAI)",
    "mednext3d_k3": "MedNeXt, kernels of 3 (MONAI)",
    "mednext3d_k5": "MedNeXt, kernels of 5 (MONAI)",
    "plain_conv_unet3d": "PlainConvUNet (nnU-Net)",
    "residual_encoder_unet3d": "ResidualEncoderUNet (nnU-Net)",
    "wan_decoder": "Wan decoder",
    "ltx_decoder": "LTX-Video decoder",
    "hunyuan_decoder": "HunyuanVideo decoder",
}
RANKS = {5: "3D and video", 4: "2D"}
WAYS = {BY_TORCH: "model.to(memory_format=torch.channels_last_3d)", OURS: "torch_nhwc.convert_(model)"}


def text(x: float, y: float, content: str, kind: str = "plain") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" class="{kind}"/>'


def line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<path d="M{x:.1f} {top:g}V{bottom:g}" class="{kind}"/>'


def picture(height: float, label: str, parts: Iterable[str]) -> str:
    """Return an image; the label is for readers who do not see it."""
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    back = box(0.5, 0.5, WIDTH - 1, height - 1, "back")
    return "\n".join([start, f"<style>{STYLE}</style>", back, *parts, "</svg>", ""])


def where(measured: Row) -> str:
    """Return the machine, for the small print."""
    machine = measured["machine"]
    return f"{machine['processor']}, {several(measured['threads'], 'thread')}, torch {machine['environment']['torch']}"


def kept(measured: Row) -> str:
    """Draw which layers of a model keep channels-last, and the time of a training step, for each way to convert it."""
    rows = {row["way"]: row for row in measured["results"]}
    left, bottom, times = 600, 84 + 76 * len(WAYS), {way: row["ms"]["min"] for way, row in rows.items()}
    unit = 150 / max(times.values())
    parts = [
        text(MARGIN, 36, "A 3D U-Net, one square for each layer", "title"),
        *(box(MARGIN, 50, 12, 12, "kept"), text(MARGIN + 18, 61, "channels-last")),
        *(box(MARGIN + 120, 50, 12, 12, "lost"), text(MARGIN + 138, 61, "not channels-last")),
        text(left, 36, "Time of a training step", "title"),
    ]
    sentences = []
    for index, (way, call) in enumerate(WAYS.items()):
        top = 84 + 76 * index
        layers = [name in CHANNELS_LAST_NAMES for name in rows[way]["formats"]]
        pitch, count = (left - 2 * MARGIN) / len(layers), f"{sum(layers)} of {len(layers)} layers"
        parts += [
            text(MARGIN, top + 14, f"after {call}", "code"),
            text(left - MARGIN - 2, top + 14, count, "end"),
            *(
                box(MARGIN + place * pitch, top + 24, pitch - 2, 28, "kept" if is_kept else "lost")
                for place, is_kept in enumerate(layers)
            ),
            box(left, top + 24, unit * times[way], 28, "time"),
            text(left + unit * times[way] + 8, top + 43, f"{times[way]:.0f} ms", "strong"),
        ]
        sentences.append(f"After {call} {count} are channels-last, a training step takes {times[way]:.0f} ms.")
    end = left + unit * times[CONTIGUOUS]
    size = "x".join(map(str, rows[OURS]["shape"][2:]))
    parts += [
        line(end, 104, bottom - 18, "mark"),
        text(end, bottom - 4, f"not converted: {times[CONTIGUOUS]:.0f} ms", "faint middle"),
        text(MARGIN, bottom + 4, f"DynUNet of MONAI, a volume of {size}, float32", "faint"),
        text(MARGIN, bottom + 22, where(measured), "faint"),
    ]
    return picture(bottom + 40, " ".join(sentences), parts)


def performance(measured: Row) -> str:
    """Draw how many times as fast models are in channels-last as in contiguous memory, by their least times."""
    rows = [row for row in by_case(measured).values() if row["model"] in TITLES]
    models = sorted(grouped(rows, lambda row: row["model"]).values(), key=lambda of_model: -max(map(gain, of_model)))
    lefts, unit = dict(zip(MODES, (266, 556))), 210 / max(map(gain, rows))
    parts = [
        text(MARGIN, 36, "How many times as fast models are in channels-last", "title"),
        *(box(MARGIN, 50, 12, 12, "kept"), text(MARGIN + 18, 61, "torch_nhwc.convert_(model)")),
        *(line(266, 49, 63, "mark"), text(274, 61, "plain channels-last, as by model.to(memory_format=...)")),
        *(line(690, 49, 63, "one"), text(698, 61, "contiguous: 1x")),
        *(text(left, 94, mode.capitalize(), "strong") for mode, left in lefts.items()),
    ]
    top = 100
    for rank, of_rank in sorted(grouped(models, lambda of_model: len(of_model[0]["shape"])).items(), reverse=True):
        parts.append(text(MARGIN, top + 16, RANKS[rank], "strong"))
        parts += [line(left + unit, top + 4, top + 26 + 20 * len(of_rank), "one") for left in lefts.values()]
        top += 24
        for of_model in of_rank:
            parts.append(text(MARGIN, top + 14, TITLES[of_model[0]["model"]]))
            for row in of_model:
                left, plain, ours = lefts[row["mode"]], unit * gain(row, of="full"), unit * gain(row)
                parts += [
                    box(left, top + 3, ours, 14, "kept"),
                    line(left + plain, top + 2, top + 18, "mark"),
                    text(left + max(plain, ours) + 6, top + 15, f"{gain(row):.2f}x"),
                ]
            top += 20
        top += 12
    parts.append(text(MARGIN, top + 16, f"float32, {where(measured)}", "faint"))
    most = max(rows, key=gain)
    best = f"up to {gain(most):.2f} times, {TITLES[most['model']]} in {most['mode']}"
    return picture(top + 32, f"How many times as fast models are in channels-last: {best}.", parts)
