"""The shapes of the convolution weights of the models of models.py, for machines without their libraries.

    python benchmarks/shapes.py

writes shapes.json from the models themselves.
"""

import json
from pathlib import Path

import torch
from models import MODELS, weights_of
from torch import nn

FILE = Path(__file__).with_suffix(".json")


def shapes_of(model: nn.Module) -> list[list[int]]:
    return [list(weight.shape) for weight in weights_of(model)]


def load() -> dict[str, list[list[int]]]:
    """Return the shapes of each model."""
    return json.loads(FILE.read_text())


def convolutions(shapes: list[list[int]]) -> nn.ModuleList:
    """Return layers with weights of these shapes, and nothing else."""
    kinds = {4: nn.Conv2d, 5: nn.Conv3d}
    return nn.ModuleList(
        kinds[2 + len(kernel)](inputs, outputs, tuple(kernel), bias=False) for outputs, inputs, *kernel in shapes
    )


def main() -> None:
    with torch.device("meta"):
        shapes = {name: shapes_of(make()) for name, make in MODELS.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(of_model)}" for name, of_model in shapes.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
