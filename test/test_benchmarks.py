"""The benchmarks for a GPU, all of it that needs none on small weights on the CPU, and for real where there is one; and
those of layers and layouts, on small activations.
"""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cuda_build
import pytest
import torch
from selection import some_of
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import bench_calls
import bench_collate
import bench_counters
import bench_guard
import bench_layers
import bench_layouts
import bench_models
import bench_trace
import bench_tune
import bench_verify
import cuda_models
import cuda_report
import cuda_weights
import each_forward_steps
import layer_cases
import layout_models
import machine
import report
import report_layers
import report_tune
import report_verify
import shapes
import shared_copy
import stopwatch
from stopwatch import STOPWATCHES, interleaved, sets_beyond_cache

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
    def missing():
        raise ModuleNotFoundError("no such library")

    both = {TINY: tiny, "CogVideoX autoencoder (diffusers)": missing}
    monkeypatch.setattr(cuda_models, "MODELS", both)
    monkeypatch.setattr(
        shapes, "load", lambda: {name: [[4, 3, 3, 3, 3], [4, 4, 1, 1, 1], [4, 1, 3, 3]] for name in both}
    )
    return list(both)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_weight_is_measured_beside_every_baseline(point, device, monkeypatch):
    monkeypatch.setattr(cuda_weights, "LARGE", 0)
    copies = shared_copy.variants() if device == "cuda" else {"shared_copy": lambda out, source: out.copy_(source)}
    measured = cuda_weights.measure(STOPWATCHES[device](), point, copies, samples=2)
    jobs = {"ours", "ours_fresh", "plain_copy", "eager_copy", *copies}
    jobs.add("eager_two_steps" if point.to else "eager_contiguous")
    assert measured["times"].keys() == jobs
    assert measured["errors"] == {}
    assert all(0 < times["min"] <= times["median"] for times in measured["times"].values())
    to = point.to or point.dtype
    assert measured["copied_bytes"] * 2 == measured["bytes"] // point.dtype.itemsize * (
        point.dtype.itemsize + to.itemsize
    )
    assert json.loads(json.dumps(measured)) == measured


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_is_measured_beside_the_clone_and_the_operator(requires_grad):
    measured = bench_calls.measure((4, 1, 3, 3), requires_grad, samples=2)
    assert all(0 < times["min"] <= times["median"] for times in measured["times"].values())
    assert json.loads(json.dumps(measured)) == measured
    (row,) = report.calls({"results": [measured]}).splitlines()[2:]
    assert row.startswith(f"| 4x1x3x3 float32 | {'yes' if requires_grad else 'no'} |")


@pytest.mark.cuda
def test_the_compiler_is_measured():
    point = cuda_weights.Point((64, 64, 3, 3), torch.float32, with_compile=True)
    measured = cuda_weights.measure(STOPWATCHES["cuda"](), point, {}, samples=2)
    assert measured["errors"] == {}
    assert "compiled_clone" in measured["times"]


@pytest.mark.cuda
def test_copies_through_shared_memory_copy():
    source = torch.randint(0, 100, (1 << 20 | 48,), dtype=torch.uint8, device="cuda")
    for copy in shared_copy.variants().values():
        out = torch.zeros_like(source)
        copy(out, source)
        assert torch.equal(out, source)


def test_the_copy_through_shared_memory_compiles(tmp_path):
    nvcc = cuda_build.required_toolkit() / "bin/nvcc"
    subprocess.run(shared_copy.compile_command(nvcc, "sm_90", tmp_path / "copy.so"), check=True)


