"""Every code block of the README and the docs runs, and every figure is the benchmark's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cuda_build
import pytest
import torch
from torch.utils import cpp_extension

import torch_nhwc as nhwc

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages):
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if match[1] in languages:
                found.append(pytest.param(match[2], id=f"{document.name}:{line}"))
    return found


def test_every_block_has_a_language_that_a_test_runs():
    languages = {match[1] for document in DOCUMENTS for match in BLOCK.finditer(document.read_text())}
    assert languages == {"python", "cpp", "console"}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    (tmp_path / "block.py").write_text(code)  # TorchScript reads the source of what it compiles
    subprocess.run([sys.executable, tmp_path / "block.py"], check=True, env=environment)


@pytest.mark.parametrize("code", blocks("cpp"))
def test_cpp_blocks_compile_and_run(code, tmp_path):
    (tmp_path / "block.cpp").write_text(code)
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", *(flag for path in cpp_extension.include_paths() for flag in ("-isystem", path))]
    flags += [f"-I{path}" for path in nhwc.include_paths()]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", str(nhwc.library_path())]
    links += [f"-Wl,-rpath,{nhwc.library_path().parent}", "-ltorch", "-ltorch_cpu", "-lc10"]
    program = tmp_path / "block"
    command = [os.environ.get("CXX", "c++"), *flags, tmp_path / "block.cpp", "-o", program, *links]
    subprocess.run(command, check=True)
    subprocess.run([program], check=True, env=cuda_build.environment())


def run_make_demo():
    # Under `make test` the environment is there; by hand, the recipe of `make demo` is what it does.
    environment = os.environ.get("TORCH_NHWC_VENV")
    recipe = [sys.executable, "-m", "torch_nhwc", "demo"]
    command = ["make", "demo", f"VENV={environment}"] if environment else recipe
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.count("equal bit for bit") == 2


COMMANDS = {
    "make demo": run_make_demo,
    "make test": lambda: None,  # this
    "pip install --no-build-isolation .": lambda: None,  # test_packaging.py
}


@pytest.mark.parametrize("block", blocks("console"))
def test_console_blocks_run(block):
    for line in block.splitlines():
        assert line.startswith("$ ")
        COMMANDS[line[2:]]()


def test_every_figure_is_the_benchmarks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    for document, sections in report.documents().items():
        for mark, figures in sections.items():
            section = f"<!-- figures: {mark} -->\n{figures}\n<!-- end of figures -->"
            assert section in document.read_text(), f"{document.name}, {mark}: type `python benchmarks/report.py`"


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", BLOCK.sub("", document.read_text())):
            assert target.startswith("http") or (document.parent / target).exists(), (document.name, target)
