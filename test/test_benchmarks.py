"""Every benchmark runs once on tiny cases, and the report reads what it writes; those of a GPU also on a fake one."""

import json
import os
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from onednn import IS_X86
from selection import some_of
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import bench_collate
import bench_convolutions
import bench_layers
import bench_layouts
import bench_models
import bench_overhead
import bench_peers
import bench_tune
import bench_weights
import cuda_layers
import cuda_layouts
import cuda_models
import cuda_weights
import figures_gpu
import figures_layers
import figures_peers
import layer_cases
import layout_models
import machine
import peers
import profile_peers
import report
import shapes
from stopwatch import STOPWATCHES, in_turns, seconds_in_turns

import torch_nhwc as nhwc

POINTS = [
    cuda_weights.Point((4, 8, 3, 3), torch.float32),
    cuda_weights.Point((4, 8, 3, 3, 3), torch.uint8, back=True),
    cuda_weights.Point((4, 8, 5, 5), torch.float32, to=torch.bfloat16),
    cuda_weights.Point((4, 8, 7, 7), torch.bfloat16, back=True, to=torch.float32),
]
TINY = "ResNet-50, a tiny one"


def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2))


@pytest.fixture
def tiny_models(monkeypatch):
    """Two models, of which one has no library."""

    def missing():
        raise ModuleNotFoundError("no such library")

    both = {TINY: tiny, "CogVideoX autoencoder (diffusers)": missing}
    monkeypatch.setattr(cuda_models, "MODELS", both)
    monkeypatch.setattr(
        shapes, "load", lambda: {name: [[4, 3, 3, 3, 3], [4, 4, 1, 1, 1], [4, 1, 3, 3]] for name in both}
    )
    return list(both)


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def read(path):
    return json.loads(path.read_text())


def assert_times(times):
    assert all(0 < each["min"] <= each["median"] for each in times.values())


# Weights and the conversion of models


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_weight_on_the_cpu_is_measured_next_to_memcpy(point):
    measured = bench_weights.measure(point, samples=2)
    assert {"memcpy", "ours", "ours_fresh"} < measured["times"].keys()
    assert_times(measured["times"])


def test_measurements_take_turns_after_a_round_that_does_not_count():
    calls = []
    taken = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert taken == {"a": [3, 5], "b": [4, 6]}


def test_each_sample_has_a_preparation_that_is_not_timed():
    prepared = []
    taken = seconds_in_turns({"job": lambda: prepared.append(None) or (lambda: None)}, samples=3)
    assert (len(taken["job"]), len(prepared)) == (3, 4)


def test_a_replaced_convolution_is_measured_next_to_pytorch_s():
    rows = bench_overhead.measure("Conv2d 3x3", rounds=2)
    assert [row["mode"] for row in rows] == ["forward", "forward with backward"]
    assert all(row["stock"] > 0 and row["replaced"] > 0 for row in rows)
    assert figures_layers.overhead({"results": rows}).count("| Conv2d 3x3 | 1x8x8x8 |") == 1


def test_a_call_is_measured_over_the_best_that_pytorch_has_for_it():
    names = [name for name in bench_overhead.CALLS if "2,000" not in name]
    rows = [bench_overhead.measure_call(name, rounds=1) for name in names]
    assert all(row["stock"] > 0 and row["replaced"] > 0 and row[row["of"]] is not None for row in rows)
    assert figures_layers.calls({"results": rows}).count("\n") == len(names) + 1


def test_the_passes_of_convolutions_are_measured_by_who_computes_them():
    layers = [bench_convolutions.Layer("", 1, 8, 8, 6, kernel, groups=8, axes=3) for kernel in (3, (1, 3, 3))]
    rows = [bench_convolutions.measure(layer, "float32", p, 0) for layer in layers for p in bench_convolutions.PASSES]
    assert [row["kind"] for row in rows] == ["depthwise, 3D"] * 6
    assert layers[1].flops == 2 * 8 * 9 * 6**3
    measured = {"results": rows, "machine": {"capability": "avx2"}}
    assert ("| depthwise, 3D | weight gradient | 2 of 2: " in figures_layers.passes(measured)) is IS_X86


@pytest.mark.parametrize("name", bench_models.MODELS)
def test_the_shapes_are_those_of_the_models(name):
    with torch.device("meta"):
        listed = shapes.load()[name]
        assert shapes.shapes_of(bench_models.MODELS[name]()) == listed
        assert shapes.shapes_of(shapes.convolutions(listed)) == listed