def test_models_are_measured_from_their_library_or_from_their_shapes(device, tiny_models):
    for name, source in zip(tiny_models, ("its library", "shapes.json")):
        measured = cuda_models.measure(STOPWATCHES[device](), name, torch.bfloat16, rounds=2)
        assert measured["source"] == source
        assert measured["device"].keys() == {"all", "moved"}
        for each in measured["device"].values():
            assert each["times"].keys() == cuda_models.DEVICE_JOBS.keys()
            assert each["errors"] == {}
        assert ("module.to" in measured["wall"]) == (name == TINY)
        assert measured["wall"]["ours, listed"]["extra_bytes"] == 0
        assert json.loads(json.dumps(measured)) == measured
        for counted in measured["launches"].values():
            assert counted is None if device == "cpu" else counted["kernels"] > 0
        if device == "cuda":
            assert measured["launches"]["ours"]["kernels"] + measured["launches"]["ours"]["copies"] <= 6


def test_weights_of_the_bars_are_large_enough():
    points = list(cuda_weights.points(with_compile=True))
    large = [
        (p.shape[2:], p.dtype, p.back) for p in points if torch.Size(p.shape).numel() * p.dtype.itemsize >= 16 << 20
    ]
    kernels = {torch.Size(kernel).numel() for kernel in cuda_weights.KERNELS}
    assert kernels == {4, 8, 9, 16, 25, 27, 49, 125}
    for kernel in cuda_weights.KERNELS:
        for dtype in cuda_weights.DTYPES:
            assert {(kernel, dtype, False), (kernel, dtype, True)} <= set(large)


def test_sets_of_memory_exceed_four_caches():
    cpu = stopwatch.Stopwatch()
    for size in (1, 1000, 64 << 10, 1 << 30):
        number = sets_beyond_cache(cpu, size)
        assert number * size >= 4 * cpu.cache_bytes()
        assert number == 2 or (number - 1) * size < 4 * cpu.cache_bytes()


def test_jobs_take_turns_and_failures_are_told():
    calls = []
    jobs = {name: [lambda name=name, i=i: calls.append(name + str(i)) for i in range(2)] for name in "ab"}

    class Failing(stopwatch.Stopwatch):
        def record(self, calls):
            if len(calls) == 1:
                raise RuntimeError("capture is not possible\nin this stream")
            return super().record(calls)

        def microseconds(self, play, times):
            play()
            return 500.0

    times, errors = interleaved(Failing(), {**jobs, "c": [lambda: None]}, samples=3)
    assert times == {name: {"min": 250.0, "median": 250.0} for name in "ab"}
    assert errors == {"c": "capture is not possible"}
    assert calls[-8:] == ["a0", "a1", "b0", "b1"] * 2


def test_steps_with_weights_converted_in_each_forward_are_measured_beside_converted_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(each_forward_steps, "MODELS", {TINY: tiny})
    monkeypatch.setattr(each_forward_steps, "INPUTS", {TINY: (3, 8, 8)})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    each_forward_steps.run([TINY, "another"], 2, tmp_path / "each-forward-cpu.json")
    measured = json.loads((tmp_path / "each-forward-cpu.json").read_text())
    assert [result["batch"] for result in measured["results"]] == [1, 8, 32]
    (row,) = each_forward_steps.as_table(measured).splitlines()[2:]
    assert re.fullmatch(rf"\| {TINY} \| 0 (\| [+-][\d.]+ % of \d+ ms ){{3}}\|", row)


def test_the_guard_is_measured_beside_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_guard, "CASES", {TINY: (tiny, (1, 3, 8, 8))})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bench_guard.run([TINY], 2, tmp_path / "guard-cpu.json")
    (row,) = bench_guard.as_table(json.loads((tmp_path / "guard-cpu.json").read_text())).splitlines()[2:]
    assert re.fullmatch(rf"\| {TINY} \| \d \| \d+ ms \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ % \|", row)


