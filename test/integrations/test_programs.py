"""The recipes of docs/frameworks.md in the programs that they are for, against the same program without them."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import imported

import torch_nhwc as nhwc

pytestmark = pytest.mark.programs
PAGE = Path(__file__).parents[2] / "docs/frameworks.md"


def recipe(section):
    """Return the Python of a section."""
    return re.search(rf"^## {section}$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]


def run(name, *arguments, **environment):
    """Run a program of the environment on one thread, and return what it printed."""
    command = [Path(sys.executable).parent / name, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "env": os.environ | environment | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Two epochs of what the recipe trains, and of nnU-Net's own trainer, on equal batches.
SHORT_TRAINERS = """
import random
import numpy
import torch


class Short:
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cpu")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 3, 2
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)


class ShortPlain(Short, nnUNetTrainer):
    pass


class ShortChannelsLast(Short, ChannelsLastTrainer):
    def on_train_start(self):
        super().on_train_start()
        assert not nhwc.check(self.network, nhwc.plan(self.network))
"""


def write_volumes(folder):
    """Write a dataset of bright cubes in noise, and return one more of its images."""
    import numpy as np
    import SimpleITK as sitk  # noqa: N813

    random = np.random.default_rng(0)
    for part in ("imagesTr", "labelsTr", "imagesTs"):
        (folder / part).mkdir(parents=True)
    for index in range(6):
        label = np.zeros((24, 28, 32), np.uint8)
        z, y, x = random.integers(2, 12, 3)
        label[z : z + 9, y : y + 9, x : x + 9] = 1
        image = (random.normal(size=label.shape) + 3 * label).astype(np.float32)
        part = "imagesTr" if index < 5 else "imagesTs"
        sitk.WriteImage(sitk.GetImageFromArray(image), folder / part / f"case_{index:03}_0000.nii.gz")
        if index < 5:
            sitk.WriteImage(sitk.GetImageFromArray(label), folder / f"labelsTr/case_{index:03}.nii.gz")
    about = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "cube": 1}}
    (folder / "dataset.json").write_text(json.dumps(about | {"numTraining": 5, "file_ending": ".nii.gz"}))


def test_nnunet_plans_trains_validates_and_predicts_the_same(tmp_path):
    imported("nnunetv2")
    import SimpleITK as sitk  # noqa: N813

    folders = {f"nnUNet_{part}": str(tmp_path / part) for part in ("raw", "preprocessed", "results", "extTrainer")}
    options = {**folders, "nnUNet_n_proc_DA": "0", "nnUNet_def_n_proc": "1", "nnUNet_compile": "0"}
    trainers = tmp_path / "extTrainer"
    trainers.mkdir()
    (trainers / "trainers.py").write_text(recipe("nnU-Net") + SHORT_TRAINERS)
    data = tmp_path / "raw/Dataset001_Cubes"
    write_volumes(data)
    planned = options | {"nnUNet_n_proc_DA": "1"}  # the planner takes it as a number of threads
    run("nnUNetv2_plan_and_preprocess", "-d", 1, "-c", "3d_fullres", "-np", 1, "-npfp", 1, **planned)

    results = tmp_path / "results/Dataset001_Cubes"

    def predicted(weights, trainer):
        """Return the labels by the weights that one trainer has written, in the network of another."""
        model = tmp_path / f"{weights}_{trainer}"
        shutil.copytree(results / f"{weights}__nnUNetPlans__3d_fullres", model)
        path = model / "fold_0/checkpoint_final.pth"
        torch.save(torch.load(path, weights_only=False) | {"trainer_name": trainer}, path)
        given = ("-i", data / "imagesTs", "-o", model / "labels", "-m", model, "-f", 0, "-device", "cpu")
        run("nnUNetv2_predict_from_modelfolder", *given, "-npp", 1, "-nps", 1, **options)
        return torch.from_numpy(sitk.GetArrayFromImage(sitk.ReadImage(model / "labels/case_005.nii.gz")).astype(int))

    losses = []
    for name in ("ShortPlain", "ShortChannelsLast"):
        run("nnUNetv2_train", 1, "3d_fullres", 0, "-tr", name, "-device", "cpu", **options)
        fold = results / f"{name}__nnUNetPlans__3d_fullres/fold_0"
        checkpoint = torch.load(fold / "checkpoint_final.pth", weights_only=False)
        losses.append(checkpoint["logging"]["train_losses"] + checkpoint["logging"]["val_losses"])
        losses[-1].append(json.loads((fold / "validation/summary.json").read_text())["foreground_mean"]["Dice"])
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-4)
    expected = predicted("ShortPlain", "ShortPlain")
    assert 0 < expected.float().mean() < 1
    for weights, trainer in (("ShortPlain", "ShortChannelsLast"), ("ShortChannelsLast", "ShortPlain")):
        assert torch.equal(predicted(weights, trainer), expected)


# Three epochs, of which the third is trained after an interrupt, by the recipe's trainer or by Ultralytics' own.
TRAINED_IN_TWO_PARTS = """
import sys