# Batches


def test_batches_are_measured_and_become_rows_of_a_table(tmp_path, monkeypatch):
    make = bench_collate.CASES["dicts, uint8 HWC, 3x224x224"][1]
    monkeypatch.setattr(bench_collate, "CASES", {TINY: (2, make, 1.0)})
    bench_collate.run([TINY], 2, 0, tmp_path / "out.json")
    (line,) = figures_layers.batches(read(tmp_path / "out.json")).splitlines()[2:]
    assert re.fullmatch(rf"\| 2 of {TINY} \| [\d.]+ → [\d.]+ ms, \*\*[\d.]+x\*\* \|  \| 1.0x \|", line)


# The scripts for a GPU


@pytest.fixture
def fake_gpu(monkeypatch):
    """Provide a GPU that is the CPU, without launches to count."""
    monkeypatch.setattr(machine, "gpu", lambda: {"name": "Fake", "driver": "1.0", "CUDA": "13.0"})
    monkeypatch.setitem(STOPWATCHES, "cuda", STOPWATCHES["cpu"])
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)


def with_norms():
    return nn.Sequential(
        nn.Conv3d(1, 32, 3), nn.GroupNorm(8, 32), nn.ReLU(), nn.InstanceNorm3d(32), nn.Conv3d(32, 2, 1)
    )