def test_batches_are_measured_beside_those_of_pytorch(tmp_path, monkeypatch):
    made = {name: make for name, (_, make, _) in bench_collate.CASES.items()}
    monkeypatch.setattr(bench_collate, "CASES", {TINY: (2, made["dicts, uint8 HWC, 3x224x224"], 1.0)})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bench_collate.run([TINY], 2, 0, tmp_path / "collate-cpu.json")
    (row,) = bench_collate.as_table(json.loads((tmp_path / "collate-cpu.json").read_text())).splitlines()[2:]
    assert re.fullmatch(rf"\| 2 of {TINY} \| [\d.]+ → [\d.]+ ms, \*\*[\d.]+x\*\* \|  \| 1.0x \|", row)


@pytest.mark.parametrize("name", bench_models.MODELS)
def test_the_shapes_are_those_of_the_models(name):
    with torch.device("meta"):
        model = bench_models.MODELS[name]()
        listed = shapes.load()[name]
        assert shapes.shapes_of(model) == listed
        assert shapes.shapes_of(shapes.convolutions(listed)) == listed


class FakeGraph:
    """What is captured has run; a replay does nothing."""

    is_capturing = False

    def capture_begin(self):
        assert not FakeGraph.is_capturing
        FakeGraph.is_capturing = True

    def capture_end(self):
        FakeGraph.is_capturing = False

    def replay(self):
        assert not FakeGraph.is_capturing


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.5


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU whose memory is the CPU's, and on which every measurement takes half a millisecond."""
    properties = SimpleNamespace(
        name="Fake", major=9, minor=0, multi_processor_count=132, L2_cache_size=32 << 10, total_memory=1 << 30
    )
    properties.shared_memory_per_block_optin = 227 << 10
    event = SimpleNamespace(
        device_type=torch.autograd.DeviceType.CUDA,
        name="kernel",
        time_range=SimpleNamespace(start=0, elapsed_us=lambda: 2.0),
    )
    fakes = {
        "CUDAGraph": FakeGraph,
        "Event": FakeEvent,
        "Stream": SimpleNamespace,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: 1000,
        "get_device_properties": lambda device: properties,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    profile = SimpleNamespace(events=lambda: [event, event])
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kwargs: zeros(*size, **{**kwargs, "device": "cpu"}))
    monkeypatch.setattr(stopwatch.CudaStopwatch, "device", "cpu")
    monkeypatch.setattr(shared_copy, "variants", lambda: {"shared_copy": lambda out, source: out.copy_(source)})
    monkeypatch.setattr(cuda_weights, "points", lambda with_compile: POINTS)
    monkeypatch.setattr(bench_counters, "read_counters", lambda: "ncu is missing")


def run_all(folder, models, monkeypatch):
    """As `make bench-cuda`, into a folder."""
    cuda_weights.run(2, False, folder / "weights-cuda.json")
    cuda_models.run(models, 2, folder / "models-cuda.json")
    monkeypatch.setattr(sys, "argv", ["bench_counters.py", "--out", str(folder / "counters-cuda.json")])
    bench_counters.main()


@pytest.mark.usefixtures("fake_gpu")
def test_every_script_writes_what_the_report_reads(tmp_path, tiny_models, monkeypatch):
    monkeypatch.setattr(bench_counters, "CASES", [((4, 8, 3, 3), torch.float32)])
    run_all(tmp_path, tiny_models, monkeypatch)
    for name, command in (
        ("weights", "bench_weights.py --device cuda"),
        ("models", "bench_models.py --device cuda"),
        ("counters", "bench_counters.py"),
    ):
        measured = json.loads((tmp_path / f"{name}-cuda.json").read_text())
        assert measured["command"] == f"python benchmarks/{command}"
        assert measured["gpu"].keys() >= {"name", "driver", "CUDA"}
        assert {"commit", "environment"} <= measured["machine"].keys()
    text = cuda_report.section(tmp_path)
    assert "Fake, driver" in text
    assert "Failed: ncu is missing" in text
    assert "| launches for a model, every model: in place | at most 6 | 1.00 | yes |" in text
    assert "| in place, every model: extra device memory, bytes | at most 0 | 0.00 | yes |" in text
    assert all(line.startswith(("|", "`", "Failed")) for line in text.splitlines() if line)


