"""Find which operators keep channels-last, forward and backward, with this torch and on a device.

    python tools/keeping_operators.py [--device cuda] [--write]

`--write` also writes the table into docs/trace.md.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torch_nhwc as nhwc

DOCUMENT = Path(__file__).parent.parent / "docs/trace.md"
BEGIN, END = "<!-- operators -->\n", "<!-- end of operators -->"
CHANNELS = 8
Call = Callable[[Tensor], Tensor]


def per(make: Callable[[int], Call]) -> dict[int, Call]:
    """Return a call for images and one for volumes, made from the number of spatial dimensions."""
    return {2: make(2), 3: make(3)}


def both(call: Call) -> dict[int, Call]:
    return {2: call, 3: call}


def layer(name: str, *arguments: object, **keywords: object) -> dict[int, Call]:
    return per(lambda space: getattr(nn, f"{name}{space}d")(*arguments, **keywords))


def resized(mode: str) -> Call:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode)


def grid_sampled(x: Tensor) -> Tensor:
    space = x.dim() - 2
    grid = torch.rand(len(x), *x.shape[2:], space, device=x.device)
    return F.grid_sample(x, grid, align_corners=False)


CALLS: dict[str, dict[int, Call]] = {
    "convolution": layer("Conv", CHANNELS, CHANNELS, 3),
    "transposed convolution": layer("ConvTranspose", CHANNELS, CHANNELS, 2, 2),
    "batch norm": layer("BatchNorm", CHANNELS),
    "group norm": both(lambda x: F.group_norm(x, 2)),
    "instance norm": both(lambda x: F.instance_norm(x)),
    "relu": both(F.relu),
    "gelu": both(F.gelu),
    "dropout": both(F.dropout),
    "sum of two": both(lambda x: x + x.sigmoid()),
    "product with a mean over space": both(lambda x: x * x.flatten(2).mean(2)[(..., *[None] * (x.dim() - 2))]),
    "max pool": layer("MaxPool", 2),
    "average pool": layer("AvgPool", 2),
    "adaptive average pool": layer("AdaptiveAvgPool", 3),
    "adaptive max pool": layer("AdaptiveMaxPool", 3),
    "nearest upsampling": both(resized("nearest")),
    "linear upsampling": {2: resized("bilinear"), 3: resized("trilinear")},
    "bicubic upsampling": {2: resized("bicubic")},
    "pixel shuffle": {2: lambda x: F.pixel_shuffle(x, 2)},
    "grid sample": both(grid_sampled),
    "padding by zeros": per(lambda space: lambda x: F.pad(x, [1] * 2 * space)),
    "padding by reflection": per(lambda space: lambda x: F.pad(x, [1] * 2 * space, "reflect")),
    "padding by replication": per(lambda space: lambda x: F.pad(x, [1] * 2 * space, "replicate")),
    "circular padding": per(lambda space: lambda x: F.pad(x, [1] * 2 * space, "circular")),
    "softmax over channels": both(lambda x: F.softmax(x, 1)),
    "log-softmax over channels": both(lambda x: F.log_softmax(x, 1)),
    "cat over channels": both(lambda x: torch.cat([x, x.relu()], 1)),
    "chunks over channels, added": both(lambda x: torch.add(*x.chunk(2, 1))),
    "slice of channels": both(lambda x: x[:, :4].relu()),
    "channels by a tensor of indices": both(lambda x: x[:, torch.arange(4, device=x.device)]),
    "index_select of channels": both(lambda x: x.index_select(1, torch.arange(4, device=x.device))),
    "flip": both(lambda x: x.flip(2)),
    "roll": both(lambda x: x.roll(1, 2)),
    "repeat over channels": both(lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2))),
    "repeat_interleave over channels": both(lambda x: x.repeat_interleave(2, 1)),
    "where": both(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "clone": both(torch.clone),
    "cast": both(lambda x: x.to(torch.bfloat16).float()),
}


def tried(call: Call, space: int, device: str) -> str:
    """Return what a trace finds in one call."""
    if isinstance(call, nn.Module):
        call = call.to(device).to(memory_format=torch.channels_last if space == 2 else torch.channels_last_3d)
    x = torch.randn(2, *[12] * space, CHANNELS, device=device).movedim(-1, 1).requires_grad_()
    with nhwc.trace(nn.Module()) as trace:
        try:
            out = call(x)
        except NotImplementedError:
            return "not implemented"
    # A layer that keeps the format returns such a gradient.
    dense = torch.rand(out.movedim(1, -1).shape, device=device).movedim(-1, 1)
    with nhwc.trace(nn.Module()) as backward:
        out.backward(dense)
    phases = [phase for phase, seen in (("forward", trace), ("backward", backward)) if seen.losses]
    return f"loses {' and '.join(phases)}" if phases else "keeps"


def table(device: str) -> str:
    """Return a row for each result, with the operators that have it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, calls in CALLS.items():
        cells = tuple(tried(calls[space], space, device) if space in calls else "" for space in (2, 3))
        names.setdefault(cells, []).append(name)
    rows = ["| images | volumes | operators |", "| --- | --- | --- |"]
    rows += [f"| {' | '.join(cells)} | {'; '.join(of_result)} |" for cells, of_result in names.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = table(arguments.device)
    print(f"torch {torch.__version__}, {arguments.device}\n\n{text}")
    if arguments.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
