"""The conversion of whole models, every single one in a fresh process, as it happens to users.

    python benchmarks/bench_models.py [--device cpu|cuda] [--rounds N] [--models NAME ...] [--out FILE]

A process makes one model, with weights that are its own or that were loaded, does one job to it on one thread, and
reports the time and by how much the resident set grew beyond the model at its highest. The jobs take turns; the figures
are medians over the rounds. On a GPU all is done in one process: cuda_models.py.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import machine
import torch
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.sites import CHANNELS_LAST, find_sites

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["diffusers", "monai.networks.nets.unet", "torch_nhwc", "transformers", "diffusers.models"]
)


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig())


def mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config())


def unet2d() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)


def unet3d() -> nn.Module:
    from monai.networks.nets.unet import UNet

    return UNet(3, 1, 2, channels=(64, 128, 256, 512, 1024), strides=(2, 2, 2, 2), num_res_units=2)


def video_autoencoder() -> nn.Module:
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50 (transformers)": resnet50,
    "MobileNetV2 (transformers)": mobilenet_v2,
    "UNet2DConditionModel, Stable Diffusion 1.5 (diffusers)": unet2d,
    "3D UNet (monai)": unet3d,
    "CogVideoX autoencoder (diffusers)": video_autoencoder,
}


def made(make: Callable[[], nn.Module], _: Path, device: str = "cpu") -> nn.Module:
    """A model whose weights have memory of their own, as after `load_state_dict`; their values do not matter."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device=device)
    with torch.no_grad():
        for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(index)
    return model.eval()


def torch_loaded(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """A model from `torch.save` and `torch.load`."""
    file = folder / "model.pt"
    if not file.exists():
        torch.save(made(make, folder), file)
    return torch.load(file, weights_only=False)


def pretrained(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """A model from `save_pretrained` and `from_pretrained`."""
    if not (folder / "pretrained").exists():
        made(make, folder).save_pretrained(folder / "pretrained")
    with torch.device("meta"):
        model_class = type(make())
    return model_class.from_pretrained(folder / "pretrained").eval()


SOURCES: dict[str, Callable[[Callable[[], nn.Module], Path], nn.Module]] = {
    "made": made,
    "torch.load": torch_loaded,
    "from_pretrained": pretrained,
}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [site.tensor for site in find_sites(model) if site.tensor is not None]


def moved_of(weights: list[Tensor]) -> list[Tensor]:
    """Those of which the bytes move."""
    return [weight for weight in weights if weight.shape[1] > 1 and weight[0, 0].numel() > 1]


def stock(model: nn.Module) -> object:
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def ours(model: nn.Module) -> object:
    nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return nhwc.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def ours_fresh(model: nn.Module) -> object:
    return nhwc.convert_weights_(weights_of(model), storage="fresh")


def module_to(model: nn.Module) -> object:
    return model.to(memory_format=CHANNELS_LAST[next(weight.dim() for weight in weights_of(model))])


def memcpy(model: nn.Module) -> Callable[[], object]:
    """The same bytes, to memory that is resident."""
    weights = weights_of(model)
    copies = [torch.zeros_like(weight) for weight in weights]
    return lambda: [copy.copy_(weight) for copy, weight in zip(copies, weights, strict=True)]


JOBS: dict[str, Callable[[nn.Module], object]] = {
    "stock": stock,
    "ours": ours,
    "ours fresh": ours_fresh,
    "module.to": module_to,
}


def resident(field: str) -> int:
    """A size of this process in bytes: VmRSS is what is resident, VmHWM the most that ever was."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def run_here(model_name: str, source: str, job_name: str, folder: Path, answer: Connection) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    with torch.no_grad():
        model = SOURCES[source](MODELS[model_name], folder)
        weights = weights_of(model)
        for weight in weights:
            weight.sum()  # resident, whatever it came from
        job: Callable[[], object] = memcpy(model) if job_name == "memcpy" else lambda: JOBS[job_name](model)
    moved = moved_of(weights)
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set counts from here
    before = resident("VmRSS")
    start = time.perf_counter()
    try:
        job()
        milliseconds: float | None = (time.perf_counter() - start) * 1e3
    except RuntimeError:
        assert job_name == "module.to"  # which has one format for 2D and 3D layers
        milliseconds = None
    extra = max(0, resident("VmHWM") - before)
    if job_name == "ours":
        assert all(weight.stride()[1] == 1 for weight in moved)
    answer.send(
        {
            "ms": milliseconds,
            "extra_bytes": extra,
            "bytes": sum(weight.nbytes for weight in weights),
            "moved_bytes": sum(weight.nbytes for weight in moved),
            "largest_bytes": max(weight.nbytes for weight in weights),
        }
    )


def run_in_a_process(*arguments: object) -> dict[str, float]:
    # Forked from a server that has imported the libraries and done nothing else.
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run_here, args=(*arguments, there))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    return answer


def cases(models: list[str]) -> Iterator[tuple[str, str]]:
    for model in models:
        for source in SOURCES:
            if source != "from_pretrained" or "monai" not in model:
                yield model, source


def measure(model: str, source: str, rounds: int) -> dict[str, object]:
    """One model from one source: every job in `rounds` processes of its own."""
    runs: dict[str, list[dict[str, float]]] = {job: [] for job in (*JOBS, "memcpy")}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for job, seen in runs.items():
                seen.append(run_in_a_process(model, source, job, Path(folder)))
    sizes = {name: runs["stock"][0][name] for name in ("bytes", "moved_bytes", "largest_bytes")}
    jobs = {
        job: {
            "ms": None if seen[0]["ms"] is None else statistics.median(run["ms"] for run in seen),
            "min_ms": None if seen[0]["ms"] is None else min(run["ms"] for run in seen),
            "extra_bytes": statistics.median(run["extra_bytes"] for run in seen),
        }
        for job, seen in runs.items()
    }
    return {"model": model, "source": source, **sizes, "jobs": jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="5 on the CPU, 15 on a GPU")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or {"cpu": 5, "cuda": 15}[arguments.device]
    arguments.out = arguments.out or machine.ROOT / f"benchmarks/results/models-{arguments.device}.json"
    if arguments.device == "cuda":
        import cuda_models

        return cuda_models.run(arguments.models, arguments.rounds, arguments.out)
    results = []
    for model, source in cases(arguments.models):
        results.append(measure(model, source, arguments.rounds))
        jobs = results[-1]["jobs"]
        print(
            model, source, {job: figures["ms"] and round(figures["ms"], 2) for job, figures in jobs.items()}, flush=True
        )
    machine.write(arguments.out, "bench_models.py", results, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