@pytest.mark.cuda
def test_every_script_runs_on_a_gpu(tmp_path, tiny_models, monkeypatch):
    monkeypatch.setattr(cuda_weights, "points", lambda with_compile: POINTS)
    run_all(tmp_path, tiny_models, monkeypatch)
    assert torch.cuda.get_device_name() in cuda_report.section(tmp_path)


def weight_point(kernel, dtype, **times):
    shape = [*cuda_weights.shape_of(kernel, 16 << 20, getattr(torch, dtype))]
    nbytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    taken = {job: {"min": time, "median": time} for job, time in times.items()}
    point = {"shape": shape, "dtype": dtype, "to": None, "back": False, "bytes": nbytes, "copied_bytes": nbytes}
    return {**point, "times": taken, "errors": {}}


def met(rows):
    return [(row[2], row[3]) for row in rows]


def test_the_bars_say_what_is_met():
    slow = weight_point((3, 3), "float32", ours=10, ours_fresh=10, plain_copy=8.9, shared_copy_1=9.8, shared_copy_2=9.9)
    fast = weight_point((7, 7), "float32", ours=10, ours_fresh=10, plain_copy=9.5, eager_copy=40, eager_contiguous=60)
    rows = cuda_report.weight_bars([slow, fast])
    assert met(rows[:1]) == [("0.89 to 0.95, or 0.98", "yes")]
    assert met(rows[1:4]) == [("not measured, or not measured", "not measured")] * 2 + [
        ("not measured", "not measured")
    ]
    assert met(rows[4:]) == [("4.00", "no"), ("6.00", "in part")]
    slow["times"]["shared_copy_1"]["median"] = 9.6  # the best of them counts
    assert met(cuda_report.weight_bars([slow])[:1]) == [("0.89, or 0.96", "no")]
    other = weight_point((2, 2), "float32", ours=10, plain_copy=1)
    assert met(cuda_report.weight_bars([other])[:1]) == [("not measured, or not measured", "not measured")]

    counts = {"load_sectors": 100, "store_sectors": 104, "shared_passes": 50}
    close = {"modelled": counts, "read": {**counts, "store_sectors": 100}}
    assert met([cuda_report.counter_bar([close])]) == [("0.00 to 0.04", "yes")]
    assert met([cuda_report.counter_bar([{**close, "read": None}])]) == [("not measured", "not measured")]


def test_without_results_the_report_says_so(tmp_path):
    assert cuda_report.section(tmp_path) == "Nothing has been measured yet."


METRICS = [metric for metrics in bench_counters.COUNTERS.values() for metric in metrics]
NCU = f"""==PROF== Connected to process 7
==PROF== Profiling "convert_tiles" - 0: 0%....100% - 1 pass
"ID","Kernel Name","Grid Size",{",".join(f'"{metric}"' for metric in METRICS)}
"","","","sector","sector","",""
"0","void nhwc::cuda::detail::convert_tiles<...>(...)","(36, 1, 1)","36,864","36,900","9,216","9,216"
"""


def test_the_profilers_table_is_understood():
    assert bench_counters.counters_in(NCU) == [{"load_sectors": 36864, "store_sectors": 36900, "shared_passes": 18432}]


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (NCU, 0, "counted"),
        ("==ERROR== ERR_NVGPUCTRPERM\n", 1, "ERR_NVGPUCTRPERM"),
        ("", 0, "0 of 1"),
        ('"ID"\n""\n"0"', 0, "KeyError"),
    ],
)
def test_a_profiler_that_cannot_read_says_why(output, status, expected, monkeypatch):
    monkeypatch.setattr(bench_counters, "CASES", bench_counters.CASES[:1])
    monkeypatch.setattr(bench_counters.shutil, "which", lambda *name, **path: "ncu")
    ran = SimpleNamespace(stdout=output, stderr="", returncode=status)
    monkeypatch.setattr(bench_counters.subprocess, "run", lambda *command, **how: ran)
    read = bench_counters.read_counters()
    assert len(read) == 1 if expected == "counted" else expected in read


