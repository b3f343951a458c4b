"""Drawn models, converted while they train, against the same ones unconverted; then reverted."""

import copy
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from drawing import expect
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import torch_nhwc as nhwc

CONVOLUTIONS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS: dict[str, dict[int, Any]] = {
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
}
POOLS: dict[str, dict[int, Any]] = {
    "average": {2: nn.AvgPool2d, 3: nn.AvgPool3d},
    "largest": {2: nn.MaxPool2d, 3: nn.MaxPool3d},
}


class Doubled(nn.Module):
    """A parametrization by one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight


class OwnConvolution(nn.Module):
    """A module that calls the function on its own parameter, which shows when it runs."""

    def __init__(self, width: int, space: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, width, *[3] * space) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (F.conv2d if x.dim() == 4 else F.conv3d)(x, self.kernel, padding=1)


class Residual(nn.Module):
    """A block with a connection around it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{index}": layer for index, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers.values():
            y = layer(y)
        return x + y


WRAPPERS: dict[str, Any] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "doubled": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()) and layer,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),  # type: ignore[no-untyped-call]
    "orthogonal": parametrizations.orthogonal,
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True, amsgrad=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    "fused adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3, eps=(1e-4, 1e-3)),
}


def draw(random: Random) -> dict[str, Any]:
    space, width = random.choice((2, 2, 3)), random.choice((4, 6, 8, 12))
    blocks = [_draw_block(random, width) for _ in range(random.randint(2, 7))]
    is_preserving = random.random() < 0.5
    steps_before = random.choice((0, 1, 2))
    # Adam and the like divide by the size of the gradient, and so enlarge its rounding error.
    dtype = random.choice((torch.float64, torch.float64, torch.float32))
    optimizer = random.choice([*OPTIMIZERS] if dtype == torch.float64 else ["sgd", "fused sgd"])
    # PyTorch's own gradient of instance norm is wrong on channels-last for a batch of 1.
    batches = (1, 2, 3) if is_preserving or "'instance'" not in repr(blocks) else (2, 3)
    sizes = [random.randint(8, 12) if space == 2 else random.randint(6, 8) for _ in range(space)]
    return {
        "space": space,
        "width": width,
        "channels": random.choice((1, 2, 3, 4)),
        "blocks": blocks,
        "dtype": dtype,
        # Large enough for every axis to have an output position that sees the whole kernel.
        "input": [random.choice(batches), *sizes],
        "optimizer": optimizer,
        "averaged": random.choice((None, None, "model", "copy", "tensors")),
        "steps_before": steps_before,
        # Adagrad has state before its first step.
        "is_optimizer_given": steps_before > 0 or optimizer == "fused adagrad" or random.random() < 0.5,
        "options": {
            "preserve": is_preserving,
            "each_forward": random.random() < 0.2,
            "input_format": random.choice((None, "channels_last")),
            "storage": random.choice((None, None, "auto", "fresh", "detach")),
        },
        "is_observed": random.random() < 0.3,
        "is_by_plan": random.random() < 0.2,
        "is_held": random.random() < 0.3,
        "threads": random.choice((1, 2)),
        "seed": random.getrandbits(60),
    }


def _draw_block(random: Random, width: int, depth: int = 0) -> dict[str, Any]:
    kinds = ["convolution"] * 4 + [
        "transposed",
        "norm",
        "norm",
        "activation",
        "pool",
        "upsample",
        "own",
        "again",
        "tied",
    ]
    kind = random.choice(kinds + ["residual"] * 2 * (depth < 2))
    block: dict[str, Any] = {"kind": kind}
    if kind == "convolution":
        block |= {
            "kernel": random.choice((1, 3, 3)),
            "groups": random.choice([1, 1, 2, width]),
            "bias": random.random() < 0.5,
            "padding_mode": random.choice(("zeros", "zeros", "circular", "reflect")),
            "wrapper": random.choice([None] * 8 + [*WRAPPERS]),
        }
    elif kind == "norm":
        block["norm"] = random.choice(("batch", "instance", "group"))
    elif kind == "activation":
        block["activation"] = random.choice(("ReLU", "GELU", "SiLU", "Tanh"))
    elif kind == "pool":
        block["pool"] = random.choice(("average", "largest"))
    elif kind == "residual":
        block["blocks"] = [_draw_block(random, width, depth + 1) for _ in range(random.randint(1, 3))]
    elif kind in ("again", "tied"):
        block["which"] = random.randint(0, 5)
    return block


