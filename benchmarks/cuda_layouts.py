"""Whole models on a GPU, each also compiled: `bench_layouts.py --device cuda`.

Compiling takes a minute or more, the measurement seconds. So each model and mode has a process of its own, in which
everything is compiled while the others do the same, and which is measured when the GPU has nothing else to do.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import layout_models
import machine
import torch
from layout_models import CONTIGUOUS, PRESERVED, STEPS, LayoutModel, difference, layouts, network, nnunet, replaced
from stopwatch import STOPWATCHES, in_turns, summary
from torch import Tensor, nn

COMPILED, BOTH = "compiled", "preserved, compiled"
AUTOCAST, BFLOAT16 = "bfloat16 autocast", "bfloat16"
SAMPLES = range(5, 50)
COMPILING = 90.0  # seconds; who needs more is left out


class GpuModel(NamedTuple):
    """A model of the size that people train or run, in which dtype it runs, and whether it compiles within minutes."""

    model: LayoutModel
    dtype: str = AUTOCAST
    compiles: bool = True


def sized(name: str, *shape: int) -> GpuModel:
    """Return a model of the CPU's with an input of another shape."""
    return GpuModel(layout_models.MODELS[name]._replace(shape=shape))


def decoder(name: str, shape: tuple[int, ...], **config: object) -> GpuModel:
    """Return the decoder of one of diffusers' autoencoders, which runs in bfloat16."""
    return GpuModel(LayoutModel(network("diffusers", name, **config), shape, decodes=True), BFLOAT16)


def text_condition(batch: int) -> dict[str, Tensor]:
    return {"timestep": torch.ones(batch, dtype=torch.long), "encoder_hidden_states": torch.ones(batch, 77, 768)}


VOLUME = (2, 1, 128, 128, 128)
monai_unet = network("monai.networks.nets.unet", "UNet", 3, 1, 2, (32, 64, 128, 256), (2, 2, 2), num_res_units=2)
segresnet = network(
    "monai.networks.nets.segresnet", "SegResNet", spatial_dims=3, init_filters=32, in_channels=1, out_channels=2
)
autoencoder = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
unet2d_condition = network("diffusers", "UNet2DConditionModel", cross_attention_dim=768, attention_head_dim=8)
# In the order of what they are worth: what is last may be cut off.
LOOK = "look"  # a small one, for a look at what comes out
MODELS = {
    "dynunet3d": GpuModel(LayoutModel(layout_models.dynunet(32, 64, 128, 256, 320), VOLUME)),
    "residual_encoder_unet3d": sized("residual_encoder_unet3d", *VOLUME),
    "segresnet3d": GpuModel(LayoutModel(segresnet, VOLUME)),
    "monai_unet3d": GpuModel(LayoutModel(monai_unet, VOLUME)),
    "resnet50": sized("resnet50", 64, 3, 224, 224),
    "r3d_18": GpuModel(LayoutModel(network("torchvision.models.video", "r3d_18"), (8, 3, 16, 112, 112))),
    "vae_decoder": decoder("AutoencoderKL", (1, 4, 128, 128), **autoencoder),
    "wan_decoder": decoder("AutoencoderKLWan", (1, 16, 3, 60, 104))._replace(compiles=False),
    "hunyuan_decoder": decoder("AutoencoderKLHunyuanVideo", (1, 16, 5, 32, 32))._replace(compiles=False),
    "unet2d_condition": GpuModel(
        LayoutModel(unet2d_condition, (4, 4, 64, 64), text_condition, trains=False), BFLOAT16, False
    ),
    "mednext3d_k3": sized("mednext3d_k3", 2, 1, 64, 64, 64),
    "convnext_t": sized("convnext_t", 64, 3, 224, 224),
    "plain_conv_unet3d": GpuModel(LayoutModel(nnunet("PlainConvUNet", n_conv_per_stage=[2] * 5), VOLUME)),
    LOOK: GpuModel(
        LayoutModel(lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4), nn.ReLU()), (1, 1, *[8] * 3))
    ),
}
CHOSEN = [name for name in MODELS if name != LOOK]


class Called(nn.Module):
    """A model with what else its forward takes; what trains runs in autocast, and its backward outside of it."""

    def __init__(self, measured: GpuModel, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model, self.decodes = model, measured.model.decodes
        self.casts, self.device_type = measured.dtype == AUTOCAST, x.device.type
        extra = measured.model.extra_inputs(len(x), x.dtype)
        self.extra = {name: value.to(x.device) for name, value in extra.items()}

    def forward(self, x: Tensor) -> object:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.casts):
            return self.model.decode(x) if self.decodes else self.model(x, **self.extra)