def test_a_profile_without_kernels_is_none():
    def event(name, start, device_type=torch.autograd.DeviceType.CUDA):
        return SimpleNamespace(
            device_type=device_type, name=name, time_range=SimpleNamespace(start=start, elapsed_us=lambda: start)
        )

    runtime = event("cudaLaunchKernel", 0, torch.autograd.DeviceType.CPU)
    events = [event("Memcpy DtoD (Device -> Device)", 3), event("convert_tiles", 2), event("add_", 1), runtime]
    assert stopwatch.count_launches(events) == {"kernels": 1, "copies": 1, "kernel_us": 2}
    assert stopwatch.count_launches([runtime]) is None


def test_the_commit_can_be_told(monkeypatch):
    monkeypatch.setenv("TORCH_NHWC_COMMIT", "abc1234")
    assert machine.commit() == "abc1234"


def small(case):
    """The case on an activation of a few voxels."""
    return case._replace(shape=(2, *case.shape[1:2], *(4 for _ in case.shape[2:])))


def first_of_each_layer():
    cases = {}
    for case in layer_cases.CASES:
        cases.setdefault((case.layer, case.arguments.split(", ")[-1]) if case.layer == "conv3d" else case.layer, case)
    return list(cases.values())


@pytest.mark.parametrize("case", first_of_each_layer(), ids=lambda case: case.name)
def test_layers_are_measured_beside_both_of_pytorchs(case):
    for mode in case.modes:
        row = bench_layers.measure(small(case), torch.float32, mode, seconds=0)
        assert row["errors"] == {}
        assert all(0 < times["min"] <= times["median"] for times in row["times"].values())
        assert row["times"].keys() == layer_cases.FUNCTIONS.keys()
        assert row["bars"].keys() <= row["ratios"].keys()
        assert report_layers.group(row) in report_layers.GROUPS.values()


@pytest.mark.parametrize("case", some_of(layer_cases.CASES, *first_of_each_layer()), ids=lambda case: case.name)
def test_ours_and_pytorchs_compute_the_same_and_each_keeps_to_its_format(case):
    outs = {}
    for way, functions in layer_cases.FUNCTIONS.items():
        x, parameters, targets = bench_layers.inputs(small(case), torch.float32, way)
        outs[way] = case.of(functions)(x, *parameters, *targets)
        assert x.stride()[1] == (1 if way != "contiguous" else x[0, 0].numel())
    torch.testing.assert_close(outs["ours"], outs["contiguous"], rtol=1e-4, atol=1e-4)
    assert outs["ours"].dim() == 0 or outs["ours"].stride()[1] == 1


def test_what_a_layer_cannot_do_has_no_time_but_a_text(monkeypatch):
    def refuse(*arguments):
        raise NotImplementedError("not for this dtype\nand so on")

    case = small(layer_cases.CASES[0])
    monkeypatch.setitem(layer_cases.FUNCTIONS, "stock_channels_last", SimpleNamespace(group_norm=refuse))
    row = bench_layers.measure(case, torch.float32, layer_cases.FORWARD, seconds=0)
    assert row["times"]["stock_channels_last"] is None
    assert row["errors"] == {"stock_channels_last": "not for this dtype"}
    assert row["ratios"]["stock_over_ours"] is None
    assert row["ratios"]["over_contiguous"] > 0


