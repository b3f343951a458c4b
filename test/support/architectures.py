"""Models as people have them, small and with random weights.

Importing their packages takes seconds, in each process that collects tests: a model's own is imported when it is made.
"""

import torch

IMAGE = (1, 3, 64, 64)
VOLUME = (1, 1, 16, 16, 16)


def transformer(name, shape=IMAGE, argument="pixel_values", **config):
    """By its name; a configuration inside of the configuration is made when it is needed."""

    def make():
        import transformers

        values = {key: value() if callable(value) else value for key, value in config.items()}
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**values))
        return model, {argument: torch.randn(shape, dtype=torch.float64)}

    return make


def resnet_backbone():
    from transformers import ResNetConfig

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return ResNetConfig(out_features=["stage4"], **sizes)


def diffuser(name, *shapes, **config):
    def make():
        import diffusers

        model = getattr(diffusers, name)(**config)
        return model, tuple(torch.randn(shape, dtype=torch.float64) if shape else 1 for shape in shapes)

    return make


def monai(name, *arguments, shape=VOLUME, **config):
    def make():
        import monai.networks.nets

        model = getattr(monai.networks.nets, name)(*arguments, **config)
        return model, (torch.randn(shape, dtype=torch.float64),)

    return make


SMALL = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
LAYERED = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
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
        "Detr", use_timm_backbone=False, backbone=None, backbone_config=resnet_backbone, **QUERIES,
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
