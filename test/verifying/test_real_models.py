"""Models as people have them: where nothing is wrong, nothing is said to be; what is wrong in PyTorch is found."""

import copy
import importlib
import itertools

import pytest
import torch
from comparison import quiet

import torch_nhwc as nhwc


def made(name, dtype, training):
    """Return a model and its inputs; importing what makes them takes seconds."""
    torch.manual_seed(0)
    with quiet():
        model, inputs = importlib.import_module("architectures").ARCHITECTURES[name]()
    model = model.to(dtype).train(training)
    return model, tuple(each.to(dtype) if isinstance(each, torch.Tensor) else each for each in inputs)


CASES = [
    *itertools.product(
        ("UNet2DCondition", "AutoencoderKL", "monai.DynUNet"), (torch.float32, torch.bfloat16), (True, False)
    )
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype", "training"), CASES)
def test_nothing_differs_where_layers_are_replaced_or_there_are_none_to_replace(name, dtype, training):
    before, inputs = made(name, dtype, training)
    with quiet():
        report = nhwc.convert_(after := copy.deepcopy(before), preserve=True, input_format="channels_last")
    verification = nhwc.verify(before, after, inputs)
    assert verification, str(verification)
    assert report.model is after