def test_the_bars_of_layers_are_the_projects():
    def bars(layer, dtype, mode, **fields):
        (case, *_) = [case for case in layer_cases.CASES if case.layer == layer]
        return layer_cases.bars(case._replace(**fields), dtype, mode)

    forward, both, backward = layer_cases.FORWARD, layer_cases.BOTH, layer_cases.BACKWARD
    large, tiny = (1, 64, 256, 256), (1, 16, 8, 8)
    assert bars("group_norm", torch.float32, forward, shape=tiny) == {"over_contiguous": 1.15}
    assert bars("group_norm", torch.float32, both, shape=large) == {"over_contiguous": 1.3}
    assert bars("group_norm", torch.bfloat16, forward, shape=(1, 8, 8, 8)) == {}
    assert bars("group_norm", torch.bfloat16, backward) == {"stock_over_ours": 8}
    assert bars("instance_norm", torch.float32, both) == {"over_contiguous": 0.8, "stock_over_ours": 5}
    assert bars("conv3d", torch.float32, both) == {"over_contiguous": 0.9}
    assert bars("conv3d", torch.bfloat16, both) == {}
    assert bars("interpolate", torch.float32, both) == {}


def test_layers_and_layouts_are_reported(tmp_path, monkeypatch, capsys):
    def tiny_model():
        return nn.Sequential(nn.Conv3d(1, 8, 3), nn.GroupNorm(2, 8), nn.Conv3d(8, 2, 3))

    tiny = layout_models.LayoutModel(tiny_model, (1, 1, 8, 8, 8))
    monkeypatch.setattr(bench_layouts, "MODELS", {"first": tiny, "second": tiny})
    out = tmp_path / "layouts-cpu.json"
    for names in (["first", "second"], ["second"]):
        bench_layouts.run(names, ["float32", "bfloat16"], [], 0, out)
    layouts = json.loads(out.read_text())
    assert [row["model"] for row in layouts["results"]] == ["first"] * 4 + ["second"] * 4
    for row in layouts["results"]:
        assert row["times"].keys() == row["gains"].keys() == {"contiguous", "weights", "full", "preserved"}
        assert row["exchanged"] == {"GroupNorm": 1}
        assert row["shape"][0] == (2 if row["dtype"] == "float32" else 1)
        assert row["bars"].keys() == {"preserved_over_full", "preserved"}
        assert max(row["differences"].values()) < (1e-4 if row["dtype"] == "float32" else 0.1)

    monkeypatch.setattr(bench_layers.layer_errors, "CASES", [small(bench_layers.layer_errors.CASES[0])])
    chosen = [small(layer_cases.CASES[0])]
    measured = bench_layers.run(chosen, chosen, 0)
    machine.write(tmp_path / "layers-cpu.json", "bench_layers.py", measured.pop("results"), quick=True, **measured)
    layers = json.loads((tmp_path / "layers-cpu.json").read_text())
    assert {row["mean_over_deviation"] for row in layers["accuracy"]} == {0, 3, 10, 100, 1000, 3000}
    assert layers["machine"]["AMX"] == machine.has_amx()
    bars = report_layers.bars(layers, layouts)
    assert report_layers.QUICK in bars
    assert "whole models where layers are exchanged: gain over contiguous | at least 0.98" in bars
    assert "| group norm float32: the largest error over that of PyTorch's on contiguous | at most 2 |" in bars
    assert "| second | 2 | float32 | training |" in report_layers.layouts(layouts)
    monkeypatch.setattr(report_layers, "SHOWN", {"first": "the first"})
    assert "| the first |" in report_layers.gains(layouts)
    for table in (report_layers.losses, report_layers.layers, report_layers.accuracy, report_layers.threads):
        assert "| group" in table(layers)


@pytest.mark.exhaustive
def test_the_compiler_is_told_with_its_first_call(monkeypatch):
    monkeypatch.setattr(bench_layouts.torch, "compile", lambda model: model)
    monkeypatch.setitem(bench_layouts.MODELS, "tiny", layout_models.LayoutModel(tiny, (1, 3, 8, 8)))
    row = bench_layouts.measure("tiny", torch.float32, "inference", with_compile=True, budget=0)
    assert row["compile_seconds"].keys() == bench_layouts.COMPILED.keys() <= row["times"].keys()
    assert (row["exchanged"], row["bars"]) == ({}, {})
    assert "| tiny | float32 | inference |" in report_layers.peers({"results": [row]})


