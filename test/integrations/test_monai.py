"""MONAI's sliding windows and datasets with converted networks; docs/frameworks.md trains with its engine."""

import pytest
import torch

import torch_nhwc as nhwc

pytestmark = pytest.mark.exhaustive  # importing MONAI takes seconds

CL3D = torch.channels_last_3d


def unet():
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return UNet(3, 2, 2, (4, 8, 16), (2, 2), num_res_units=1)


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