class Builder:
    """Makes the modules of a case; the same ones for the same seed."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.width, self.space, self.dtype = case["width"], case["space"], case["dtype"]
        self.made: list[nn.Module] = []

    def block(self, drawn: dict[str, Any]) -> nn.Module:
        layer = self._make(drawn)
        self.made.append(layer)
        return layer

    def _make(self, drawn: dict[str, Any]) -> nn.Module:
        kind, width, space = drawn["kind"], self.width, self.space
        if kind == "again" and self.made:
            return self.made[drawn["which"] % len(self.made)]
        if kind == "convolution":
            sizes = {"kernel_size": drawn["kernel"], "padding": drawn["kernel"] // 2, "groups": drawn["groups"]}
            layer = CONVOLUTIONS[space](width, width, **sizes, bias=drawn["bias"], padding_mode=drawn["padding_mode"])
            return WRAPPERS[drawn["wrapper"]](layer) if drawn["wrapper"] else layer
        if kind == "transposed":
            return TRANSPOSED[space](width, width, 3, padding=1)
        if kind == "norm":
            return nn.GroupNorm(2, width) if drawn["norm"] == "group" else NORMS[drawn["norm"]][space](width)
        if kind == "activation":
            return getattr(nn, drawn["activation"])()
        if kind == "pool":
            # Where two values differ by their rounding alone, it decides which one is the largest and has the gradient.
            pool = "average" if self.dtype == torch.float32 else drawn["pool"]
            return POOLS[pool][space](3, stride=1, padding=1)
        if kind == "upsample":
            return nn.Sequential(nn.Upsample(scale_factor=2), POOLS["average"][space](2))
        if kind == "own":
            return OwnConvolution(width, space)
        if kind == "residual":
            return Residual(*(self.block(each) for each in drawn["blocks"]))
        layer = CONVOLUTIONS[space](width, width, 3, padding=1)
        plain = [each for each in self.made if type(each) is CONVOLUTIONS[space] and "weight" in each._parameters]
        plain = [each for each in plain if each.weight.shape == layer.weight.shape]
        if kind == "tied" and plain:
            layer.weight = plain[drawn["which"] % len(plain)].weight
        return layer


def build(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(case["seed"])
    builder = Builder(case)
    stem = CONVOLUTIONS[case["space"]](case["channels"], case["width"], 3, padding=1)
    blocks = [builder.block(each) for each in case["blocks"]]
    last = CONVOLUTIONS[case["space"]](case["width"], 3, 1)
    return nn.Sequential(stem, nn.Sequential(*blocks), last).to(case["dtype"])


class Training:
    """A model, its optimizer and its averaged copy; with other inputs by `shift` roundings."""

    def __init__(self, case: dict[str, Any], shift: int = 0) -> None:
        self.case, self.model, self.shift = case, build(case), shift
        self.optimizer = OPTIMIZERS[case["optimizer"]](self.model.parameters())
        self.averaged: Any = None
        if case["averaged"] == "model" and not _has_computed_weights(self.model):
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model)
        elif case["averaged"] == "copy" and not _has_computed_weights(self.model):
            self.averaged = copy.deepcopy(self.model)
        elif case["averaged"] == "tensors":
            self.averaged = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def step(self, number: int) -> Tensor:
        batch, *sizes = self.case["input"]
        x = torch.randn(batch, self.case["channels"], *sizes, generator=torch.Generator().manual_seed(number))
        x = x.to(self.case["dtype"]) * (1 + self.shift * torch.finfo(self.case["dtype"]).eps)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if isinstance(self.averaged, torch.optim.swa_utils.AveragedModel):
            self.averaged.update_parameters(self.model)
        return loss.detach()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that training changes, by name."""
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        named = [*self.model.named_parameters()]
        tensors |= {f"gradient of {name}": each.grad for name, each in named if each.grad is not None}
        for name, parameter in named:
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"{label} of {name}": each for label, each in state.items() if isinstance(each, Tensor)}
        if isinstance(self.averaged, nn.Module):
            tensors |= {f"averaged {name}": each for name, each in self.averaged.state_dict().items()}
        elif self.averaged:
            tensors |= {f"averaged {name}": each for name, each in self.averaged.items()}
        return tensors


def _has_computed_weights(model: nn.Module) -> bool:
    """Return whether a layer has a weight that is no parameter, which deepcopy refuses."""
    return any(isinstance(vars(module).get("weight"), Tensor) for module in model.modules())