def test_decisions_are_measured_again_and_reported(tmp_path, monkeypatch, capsys):
    tiny_model = layout_models.LayoutModel(tiny, (1, 3, 8, 8))
    monkeypatch.setattr(bench_tune, "MODELS", {"first": tiny_model, "second": tiny_model})
    out = tmp_path / "tune-cpu.json"
    chosen = list(bench_tune.cases(["first", "second"], ["float32"], bench_tune.MODES))
    for some in (chosen[2:], chosen[:2], chosen[:1]):
        bench_tune.run(some, 0.05, 0.01, out, call=lambda function, *given: function(*given))
    measured = json.loads(out.read_text())
    assert [row["model"] for row in measured["results"]] == ["first"] * 2 + ["second"] * 2
    for row in measured["results"]:
        assert row["over"].keys() == {"contiguous", "weights only", "full"}
        assert row["choice"] in row["times"]
        assert row["over"][row["choice"]] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
        assert all(each["low"] <= each["ratio"] <= each["high"] for each in row["over"].values())
    table = report_tune.decisions(measured)
    assert report_layers.QUICK in table
    assert "| first | float32 | training |" in table
    bars = report_tune.bars(measured)
    assert "| 4 cases: intervals over the best fixed policy that lie wholly below 0.97 | none |" in bars
    assert "| geometric mean of the speed over full, 4 cases | at least 1 |" in bars
    row = measured["results"][0]
    row["over"]["full"] = {"ratio": 0.5, "low": 0.4, "high": 0.6}
    row["best"] = "full"
    assert "| first float32 inference | no |" in report_tune.bars(measured)


@pytest.mark.exhaustive
def test_planted_faults_are_found_and_reported(tmp_path, monkeypatch):
    def small():
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))

    monkeypatch.setattr(bench_verify, "MODELS", {"small": layout_models.LayoutModel(small, (1, 3, 8, 8))})
    monkeypatch.setattr(bench_verify, "SMALL", {"small": (2, 3, 8, 8)})
    out = tmp_path / "verify-cpu.json"
    bench_verify.run(["small"], ["float32"], out)
    measured = json.loads(out.read_text())
    assert [list(row["planted"].values()) for row in measured["results"]] == [["1", "3", "4"], ["1", "3", "4", "2"]]
    assert all(bench_verify.is_met(row) for row in measured["results"])
    text = report_verify.findings(measured)
    assert "| wrong backward: planted in 1 cases | all found | 1 | yes |" in text
    assert "| the first layer that differs is the first planted | all | 2 | yes |" in text
    measured["results"][0]["false_alarms"] = ["0: output"]
    assert text.endswith("| 0 | 0 | yes |")
    assert report_verify.findings(measured).endswith("| 0 | 1 | no |\n\nNot met by small float32 inference.")


@pytest.mark.parametrize("name", some_of(layout_models.MODELS, "unet2d", "segresnet3d", "poolformer"))
def test_every_model_of_the_layouts_is_made(name):
    with torch.device("meta"):
        assert any(parameter.dim() in (4, 5) for parameter in layout_models.MODELS[name].make().parameters())


def test_what_a_trace_adds_is_measured_in_every_mode(monkeypatch):
    monkeypatch.setattr(bench_trace, "BLOCKS", 1)
    for mode in bench_trace.MODES:
        row = bench_trace.measure("losing", mode, samples=1)
        assert row["operators"] > 3
        assert row["losses"] > 0
        assert row["times"].keys() == {"alone", "empty mode", "traced"}
        assert row["added"].keys() == {"empty mode", "traced"}
