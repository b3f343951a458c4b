"""Models as people have them, small and with random weights: all convolutions convert, and training goes on."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from comparison import assert_trains_alike, layouts, quiet, tensors
from reference import FORMATS, canonical_strides
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason

transformers = importlib.import_module("transformers")
diffusers = importlib.import_module("diffusers")
monai_networks = importlib.import_module("monai.networks.nets")

IMAGE = (1, 3, 64, 64)
VOLUME = (1, 1, 16, 16, 16)


def transformer(name, shape=IMAGE, argument="pixel_values", **config):
    """By its name; a configuration inside of the configuration is made when it is needed."""

    def make():
        values = {key: value() if callable(value) else value for key, value in config.items()}
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**values))
        return model, {argument: torch.randn(shape, dtype=torch.float64)}

    return make


def diffuser(name, *shapes, **config):
    def make():
        model = getattr(diffusers, name)(**config)
        return model, tuple(torch.randn(shape, dtype=torch.float64) if shape else 1 for shape in shapes)

    return make


def monai(name, *arguments, shape=VOLUME, **config):
    def make():
        model = getattr(monai_networks, name)(*arguments, **config)
        return model, (torch.randn(shape, dtype=torch.float64),)

    return make


SMALL = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
LAYERED = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
# A dropout's mask follows the strides of the activations, which follow those of the weights.
QUERIES = {
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 4},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}
BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
}
ARCHITECTURES = {
    "ResNet": transformer("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "MobileNetV2": transformer("MobileNetV2", depth_multiplier=0.25),
    "ConvNextV2": transformer("ConvNextV2", **SMALL),
    "BiT": transformer(
        "Bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck", num_groups=2,
    ),
    "Wav2Vec2": transformer(
        "Wav2Vec2", shape=(1, 2000), argument="input_values", num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_feat_extract_layers=2, apply_spec_augment=False, **LAYERED,
    ),
    "DETR": transformer(
        "Detr", use_timm_backbone=False, backbone=None,
        backbone_config=lambda: transformers.ResNetConfig(out_features=["stage4"], **RESNET), **QUERIES,
    ),
    "UNet2DCondition": diffuser(
        "UNet2DConditionModel", (1, 4, 16, 16), (), (1, 4, 8), block_out_channels=(8, 16), norm_num_groups=4,
        layers_per_block=1, cross_attention_dim=8, attention_head_dim=4, sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "AutoencoderKL": diffuser("AutoencoderKL", (1, 3, 16, 16), latent_channels=4, **BLOCKS),
    "monai.UNet": monai("UNet", 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
    "monai.DynUNet": monai(
        "DynUNet", 3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16], deep_supervision=True, deep_supr_num=1,
    ),
    "monai.EfficientNet": monai(
        "EfficientNetBN", "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1, shape=(1, 1, 32, 32),
    ),
}  # fmt: skip


# Some compute a softmax in float32, whatever their weights are.
TOLERANCE = 1e-5
# In training the batch norms of such small inputs make mountains of the last bit's differences.
IN_EVAL = ("MobileNetV2", "monai.EfficientNet")


# These standardise their weights in forward, which only example inputs show.
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
    remarks = {row.reason for row in seen} - {None, Reason.IN_FORMAT, Reason.ONE_CHANNEL}
    assert remarks == ({Reason.COMPUTED_IN_FORWARD} if name in STANDARDISED else set())
    assert [replace(row, reason=None) for row in seen] == [replace(row, reason=None) for row in nhwc.plan(model).rows]