class Unconverted:
    """The same training without a conversion, and again with inputs that differ by a few roundings.

    How far these two are apart is what rounding alone can do: a gradient that should be zero and is divided by its own
    size, or a model that diverges, makes any difference large.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.plain, self.shifted = Training(case), Training(case, shift=4)
        self.rtol, self.atol = (1e-3, 1e-4) if case["dtype"] == torch.float32 else (1e-6, 1e-7)
        self.tensors = self.plain.tensors

    def expect_step_of(self, ours: Training, number: int, what: str) -> None:
        """Take a step in all, and expect the same loss."""
        self._expect_close(ours.step(number), self.plain.step(number), self.shifted.step(number), what)

    def expect_tensors_of(self, ours: Training) -> None:
        actual, expected, shifted = ours.tensors(), self.plain.tensors(), self.shifted.tensors()
        expect(actual.keys() == expected.keys(), f"other tensors: {actual.keys() ^ expected.keys()}")
        for name, each in actual.items():
            self._expect_close(each, expected[name], shifted[name], name)

    def _expect_close(self, actual: Tensor, expected: Tensor, shifted: Tensor, what: str) -> None:
        if not expected.isfinite().all() or not expected.numel():  # the unconverted model diverges
            return
        error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
        allowed = self.atol + self.rtol * largest + 10 * (shifted - expected).abs().max().item()
        expect(error <= allowed, f"{what}: differs by {error:.1e}, and its largest value is {largest:.1e}")


def check(case: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(case["threads"])
    ours, others = Training(case), Unconverted(case)
    for number in range(case["steps_before"]):
        others.expect_step_of(ours, number, "the loss before")
    classes, before = [type(each) for each in ours.model.modules()], ours.tensors()
    strides = {name: each.stride() for name, each in before.items()}
    values = {name: each.detach().clone() for name, each in before.items()}
    held = ours.model.state_dict() if case["is_held"] else {}
    parameters = [id(each) for each in ours.model.parameters()]
    report = _convert(case, ours)
    expect([id(each) for each in ours.model.parameters()] == parameters, "the parameters are other objects")
    _expect_equal(ours.tensors(), values, "converting")
    for name, each in held.items():
        expect(torch.equal(each, values[name]), f"{name}: a tensor that somebody holds has changed")
    tensors = dict(ours.model.named_parameters(remove_duplicate=False))
    for row in report.rows:
        if row.outcome is not None and row.full_name in tensors:
            expect(
                tensors[row.full_name].stride() == row.target_strides, f"{row.full_name}: not the strides of its row"
            )
    found = nhwc.check(ours.model, report.plan, optimizer=ours.optimizer)
    expect(not found, f"check finds {found}")
    first = case["steps_before"]
    for number in (first, first + 1):
        others.expect_step_of(ours, number, "the loss")
    others.expect_tensors_of(ours)
    values = {name: each.detach().clone() for name, each in ours.tensors().items()}
    given = (ours.optimizer, None) if case["is_optimizer_given"] else (ours.optimizer, ours.averaged)
    report.revert(*given)
    _expect_equal(ours.tensors(), values, "reverting")
    for (path, each), was in zip(ours.model.named_modules(), classes):
        # PyTorch makes a class of its own for each parametrized layer.
        is_same = type(each) is was or (parametrize.is_parametrized(each) and type(each).__mro__[1:] == was.__mro__[1:])
        expect(is_same, f"{path} is a {type(each)}, not a {was}")
    for name, each in ours.tensors().items():
        is_new = name not in strides or name.startswith("gradient")
        wanted = others.tensors()[name].stride() if is_new else strides[name]
        same = all(size < 2 or own == other for size, own, other in zip(each.shape, each.stride(), wanted))
        expect(
            same if is_new else each.stride() == wanted, f"{name}: strides {each.stride()} after revert, not {wanted}"
        )
    others.expect_step_of(ours, first + 2, "the loss after revert")
    others.expect_tensors_of(ours)
    return {
        "weights": len(report.rows),
        "converted": sum(row.outcome is not None for row in report.rows),
        "replaced": len(report.plan.layers),
        f"by {case['optimizer']}": 1,
    }


def _convert(case: dict[str, Any], ours: Training) -> nhwc.Report:
    batch, *sizes = case["input"]
    options = {name: value for name, value in case["options"].items() if value is not None}
    if case["is_observed"]:
        options["example_inputs"] = torch.zeros(batch, case["channels"], *sizes, dtype=case["dtype"])
    owned: dict[str, Any] = {"optimizer": ours.optimizer, "ema": ours.averaged} if case["is_optimizer_given"] else {}
    if not case["is_by_plan"]:
        return nhwc.convert_(ours.model, **options, **owned)
    plan = nhwc.Plan.from_json(nhwc.plan(ours.model, **options).to_json())
    return nhwc.convert_(ours.model, plan=plan, **owned)


def _expect_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> None:
    expect(
        actual.keys() == expected.keys(), f"{when} changed which tensors there are: {actual.keys() ^ expected.keys()}"
    )
    for name, each in actual.items():
        # A model that diverges has NaN in both.
        is_same = torch.equal(each.nan_to_num(), expected[name].nan_to_num())
        expect(is_same, f"{when} changed the values of {name}")