def ways(measured: GpuModel, mode: str, device: str) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return what is measured, each with its input, the reference first."""
    torch.manual_seed(0)
    dtype = torch.float32 if measured.dtype == AUTOCAST else torch.bfloat16
    model = measured.model.make().to(device, dtype).train(mode == "training")
    x = torch.randn(measured.model.shape, device=device, dtype=dtype)
    made = layouts(measured.model, model, x)
    compiling = {COMPILED: CONTIGUOUS, BOTH: PRESERVED} if measured.compiles else {}
    for compiled, plain in compiling.items():
        made[compiled] = copy.deepcopy(made[plain][0]), made[plain][1]
    called = {way: (Called(measured, each, given), given) for way, (each, given) in made.items()}
    for way in compiling:
        called[way][0].compile(backend="inductor" if device == "cuda" else "aot_eager")
    return called


def measure(
    measured: GpuModel, name: str, mode: str, seconds: float, device: str, wait: Callable[[], object]
) -> dict[str, object]:
    """Measure every way of a model after `wait`; what fails is among the errors."""
    made = ways(measured, mode, device)
    # What a step calls is a model as in the other benchmarks, whose own `forward` has all that it takes.
    called = LayoutModel(measured.model.make, measured.model.shape)
    steps = {way: partial(STEPS[mode], called, *each) for way, each in made.items()}
    errors: dict[str, str] = {}

    def run(way: str) -> Tensor | None:
        try:
            torch.manual_seed(0)
            return steps[way]().float().cpu()
        except Exception as error:  # of any compiler, too
            errors[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return None

    for way in steps:
        run(way)
        if device == "cuda":
            torch.cuda.empty_cache()
    wait()
    # What found no memory beside the others has it now.
    errors = {way: error for way, error in errors.items() if "OutOfMemory" not in error}
    # What cuDNN chose while others computed is not what it is to use: with other settings it chooses anew.
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    stopwatch = STOPWATCHES[device]()
    computed, extra, took = {}, {}, 0.0
    for way in (way for way in steps if way not in errors):
        result = run(way)
        if result is not None:
            computed[way] = result
            extra[way] = stopwatch.extra_bytes(steps[way])
            took += stopwatch.wall(steps[way]) * 1e-6
    samples = min(SAMPLES.stop, max(SAMPLES.start, int(seconds / max(took, 1e-3))))
    taken = in_turns({way: partial(stopwatch.wall, steps[way]) for way in extra}, samples, warm_up=0)
    reference = next(iter(made))
    return {
        "model": name,
        "shape": list(measured.model.shape),
        "dtype": measured.dtype,
        "mode": mode,
        "samples": samples,
        "replaced": replaced(made[reference][0], made[PRESERVED][0]),
        "times": {way: summary([each / 1e3 for each in values]) for way, values in taken.items()},
        "extra_bytes": extra,
        "differences": {way: difference(each, computed[reference]) for way, each in computed.items()}
        if reference in computed
        else {},
        "errors": errors,
        "commit": machine.commit(),
    }


def start(name: str, mode: str, seconds: float, device: str, compiles: bool) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, name, mode, str(seconds), device, *([] if compiles else ["--eager"])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def last_line(process: subprocess.Popen[str], of: str) -> str:
    """Return what follows the word in the next line that begins with it, or nothing if the process ends before."""
    assert process.stdout is not None
    return next((line.removeprefix(of).strip() or of for line in process.stdout if line.startswith(of)), "")


def run(
    names: Sequence[str], seconds: float, out: Path, compiled: Sequence[str] = tuple(MODELS), at_once: int = 22
) -> None:
    """Measure models in processes that compile together and are measured in turns; write the file after each."""
    cases = [(name, mode) for name in names for mode in MODELS[name].model.modes]
    device, order = STOPWATCHES["cuda"]().device, list(MODELS)
    with ThreadPoolExecutor(at_once) as pool:
        for begin in range(0, len(cases), at_once):
            processes = {
                case: start(*case, seconds, device, case[0] in compiled) for case in cases[begin : begin + at_once]
            }
            ready = {case: pool.submit(last_line, process, "ready") for case, process in processes.items()}
            end = time.monotonic() + COMPILING
            for case, is_ready in ready.items():
                try:
                    is_ready.result(max(0, end - time.monotonic()))
                except TimeoutError:
                    processes[case].kill()
            for case, process in processes.items():
                row = last_line(process, "row") if answered(process) else ""
                process.wait()
                if not row:
                    print(f"{case} failed", flush=True)
                    continue
                machine.add(
                    *(out, "bench_layouts.py --device cuda", [json.loads(row)]),
                    order=lambda row: (order.index(row["model"]), row["mode"]),
                    **{"gpu": machine.gpu(), "seconds": seconds},
                )
                show(json.loads(row))


def answered(process: subprocess.Popen[str]) -> bool:
    """Tell a process to go on, and return whether it is there."""
    assert process.stdin is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except OSError:
        return False
    return True


def show(row: dict) -> None:
    times = ", ".join(f"{way} {each['median']:.1f} ms" for way, each in row["times"].items())
    print(f"{row['model']} {row['dtype']} {row['mode']}: {times}; {row['errors'] or 'no errors'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A model of bench_layouts.py --device cuda, in a process of its own.")
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("mode", choices=list(STEPS))
    parser.add_argument("seconds", type=float)
    parser.add_argument("device")
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)

    def wait() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    measured = MODELS[arguments.name]
    measured = measured._replace(compiles=measured.compiles and not arguments.eager)
    row = measure(measured, arguments.name, arguments.mode, arguments.seconds, arguments.device, wait)
    print("row", json.dumps(machine.rounded(row)), flush=True)


if __name__ == "__main__":
    main()
