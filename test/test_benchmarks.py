"""Every benchmark runs once on tiny cases, and its figures fill the documents; those of a GPU also on a fake one."""

import json
import os
import re
import sys
from collections import Counter
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from selection import some_of
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import bench_convolutions
import bench_errors
import bench_models
import bench_peers
import bench_weights
import cuda_layouts
import cuda_models
import figures_peers
import layer_cases
import layout_models
import machine
import peers
import pictures
import profile_peers
import report
import shapes
from stopwatch import STOPWATCHES, in_turns

import torch_nhwc as nhwc


def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))


def with_norms():
    return nn.Sequential(
        nn.Conv3d(1, 32, 3), nn.GroupNorm(8, 32), nn.ReLU(), nn.InstanceNorm3d(32), nn.Conv3d(32, 2, 1)
    )


def missing():
    raise ModuleNotFoundError("no such library")


def small(case):
    """Return the case on an activation of a few voxels."""
    return case._replace(shape=(2, *case.shape[1:2], *(4 for _ in case.shape[2:])))


def of_each_layer(cases):
    return [small(case) for case in {(case.layer, len(case.shape)): case for case in cases}.values()]


MODEL = layout_models.LayoutModel(tiny, (2, 3, 12, 12))
FEW_PEERS = {name: peers.PEERS[name] for name in ("contiguous", "model.to", "ours")}
PROFILES = {name: profile_peers.PROFILES[name] for name in ("contiguous", "ours")}
POINTS = [
    bench_weights.Point((4, 8, 3, 3), torch.float32),
    bench_weights.Point((4, 8, 3, 3, 3), torch.uint8, back=True),
    bench_weights.Point((4, 8, 5, 5), torch.float32, to=torch.bfloat16),
    bench_weights.Point((4, 8, 7, 7), torch.bfloat16, back=True, to=torch.float32),
]
LAYERS = [bench_convolutions.Layer("tiny", 1, 8, 8, 6, kernel, groups=8, axes=3) for kernel in (3, (1, 3, 3))]
VOLUME = layout_models.LayoutModel(with_norms, (1, 1, 8, 8, 8))
ERRORS = [bench_errors.Case((1, 16, 6, 6), groups, groups > 1, groups) for groups in (1, 2)]
# By script: the file of its results, what is in the place of its cases, and the options of its smallest run.
RUNS = {
    "bench_collate": ("collate-cpu", {}, ["--samples", 1, "--workers", 0, "--case", "dicts, uint8 HWC, 3x224x224"]),
    "bench_convolutions": ("passes-cpu", {"LAYERS": LAYERS}, ["--seconds", 0, "--dtype", "float32"]),
    "bench_errors": ("errors-cpu", {"CASES": ERRORS}, []),
    "bench_kept": ("kept-cpu", {"MODEL": VOLUME}, ["--samples", 1]),
    "bench_layers": ("layers-cpu", {"CASES": of_each_layer(layer_cases.CASES)}, ["--seconds", 0]),
    "bench_layouts": ("layouts-cpu", {"MODELS": {"tiny": MODEL}}, ["--seconds", 0]),
    "bench_memory": ("memory-cpu", {"MODELS": {"tiny": MODEL}}, ["--rounds", 1, "--model", "tiny"]),
    "bench_models": ("models-cpu", {"MODELS": {"tiny, as of monai": tiny}}, ["--rounds", 1]),
    "bench_overhead": ("overhead-cpu", {}, ["--rounds", 1, "--case", "Conv2d 3x3"]),
    "bench_peers": ("peers-cpu", {"MODELS": {"tiny": MODEL}, "PEERS": FEW_PEERS}, ["--seconds", 0, "--model", "tiny"]),
    "bench_positions": ("positions-cpu", {"LAYERS": LAYERS[:1], "BEYOND_CACHES": 1}, ["--seconds", 0]),
    "bench_tune": ("tune-cpu", {"MODELS": {"tiny": MODEL}}, ["--seconds", 0.01, "--budget", 0.05, "--model", "tiny"]),
    "bench_weights": ("weights-cpu", {"points": lambda *_: POINTS}, ["--samples", 1]),
    "profile_peers": ("peers-profile-cpu", {"MODELS": {"tiny": MODEL}, "PROFILES": PROFILES}, ["--model", "tiny"]),
}
ON_GPU = {
    "bench_layers": ("layers-cuda", {"CASES_ON_GPU": of_each_layer(layer_cases.CASES_ON_GPU)}, ["--seconds", 0]),
    "bench_layouts": ("layouts-cuda", {}, ["--seconds", 0, "--model", cuda_layouts.LOOK]),
    "bench_models": ("models-cuda", {"MODELS": {"tiny": tiny}}, ["--rounds", 1, "--models", "tiny"]),
    "bench_weights": ("weights-cuda", {"points_on_gpu": lambda *_: POINTS}, ["--samples", 1, "--without-compile"]),
}


