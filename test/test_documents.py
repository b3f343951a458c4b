"""Every code block of the README and the docs runs, every link leads somewhere, and every figure is the benchmark's."""

import importlib
import inspect
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import cmake_build
import cuda_build
import pytest
import torch
from onednn import CPU_HAS_AVX512
from programs import PROGRAMS, imported
from public_names import public_names
from selection import some_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SLOW = "#include", "diffusers", "integrations", "monai", "torch.compile(", "torchao"
OPTIONAL = "dynamic_network_architectures", *PROGRAMS


def packages_in(*codes, among):
    """Return the packages, of some, that programs import."""
    return [each for each in among for code in codes if re.search(rf"^(import|from) {each}\b", code, re.MULTILINE)]


def blocks(*languages):
    """Return the groups of blocks that follow each other in these languages.

    Compiling against torch's headers takes half a minute, a model by Inductor a third of one, and importing large
    packages seconds: groups that do are not for `make test`.
    """
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        matches = list(BLOCK.finditer(text))
        for index in range(len(matches) - len(languages) + 1):
            group = matches[index : index + len(languages)]
            if tuple(match[1] for match in group) == languages:
                line = text[: group[0].start()].count("\n") + 1
                is_slow = any(word in match[2] for match in group for word in SLOW)
                marks = [pytest.mark.exhaustive] if is_slow else []
                marks += [pytest.mark.programs] if packages_in(*(match[2] for match in group), among=PROGRAMS) else []
                found.append(pytest.param(*(match[2] for match in group), marks=marks, id=f"{document.name}:{line}"))
    return found


def test_every_block_has_a_language_that_a_test_runs():
    languages = {match[1] for document in DOCUMENTS for match in BLOCK.finditer(document.read_text())}
    assert languages == {"python", "cmake", "cpp", "cuda", "console"}
    # A program in C++ follows its project, and the commands that build it follow both.
    assert len(blocks("cmake")) == len(blocks("cpp")) == len(blocks("cmake", "cpp", "console"))
    assert len(blocks("cuda")) == len(blocks("cuda", "console"))


# Processes that have already imported torch, and what optimizers import, which takes longer than most blocks run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch_nhwc", "torch._dynamo"])