def run_all(folder, models, monkeypatch):
    """Do what `make bench-cuda` does, into a folder, and return what each script wrote."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # what it is set to ends with the test
    monkeypatch.setattr(cuda_weights, "points", lambda with_compile: POINTS)
    cuda_weights.run(2, False, folder / "weights-cuda.json")
    cuda_models.run(models, 2, folder / "models-cuda.json")
    norms = [case._replace(shape=(*case.shape[:2], *(8 for _ in case.shape[2:]))) for case in cuda_layers.CASES]
    kinds = {(case.layer, len(case.shape)): case for case in norms}
    cuda_layers.run(list(kinds.values()), 0, folder / "layers-cuda.json")
    monkeypatch.setattr(cuda_layouts, "MODELS", {"tiny": layout_models.LayoutModel(with_norms, (1, 1, 8, 8, 8))})
    cuda_layouts.run(["tiny"], 0, folder / "layouts-cuda.json")
    names = ("weights", "models", "layers", "layouts")
    return {name: read(folder / f"{name}-cuda.json") for name in names}


@pytest.mark.usefixtures("fake_gpu")
def test_every_script_writes_what_the_report_reads(tmp_path, tiny_models, monkeypatch):
    written = run_all(tmp_path, tiny_models, monkeypatch)
    measured, models = written["weights"], written["models"]["results"]
    for point, row in zip(POINTS, measured["results"], strict=True):
        jobs = {"ours", "ours_fresh", "plain_copy", "eager_copy"}
        assert row["times"].keys() == jobs | {"eager_two_steps" if point.to else "eager_contiguous"}
        assert row["errors"] == {}
        assert_times(row["times"])
    for row in models:
        assert row["source"] == ("its library" if row["model"] == TINY else "shapes.json")
        assert row["device"].keys() == {"all", "moved"}
        assert all(each["errors"] == {} for each in row["device"].values())
        assert ("module.to" in row["wall"]) == (row["model"] == TINY)
        assert row["wall"]["ours, listed"]["extra_bytes"] == 0
    norms, layouts = written["layers"]["results"], written["layouts"]["results"]
    assert {(row["layer"], len(row["shape"])) for row in norms} == {
        (layer, rank) for layer in layer_cases.NORMS for rank in (4, 5)
    }
    assert len(norms) == 4 * 3 * 2  # of each dtype, forward and backward
    for row in norms:
        assert row["times"].keys() == {"ours", "stock_channels_last", "contiguous", "copy"}
        assert_times(row["times"])
        assert row["differences"]["ours"] < (1e-4 if row["dtype"] == "float32" else 0.05)
    assert [row["mode"] for row in layouts] == ["inference", "training"]
    for row in layouts:
        assert row["times"].keys() == row["extra_bytes"].keys() == {"contiguous", "full", "preserved", "compiled"}
        assert row["replaced"] == {"Conv3d": 2, "GroupNorm": 1, "InstanceNorm3d": 1}
        assert max(row["differences"].values()) < 0.05
    assert measured["command"] == "python benchmarks/bench_weights.py --device cuda"
    assert {"commit", "processor", "cores", "capability", "environment"} <= measured["machine"].keys()
    text = figures_gpu.section(*written.values())
    assert "Fake, driver" in text
    assert "| launches for a model, every model: in place | at most 6 | not measured | not measured |" in text
    assert "| in place, every model: extra device memory, bytes | at most 0 | 0.00 | yes |" in text
    assert "| norms of 64 MB and more: bandwidth over a copy | at least 0.8 | not measured | not measured |" in text
    assert "| `instance_norm`, affine | 1x32x8x8x8 | bfloat16 | backward | 0.0 |" in text
    assert text.count("| `tiny` | 1x1x8x8x8 |") == 2


@pytest.mark.cuda
def test_every_script_runs_on_a_gpu(tmp_path, tiny_models, monkeypatch):
    with_compile = cuda_weights.Point((64, 64, 3, 3), torch.float32, with_compile=True)
    monkeypatch.setattr(sys.modules[__name__], "POINTS", [*POINTS, with_compile])
    monkeypatch.setenv("TORCH_NHWC_CUDA_NORMS", "1")
    # Tiny objects would go through a million sets of memory to fill the cache of a GPU.
    monkeypatch.setattr(STOPWATCHES["cuda"], "cache_bytes", STOPWATCHES["cpu"].cache_bytes)
    written = run_all(tmp_path, tiny_models, monkeypatch)
    assert all(row["errors"] == {} for name in ("weights", "layers", "layouts") for row in written[name]["results"])
    assert "compiled_clone" in written["weights"]["results"][-1]["times"]
    assert all(row["replaced"] == {"GroupNorm": 1, "InstanceNorm3d": 1} for row in written["layouts"]["results"])
    for row in written["models"]["results"]:
        assert row["launches"]["ours"]["kernels"] + row["launches"]["ours"]["copies"] <= 6
    assert torch.cuda.get_device_name() in figures_gpu.section(*written.values())


def test_results_stay_beside_those_of_the_same_gpu(tmp_path):
    out = tmp_path / "out.json"
    for model, gpu, kept in [("a", "first", "a"), ("b", "first", "ab"), ("a", "first", "ab"), ("c", "second", "c")]:
        machine.add(out, "bench.py", [{"model": model}], order=lambda row: row["model"], gpu={"name": gpu})
        assert "".join(row["model"] for row in read(out)["results"]) == kept


# Layers and whole models


def small(case):
    """Return the case on an activation of a few voxels."""
    return case._replace(shape=(2, *case.shape[1:2], *(4 for _ in case.shape[2:])))


def first_of_each_layer():
    cases = {}
    for case in layer_cases.CASES:
        cases.setdefault(case.layer, case)
    return list(cases.values())


@pytest.mark.parametrize("case", first_of_each_layer(), ids=lambda case: case.name)
def test_layers_are_measured_and_compute_what_pytorchs_do(case):
    for mode in layer_cases.MODES:
        row = bench_layers.measure(small(case), torch.float32, mode, seconds=0)
        assert row["errors"] == {}
        assert_times(row["times"])
        assert figures_layers.group(row)
    outs = {}
    for way, functions in layer_cases.FUNCTIONS.items():
        x, parameters, targets = bench_layers.inputs(small(case), torch.float32, way)
        outs[way] = case.of(functions)(x, *parameters, *targets)
    torch.testing.assert_close(outs["ours"], outs["contiguous"], rtol=1e-4, atol=1e-4)
    assert outs["ours"].dim() == 0 or outs["ours"].stride()[1] == 1


def test_layers_are_reported(tmp_path, monkeypatch):
    measured = bench_layers.run([small(layer_cases.CASES[0])], 0)
    machine.write(tmp_path / "layers.json", "bench_layers.py", measured, quick=True)
    layers = read(tmp_path / "layers.json")
    monkeypatch.setattr(report, "load", lambda name: layers)
    assert report.QUICK in report.written((figures_layers.bars, ("layers-cpu",)))
    for table in (figures_layers.losses, figures_layers.bars):
        assert "| group" in table(layers)


def test_layouts_are_measured_again_and_reported(tmp_path, monkeypatch):
    def with_group_norm():
        return nn.Sequential(nn.Conv3d(1, 8, 3), nn.GroupNorm(2, 8), nn.Conv3d(8, 2, 3))

    model = layout_models.LayoutModel(with_group_norm, (1, 1, 8, 8, 8))
    monkeypatch.setattr(bench_layouts, "MODELS", {"first": model, "second": model})
    out = tmp_path / "layouts.json"
    for names in (["first", "second"], ["first"]):
        bench_layouts.run(names, ["float32", "bfloat16"], 0, out)
    monkeypatch.setattr(bench_layouts, "takes_bfloat16", lambda: False)
    bench_layouts.run(["second"], ["bfloat16"], 0, out)
    layouts = read(out)
    assert [row["model"] for row in layouts["results"]] == ["first"] * 4 + ["second"] * 4
    both = {"contiguous float32", "preserved float32"}
    for row in layouts["results"]:
        expected = {"contiguous", "full", "preserved"} | (both if row["dtype"] == "bfloat16" else set())
        if row["dtype"] == "bfloat16" and (row["model"] == "second" or len(row["times"]) == 3):
            expected = {"preserved", *both}
        assert row["times"].keys() == row["differences"].keys() == expected
        assert row["replaced"] == {"GroupNorm": 1, "Conv3d": 2}
        assert max(row["differences"].values()) < (1e-4 if row["dtype"] == "float32" else 0.1)
    assert "| second | 1x1x8x8x8 | training |" in figures_layers.layouts(layouts, layouts)
    assert figures_layers.halves(layouts).count("| second | ") == 2


def test_the_readme_has_the_best_use_first_and_says_when_to_leave_a_model_alone(monkeypatch):
    def measured(capability, bounds, **milliseconds):
        of_ours = {model: {"contiguous": 100, "full": 90, "preserved": each} for model, each in milliseconds.items()}
        rows = [
            {
                "model": model,
                "mode": "training",
                "dtype": "float32",
                "times": {layout: {"min": each} for layout, each in times.items()},
            }
            for model, times in of_ours.items()
        ]
        return {
            "quick": False,
            "machine": {"processor": "CPU", "capability": capability, "bounds": bounds},
            "results": rows,
        }

    wide = measured("avx512", {}, good=80, best=50, other=100, another=90)
    narrow = measured("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, good=80, best=40, other=90, another=90)
    shown = {("good", "training"): "A good one", ("best", "training"): "The best"}
    monkeypatch.setattr(figures_layers, "SHOWN", shown)
    assert figures_layers.gains(wide, narrow).splitlines() == [
        "| model |  | CPU, AVX-512 | CPU held to AVX2 | what to do |",
        "| --- | --- | --- | --- | --- |",
        "| The best | training | 100 → 50 ms, **2.00x** (1.11x) | 100 → 40 ms, **2.50x** (1.11x) | convert it |",
        "| A good one | training | 100 → 80 ms, **1.25x** (1.11x) | 100 → 80 ms, **1.25x** (1.11x) | convert it |",
        "| `other`, the least gain of all | training | 100 → 100 ms, **1.00x** (1.11x) "
        "| 100 → 90 ms, **1.11x** (1.11x) | leave it contiguous with AVX-512 |",
    ]


def test_decoders_are_measured_in_inference_and_missing_packages_are_left_out(tmp_path, monkeypatch, capsys):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = nn.Conv3d(2, 8, 3)

        def decode(self, latents):
            assert latents.is_contiguous()
            return SimpleNamespace(sample=self.decoder(latents))

    def missing():
        raise ModuleNotFoundError("no such library")

    models = {"missing": missing, "decoder": Autoencoder}
    made = {name: layout_models.LayoutModel(make, (1, 2, 4, 4, 4), decodes=True) for name, make in models.items()}
    monkeypatch.setattr(bench_layouts, "MODELS", made)
    bench_layouts.run(list(made), ["float32"], 0, tmp_path / "layouts.json")
    assert "missing is left out: no such library" in capsys.readouterr().out
    (row,) = read(tmp_path / "layouts.json")["results"]
    assert (row["model"], row["mode"], row["replaced"]) == ("decoder", "inference", {"Conv3d": 1})


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


def test_decisions_are_measured_again_and_reported(tmp_path, monkeypatch):
    model = layout_models.LayoutModel(tiny, (1, 3, 8, 8))
    monkeypatch.setattr(bench_tune, "MODELS", {"first": model, "second": model})
    out = tmp_path / "tune-cpu.json"
    chosen = list(bench_tune.cases(["first", "second"], ["float32"], ["inference", "training"]))
    for some in (chosen[2:], chosen[:2]):
        bench_tune.run(some, 0.05, 0.01, out, call=lambda function, *given: function(*given))
    measured = read(out)
    assert [row["model"] for row in measured["results"]] == ["first"] * 2 + ["second"] * 2
    for row in measured["results"]:
        assert row["over"].keys() == {"contiguous", "weights only", "full", "full, preserved"}
        assert row["over"][row["choice"]] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert "over full (99 % interval)" in figures_layers.decisions(measured)
    measured["results"][0] |= {"best": "full", "over": {"full": {"ratio": 0.5, "low": 0.4, "high": 0.6}}}
    assert (
        "| 4 cases: 99 % intervals over the best policy, wholly below 0.97 | none |"
        in figures_layers.bars_of_decisions(measured)
    )
    assert "| first float32 inference | no |" in figures_layers.bars_of_decisions(measured)


def same_process(monkeypatch):
    """Let every peer run in this process, where each is what the functions of its process work on."""

    @contextmanager
    def process():
        current = []

        def call(function, *arguments):
            if current:
                bench_peers.Prepared.current = current[0]
            result = function(*arguments)
            current[:] = [bench_peers.Prepared.current] if function is bench_peers.prepare else current
            return result

        yield call

    monkeypatch.setattr(bench_peers, "process", process)


def test_peers_are_measured_in_turns_and_reported(tmp_path, monkeypatch):
    def raising(model, x, mode, budget):
        raise NotImplementedError("Summary:\nit has no such operator\n\nSet TORCHDYNAMO_VERBOSE=1\nfor more")

    few = {name: peers.PEERS[name] for name in ("contiguous", "model.to", "ours", "ours by tune")}
    few["OpenVINO"] = peers.Peer(raising, peers.INFERENCE)
    model = layout_models.LayoutModel(lambda: nn.Sequential(tiny(), nn.Dropout(0.9)), (1, 3, 8, 8))
    for module in (bench_peers, figures_peers):
        monkeypatch.setattr(module, "PEERS", few)
    monkeypatch.setattr(bench_peers, "MODELS", {"first": model, "second": model})
    fault = "group norm of shifted data"
    same_process(monkeypatch)
    out = tmp_path / "peers-cpu.json"
    both = [(name, mode) for name in ("second", "first", fault) for mode in layout_models.MODES]
    bench_peers.run(both, few, 0.05, 0, out)
    there = {machine.case_of(row) for row in read(out)["results"]}
    bench_peers.run(both, few, 0.05, 0, out, there - {("first", "training", "ours")})
    measured = read(out)
    assert [row["model"] for row in measured["results"]] == ["first"] * 9 + ["second"] * 9 + [fault] * 9
    for row in measured["results"]:
        if row["peer"] == "OpenVINO":
            assert row["failure"] == "NotImplementedError: it has no such operator"
            continue
        assert ("gradients" in row["differences"]) is (row["mode"] == "training")
        assert ("over" in row) is (row["model"] != fault)
        assert row["model"] == fault or max(row["differences"].values()) < 1e-5
    ours, base = (
        next(row for row in measured["results"] if (row["model"], row["peer"]) == (fault, peer))
        for peer in ("model.to", "contiguous")
    )
    assert figures_peers.is_wrong(ours, base)
    assert "| contiguous | inference | 2 of 2 | " in figures_peers.costs(measured)
    assert "| first | inference | OpenVINO | NotImplementedError: it has no such operator |" in figures_peers.failures(
        measured
    )
    for mode in layout_models.MODES:
        assert "| second | 1x3x8x8 | " in figures_peers.speeds(measured, mode)


def test_the_readme_says_which_way_is_the_fastest_and_which_are_wrong():
    def row(model, mode, peer, ratio=None, **others):
        over = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1} if ratio else None
        timed = {"over": over, "seconds": 2.0, "times": {"median": 100.0}} if over else {}
        return {"model": model, "mode": mode, "peer": peer, "shape": [1, 2], **timed, **others}

    fault = "group norm of shifted data"
    results = [
        *(row(model, "inference", "contiguous", 1.0) for model in ("a", "b")),
        row("a", "inference", "OpenVINO", 2.0),
        row("a", "inference", "compile", 1.5),
        row("a", "inference", "compile max-autotune", 1.6),
        row("a", "inference", "ours", 1.2),
        row("b", "inference", "OpenVINO", failure="RuntimeError: no such operator"),
        row("b", "inference", "ours", 1.8),
        *(row("a", "training", peer, ratio) for peer, ratio in (("contiguous", 1.0), ("ours, compiled", 2.5))),
        row(fault, "inference", "contiguous", differences={"output": 2e-5}),
        row(fault, "inference", "model.to", differences={"output": 3e-2}),
        row(fault, "inference", "ours", differences={"output": 1e-4}),
        row(fault, "inference", "torch.nn.utils", failure="BrokenProcessPool: it died"),
    ]
    lines = figures_peers.compared({"quick": False, "results": results}).splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:6] for line in lines[2:]}
    assert [*cells] == [*figures_peers.WAYS]
    assert [*cells.values()] == [
        ["-", "-", "-", "-", "1 of 1"],
        ["**1.50** (1.50; 1 model)", "-", "-", "2.0", "-"],
        ["**2.00** (2.00; 1 model)", "-", "a (inference)", "2.0", "-"],
        ["-", "-", "-", "-", "-"],
        ["**1.47** (1.20 to 1.80; 2 models)", "-", "b (inference)", "2.0", "0 of 1"],
        ["-", "-", "-", "-", "-"],
        ["-", "**2.50** (2.50; 1 model)", "a (training)", "2.0", "-"],
    ]
    assert "**BrokenProcessPool**" in figures_peers.faults({"results": results})
    speeds = figures_peers.speeds({"quick": False, "results": results}, "inference").splitlines()
    assert speeds[2:] == [
        "| a | 1x2 | 100 | 1.50 (1.40 to 1.60) | 1.60 (1.50 to 1.70) | 1.20 (1.10 to 1.30) | **2.00** (1.90 to 2.10) |",
        "| b | 1x2 | 100 | - | - | **1.80** (1.70 to 1.90) | RuntimeError |",
    ]


def test_the_milliseconds_of_a_call_have_causes(tmp_path, monkeypatch):
    names = (
        "aten::mkldnn_convolution",
        "InstanceNormalization",
        "MVN",
        "nhwc::native_group_norm",
        "FusedConv",
        "Concat",
    )
    convolutions, norms, others = profile_peers.CONVOLUTIONS, profile_peers.NORMS, profile_peers.OTHERS
    assert [*map(profile_peers.cause_of, names)] == [convolutions, norms, norms, norms, convolutions, others]
    line = "onednn_verbose,v1,primitive,exec,cpu,{},jit:uni,undef,src:f32::blocked:abcd::f0,,,{},0.5"
    kinds = [("reorder", "8x3x3x3"), ("reorder", "1x8x6x6"), ("convolution", "8x3x3x3")]
    found = profile_peers.reorders([line.format(*kind) for kind in kinds] + ["other"], {"8x3x3x3"})
    assert found == {profile_peers.WEIGHTS: 0.5, profile_peers.FORMATS: 0.5}

    model = layout_models.LayoutModel(lambda: nn.Sequential(tiny(), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 32, 32))
    monkeypatch.setattr(profile_peers, "MODELS", {"first": model})
    monkeypatch.setattr(bench_peers, "MODELS", {"first": model})
    monkeypatch.setattr(
        profile_peers, "PROFILES", {name: profile_peers.PROFILES[name] for name in ("contiguous", "ours")}
    )
    monkeypatch.setattr(profile_peers, "process", lambda: nullcontext(lambda function, *given: function(*given)))
    profile_peers.run(["first"], tmp_path / "causes.json")
    measured = read(tmp_path / "causes.json")
    assert [row["peer"] for row in measured["results"]] == ["contiguous", "ours"]
    for row in measured["results"]:
        assert all(row["causes"][cause] > 0 for cause in (convolutions, norms, profile_peers.ACTIVATIONS))
    assert "| first | ours | " in figures_peers.causes(measured)


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
    model = cuda_layouts.Autocast(with_norms(), "cpu")
    model.compile(fullgraph=True, backend="aot_eager")
    assert model(torch.randn(1, 1, 8, 8, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", cuda_layouts.MODELS)
def test_the_models_of_a_gpu_take_their_inputs(name):
    if name == "residual_encoder_unet3d":
        pytest.importorskip("dynamic_network_architectures")
    measured = cuda_layouts.MODELS[name]
    with torch.device("meta"):
        assert measured.call(measured.make(), torch.empty(measured.shape)).dim() in (2, 4, 5)
