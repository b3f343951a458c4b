"""Pipelines of diffusers convert by one call, and compute, save and offload as they did."""

import importlib

import diffusers
import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Reason
from torch_nhwc.integrations import diffusers as diffusers_module
from torch_nhwc.integrations.diffusers import convert_pipeline_


def components():
    """What a pipeline holds, in small."""
    torch.manual_seed(0)
    modules = {"vae": nn.Conv2d(3, 4, 3), "text_encoder": nn.Linear(3, 4), "unet": nn.Conv3d(4, 4, 3)}
    return modules | {"tokenizer": None, "scheduler": object(), "decoder": nn.Conv2d(4, 4, 3)}


def stable_diffusion():
    """A pipeline as it is loaded, but for its tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4}
    pipe = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **blocks
        ),
        text_encoder=CLIPTextModel(CLIPTextConfig(vocab_size=16, **sizes)),
        tokenizer=None,
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            cross_attention_dim=8,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            **blocks,
        ),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe):
    prompt = torch.linspace(-1, 1, 32).view(1, 4, 8)
    embeddings = {"prompt_embeds": prompt, "negative_prompt_embeds": -prompt}
    sizes = {"num_inference_steps": 2, "height": 16, "width": 16}
    images = pipe(**embeddings, **sizes, generator=torch.Generator().manual_seed(0), output_type="np").images
    return torch.from_numpy(images)


def assert_same_image(pipe, expected):
    torch.testing.assert_close(image(pipe), expected, rtol=1e-5, atol=1e-5)


def strides(pipe):
    held = (pipe if isinstance(pipe, dict) else pipe.components).items()
    modules = [(name, each) for name, each in held if isinstance(each, nn.Module)]
    return {(name, path): each.stride() for name, module in modules for path, each in module.named_parameters()}


def test_what_has_convolutions_is_converted_and_the_rest_is_passed_by():
    held = components()
    before = strides(held)
    report = convert_pipeline_(held, strict=True, input_format="channels_last", preserve=True)
    assert [*report] == ["vae", "unet", "decoder"]
    assert held["vae"].weight.stride() == (27, 1, 9, 3)
    assert held["unet"].weight.stride() == (108, 1, 36, 12, 4)
    assert all(f"{name}: 1 weight is channels-last" in str(report) for name in report)
    assert held["vae"](torch.randn(1, 3, 5, 5)).stride() == (36, 1, 12, 4)
    report.revert()
    assert strides(held) == before
    assert not any(each._forward_pre_hooks for each in (held["vae"], held["unet"]))


def test_components_are_chosen_by_name_and_have_plans_of_their_own():
    held = components()
    assert [*convert_pipeline_(held, components="decoder", dry_run=True)] == ["decoder"]
    assert [*convert_pipeline_(held, "channels_last", components=["decoder", "vae"])] == ["decoder", "vae"]
    assert held["unet"].weight.is_contiguous()
    held = components()
    plan = nhwc.plan(held["vae"], filter_fn=lambda module, path: False)
    report = convert_pipeline_(held, plan={"vae": plan}, filter_fn=lambda module, path: True, preserve=True)
    assert [each.plan.rows[0].reason for each in report.values()] == [Reason.FILTERED, None, None]
    with pytest.warns(UserWarning, match="nothing to convert in the Linear"):
        convert_pipeline_({"text_encoder": held["text_encoder"]})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"components": ["vea"]}, "'vea' is no module of the pipeline: it has vae, text_encoder, unet, decoder"),
        ({"components": ["scheduler"]}, "'scheduler' is no module of the pipeline"),
        ({"plan": {"tokenizer": None}}, "'tokenizer' is no module of the pipeline"),
        ({"components": "vae", "plan": {"unet": None}}, "a plan for 'unet', which is not among components"),
        ({"memory_format": "nhwc"}, "convert_pipeline_: 'vae': .*nhwc"),
    ],
)
def test_bad_names_are_one_error(arguments, error):
    held = components()
    before = strides(held)
    with pytest.raises(ValueError, match=error):
        convert_pipeline_(held, **arguments)
    assert strides(held) == before


def test_a_failure_in_the_third_component_leaves_all_as_they_were():
    held = components()
    before = strides(held)
    addresses = [held[name].weight.data_ptr() for name in ("vae", "unet")]
    held["decoder"].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"convert_pipeline_: 'decoder': .*it is compiled"):
        convert_pipeline_(held, strict=True, input_format="channels_last", each_forward=True)
    with pytest.raises(RuntimeError, match=r"convert_pipeline_: 'decoder': .*it is compiled"):
        convert_pipeline_(held, strict=True, input_format="channels_last")
    assert strides(held) == before
    assert addresses == [held[name].weight.data_ptr() for name in ("vae", "unet")]
    assert [type(held["vae"]), type(held["unet"])] == [nn.Conv2d, nn.Conv3d]
    assert not held["vae"]._forward_pre_hooks


def test_an_interrupt_in_the_second_component_leaves_all_as_they_were(monkeypatch):
    held = components()
    before = strides(held)
    convert_ = diffusers_module.convert_

    def interrupting(model, **options):
        if model is held["unet"]:
            raise KeyboardInterrupt
        return convert_(model, **options)

    monkeypatch.setattr(diffusers_module, "convert_", interrupting)
    with pytest.raises(KeyboardInterrupt):
        convert_pipeline_(held)
    assert strides(held) == before


def test_a_name_that_is_given_twice_counts_once():
    held = components()
    before = strides(held)
    convert_pipeline_(held, components=["vae", "vae"]).revert()
    assert strides(held) == before


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (nn.Conv2d(3, 4, 3), {}, TypeError, "expected a pipeline or its components, got Conv2d"),
        ({}, {}, ValueError, "the pipeline has no module"),
        ({"scheduler": object()}, {"strict": True}, ValueError, "the pipeline has no module"),
        ({"controlnet": [nn.Conv2d(3, 4, 3)]}, {}, TypeError, "'controlnet' holds several modules"),
        ({"controlnet": {"a": nn.Conv2d(3, 4, 3)}}, {}, TypeError, "'controlnet' holds several modules"),
        ({"vae": nn.Conv2d(3, 4, 3)}, {"components": 3}, TypeError, r"expected plan=\{name: plan\}, and components="),
        (
            {"vae": nn.Conv2d(3, 4, 3)},
            {"plan": nhwc.plan(nn.Conv2d(3, 4, 3))},
            TypeError,
            r"expected plan=\{name: plan\}, and components=",
        ),
    ],
)
def test_what_is_no_pipeline_is_named(given, options, error, message):
    with pytest.raises(error, match=f"convert_pipeline_: {message}"):
        convert_pipeline_(given, **options)


def test_an_error_of_a_filter_of_the_caller_is_its_own():
    class OwnError(ValueError):
        def __init__(self, first, second):
            super().__init__(first)

    def raising(module, path):
        raise OwnError("a", "b")

    with pytest.raises(OwnError):
        convert_pipeline_(components(), filter_fn=raising)


def test_what_is_shared_is_converted_once():
    held = components()
    held["decoder"] = nn.Sequential(held["vae"], nn.Conv2d(4, 4, 3))
    before = strides(held)
    report = convert_pipeline_(held, strict=True)
    assert [each.outcomes for each in report.values()] == [
        (Outcome.REUSED,),
        (Outcome.REUSED,),
        (Outcome.KEPT, Outcome.REUSED),
    ]
    again = convert_pipeline_(held, strict=True)
    again.revert()
    assert held["vae"].weight.stride() == (27, 1, 9, 3)
    report.revert()
    assert strides(held) == before


OPTIONS = {
    "nothing": {},
    "inputs": {"input_format": "channels_last"},
    "preserved": {"preserve": True},
    "each forward": {"each_forward": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [*OPTIONS])
def test_a_pipeline_draws_the_same_image(options):
    pipe = stable_diffusion()
    expected, before = image(pipe), strides(pipe)
    report = convert_pipeline_(pipe, strict=True, **OPTIONS[options])
    assert [*report] == ["vae", "unet"]
    assert pipe.unet.conv_in.weight.is_contiguous() == (options == "each forward")
    assert_same_image(pipe, expected)
    report.revert()
    assert strides(pipe) == before
    assert torch.equal(image(pipe), expected)


@pytest.mark.exhaustive
def test_two_pipelines_of_the_same_components_are_one():
    pipe = stable_diffusion()
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    convert_pipeline_(pipe, strict=True)
    report = convert_pipeline_(other, strict=True)
    assert {outcome for each in report.values() for outcome in each.outcomes} == {Outcome.KEPT}


@pytest.mark.exhaustive
def test_channels_last_weights_bring_the_format_along():
    """So that `decode`, which takes its input as it comes, needs no hook: the convolution would copy it as well."""
    pipe = stable_diffusion()
    convert_pipeline_(pipe, strict=True)
    assert pipe.vae.decode(torch.randn(1, 4, 8, 8)).sample.is_contiguous(memory_format=torch.channels_last)
    with nhwc.trace(pipe.unet) as trace:
        image(pipe)
    assert [each.path for each in trace.mixed] == ["conv_in"]


@pytest.mark.exhaustive
def test_checkpoints_are_contiguous(tmp_path):
    pipe = stable_diffusion()
    expected = image(pipe)
    convert_pipeline_(pipe, strict=True, preserve=True)
    pipe.save_pretrained(tmp_path)
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, tokenizer=None)
    loaded.set_progress_bar_config(disable=True)
    assert all(each.is_contiguous() for each in loaded.unet.state_dict().values())
    assert torch.equal(image(loaded), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["fuse_qkv_projections", "tiling", "slicing", "dtype"])
def test_what_comes_afterwards_leaves_the_format(change):
    latents = torch.randn(2, 4, 12, 12)
    decoded = []
    for converts in (False, True):
        pipe = stable_diffusion()
        if converts:
            convert_pipeline_(pipe, strict=True)
        if change == "fuse_qkv_projections":
            pipe.fuse_qkv_projections()
        elif change == "dtype":
            pipe.to(torch.float64)
        else:
            getattr(pipe.vae, f"enable_{change}")()
            pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 8, 16
        decoded.append(pipe.vae.decode(latents.to(pipe.vae.dtype)).sample)
    torch.testing.assert_close(*decoded, rtol=1e-5, atol=1e-5)
    assert pipe.unet.conv_in.weight.stride() == (36, 1, 12, 4)
    assert not nhwc.check(pipe.unet, nhwc.plan(pipe.unet))


@pytest.mark.exhaustive
def test_adapters_that_come_afterwards_convert_by_another_call():
    peft = importlib.import_module("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["conv1", "to_q"], init_lora_weights=False)
    pipe, stock = stable_diffusion(), stable_diffusion()
    convert_pipeline_(pipe, strict=True)
    for each in (pipe, stock):
        each.unet.add_adapter(adapter)
    stock.unet.load_state_dict(pipe.unet.state_dict())
    expected = image(stock)
    assert_same_image(pipe, expected)
    rows = convert_pipeline_(pipe, strict=True)["unet"].rows
    assert all("lora_" in row.path for row in rows if row.outcome is not Outcome.KEPT)
    assert_same_image(pipe, expected)
    pipe.unet.fuse_lora()
    assert_same_image(pipe, expected)


CPU = torch.device("cpu")


def offloaded_whole(pipe, folder):
    pipe.enable_model_cpu_offload(device="cpu")


def offloaded_by_layers(pipe, folder):
    """What `enable_sequential_cpu_offload` does; from its "cpu:0", accelerate cannot put parameters back."""
    accelerate = importlib.import_module("accelerate")
    for module in (pipe.unet, pipe.vae, pipe.text_encoder):
        accelerate.cpu_offload(module, CPU, offload_buffers=len(module._parameters) > 0)


def offloaded_by_groups(pipe, folder):
    pipe.enable_group_offload(CPU, offload_type="leaf_level")


def offloaded_to_disk(pipe, folder):
    pipe.enable_group_offload(CPU, offload_type="leaf_level", offload_to_disk_path=str(folder))


OFFLOADS = [offloaded_whole, offloaded_by_layers, offloaded_by_groups, offloaded_to_disk]
REFUSED = [offloaded_by_layers, offloaded_to_disk]


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_conversion_before_offloading_stays(offload, tmp_path):
    pipe = stable_diffusion()
    expected = image(pipe)
    report = convert_pipeline_(pipe, strict=True, each_forward=offload is offloaded_to_disk)
    before = strides(pipe)
    offload(pipe, tmp_path)
    for _ in range(2):
        assert_same_image(pipe, expected)
    assert strides(pipe) == before
    if offload is offloaded_by_layers:
        with pytest.raises(RuntimeError, match="put back before each forward"):
            report.revert()
        pipe.remove_all_hooks()
        report.revert()
        assert torch.equal(image(pipe), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_conversion_behind_offloading_stays_or_is_refused(offload, tmp_path):
    pipe = stable_diffusion()
    expected, before = image(pipe), strides(pipe)
    offload(pipe, tmp_path)
    if offload in REFUSED:
        with pytest.warns(UserWarning, match="(30|33) sites stay as they are: .*put back before each forward"):
            report = convert_pipeline_(pipe)
        assert {row.reason for each in report.values() for row in each.rows} == {Reason.OFFLOADED}
        with pytest.raises(RuntimeError, match=r"'vae': .*put back before each forward"):
            convert_pipeline_(pipe, strict=True)
        assert strides(pipe) == before
    else:
        convert_pipeline_(pipe, strict=True)
        assert pipe.unet.conv_in.weight.stride() == (36, 1, 12, 4)
    assert_same_image(pipe, expected)


@pytest.mark.exhaustive
def test_diffusers_writes_no_channels_last_groups_to_a_disk(tmp_path):
    pipe = stable_diffusion()
    convert_pipeline_(pipe, strict=True)
    with pytest.raises(ValueError, match="save a non contiguous tensor"):
        offloaded_to_disk(pipe, tmp_path)


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=1,
        rope_max_seq_len=16,
    )
    return model, (torch.randn(1, 4, 2, 4, 4), torch.tensor([3]), torch.ones(1, 3, 8)), {}


def hunyuan_video():
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=8,
        pooled_projection_dim=4,
        rope_axes_dim=(2, 4, 4),
    )
    arguments = torch.randn(1, 4, 2, 4, 4), torch.tensor([3]), torch.ones(1, 3, 8), torch.ones(1, 3), torch.ones(1, 4)
    return model, arguments, {"guidance": torch.ones(1)}


def wan_autoencoder():
    model = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    return model, (torch.randn(1, 3, 5, 16, 16),), {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("of_video", [wan, hunyuan_video, wan_autoencoder])
@torch.no_grad()
def test_models_of_video_convert_where_to_raises(of_video):
    model, arguments, keywords = of_video()
    model.eval()
    expected = model(*arguments, **keywords).sample
    with pytest.raises(RuntimeError, match="required rank 4 tensor to use channels_last format"):
        model.to(memory_format=torch.channels_last)  # as diffusers' documents have it
    model.to(memory_format=torch.contiguous_format)
    report = convert_pipeline_({"transformer": model, "tokenizer": None}, strict=True)
    volumes = [each for each in model.parameters() if each.dim() == 5]
    assert volumes
    assert all(each.is_contiguous(memory_format=torch.channels_last_3d) for each in volumes)
    torch.testing.assert_close(model(*arguments, **keywords).sample, expected, rtol=1e-5, atol=1e-5)
    report.revert()
    assert all(each.is_contiguous() for each in model.parameters())
