"""Convert a ResNet-50 and a 3D UNet to channels-last, see what that changes, and revert it.

    python examples/demo.py

It takes about a minute on two cores. A model whose package, transformers or monai, is not installed is left out.
"""

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_nhwc

ROUNDS = 5


def resnet50() -> tuple[nn.Module, Tensor]:
    """Make ResNet-50 as transformers builds it, with random weights, and a batch of images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(return_dict=False))
    return model, torch.randn(2, 3, 224, 224)


def unet3d() -> tuple[nn.Module, Tensor]:
    """Make a 3D UNet as monai builds it, with random weights, and a volume."""
    from monai.networks.nets.unet import UNet

    model = UNet(3, 1, 2, channels=(32, 64, 128, 256, 512), strides=(2, 2, 2, 2), num_res_units=2)
    return model, torch.randn(1, 1, 64, 64, 64)


def convert_by_torch(model: nn.Module) -> None:
    """Convert the weights with PyTorch's own functions."""
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output[0] if isinstance(output, tuple) else output


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def medians_in_turns(samples: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the medians of samples that are taken in turns, after a round that warms up."""
    rounds = [{name: sample() for name, sample in samples.items()} for _ in range(ROUNDS + 1)][1:]
    return {name: statistics.median(taken[name] for taken in rounds) for name in samples}


@torch.no_grad()
def show(name: str, model: nn.Module, x: Tensor) -> None:
    """Convert a copy of a model, time both, compare their outputs, and revert the copy."""
    print(f"=== {name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    contiguous = model.eval()
    before = {key: (tensor.stride(), tensor.clone()) for key, tensor in model.state_dict().items()}

    converted = copy.deepcopy(contiguous)
    report = torch_nhwc.convert_(converted, input_format="channels_last", preserve=True)
    print(report)

    def converting(convert: Callable[[nn.Module], object]) -> Callable[[], float]:
        def sample() -> float:
            fresh = copy.deepcopy(contiguous)
            return seconds(lambda: convert(fresh))

        return sample

    took = medians_in_turns(
        {"torch.nn.utils": converting(convert_by_torch), "torch_nhwc": converting(torch_nhwc.convert_)}
    )
    print("Converting the weights:", ", ".join(f"{way} {taken * 1e3:.1f} ms" for way, taken in took.items()))

    forward = medians_in_turns(
        {
            "contiguous": lambda: seconds(lambda: output_of(contiguous, x)),
            "channels-last": lambda: seconds(lambda: output_of(converted, x)),
        }
    )
    speed = forward["contiguous"] / forward["channels-last"]
    times = ", ".join(f"{way} {taken * 1e3:.0f} ms" for way, taken in forward.items())
    print(f"Forward: {times}: {speed:.2f} times as fast.")

    expected = output_of(contiguous, x)
    difference = (output_of(converted, x) - expected).abs().max().item()
    largest = expected.abs().max().item()
    print(f"Outputs: the largest difference is {difference:.1e}, the largest output {largest:.1e}.")
    assert difference <= 1e-4 * largest

    report.revert()
    for key, tensor in converted.state_dict().items():
        strides, values = before[key]
        assert tensor.stride() == strides, key
        assert torch.equal(tensor, values), key
    assert torch.equal(output_of(converted, x), expected)
    print("Reverted: strides, weights and outputs are as before.\n")


def main() -> None:
    torch.manual_seed(0)
    for name, make in {"ResNet-50 (transformers)": resnet50, "3D UNet (monai)": unet3d}.items():
        try:
            model, x = make()
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error.name} is missing, type `pip install 'torch-nhwc[models]'`.\n")
            continue
        show(name, model, x)
    print("Whether a model gets faster depends on its shapes, its dtype and the machine: torch_nhwc.tune measures it.")


if __name__ == "__main__":
    # Other packages' remarks; the report says what was not converted.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main()
