"""The main job on real models: convert, prove that the outputs did not change, and time it honestly."""

import copy
import ctypes
import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.planning import Action, decide
from torch_nhwc.reasons import Reason
from torch_nhwc.sites import CHANNELS_LAST, find_sites

# How far an output may lie from the contiguous model's, in units of the largest output: other kernels add in another
# order, and a deep network carries the rounding of its dtype along.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class Example:
    """A model in evaluation mode with the tensor that it is called with."""

    name: str
    model: nn.Module
    input: Tensor


def resnet50() -> Example:
    """ResNet-50 as transformers builds it, random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig())
    return Example("ResNet-50 (transformers)", model, torch.randn(2, 3, 224, 224))


def unet3d() -> Example:
    """A 3D UNet with residual units as monai builds it, random weights."""
    from monai.networks.nets.unet import UNet

    channels = (32, 64, 128, 256, 512)
    model = UNet(3, 1, 2, channels=channels, strides=(2, 2, 2, 2), num_res_units=2)
    return Example("3D UNet (monai)", model, torch.randn(1, 1, 64, 64, 64))


def video_autoencoder() -> Example:
    """A small CogVideoX autoencoder as diffusers builds it, random weights."""
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX(block_out_channels=(64, 128, 128, 256), layers_per_block=1)
    return Example("CogVideoX autoencoder (diffusers)", model, torch.randn(1, 3, 5, 64, 64))


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": resnet50,
    "unet3d": unet3d,
    "video-autoencoder": video_autoencoder,
}


def load_torchscript(path: str, input_shape: Sequence[int]) -> Example:
    """A saved TorchScript model with a random input.

    Raises:
        ValueError: the file cannot be loaded.
    """
    try:
        model = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call, unused-ignore]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a TorchScript archive: {str(error).splitlines()[0]}") from error
    return Example(path, model, torch.randn(*input_shape))


def load_factory(factory: str, input_shape: Sequence[int] | None) -> Example:
    """A model from `module:callable`, which returns the model, or the model and its input.

    Raises:
        ValueError: there is no such callable, it returns something else, or there is neither an input nor a shape for
            one.
    """
    module_name, _, function_name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"expected module:callable, got {factory!r}: {error}") from error
    made = function()
    model, example_input = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(example_input, Tensor | None):
        raise ValueError(f"expected {factory} to return a module, or a module and its input tensor")
    if example_input is None:
        if input_shape is None:
            raise ValueError(f"{factory} returns no input: name its shape with --input-shape, such as 1,3,224,224")
        example_input = torch.randn(*input_shape)
    return Example(factory, model, example_input)


@dataclass
class Tally:
    """How many sites, and their bytes."""

    sites: int = 0
    bytes: int = 0

    def add(self, weight: Tensor) -> None:
        """Counts one more site."""
        self.sites += 1
        self.bytes += weight.nbytes


@dataclass
class Result:
    """What the main job saw on one model. Times are medians in milliseconds of interleaved runs."""

    model: str
    device: str
    dtype: str
    threads: int
    converted: Tally = field(default_factory=Tally)
    restrided: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    left: list[str] = field(default_factory=list)
    weights_equal: bool = False
    convert_ms: float = 0.0
    stock_convert_ms: float | None = None
    stock_over_ours: float | None = None
    forward_contiguous_ms: float = 0.0
    forward_converted_ms: float = 0.0
    forward_channels_last_input_ms: float = 0.0
    largest_output: float = 0.0
    largest_difference: float = 0.0
    tolerance: float = 0.0

    @property
    def unchanged(self) -> bool:
        """Whether the weights are equal bit for bit and the outputs within the tolerance."""
        return self.weights_equal and self.largest_difference <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self) | {"unchanged": self.unchanged}


def run(example: Example, device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 5) -> Result:
    """Does the main job on one model; the example's own model becomes and stays contiguous."""
    model = example.model.eval().to(device=device, dtype=dtype)
    _convert(model, torch.contiguous_format)
    inputs = example.input.to(device=device, dtype=dtype)
    result = Result(example.name, device, str(dtype).removeprefix("torch."), torch.get_num_threads())

    converted = _copy(model)
    _tally(converted, result)
    _convert(converted)
    result.weights_equal = _weights_equal(model, converted)

    scripted = isinstance(model, torch.jit.ScriptModule)  # the stock converters do nothing to those
    jobs = {"ours": _convert} if scripted else {"ours": _convert, "stock": _stock_convert}
    times = _interleaved({name: _prepared(job, model) for name, job in jobs.items()}, repeats, device)
    result.convert_ms = times["ours"]
    if not scripted:
        result.stock_convert_ms = times["stock"]
        result.stock_over_ours = times["stock"] / times["ours"]

    channels_last_input = (
        inputs.to(memory_format=CHANNELS_LAST[inputs.dim()]) if inputs.dim() in CHANNELS_LAST else inputs
    )
    with torch.no_grad():
        reference = _first_tensor(model(inputs)).double()
        output = _first_tensor(converted(inputs)).double()
        forwards = {
            "contiguous": lambda: lambda: model(inputs),
            "converted": lambda: lambda: converted(inputs),
            "channels_last_input": lambda: lambda: converted(channels_last_input),
        }
        times = _interleaved(forwards, repeats, device)
    result.forward_contiguous_ms = times["contiguous"]
    result.forward_converted_ms = times["converted"]
    result.forward_channels_last_input_ms = times["channels_last_input"]
    result.largest_output = reference.abs().max().item()
    result.largest_difference = (output - reference).abs().max().item()
    result.tolerance = TOLERANCES[dtype] * result.largest_output
    return result


