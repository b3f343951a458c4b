"""C++ users: public headers, the filter transpose by itself, a LibTorch program, and the CUDA sources' compiler."""

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import cmake_build
import cuda_build
import pytest
import torch
from selection import some_of
from torch.utils import cpp_extension

import torch_nhwc as nhwc

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
INCLUDE = Path(nhwc.cpp_extension.include_paths()[0])
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
CXX = os.environ.get("CXX", "c++")
NEED_TORCH = ("torch_nhwc/ops.h", "torch_nhwc/functional.h", "torch_nhwc/module")
TORCH_FREE = [header for header in HEADERS if not header.startswith(NEED_TORCH)]


# test_module.py includes module.h first, and twice.
ALONE = [header for header in HEADERS if header != "torch_nhwc/module.h"]


@pytest.mark.parametrize("header", some_of(ALONE, *TORCH_FREE, "torch_nhwc/ops.h"))
def test_every_public_header_compiles_alone_and_those_without_torch_as_cpp17(header, tmp_path):
    source = tmp_path / "alone.cpp"
    source.write_text(f"#include <{header}>\n#include <{header}>\n")
    # torch's own headers want C++20 from 2.12 on; ours are clean under C++17 wherever torch's are.
    standard = "c++17" if header in TORCH_FREE or torch.__version__ < "2.12" else "c++20"
    torchs = [] if header in TORCH_FREE else cpp_extension.include_paths()
    system = [flag for path in torchs for flag in ("-isystem", path)]
    command = [CXX, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{INCLUDE}"]
    subprocess.run([*command, *system, str(source)], check=True)


def test_the_version_macro_is_the_packages_version():
    text = (INCLUDE / "torch_nhwc/version.h").read_text()
    assert ".".join(re.findall(r"#define TORCH_NHWC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)) == nhwc.__version__


AVX2 = ["avx2", "f16c", "fma", "bmi2"]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"]
# The instruction sets that the headers distinguish, see cpu/level.h, by the compiler's names for their parts.
CPU_LEVELS = {
    "baseline": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_vbmi": [*AVX512, "avx512vbmi"],
    "avx512_bf16": [*AVX512, "avx512vbmi", "avx512bf16"],
}
PROGRAMS = ["zip_network", "filter_transpose", "casts"]
# The levels differ in shuffles, and BF16 has a cast. Under the sanitizers the best level runs the others.
PROGRAMS_OF_LEVELS = dict.fromkeys(("avx512", "avx512_vbmi"), PROGRAMS[:1])
ADDRESSES = ["-fsanitize=address", "-fno-sanitize-recover", "-g1"]
# Checks of addresses that are calls compile faster than checks in place.
ADDRESSES += ["--param", "asan-instrumentation-with-call-threshold=0"]
# Of the undefined behaviors, invalid pointers are the address sanitizer's too, and their checks compile for minutes.
SANITIZERS = [*ADDRESSES, "-fsanitize=undefined", "-fno-sanitize=null,object-size"]


def cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU, by the compiler's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.replace("avx512_", "avx512").split())


def run_program(name: str, folder: Path, compiler: str, *flags: str, run: Sequence[str] = (), step: int = 1) -> None:
    """Compile and run one of the programs in this folder that end with "ok"."""
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", *flags]
    subprocess.run([*command, str(HERE / f"{name}.cpp"), "-o", str(folder / name)], check=True)
    command = [*run, str(folder / name), str(step)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.endswith("ok\n")
    # The networks may not be there: a compiler without shuffles makes do with plain loops. These compilers have them.
    assert name != "zip_network" or int(output.split()[0]) > 0


def run_programs(names: Sequence[str], *arguments: Any, **options: Any) -> None:
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(run_program, name, *arguments, **options) for name in names]:
            done.result()


@pytest.mark.levels
@pytest.mark.exhaustive  # test_cpu_levels.py runs the library at all of them
@pytest.mark.parametrize("level", [*CPU_LEVELS][:-1])
def test_the_filter_transpose_stands_alone_at_every_level(level: str, tmp_path: Path) -> None:
    missing = set(CPU_LEVELS[level]) - cpu_flags()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    programs = PROGRAMS_OF_LEVELS.get(level, PROGRAMS)
    run_programs(programs, tmp_path, CXX, "-O1", *(f"-m{part}" for part in CPU_LEVELS[level]), step=5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["baseline", "best"])
def test_the_filter_transpose_stands_alone_under_the_sanitizers(level: str, tmp_path: Path) -> None:
    available = [parts for parts in CPU_LEVELS.values() if set(parts) <= cpu_flags()]
    parts = [] if level == "baseline" else available[-1]
    # Nothing in a network is for a sanitizer to see: all its indices are constants.
    programs = [name for name in PROGRAMS if name != "zip_network"]
    # What instruction sets differ in is where they read and write; with all checks, theirs compile for five minutes.
    sanitizers = ADDRESSES if parts else SANITIZERS
    run_programs(programs, tmp_path, CXX, "-O1", *sanitizers, *(f"-m{part}" for part in parts), step=5)


def test_the_matrices_of_winograd_are_right_in_exact_arithmetic(tmp_path: Path) -> None:
    """AT [(G weight) * (BT input)] is the correlation of input and weight: bilinear, so that unit vectors prove it."""
    command = [
        CXX,
        "-std=c++20",
        f"-I{ROOT / 'csrc'}",
        str(HERE / "winograd_matrices.cpp"),
        "-o",
        str(tmp_path / "run"),
    ]
    subprocess.run(command, check=True)
    printed = subprocess.run([tmp_path / "run"], check=True, capture_output=True, text=True).stdout
    matrices: dict[tuple[int, int], dict[str, list[list[Fraction]]]] = {}
    for name, m, r, *numbers in map(str.split, printed.splitlines()):
        exact = [Fraction(float.fromhex(number)).limit_denominator(1000) for number in numbers]
        assert [float(number) for number in exact] == [float.fromhex(number) for number in numbers]
        matrices.setdefault((int(m), int(r)), {}).setdefault(name, []).append(exact)
    assert {(2, 3), (4, 3)} <= matrices.keys()
    for (m, r), found in matrices.items():
        points = range(m + r - 1)
        for result, tap, position in itertools.product(range(m), range(r), points):
            products = (found["AT"][result][p] * found["G"][p][tap] * found["BT"][p][position] for p in points)
            assert sum(products) == (position == result + tap), (m, r, result, tap, position)


def build_layer_kernels(folder: Path) -> Path:
    """Compile the program of the CPU kernels of layers with the sanitizers. Return its path."""
    cpu, torchs = ROOT / "csrc/cpu", cpp_extension.include_paths()
    # As one, like setup.py does: alone, each would take most of its time for torch's headers.
    names = [
        "depthwise",
        "dispatch",
        "group_norm",
        "inner_product",
        "output",
        "pointwise",
        "softmax",
        "weight_gradient",
    ]
    drivers = folder / "drivers.cpp"
    drivers.write_text("".join(f'#include "cpu/{name}.cpp"\n' for name in (*names, "winograd")))
    # The slowest first. What instruction sets differ in is where they read and write; with all checks they compile for
    # minutes. avx512_vbmi and avx512_bf16 have filter transposes alone, which the test above checks.
    sources = {cpu / f"isa/{level}.cpp": ADDRESSES for level in ("avx512", "avx2")}
    sources |= {cpu / f"isa/{level}.cpp": [] for level in ("avx512_vbmi", "avx512_bf16")}
    sources |= dict.fromkeys((HERE / "layer_kernels.cpp", cpu / "isa/baseline.cpp", drivers), SANITIZERS)
    # Optimised, they would compile three times as long, which is more than they run.
    command = [CXX, "-std=c++20", "-O0", "-fopenmp", f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}"]
    command += [flag for path in torchs for flag in ("-isystem", path)]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([*command, *sources[source], "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compiled, sources))
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    program = folder / "layer_kernels"
    subprocess.run([*command, *SANITIZERS, *objects, "-o", program, *libraries, "-ltorch_cpu", "-lc10"], check=True)
    return program


@pytest.mark.exhaustive
def test_the_kernels_of_layers_under_the_sanitizers_at_every_level(tmp_path: Path) -> None:
    program, best = build_layer_kernels(tmp_path), nhwc.ops.cpu_capability()
    levels = ["baseline", "avx2", "avx2_128", "avx512"]

    def run(level: str) -> None:
        environment = os.environ | {"TORCH_NHWC_CPU_CAPABILITY": level}
        done = subprocess.run([program, "60"], capture_output=True, text=True, env=environment)
        assert done.stdout == "ok\n", f"{level}: {done.stderr[-6000:]}"

    with ThreadPoolExecutor(max_workers=2) as pool:
        # The best may be one of the last, with the kernels of AVX-512.
        list(pool.map(run, levels[: levels.index(best) + 1] if best in levels[:3] else levels))


def require_tools(*tools: str) -> None:
    """Skip a test whose tools are missing, and fail it where they are promised."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        assert os.environ.get("TORCH_NHWC_REQUIRE_QEMU") != "1", f"promised here, and not found: {missing}"
        pytest.skip(f"needs {', '.join(missing)} (Debian packages qemu-user, g++-aarch64-linux-gnu)")


@pytest.mark.emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compiler", "emulator"),
    [
        pytest.param(CXX, ["qemu-x86_64", "-cpu", "core2duo"], id="x86-64-without-avx"),
        pytest.param("aarch64-linux-gnu-g++", ["qemu-aarch64"], id="neon"),
    ],
)
def test_the_filter_transpose_on_an_emulated_cpu(compiler: str, emulator: list[str], tmp_path: Path) -> None:
    require_tools(compiler, emulator[0])
    run_programs(PROGRAMS, tmp_path, compiler, "-O1", "-static", run=emulator, step=13)


@pytest.mark.emulated
@pytest.mark.exhaustive
def test_the_kernels_of_layers_compile_for_neon(tmp_path: Path) -> None:
    """Their drivers need torch, so that they do not run here."""
    compiler = "aarch64-linux-gnu-g++"
    require_tools(compiler)
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, "-c", ROOT / "csrc/cpu/isa/baseline.cpp", "-o", tmp_path / "neon.o"], check=True)


@pytest.mark.emulated
@pytest.mark.exhaustive
def test_the_level_chosen_for_an_emulated_cpu(tmp_path: Path) -> None:
    """By a program of its own: to import torch in the emulator takes minutes."""
    require_tools("qemu-x86_64")
    program, library = tmp_path / "chosen_level", Path(torch.__file__).parent / "lib"
    command = [CXX, "-std=c++20", f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}", HERE / "chosen_level.cpp", "-o", program]
    command += [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    subprocess.run([*command, f"-L{library}", f"-Wl,-rpath,{library}", "-lc10"], check=True)
    variables = ("TORCH_NHWC_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    levels = {"core2duo": "baseline", "Haswell": "avx2", "EPYC-Milan": "avx2_128", "Dhyana": "avx2_128"}
    for processor, level in levels.items():
        run = ["qemu-x86_64", "-cpu", processor, program]
        assert subprocess.run(run, capture_output=True, text=True, env=environment).stdout == f"{level}\n", processor


def test_a_libtorch_program_uses_the_operators_without_python(tmp_path):
    program = cmake_build.make_program(HERE, tmp_path / "build", "consumer")
    run = cmake_build.run_program(program, capture_output=True, text=True)
    assert run.stdout == "ok\n"


def test_the_library_needs_no_python():
    library = nhwc.cpp_extension.library_path()
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "libtorch_cpu" in needed
    assert "libgomp" in needed  # without OpenMP at::parallel_for runs on one thread, and says nothing
    assert "python" not in needed
    symbols = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
    assert not re.search(r" U _?Py", symbols)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["75", "80", "90", "100", "120"])
def test_the_cuda_kernels_need_no_torch_and_stay_in_registers(architecture, tmp_path):
    kernels = cuda_build.kernels("filter", architecture, tmp_path, "--keep", "--keep-dir", tmp_path)
    # Nine kinds of elements, five of which are permuted in place too; small and large arguments.
    assert len(kernels) == 2 * (9 + 5)
    for kernel in kernels:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel
        # With 64 registers four blocks of 256 threads fill a processor's. Of long filters there is one block on each.
        most = 64 if "convert_tiles" in kernel else 255
        assert int(re.search(r"Used (\d+) registers", kernel)[1]) <= most, kernel
    ptx = (tmp_path / "filter_kernels.ptx").read_text()
    assert not re.search(r"\b(ld|st)\.local\b", ptx)
    entries = ptx.split(".entry ")[1:]
    assert len(entries) == len(kernels)
    argument_bytes = []
    for entry in entries:
        assert re.search(r"\bld\.global\.v4\.[a-z]32\b", entry)
        assert re.search(r"\bst\.global\.v4\.[a-z]32\b", entry)
        arguments = entry[: entry.index(")")]
        lists = map(int, re.findall(r"_param_0\[(\d+)\]", arguments))
        argument_bytes.append(sum(lists) + 8 * arguments.count(".u64"))
    assert sum(nbytes <= 4096 for nbytes in argument_bytes) == len(entries) / 2
    assert max(argument_bytes) <= 32764


@pytest.mark.exhaustive
def test_the_host_code_for_cuda_compiles():
    """Against the headers of any torch, a CPU build included."""
    sources = sorted((ROOT / "csrc/cuda").glob("*.cpp"))
    assert sources
    for source in sources:
        command = [CXX, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        command += [f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}", *cuda_build.torch_headers()]
        subprocess.run([*command, source], check=True)