def test_every_script_has_a_run():
    scripts = {path.stem for path in Path(report.__file__).parent.glob("*.py") if "machine.parser(" in path.read_text()}
    assert scripts == RUNS.keys()


@contextmanager
def this_process():
    """Yield what calls functions here, where each peer is what the functions of its process work on."""
    current = []

    def call(function, *arguments):
        if current:
            bench_peers.Prepared.current = current[0]
        result = function(*arguments)
        current[:] = [bench_peers.Prepared.current] if function is bench_peers.prepare else current
        return result

    yield call


# What would run in a process of its own, which does not see these cases.
IN_PROCESS = {
    "process": this_process,
    "apart": lambda function, *arguments: function(*arguments),
    "run_in_a_process": lambda *arguments: bench_models.run_here(*arguments),
}


def measured_by(script, run, out, monkeypatch):
    """Run a script on the cases of its row, check what it writes and every table that has its results."""
    file, cases, options = run
    own = import_module(script)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # what it is set to ends with the test
    for module in (own, bench_peers, cuda_models):
        for name, value in (cases | IN_PROCESS).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, options), "--out", str(out)])
    own.main()
    measured = json.loads(out.read_text())
    assert measured["command"].startswith(f"python benchmarks/{script}.py")
    assert {"commit", "processor", "cores", "capability", "environment"} <= measured["machine"].keys()
    assert measured["results"]
    for row in measured["results"]:
        assert "ours" not in row.get("errors", {})
    real = report.load
    both = measured | real(file) | {"results": [*real(file)["results"], *measured["results"]]}
    monkeypatch.setattr(report, "load", lambda name: both if name == file else real(name))
    made = [*report.PICTURES.values(), *(block for blocks in report.BLOCKS.values() for block in blocks.values())]
    blocks = [block for block in made if file in block[1]]
    assert blocks
    assert all(map(report.written, blocks))
    return measured["results"]


@pytest.mark.parametrize("script", RUNS)
def test_a_script_runs_and_its_figures_fill_the_documents(script, tmp_path, monkeypatch):
    measured_by(script, RUNS[script], tmp_path / "out.json", monkeypatch)


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["fake", "cuda"])
@pytest.mark.parametrize("script", some_of(ON_GPU, *(ON_GPU.keys() - {"bench_layouts"})))  # which compiles
def test_a_script_for_a_gpu_runs_and_its_figures_fill_the_documents(script, is_real, tmp_path, monkeypatch):
    file, cases, options = ON_GPU[script]
    if is_real:  # tiny objects would go through a million sets of memory to fill the cache of a GPU
        monkeypatch.setattr(STOPWATCHES["cuda"], "cache_bytes", STOPWATCHES["cpu"].cache_bytes)
        monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")
    else:
        monkeypatch.setattr(machine, "gpu", lambda: {"name": "Fake", "driver": "1.0", "CUDA": "13.0"})
        monkeypatch.setattr(machine, "switch_norms_on", lambda: None)
        monkeypatch.setitem(STOPWATCHES, "cuda", STOPWATCHES["cpu"])
        monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    rows = measured_by(script, (file, cases, ["--device", "cuda", *options]), tmp_path / "out.json", monkeypatch)
    for row in rows:
        has_kink = "relu" in row.get("arguments", "")  # where rounding decides which gradient an element has
        assert max(row.get("differences", {"none": 0}).values()) < (1 if has_kink else 0.05)
        if "launches" in row and is_real:
            assert row["launches"]["ours"]["kernels"] + row["launches"]["ours"]["copies"] <= 6


def test_the_picture_of_the_layers_has_a_square_for_each_and_the_time_of_each_way():
    measured = report.load("layouts-cpu") | {
        "results": [
            {"way": way, "shape": [1, 1, 8, 9, 10], "formats": formats, "ms": {"min": least, "median": 2 * least}}
            for way, formats, least in [
                ("contiguous", ["contiguous"] * 3, 50.0),
                ("model.to", ["channels_last_3d", "contiguous", "other"], 60.0),
                ("convert_", ["channels_last_3d"] * 3, 20.0),
            ]
        ]
    }
    image = pictures.kept(measured)
    assert Counter(each.get("class") for each in of_class(image, "rect")) == {
        "kept": 1 + 1 + 3,  # the legend, and a square for each layer
        "lost": 1 + 2,
        "time": 2,
        "back": 1,
    }
    first, second = (float(each.get("width")) for each in of_class(image, "rect", "time"))
    assert first == pytest.approx(3 * second)
    words = [each.text for each in of_class(image, "text")]
    assert {"1 of 3 layers", "60 ms", "3 of 3 layers", "20 ms", "not converted: 50 ms"} <= {*words}
    assert "a volume of 8x9x10" in " ".join(words)


