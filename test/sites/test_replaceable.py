"""Which layers of a model are found to lose on channels-last, and why some are not replaced."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason
from torch_nhwc.planning.faults import is_slow_depthwise_volume
from torch_nhwc.sites.finding import walk_layers


def reasons(model):
    return {layer.path: layer.reason for layer in walk_layers(model).layers}


class Own(nn.GroupNorm):
    """Computes its statistics itself, as MONAI's `MaisiGroupNorm3D`."""

    def forward(self, x):
        return (x - x.mean()) / x.std()


class NoForward(nn.GroupNorm):
    """Has PyTorch's methods, as transformers' `PoolFormerGroupNorm`."""


class Halved(nn.LogSoftmax):
    def forward(self, x):
        return F.log_softmax(x, self.dim) / 2


class OwnSizes(nn.Conv2d):
    """Has PyTorch's methods, as the depthwise convolutions of transformers' EfficientNet."""

    def __init__(self, channels):
        super().__init__(channels, channels, 3, 2, "valid", groups=channels)


class OwnPadding(nn.Conv2d):
    """Pads and calls the function itself, as timm's `Conv2dSame`."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def test_layers_that_cannot_be_replaced_have_a_reason():
    replaced = nn.GroupNorm(2, 6)
    replaced.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "norm": nn.GroupNorm(2, 6),
            "no_forward": NoForward(2, 6),
            "own": Own(2, 6),
            "softmax": Halved(1),
            "replaced": replaced,
            "other_dim": nn.Softmax(-1),
            "images": nn.Conv2d(2, 2, 1).eval(),
            "own_sizes": OwnSizes(2),
            "own_padding": OwnPadding(2, 2, 3),
            "volumes": nn.ConvTranspose3d(2, 2, 3),
            "batch": nn.BatchNorm2d(2).eval(),
            "rows": nn.BatchNorm1d(2),
            "nearest": nn.Upsample(scale_factor=2),
            "lazy": nn.LazyInstanceNorm2d(),
            "lp_pool": nn.LPPool3d(2, 2),
        }
    )
    assert reasons(model) == {
        "norm": None,
        "no_forward": None,
        "own": Reason.OTHER_CLASS,
        "softmax": Reason.OTHER_CLASS,
        "replaced": Reason.FORWARD_REPLACED,
        "other_dim": Reason.OTHER_ARGUMENTS,
        "images": None,
        "own_sizes": None,
        "own_padding": None,
        "volumes": None,
        "batch": None,
        "lazy": Reason.LAZY_LAYER,
    }
    assert reasons(nn.Sequential(nn.GroupNorm(2, 6).to("meta"))) == {"0": None}


def on_gpu(*layers):
    """Return a model whose tensors say that they are on a GPU."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    model = nn.Sequential(nn.Conv2d(2, 2, 3), *layers)
    for module in model:
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else parameter.detach().as_subclass(Elsewhere)
    return model


def test_layers_of_another_device_are_kept(monkeypatch):
    """The device of a layer without tensors is that of the model."""
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    model = on_gpu(nn.GELU(), nn.GroupNorm(1, 2), nn.BatchNorm2d(2), nn.InstanceNorm2d(2))
    assert reasons(model) == dict.fromkeys("01234", Reason.OTHER_DEVICE)


def test_norms_of_a_gpu_are_replaced_where_its_kernels_run(monkeypatch):
    monkeypatch.setattr(nhwc.ops, "runs_cuda_norms", lambda device: device.type == "cuda")
    norms = (nn.GroupNorm(1, 2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2, affine=True), nn.BatchNorm2d(2))
    model = on_gpu(nn.GELU(), nn.AvgPool3d(2), *norms)
    assert reasons(model) == dict.fromkeys("12", Reason.OTHER_DEVICE) | dict.fromkeys("03456")
    layers = (nn.Conv2d(2, 2, 3, bias=False), nn.Conv3d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3))
    kept = dict.fromkeys("13", Reason.OTHER_DEVICE)  # a bias is what PyTorch adds in a pass of its own
    assert reasons(model := on_gpu(*layers)) == kept | dict.fromkeys("02")
    assert "without passes of its own for padding and bias" in walk_layers(model).layers[0].gains


def test_depthwise_volumes_of_a_gpu_are_replaced_whatever_the_switch_says(monkeypatch):
    layers = [nn.Conv3d(4, 4, 3, groups=4), nn.Conv3d(4, 8, 3, groups=4)]
    others = [nn.Conv3d(4, 4, 3, groups=2), nn.Conv3d(1, 4, 3), nn.ConvTranspose3d(4, 4, 3, groups=4)]
    model = on_gpu(*layers, *others, nn.Conv2d(4, 4, 3, groups=4))
    for switch in "01":
        monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", switch)
        assert reasons(model) == dict.fromkeys("12") | dict.fromkeys("03456", Reason.OTHER_DEVICE)
    slow = [is_slow_depthwise_volume(site) for site in walk_layers(model).sites]
    assert slow == [False, True, True, False, False, False, False]
    assert not any(is_slow_depthwise_volume(site) for site in walk_layers(nn.Conv3d(4, 4, 3, groups=4)).sites)


def test_pads_and_interpolations_are_replaced_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(nhwc.ops, "runs_cuda_norms", lambda device: device.type == "cuda")
    pads = (nn.ReflectionPad2d(1), nn.ReplicationPad3d(1), nn.CircularPad2d(1), nn.ZeroPad2d(1))
    layers = (*pads, nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d(4), nn.Upsample(4, mode="bicubic"))
    padded = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect", bias=False)
    assert reasons(on_gpu(padded, *layers)) == dict.fromkeys("0123467")
    assert reasons(nn.Sequential(nn.Conv2d(2, 2, 3), padded, *layers)) == dict.fromkeys("014")
    nhwc.convert_(model := nn.Sequential(nn.Conv2d(2, 2, 3), *layers))
    assert [type(layer).__name__ for layer in model[1:]] == [
        *("ReflectionPad2d", "ReplicationPad3d", "PreservingCircularPad2d", "ZeroPad2d"),
        *("Upsample", "UpsamplingBilinear2d", "Upsample"),
    ]


def test_a_library_without_cuda_runs_no_norms_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")
    assert not nhwc.ops.runs_cuda_norms("cpu")
    if nhwc.cpp_extension.build_info()["cuda"] is None:
        assert not nhwc.ops.runs_cuda_norms()


def test_layers_inside_of_a_wrapper_are_kept_with_its_reason():
    model = nn.Sequential(nn.Sequential(nn.GELU()))
    model[0].compile(backend="eager")
    assert reasons(model) == {"0.0": Reason.COMPILED}


def test_a_reason_that_weights_have_too_is_printed_once():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
    plan = str(nhwc.plan(torch.compile(model, backend="eager")))
    assert plan.count("take") == 1
    assert "1 Conv2d kept (_orig_mod.0): COMPILED, as above" in plan
    assert "1 GELU kept (_orig_mod.1): COMPILED, as above" in plan


def test_layers_inside_of_torchscript_are_a_remark():
    model = nn.Sequential(torch.jit.script(nn.GELU()), nn.GELU())
    report = nhwc.convert_(model, preserve=True)
    assert Reason.SCRIPTED_LAYERS.value in report.remarks
    assert [row.path for row in report.plan.layers] == ["1"]