def run_block(path, output):
    """Run a block in such a process."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["TORCH_EXTENSIONS_DIR"] = str(path.parent)
    warnings.simplefilter("ignore")
    runpy.run_path(str(path), run_name="__main__")


# What the CPU must have where a block of docs/upstream.md bounds oneDNN by its name for it.
BOUNDS = {"AVX512_CORE_BF16": CPU_HAS_AVX512, "ALL": torch.cpu._is_amx_tile_supported()}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    """Blocks of docs/upstream.md fail where PyTorch has mended the fault: then the section and our guard can go."""
    for package in packages_in(code, among=OPTIONAL):
        imported(package)
    (tmp_path / "block.py").write_text(code)  # TorchScript reads the source of what it compiles
    if bound := re.search(r'"ONEDNN_MAX_CPU_ISA"\] = "(\w+)"', code):
        if not BOUNDS[bound[1]]:
            pytest.skip(f"a CPU with the instructions of oneDNN's {bound[1]}")
        # oneDNN reads the bound once, which happens when those processes import.
        subprocess.run([sys.executable, tmp_path / "block.py"], check=True)
        return
    process = PROCESSES.Process(target=run_block, args=(tmp_path / "block.py", tmp_path / "output"))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()


@pytest.mark.exhaustive  # test_cpp.py and test_module.py compile the same for `make test`
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(("project", "code", "commands"), blocks("cmake", "cpp", "console"))
def test_cmake_projects_build_and_run(project, code, commands, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(project)
    (tmp_path / "main.cpp").write_text(code)
    torch.jit.script(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))).save(tmp_path / "model.pt")
    (name,) = re.findall(r"add_executable\((\w+)", project)
    cmake_build.run_typed(typed(commands), tmp_path)
    cmake_build.assert_needs_no_python(tmp_path / "build" / name, of_ours="torch_nhwc" in project)
    if name == "run":
        archives = [tmp_path / "model.pt", tmp_path / "converted.pt"]
        run = cmake_build.run_program(tmp_path / "build/run", *archives, capture_output=True, text=True)
        said = [re.split(": a mean of |, equal", line) for line in run.stdout.splitlines()]
        means = [float(mean) for _, mean, _ in said]
        assert means == pytest.approx([means[0]] * len(archives), abs=1e-5)
    if "usage" in code:
        with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
            cmake_build.run_program(tmp_path / "build" / name)
        assert torch.jit.load(tmp_path / "converted.pt").state_dict()["0.weight"].stride() == (27, 1, 9, 3)


@pytest.mark.parametrize(("code", "commands"), blocks("cuda", "console"))
def test_cuda_programs_build_and_run_where_there_is_a_gpu(code, commands, tmp_path):
    toolkit = cuda_build.required_toolkit()
    (tmp_path / "main.cu").write_text(code)
    cmake_build.run_typed([f'PATH="{toolkit / "bin"}:$PATH"', *typed(commands)], tmp_path)
    if torch.cuda.is_available():
        assert subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout == "ok\n"


@pytest.mark.parametrize("code", [block for block in blocks("python") if "cuda_sources" in block.values[0]])
def test_cuda_sources_in_python_blocks_compile(code, tmp_path):
    (source,) = re.findall(r'source = """\n(.*?)"""', code, re.DOTALL)
    (tmp_path / "source.cu").write_text(source)
    flags = [*cuda_build.torch_headers(), "-o", tmp_path / "source.o"]
    cuda_build.nvcc(tmp_path / "source.cu", "c++20", "90", *flags)


def typed(commands):
    lines = commands.splitlines()
    assert all(line.startswith("$ ") for line in lines)
    return [line[2:] for line in lines]


def run_make_demo():
    """Run what `make demo` runs, with three rounds of each case instead of 70 seconds of rounds."""
    command = ["make", "--no-print-directory", "--dry-run", "demo"]
    recipe = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert recipe.endswith("/python examples/demo.py\n")
    script = 'main = __import__("runpy").run_path("examples/demo.py")["main"]; main.__globals__["SECONDS"] = 0; main()'
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "Reverted: strides, weights and results are as before." in run.stdout
    assert run.stdout.endswith("of your model.\n")


COMMANDS = {
    "make demo": run_make_demo,
    "make test": lambda: None,  # this
    "pip install --no-build-isolation .": lambda: None,  # test_packaging.py
    "pip install --no-build-isolation '.[cli,models]'": lambda: None,  # likewise
}


def run_command_line(command, folder):
    """Run `torch-nhwc` or `python` in a folder with the module that the documents have for it."""
    (module,) = [code for (code,) in (block.values for block in blocks("python")) if code.startswith("# my_model.py")]
    (folder / "my_model.py").write_text(module)
    program, *arguments = shlex.split(command)
    program = [sys.executable] if program == "python" else [sys.executable, "-m", "torch_nhwc"]
    if "tune" in arguments and "--budget" not in arguments:
        arguments += ["--budget", "5"]  # of a minute
    subprocess.run([*program, *arguments], check=True, cwd=folder)


# These run with their programs.
BUILDS = [block.values[-1] for block in [*blocks("cmake", "cpp", "console"), *blocks("cuda", "console")]]


@pytest.mark.exhaustive  # the demo and the command line measure
@pytest.mark.parametrize("commands", [block for block in blocks("console") if block.values[0] not in BUILDS])
def test_console_blocks_run(commands, tmp_path):
    for command in typed(commands):
        if command.startswith(("torch-nhwc ", "python ")):
            run_command_line(command, tmp_path)
        else:
            COMMANDS[command]()


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("report")


def test_every_figure_is_the_benchmarks(report):
    for document, sections in report.documents().items():
        for mark, figures in sections.items():
            section = f"<!-- figures: {mark} -->\n{figures}\n<!-- end of figures -->"
            assert section in document.read_text(), f"{document.name}, {mark}: type `python benchmarks/report.py`"


def test_every_picture_is_the_benchmarks(report):
    for path, image in report.drawn().items():
        assert image == path.read_text(), f"{path.name}: type `python benchmarks/report.py`"


def anchors(document):
    """Return the anchors that GitHub, and the site, make of the titles."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", BLOCK.sub("", document.read_text())):
        path = document.parent / target if target else document
        if not target.startswith("http"):
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), (target, anchor)


