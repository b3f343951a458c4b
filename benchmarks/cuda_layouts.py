"""Whole models on a GPU, of the size that people train, in bfloat16 autocast.

`bench_layouts.py --device cuda`. The copies of a model take turns: contiguous, channels-last, channels-last with
replaced norms, and contiguous under `torch.compile`. For a call in inference and for a training step without the
optimizer's part: milliseconds that a caller waits, synchronisation included, minimum and median, and the memory in use
beyond the model and its input at its highest. cuDNN chooses among its kernels by their time (`cudnn.benchmark`).
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import layout_models
import machine
import torch
from layout_models import CONTIGUOUS, PRESERVED, STEPS, LayoutModel, difference, dynunet, layouts, replaced
from stopwatch import STOPWATCHES, Stopwatch, in_turns, summary
from torch import Tensor, nn

COMPILED = "compiled"
FEWEST, MOST = 5, 50


def sized(name: str, *shape: int) -> LayoutModel:
    """Return a model of the CPU's benchmark with an input of another shape."""
    return layout_models.MODELS[name]._replace(shape=shape)


MODELS = {
    "dynunet3d": LayoutModel(dynunet(32, 64, 128, 256, 320), (2, 1, 128, 128, 128)),
    "residual_encoder_unet3d": sized("residual_encoder_unet3d", 2, 1, 128, 128, 128),
    "resnet50": sized("resnet50", 64, 3, 224, 224),
    "vae_kl": sized("vae_kl", 8, 3, 256, 256),
}


class Autocast(nn.Module):
    """A model whose forward runs in bfloat16 autocast, and not its backward, as PyTorch advises."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x: Tensor) -> object:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(x)


def copies(measured: LayoutModel, mode: str, device: str) -> layout_models.Copies:
    """Return what is measured, on a device."""
    torch.manual_seed(0)
    model = measured.make().to(device).train(mode == "training")
    x = torch.randn(measured.shape, device=device)
    made = layouts(measured, model, x)
    made[COMPILED] = (copy.deepcopy(model), x)
    casting = {layout: (Autocast(each, device), given) for layout, (each, given) in made.items()}
    casting[COMPILED][0].compile()
    return casting


def measure(stopwatch: Stopwatch, name: str, mode: str, budget: float) -> dict[str, object]:
    """Measure a model in one mode, and the largest difference of its results; what fails is among the errors."""
    measured = MODELS[name]
    made = copies(measured, mode, stopwatch.device)
    steps = {layout: partial(STEPS[mode], measured, *each) for layout, each in made.items()}
    computed, extra, errors = {}, {}, {}
    for layout, step in steps.items():
        try:
            torch.manual_seed(0)
            computed[layout] = step().float()
            extra[layout] = stopwatch.extra_bytes(step)  # compiled, and with the choices of cuDNN
        except RuntimeError as error:
            errors[layout] = str(error).strip().split("\n")[0]
    steps = {layout: steps[layout] for layout in extra}
    took = sum(stopwatch.wall(step) for step in steps.values()) * 1e-6
    samples = min(MOST, max(FEWEST, int(budget / took)))
    taken = in_turns({layout: partial(stopwatch.wall, step) for layout, step in steps.items()}, samples)
    return {
        "model": name,
        "shape": list(measured.shape),
        "dtype": "bfloat16 autocast",
        "mode": mode,
        "commit": machine.commit(),
        "samples": samples,
        "replaced": replaced(made[CONTIGUOUS][0], made[PRESERVED][0]),
        "times": {layout: summary([each / 1e3 for each in values]) for layout, values in taken.items()},
        "extra_bytes": extra,
        "differences": {layout: difference(each, computed[CONTIGUOUS]) for layout, each in computed.items()}
        if CONTIGUOUS in computed
        else {},
        "errors": errors,
    }


def run(names: Sequence[str], budget: float, out: Path) -> None:
    """Measure models on the current GPU, and write the file after each of them. One without its library is left out."""
    torch.backends.cudnn.benchmark = True
    stopwatch, order = STOPWATCHES["cuda"](), list(MODELS)
    for name in names:
        try:
            rows = [measure(stopwatch, name, mode, budget) for mode in MODELS[name].modes]
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        print(*rows, sep="\n", flush=True)
        machine.add(
            *(out, "bench_layouts.py --device cuda", rows),
            order=lambda row: (order.index(row["model"]), row["mode"]),
            **{"seconds": budget, "gpu": machine.gpu()},
        )
