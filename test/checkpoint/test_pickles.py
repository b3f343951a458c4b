"""Files of torch.save: state dicts, checkpoints with an optimizer's state, and whole models."""

import copy

import pytest
import torch
from guarding import unguarded
from saved_files import STRIDES
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))


def trained(model, optimizer):
    torch.manual_seed(1)
    optimizer.zero_grad()
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()


def assert_step_alike(*pairs):
    """Expect equal parameters after a step where there is no torch_nhwc."""
    with unguarded():
        for model, optimizer in pairs:
            trained(model, optimizer)
    for both in zip(*(model.parameters() for model, _ in pairs)):
        torch.testing.assert_close(*both)


def converted(content, folder, **options):
    """Save and convert something; return what is loaded, and the report."""
    torch.save(content, folder / "in.pt")
    report = nhwc.convert_saved(folder / "in.pt", folder / "out.pt", **options)
    return torch.load(folder / "out.pt", weights_only=not options.get("allow_pickle")), report


def test_tensors_named_weight_of_a_convolution_s_rank_convert_and_everything_else_stays(tmp_path):
    state = network().state_dict()
    state |= {
        "position": torch.randn(1, 3, 4, 4),
        "codes.weight": torch.ones(2, 3, 4, 4, dtype=torch.int64),
        "depthwise.weight": torch.randn(4, 1, 3, 3),
        "volume.weight": nn.Parameter(torch.randn(2, 3, 3, 3, 3)),
        "tied.weight": state["0.weight"],
        "step": 7,
    }
    after, report = converted(state, tmp_path)
    moved = {"0.weight": STRIDES, "2.weight": (36, 1, 12, 4), "volume.weight": (81, 1, 27, 9, 3)}
    moved["tied.weight"] = STRIDES
    assert {row.full_name for row in report.rows} == {"0.weight", "2.weight", "depthwise.weight", "volume.weight"}
    assert {row.full_name: row.reason for row in report.rows}["depthwise.weight"] is Reason.ONE_CHANNEL
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(after[name], value), name
            assert after[name].stride() == moved.get(name, value.stride()), name
    assert after["step"] == 7
    assert after["tied.weight"].data_ptr() == after["0.weight"].data_ptr()
    assert after["volume.weight"].requires_grad
    assert after._metadata == state._metadata
    assert "a model takes the strides of a state dict only by load_state_dict(..., assign=True)" in report.remarks[0]


