"""The models that are measured, where their weights come from, and which of those a conversion is about."""

from collections.abc import Callable
from pathlib import Path

import torch
from layout_models import classifier, network
from torch import Tensor, nn

from torch_nhwc.sites.finding import find

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50 (transformers)": classifier("ResNet"),
    "MobileNetV2 (transformers)": classifier("MobileNetV2"),
    "UNet2DConditionModel, Stable Diffusion 1.5 (diffusers)": network(
        "diffusers", "UNet2DConditionModel", cross_attention_dim=768, attention_head_dim=8
    ),
    "3D UNet (monai)": network(
        "monai.networks.nets.unet", "UNet", 3, 1, 2, (64, 128, 256, 512, 1024), (2, 2, 2, 2), num_res_units=2
    ),
    "CogVideoX autoencoder (diffusers)": network(
        "diffusers", "AutoencoderKLCogVideoX", block_out_channels=(128, 256, 256, 512), layers_per_block=3
    ),
}


def made(make: Callable[[], nn.Module], _: Path | None = None, device: str = "cpu") -> nn.Module:
    """Return a model whose weights have memory of their own, as after `load_state_dict`; their values do not matter."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device=device)
    with torch.no_grad():
        for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(index)
    return model.eval()


def torch_loaded(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return a model from `torch.save` and `torch.load`."""
    file = folder / "model.pt"
    if not file.exists():
        torch.save(made(make), file)
    return torch.load(file, weights_only=False)


def assigned(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return a model that took over the tensors of a loaded state dict."""
    file = folder / "state.pt"
    if not file.exists():
        torch.save(made(make).state_dict(), file)
    with torch.device("meta"):
        model = make()
    model.load_state_dict(torch.load(file), assign=True)
    return model.eval()


def pretrained(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return a model from `save_pretrained` and `from_pretrained`."""
    if not (folder / "pretrained").exists():
        made(make).save_pretrained(folder / "pretrained")
    with torch.device("meta"):
        model_class = type(make())
    return model_class.from_pretrained(folder / "pretrained").eval()


SOURCES: dict[str, Callable[[Callable[[], nn.Module], Path], nn.Module]] = {
    "made": made,
    "torch.load": torch_loaded,
    "assign=True": assigned,
    "from_pretrained": pretrained,
}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [site.tensor for site in find(model).sites if site.tensor is not None]


def moved_of(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights whose bytes move."""
    return [weight for weight in weights if weight.shape[1] > 1 and weight[0, 0].numel() > 1]
