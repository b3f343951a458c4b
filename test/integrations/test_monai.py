"""MONAI's engines, sliding windows, datasets and bundles with converted networks."""

import json

import pytest
import torch

import torch_nhwc as nhwc

pytestmark = pytest.mark.exhaustive  # importing MONAI's engines takes seconds

CL3D = torch.channels_last_3d


def unet():
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return UNet(3, 2, 2, (4, 8, 16), (2, 2), num_res_units=1)


@pytest.fixture
def trained():
    """Return a function that gives an engine's losses, and whether the network saw only channels-last images."""
    from ignite.engine import Events
    from monai.data import DataLoader
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss

    def train(converts):
        network, losses, formats = unet(), [], []
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
        if converts:
            nhwc.convert_(network, optimizer=optimizer, input_format="channels_last", preserve=True, strict=True)
        network.register_forward_pre_hook(
            lambda module, inputs: formats.append(inputs[0].is_contiguous(memory_format=CL3D))
        )
        torch.manual_seed(0)
        images, labels = torch.randn(4, 2, 8, 8, 8), torch.randint(0, 2, (4, 1, 8, 8, 8)).float()
        samples = [{"image": image, "label": label} for image, label in zip(images, labels)]
        trainer = SupervisedTrainer(
            device="cpu",
            max_epochs=2,
            train_data_loader=DataLoader(samples, batch_size=2),
            network=network,
            optimizer=optimizer,
            loss_function=DiceLoss(softmax=True, to_onehot_y=True),
        )
        note = lambda engine: losses.append(engine.state.output[0]["loss"])  # noqa: E731
        trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
        trainer.run()
        return torch.tensor(losses), all(formats)

    return train


def test_an_engine_trains_to_the_same_losses(trained):
    expected, was_channels_last = trained(converts=False)
    assert not was_channels_last
    losses, is_channels_last = trained(converts=True)
    assert is_channels_last
    assert len(losses) == 4
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_a_meta_tensor_gets_the_same_numbers_and_format_and_keeps_its_metadata():
    from monai.data import MetaTensor

    layers = torch.nn.GroupNorm(4, 16), torch.nn.GELU(), torch.nn.AvgPool3d(2), torch.nn.Softmax(1)
    network = torch.nn.Sequential(*layers)
    nhwc.convert_(network)
    volume = (100 + torch.randn(1, 16, 8, 8, 8)).to(memory_format=CL3D)
    expected = network(volume)
    output = network(MetaTensor(volume, meta={"name": "a scan"}))
    assert type(output) is MetaTensor
    assert output.meta["name"] == "a scan"
    assert output.stride() == expected.stride()
    assert torch.equal(output.as_tensor(), expected)
    exact = torch.nn.functional.group_norm(volume.double(), 4)
    torch.testing.assert_close(network[0](MetaTensor(volume)).as_tensor().double(), exact, rtol=0, atol=2e-3)


@torch.no_grad()
def test_each_sliding_window_enters_in_channels_last():
    from monai.inferers import sliding_window_inference

    volume, network = torch.randn(1, 2, 12, 16, 16).to(memory_format=CL3D), unet().eval()
    expected = sliding_window_inference(volume, (8, 8, 8), 4, network)
    for options in ({}, {"input_format": "channels_last", "preserve": True}):
        nhwc.convert_(network, strict=True, **options)
        entered = []
        hook = network.model.register_forward_pre_hook(
            lambda _, inputs, entered=entered: entered.append(inputs[0].is_contiguous(memory_format=CL3D))
        )
        output = sliding_window_inference(volume, (8, 8, 8), 4, network)
        hook.remove()
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert set(entered) == {bool(options)}


@pytest.mark.parametrize("keeps", [False, True])
def test_datasets_and_loaders_make_contiguous(keeps):
    from monai.data import CacheDataset, DataLoader, list_data_collate
    from monai.transforms import Lambda

    lay_out = Lambda(lambda volume: nhwc.data.to_channels_last(volume[None])[0])
    dataset = CacheDataset([torch.randn(2, 4, 4, 4)] * 2, lay_out, progress=False, as_contiguous=not keeps)
    assert dataset[0].stride() == ((1, 32, 8, 2) if keeps else (64, 16, 4, 1))
    assert next(iter(DataLoader(dataset, 2))).is_contiguous()
    batch = next(iter(DataLoader(dataset, 2, collate_fn=nhwc.data.wrap_collate_fn(list_data_collate))))
    assert batch.is_contiguous(memory_format=CL3D)
    assert torch.equal(batch[0], dataset[0])


@pytest.mark.parametrize("options", [{}, {"input_format": "channels_last"}])
def test_an_exported_bundle_keeps_its_metadata(options, tmp_path):
    from monai.bundle import ckpt_export
    from monai.data import load_net_with_metadata

    network, volume = unet().eval(), torch.randn(1, 2, 8, 8, 8)
    torch.save(network.state_dict(), tmp_path / "model.pt")
    arguments = {"spatial_dims": 3, "in_channels": 2, "out_channels": 2, "channels": [4, 8, 16], "strides": [2, 2]}
    config = {"network": {"_target_": "UNet", **arguments, "num_res_units": 1}}
    (tmp_path / "inference.json").write_text(json.dumps(config))
    (tmp_path / "metadata.json").write_text('{"name": "a network"}')
    ckpt_export(
        "network",
        filepath=str(tmp_path / "exported.ts"),
        ckpt_file=str(tmp_path / "model.pt"),
        meta_file=str(tmp_path / "metadata.json"),
        config_file=str(tmp_path / "inference.json"),
    )
    nhwc.convert_saved(tmp_path / "exported.ts", tmp_path / "converted.ts", strict=True, **options)

    def load(name):
        return load_net_with_metadata(str(tmp_path / name), more_extra_files=("inference.json",))

    (loaded, metadata, files), (_, expected_metadata, expected_files) = load("converted.ts"), load("exported.ts")
    assert metadata == expected_metadata
    assert metadata["name"] == "a network"
    assert files == expected_files
    assert b"UNet" in files["inference.json"]
    weights = [each for each in loaded.state_dict().values() if each.dim() == 5]
    assert all(each.is_contiguous(memory_format=CL3D) for each in weights)
    torch.testing.assert_close(loaded(volume), network(volume), rtol=1e-4, atol=1e-5)