def _tally(model: nn.Module, result: Result) -> None:
    sites = find_sites(model)
    tallies = {Action.KEEP: result.kept, Action.RESTRIDE: result.restrided, Action.CONVERT: result.converted}
    for site, row in zip(sites, decide(sites, None)):
        if row.action is Action.REFUSE:
            result.left.append(f"{site}: {row.reason.value if row.reason else ''}")
        elif site.tensor is not None and row.reason is not Reason.TIED:
            tallies[row.action].add(site.tensor)


def _convert(model: nn.Module, memory_format: torch.memory_format | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tally names what was left as it is
        nhwc.convert_(model, memory_format)


def _stock_convert(model: nn.Module) -> None:
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def _copy(model: nn.Module) -> nn.Module:
    with torch.no_grad():  # a copied TorchScript module would otherwise remember where its parameters came from
        return copy.deepcopy(model)


def _prepared(job: Callable[[nn.Module], object], model: nn.Module) -> Callable[[], Callable[[], object]]:
    # A model is converted once in a process's life, so memory that earlier runs have freed goes back to the system
    # before each: otherwise one job would be given the warm pages of another.
    def prepare() -> Callable[[], object]:
        fresh = _copy(model)
        _give_freed_memory_back()
        return lambda: job(fresh)

    return prepare


def _weights_equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(_bits(p), _bits(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _interleaved(
    preparations: Mapping[str, Callable[[], Callable[[], object]]], repeats: int, device: str
) -> dict[str, float]:
    """The median time of each job in milliseconds. A preparation makes a job for one run, outside of the time."""
    samples: dict[str, list[float]] = {name: [] for name in preparations}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, prepare in preparations.items():
            job = prepare()
            _synchronize(device)
            start = time.perf_counter()
            job()
            _synchronize(device)
            if repeat:
                samples[name].append((time.perf_counter() - start) * 1e3)
            del job  # and its model, before the next preparation gives freed memory back
    return {name: statistics.median(values) for name, values in samples.items()}


def _give_freed_memory_back() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _first_tensor(output: Any) -> Tensor:
    """The first tensor of whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(_first_tensor(value) for value in values if value is not None)