def of_class(image, name, kind=None):
    """Return the elements of an image that have a name, and a class."""
    found = ElementTree.fromstring(image).iter(f"{{http://www.w3.org/2000/svg}}{name}")
    return [each for each in found if kind in (None, each.get("class"))]


def test_the_picture_of_the_models_has_a_bar_for_each_model_and_mode():
    measured = report.load("layouts-cpu")
    image = pictures.performance(measured)
    rows = [row for row in measured["results"] if row["dtype"] == "float32" and row["model"] in pictures.TITLES]
    words = [each.text for each in of_class(image, "text")]
    assert len(of_class(image, "rect", "kept")) == 1 + len(rows)  # the legend
    assert {pictures.TITLES[row["model"]] for row in rows} <= {*words}
    assert sorted(word for word in words if re.fullmatch(r"[\d.]+x", word)) == sorted(
        f"{row['times']['contiguous']['min'] / row['times']['preserved']['min']:.2f}x" for row in rows
    )


def test_the_models_of_the_layouts_have_titles_in_the_picture():
    assert pictures.TITLES.keys() == layout_models.MODELS.keys()


def test_measurements_take_turns_after_a_round_that_does_not_count():
    calls = []
    taken = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert taken == {"a": [3, 5], "b": [4, 6]}


@pytest.mark.parametrize("name", bench_models.MODELS)
def test_the_shapes_are_those_of_the_models(name):
    with torch.device("meta"):
        listed = shapes.load()[name]
        assert shapes.shapes_of(bench_models.MODELS[name]()) == listed
        assert shapes.shapes_of(shapes.convolutions(listed)) == listed


def test_results_stay_beside_those_of_the_same_gpu(tmp_path):
    out = tmp_path / "out.json"
    for model, gpu, kept in [("a", "first", "a"), ("b", "first", "ab"), ("a", "first", "ab"), ("c", "second", "c")]:
        machine.add(out, "bench.py", [{"model": model}], order=lambda row: row["model"], gpu={"name": gpu})
        assert "".join(row["model"] for row in json.loads(out.read_text())["results"]) == kept


def test_norms_on_a_gpu_are_measured_where_the_library_has_them(monkeypatch):
    monkeypatch.setattr(nhwc.ops, "runs_cuda_norms", lambda: os.environ.get("TORCH_NHWC_CUDA_NORMS") == "1")
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "0")
    machine.switch_norms_on()
    assert nhwc.ops.runs_cuda_norms()
    monkeypatch.setattr(nhwc.ops, "runs_cuda_norms", lambda: False)
    with pytest.raises(SystemExit, match="built without CUDA"):
        machine.switch_norms_on()


def test_bounds_of_instruction_sets_are_noted(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.bounds()["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert not machine.has_amx()


UNREPAIRED = "antialiased resize to one column"  # a function, which no conversion of layers replaces


@pytest.mark.parametrize("fault", peers.FAULTS)
def test_faults_are_computed_right_by_ours(fault, tmp_path):
    bench_peers.reference(fault, "training", tmp_path)
    found = bench_peers.prepare(fault, "training", "ours", 0.0, tmp_path)["differences"]
    assert figures_peers.is_wrong({"differences": found}, None) is (fault == UNREPAIRED)


@pytest.mark.parametrize("name", some_of(layout_models.MODELS, "unet2d", "segresnet3d", "poolformer"))
def test_every_model_of_the_layouts_is_made(name):
    if name in ("plain_conv_unet3d", "residual_encoder_unet3d"):
        pytest.importorskip("dynamic_network_architectures")
    with torch.device("meta"):
        assert any(parameter.dim() in (4, 5) for parameter in layout_models.MODELS[name].make().parameters())


def test_a_model_of_a_gpu_is_compiled_as_a_whole():
    model = cuda_layouts.Called(cuda_layouts.MODELS[cuda_layouts.LOOK], with_norms(), x := torch.randn(1, 1, 8, 8, 8))
    model.compile(fullgraph=True, backend="aot_eager")
    assert model(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", cuda_layouts.CHOSEN)
def test_the_models_of_a_gpu_take_their_inputs(name):
    if name in ("residual_encoder_unet3d", "plain_conv_unet3d"):
        pytest.importorskip("dynamic_network_architectures")
    if name == "r3d_18":
        pytest.importorskip("torchvision")
    measured = cuda_layouts.MODELS[name].model
    with torch.device("meta"):
        assert measured.call(measured.make(), torch.empty(measured.shape)).dim() in (2, 4, 5)
