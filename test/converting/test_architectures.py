"""Models as people have them, small and with random weights: all convolutions convert, and training goes on."""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES
from comparison import assert_trains_alike, layouts, quiet, tensors
from reference import FORMATS, canonical_strides
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason

# Some compute a softmax in float32, whatever their weights are.
TOLERANCE = 1e-5
# In training the batch norms of such small inputs make mountains of the last bit's differences.
IN_EVAL = ("MobileNetV2", "monai.EfficientNet")
# These standardise their weights in forward, which only example inputs show, and replaced layers convert.
STANDARDISED = ("BiT",)


def made(name):
    """Return a model in double, and its inputs."""
    model, inputs = ARCHITECTURES[name]()
    return model.double().train(name not in IN_EVAL), inputs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_convolution_of_a_real_model_converts_and_training_goes_on(name):
    with quiet():
        model, inputs = made(name)
        plain, before = copy.deepcopy(model), layouts(model)

        def run(each):
            return each(**inputs) if isinstance(inputs, dict) else each(*inputs)

        report = nhwc.convert_(model, strict=name != "Wav2Vec2")  # it has convolutions in 1D alone, which is an error
        convolutions = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)
        found = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, convolutions)}
        assert {row.full_name for row in report.plan.rows} == found
        assert found or name == "Wav2Vec2"
        after = tensors(model)
        for row in report.plan.rows:
            wanted = torch.contiguous_format if row.reason is Reason.ONE_CHANNEL else FORMATS[row.rank]
            assert after[row.full_name].stride() == canonical_strides(row.shape, wanted)
        assert_trains_alike(model, plain, run, steps=2, tolerance=TOLERANCE)
        report.revert()
        assert layouts(model) == before
        assert_trains_alike(model, plain, run, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_example_inputs_show_nothing_that_the_layers_have_not_shown(name):
    with quiet():
        model, inputs = made(name)
        seen = nhwc.plan(model, example_inputs=inputs).rows
        kept = nhwc.plan(model, example_inputs=inputs, preserve=False).rows
    standardised = {row.reason for row in kept} & {Reason.COMPUTED_IN_FORWARD}
    assert standardised == ({Reason.COMPUTED_IN_FORWARD} if name in STANDARDISED else set())
    remarks = {row.reason for row in seen} - {None, Reason.IN_FORMAT, Reason.ONE_CHANNEL}
    assert not remarks
    assert [replace(row, reason=None) for row in seen] == [replace(row, reason=None) for row in nhwc.plan(model).rows]