@pytest.mark.parametrize("is_converted", [True, False])
def test_h06_the_optimizer_state_of_a_checkpoint_has_the_strides_of_its_weights(is_converted, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    trained(model, optimizer)
    checkpoint, report = converted({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert checkpoint["optimizer"]["state"][0]["exp_avg"].stride() == STRIDES
    assert "a fused CPU optimizer gives wrong updates, silently" in report.remarks[-1]

    again = start
    if is_converted:
        again.to(memory_format=torch.channels_last)
    again.load_state_dict(checkpoint["model"], assign=not is_converted)
    resumed = torch.optim.Adam(again.parameters(), fused=True)
    resumed.load_state_dict(checkpoint["optimizer"])
    assert_step_alike((again, resumed), (model, optimizer))


def test_h06_the_state_of_an_optimizer_object_has_the_strides_of_its_weights(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    trained(model, optimizer)
    checkpoint, _ = converted({"model": model, "optimizers": [optimizer]}, tmp_path, allow_pickle=True)
    assert b"torch_nhwc" not in (tmp_path / "out.pt").read_bytes()
    again, resumed = checkpoint["model"], checkpoint["optimizers"][0]
    assert again[0].weight is resumed.param_groups[0]["params"][0]
    assert again[0].weight.stride() == resumed.state[again[0].weight]["exp_avg"].stride() == STRIDES

    assert_step_alike((again, resumed), (model, optimizer))


def test_an_optimizer_object_with_a_state_dict_is_refused(tmp_path):
    model = nn.Conv2d(3, 4, 3)
    content = {"model": model.state_dict(), "optimizer": torch.optim.Adam(model.parameters())}
    with pytest.raises(ValueError, match=r"in.pt: the Adam holds none of the model's parameters: its state would not"):
        converted(content, tmp_path, allow_pickle=True)
    assert not (tmp_path / "out.pt").exists()


def test_what_shares_memory_with_a_tensor_in_a_list_stays_with_it(tmp_path):
    weight = torch.randn(4, 3, 3, 3)
    content = {"model": {"0.weight": weight}, "raw": [weight.detach()], 1: weight.view(-1)}
    with pytest.warns(UserWarning, match="1 of 1 weight refused"):
        after, report = converted(content, tmp_path)
    assert report.rows[0].reason is Reason.TIED_BY_VIEW
    assert len({each.data_ptr() for each in (after["model"]["0.weight"], after["raw"][0], after[1])}) == 1


def test_optimizer_state_that_may_be_that_of_another_parameter_is_refused(tmp_path):
    state = {"conv.weight": torch.randn(4, 3, 3, 3), "position": torch.randn(4, 3, 3, 3)}
    optimizer = torch.optim.Adam([nn.Parameter(each) for each in state.values()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match=r"optimizer state of shape \(4, 3, 3, 3\) may belong to a weight that is"):
        converted({"model": state, "optimizer": optimizer.state_dict()}, tmp_path)
    assert not (tmp_path / "out.pt").exists()


class RunsCode:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("older", [True, False])
def test_nothing_is_unpickled_that_could_run_code(older, tmp_path):
    content = {"weight": torch.randn(4, 3, 3, 3), "hidden": RunsCode()}
    torch.save(content, tmp_path / "in.pt", _use_new_zipfile_serialization=not older)
    with pytest.raises(ValueError, match=r"in.pt: torch.load refuses it as tensors and plain data.*allow_pickle=True"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    with pytest.raises(SystemExit, match="it ran"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", allow_pickle=True)
    assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


def test_whole_models_convert_where_pickles_are_allowed(tmp_path):
    model = network().eval()
    model[2] = nn.utils.spectral_norm(model[2]).eval()
    x = torch.randn(2, 3, 8, 8)
    after, report = converted({"ema": model, "epoch": 3}, tmp_path, allow_pickle=True)
    assert after["ema"][0].weight.stride() == STRIDES
    assert [row.path for row in report.rows if row.target_strides] == ["ema.0", "ema.2"]
    torch.testing.assert_close(after["ema"](x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm")
def test_what_would_need_this_package_in_the_file_stays_as_it_is(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.utils.weight_norm(nn.Conv2d(4, 4, 3)), nn.LazyConv2d(2, 1))
    _, report = converted(model, tmp_path, allow_pickle=True)
    assert b"torch_nhwc" not in (tmp_path / "out.pt").read_bytes()
    assert "1, 2: left unchanged, since the file would need torch_nhwc where it is loaded" in report.remarks
    assert report.rows[0].target_strides == STRIDES
    message = "nothing to convert: 1: left unchanged, since the file would need torch_nhwc where it is loaded"
    with pytest.warns(UserWarning, match=message):
        converted(model[1:2], tmp_path, allow_pickle=True)
    with pytest.raises(RuntimeError, match=message):
        converted(model[1:2], tmp_path, allow_pickle=True, strict=True)


@pytest.mark.parametrize("is_training", [True, False])
def test_whole_models_keep_pytorch_s_classes_and_layers_that_would_train_wrong_their_layout(is_training, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1, stride=2))
    after, report = converted(model.train(is_training), tmp_path, allow_pickle=True)
    assert b"torch_nhwc" not in (tmp_path / "out.pt").read_bytes()
    assert [type(layer) for layer in after] == [nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.Conv2d]
    assert after[0].weight.stride() == STRIDES
    assert (after[3].weight.stride() == model[3].weight.stride()) == is_training
    left = "3: left unchanged, since the file would need torch_nhwc where it is loaded"
    assert (left in report.remarks) == is_training
    assert any(
        "weight gradients PyTorch computes wrong" in remark and remark.endswith("in the model, once it is loaded")
        for remark in report.remarks
    )
    assert not any("preserve" in remark for remark in report.remarks)


def test_a_format_of_inputs_is_for_archives_alone(tmp_path):
    with pytest.raises(ValueError, match=r"in.pt is a file of torch.save, and only the code of a TorchScript archive"):
        converted(network().state_dict(), tmp_path, input_format="channels_last")


@pytest.mark.parametrize(
    "content", [{"kernel": torch.randn(4, 3, 3, 3)}, [1, 2], torch.ones(2)], ids=["other", "list", "one"]
)
def test_a_file_without_weights_gives_a_warning_that_says_what_would_convert(content, tmp_path):
    torch.save(content, tmp_path / "in.pt")
    nothing = "there is no convolution, and in a state dict no floating-point tensor with four or five dimensions"
    with pytest.warns(UserWarning, match=f"nothing to convert: {nothing}"):
        report = nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt")
    assert nothing in " ".join(str(report).split())
    assert "example_inputs" not in str(report)
    with pytest.raises(RuntimeError, match=f"nothing to convert: {nothing}"):
        nhwc.convert_saved(tmp_path / "in.pt", tmp_path / "out.pt", strict=True)
