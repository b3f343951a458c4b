"""The ways to run a model that are compared: what each does to a model, and what it then calls.

All get the same contiguous input: what a way does to its format is part of every call.
"""

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import module_to, stock_convert
from layout_models import MODES, LayoutModel
from models import weights_of
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.layout import CHANNELS_LAST

Call = Callable[[Tensor], Any]
# What changes a model and returns what is called; it gets the input, the mode, and the seconds that `tune` may take.
Prepare = Callable[[nn.Module, Tensor, str, float], Call]


class Peer(NamedTuple):
    """A way, the modes in which it can be had, and what it imports, which is not timed."""

    prepare: Prepare
    modes: tuple[str, ...] = MODES
    imports: tuple[str, ...] = ()


def by_pytorch(convert: Callable[[nn.Module], object]) -> Prepare:
    """Return a conversion of weights by PyTorch, with the format of the inputs that PyTorch's documentation names."""

    def prepare(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
        memory_format = CHANNELS_LAST[next(weight.dim() for weight in weights_of(model))]
        convert(model)
        return lambda x: model(x.to(memory_format=memory_format))

    return prepare


def compiled(options: str | None = None, prepare: Prepare | None = None) -> Prepare:
    """Return a compilation, in inference with frozen weights, of the model as it is or as another way has left it."""

    def compile_it(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
        call = model if prepare is None else prepare(model, x, mode, budget)
        torch._inductor.config.freezing = mode == "inference"
        model.compile(mode=options)
        return call

    return compile_it


def eager(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
    return model


def ours(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
    nhwc.convert_(model, input_format="channels_last")
    return model


def tuned(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
    nhwc.convert_(model, plan=nhwc.tune(model, x, mode=mode, budget_seconds=budget).plan)
    return model


def openvino(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
    request = openvino_model(model, x).create_infer_request()
    return lambda x: torch.from_numpy(request.infer([x.numpy()], share_inputs=True)[0])


def openvino_model(model: nn.Module, x: Tensor, **options: Any) -> Any:
    """Return a model that OpenVINO compiled for one thread in float32."""
    os.environ["CI"] = "true"  # else its telemetry forks a process, which takes half of the CPU for some seconds
    library = importlib.import_module("openvino")
    converted = library.convert_model(model, example_input=x, input=[list(x.shape)])
    options |= {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    return library.Core().compile_model(converted, "CPU", options)


def onnxruntime(model: nn.Module, x: Tensor, mode: str, budget: float) -> Call:
    session = onnxruntime_session(model, x)
    (name,) = (each.name for each in session.get_inputs())
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def onnxruntime_session(model: nn.Module, x: Tensor, **settings: Any) -> Any:
    """Return a session of ONNX Runtime, for one thread, of a model that PyTorch exported."""
    library = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    for name, value in ({"intra_op_num_threads": 1, "inter_op_num_threads": 1} | settings).items():
        setattr(options, name, value)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
        return library.InferenceSession(file, options, providers=["CPUExecutionProvider"])


CONTIGUOUS = "contiguous"
INFERENCE = MODES[:1]
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
PEERS = {
    CONTIGUOUS: Peer(eager),
    "torch.nn.utils": Peer(by_pytorch(stock_convert)),
    "model.to": Peer(by_pytorch(module_to)),
    "compile": Peer(compiled(), imports=COMPILER),
    "compile max-autotune": Peer(compiled("max-autotune"), imports=COMPILER),
    "ours": Peer(ours),
    "ours by tune": Peer(tuned),
    "ours, compiled": Peer(compiled(prepare=ours), imports=COMPILER),
    "OpenVINO": Peer(openvino, INFERENCE, ("openvino",)),
    "ONNX Runtime": Peer(onnxruntime, INFERENCE, ("onnxruntime", "onnxscript", "torch.onnx")),
}


class Resized(nn.Module):
    """A convolution, and an antialiased resize to one column."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.convolution(x), size=(8, 1), mode="bilinear", antialias=True)


def shifted_group_norm() -> nn.Module:
    """Return a group norm whose input has a mean of some hundred deviations."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3))
    nn.init.constant_(model[0].bias, 100.0)
    return model


# What PyTorch computes wrong on some CPU, mostly in channels-last: docs/hazards.md.
FAULTS = {
    "batch norm of many rows": LayoutModel(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)), (32, 3, 112, 112)
    ),
    "group norm of shifted data": LayoutModel(shifted_group_norm, (2, 3, 32, 32)),
    "instance norm of one sample": LayoutModel(
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16), nn.Conv2d(16, 16, 3)), (1, 3, 16, 16)
    ),
    "convolution of few voxels": LayoutModel(
        lambda: nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), nn.Conv3d(16, 16, 7, 2, padding=3)), (1, 4, 5, 5, 5)
    ),
    "strided 1x1 of few channels": LayoutModel(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 16, 1, stride=2)), (4, 3, 32, 32)
    ),
    "one-channel filters, one column": LayoutModel(
        lambda: nn.Sequential(nn.Conv2d(1, 32, (3, 7), stride=(1, 2), padding=(1, 3))), (2, 1, 7, 2)
    ),
    "antialiased resize to one column": LayoutModel(Resized, (2, 3, 16, 16)),
}