CONTRIBUTORS = {"hazards.md", "how-it-works.md", "measurements.md", "upstream.md"}


def test_pages_for_users_have_no_hazard_numbers():
    for document in DOCUMENTS:
        assert document.name in CONTRIBUTORS or not re.search(r"\bh\d\d\b", document.read_text()), document.name


def test_the_documents_are_short():
    """Whoever adds to them finds what can go."""
    assert sum(len(document.read_text().splitlines()) for document in DOCUMENTS[1:]) <= 3900


def test_the_readme_is_short_and_its_tables_are_narrow():
    """The first screen ends where the first section begins."""
    lines = DOCUMENTS[0].read_text().splitlines()
    assert len("\n".join(lines).partition("\n## ")[0].strip().splitlines()) <= 45
    assert len(lines) <= 120
    assert max(line.count("|") for line in lines if line.startswith("|")) <= 6  # around five columns
    gains = "\n".join(lines).partition("<!-- figures: gains -->\n")[2].partition("<!--")[0].splitlines()
    assert [line.count("|") for line in gains] == [5] * (2 + 5)  # five rows of four columns


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda document: document.name)
def test_a_page_opens_with_a_sentence_on_what_it_is_for(document):
    first = document.read_text().splitlines()[2]
    assert not first.startswith(("#", "|", "-", "```", "!")), first


def test_the_hazards_name_files_of_tests_and_each_one_once():
    text = (ROOT / "docs/hazards.md").read_text()
    for path in re.findall(r"`(test/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    hazards = re.findall(r"^\| (h\d\d) \|", text, re.MULTILINE)
    assert len(hazards) == len(set(hazards))
    tests = "".join(path.read_text() for path in (ROOT / "test").rglob("test_*.py"))
    # h61 to h70 are what the integrations are for; their tests do not have a number.
    assert not [hazard for hazard in hazards if hazard < "h61" and not re.search(rf"\b(test_)?{hazard}_", tests)]


def listed_names():
    """Return the names and signatures that docs/api.md lists, by module: a section is about a module."""
    _, *sections = re.split(r"^## ", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    return {section.split("\n")[0]: re.findall(r"^\| `([^`]+)`", section, re.MULTILINE) for section in sections}


def test_the_reference_lists_every_public_name_with_its_module():
    listed = [f"{module}.{name.split('(')[0]}" for module, names in listed_names().items() for name in names]
    assert sorted(listed) == sorted(f"{module}.{name}" for module, names in public_names().items() for name in names)


@pytest.mark.parametrize("room", some_of(["ours", "integrations"], "ours"))  # importing frameworks takes seconds
def test_the_reference_has_every_signature(room):
    listed = {f"{module}.{name}" for module, names in listed_names().items() for name in names}
    for module, names in public_names().items():
        if ("integrations" in module) != (room == "integrations"):
            continue
        for public in (getattr(importlib.import_module(module), name) for name in names):
            if inspect.isfunction(public):
                signature = inspect.signature(public)
                parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
                plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
                assert f"{module}.{public.__name__}{plain}" in listed


def test_tables_that_a_tool_writes_are_up_to_date():
    """messages.md lists every reason, and limits.md the last result with each version of torch."""
    script = runpy.run_path(str(ROOT / "tools/write_documents.py"))
    for document in script["TABLES"]:
        path, text = script["written"](document)
        assert path.read_text() == text, "type `make docs`"