folder, trainer = Path(sys.argv[1]), {"plain": DetectionTrainer, "converted": ChannelsLastTrainer}[sys.argv[2]]
for part in ("images", "labels"):
    (folder / part).mkdir(parents=True)
for index in range(4):
    image = Image.radial_gradient("L").rotate(30 * index).resize((64, 64)).convert("RGB")
    image.paste((250, 40 * index, 90), (8 + 8 * index, 16, 32 + 8 * index, 40))
    image.save(folder / "images" / f"{index}.png")
    (folder / "labels" / f"{index}.txt").write_text(f"0 {(20 + 8 * index) / 64} 0.4375 0.375 0.375\\n")
(folder / "data.yaml").write_text(f"path: {folder}\\ntrain: images\\nval: images\\nnames: [thing]\\n")
options = {"epochs": 3, "imgsz": 64, "batch": 2, "workers": 0, "plots": False, "device": "cpu", "optimizer": "SGD"}


def interrupt(trainer):
    if trainer.epoch == 1:
        raise KeyboardInterrupt


model = YOLO("yolo11n.yaml")
model.add_callback("on_model_save", interrupt)
try:
    model.train(trainer=trainer, data=folder / "data.yaml", project=folder, **options)
    raise AssertionError("not interrupted")
except KeyboardInterrupt:
    pass
model = YOLO(folder / "train/weights/last.pt")
model.train(trainer=trainer, resume=True)
assert model.trainer.start_epoch == 2
is_converted = not nhwc.check(model.trainer.model, nhwc.plan(model.trainer.model))
assert is_converted == (trainer is ChannelsLastTrainer)
"""

# In a process that cannot import this package.
USED_WITHOUT_US = """
import sys
sys.modules["torch_nhwc"] = None
import torch
from ultralytics import YOLO

model = YOLO(sys.argv[1])
assert all(each.is_contiguous() for each in model.model.parameters())
torch.save(model.model(torch.linspace(0, 1, 3 * 64 * 64).reshape(1, 3, 64, 64))[0], sys.argv[2])
"""


def test_ultralytics_trains_the_same_resumes_and_its_checkpoints_need_nothing_of_ours(tmp_path):
    imported("ultralytics")
    options = {"YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    trainer, _ = recipe("Ultralytics").split("\nfolder = ")
    losses, outputs = [], []
    for name in ("plain", "converted"):
        folder = tmp_path / name
        run("python", "-c", trainer + TRAINED_IN_TWO_PARTS, folder, name, **options)
        rows = [*csv.DictReader((folder / "train/results.csv").open())]
        assert [row["epoch"] for row in rows] == ["1", "2", "3"]
        losses.append([float(row[key]) for row in rows for key in row if key.endswith("loss")])
        for checkpoint in ("best", "last"):
            output = folder / f"{checkpoint}.tensor"
            run("python", "-c", USED_WITHOUT_US, folder / f"train/weights/{checkpoint}.pt", output, **options)
        outputs.append(torch.load(folder / "last.tensor"))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)


def test_a_detection_model_is_channels_last_from_its_first_convolution_on():
    detection = imported("torchvision").models.detection
    options = {"weights": None, "weights_backbone": None, "num_classes": 3, "min_size": 64, "max_size": 96}
    model = detection.fasterrcnn_resnet50_fpn(**options)
    images = [torch.rand(3, 64, 80), torch.rand(3, 64, 72)]
    boxes = torch.tensor([[8.0, 10.0, 40.0, 50.0], [20.0, 5.0, 60.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]

    def losses():
        torch.manual_seed(0)
        return model(images, targets)

    model.train()
    expected = losses()
    nhwc.convert_(model)
    with nhwc.trace(model) as trace:
        got = losses()
        sum(got.values()).backward()
    for name, loss in got.items():  # few of the boxes, which are sampled, may be others
        torch.testing.assert_close(loss, expected[name], rtol=0.02, atol=1e-3)
    assert "channels-last from backbone.body.conv1 on, by convolution" in str(trace)
    assert {row.operator for row in trace.losses} == {"torchvision::roi_align"}


def test_selective_kernels_of_timm_lose_the_format_in_an_operator_that_a_trace_names():
    model = imported("timm").create_model("skresnet18", num_classes=4)
    nhwc.convert_(model, input_format="channels_last")
    with nhwc.trace(model) as trace:
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    (operator,) = {row.operator for row in trace.losses}
    assert operator == "aten::sum"
    assert "but sum in layer1.0.conv1.attn loses it" in str(trace)
