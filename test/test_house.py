"""The rooms of the package, from the ground up: what imports what, read from the sources."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_nhwc"
# A room, a file or a folder, imports only rooms before it, and itself.
ROOMS = [
    *(
        "version",
        "library",
        "cpp_extension",
        "warning",
        "outcomes",
        "ops",
        "functional",
        "sharding",
        "text",
        "formats",
        "memory",
        "reasons",
        "entries",
        "hooks",
        "page",
    ),
    *("modules", "each_forward", "running", "batching"),
    *("finding", "preserving", "planning", "tracing", "verifying", "stepping"),
    *("converting", "upkeep", "saving", "tuning", "integrations"),
    *("__init__", "cli", "__main__"),
]


# The same for the folders of csrc, by the headers that they include.
FOLDERS = ["weights", "activations", "cpu", "cuda", "no_cuda", "writing", "in_place", "ops"]


def rooms():
    """The files of every room, in the order of the rooms."""
    files = {room: [] for room in ROOMS}
    for path in sorted(PACKAGE.rglob("*.py")):
        files[path.relative_to(PACKAGE).with_suffix("").parts[0]].append(path)
    return files


def imported(path):
    """The names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports of ours are absolute"
            # `from package import name` may name a module or something in the package's __init__.
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def imports_of(path):
    """The modules of ours that a file of the package imports, by their names without the package's."""
    ours = (name for name in imported(path) if name.split(".")[0] == "torch_nhwc")
    return {name.partition(".")[2] or "__init__" for name in ours}


def test_a_room_imports_only_rooms_below_it():
    for room, paths in rooms().items():
        assert paths, f"the list of rooms names {room}, which is not there"
        above = ROOMS[ROOMS.index(room) + 1 :]
        for path in paths:
            climbs = [name for name in imports_of(path) if name.split(".")[0] in above]
            assert not climbs, f"{path.relative_to(PACKAGE)} imports {climbs}, above {room}"


def test_a_folder_of_csrc_includes_only_folders_below_it():
    for folder in FOLDERS:
        above = FOLDERS[FOLDERS.index(folder) + 1 :]
        for path in (path for path in (ROOT / "csrc" / folder).rglob("*") if path.is_file()):
            included = re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
            assert not set(included) & set(above), f"{path.relative_to(ROOT)} includes {included}, above {folder}"
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(FOLDERS)


def test_no_files_import_each_other_in_a_circle():
    package = {}
    for path in (path for paths in rooms().values() for path in paths):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        package[name.removesuffix(".__init__")] = imports_of(path)
    benchmarks = {path.stem: imported(path) for path in (ROOT / "benchmarks").glob("*.py")}
    for waiting in (package, benchmarks):
        while waiting:
            free = [name for name, imports in waiting.items() if not imports & waiting.keys() - {name}]
            assert free, f"these import each other: {sorted(waiting)}"
            for name in free:
                del waiting[name]


def test_no_import_of_ours_hides_in_a_function():
    """It would only dodge a circle. The command line's is for the sake of packages that may be missing."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__main__.py":
            continue
        tree = ast.parse(path.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
                assert not (module or "").startswith("torch_nhwc"), f"{path.relative_to(PACKAGE)}: {function.name}"


def test_every_folder_says_in_two_sentences_what_lives_there():
    for path in PACKAGE.glob("*/__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, path
        assert text.replace("\n", " ").rstrip().count(". ") == 1, f"{path.parent.name}: {text}"


def test_no_file_is_longer_than_a_reader_keeps_in_mind():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path
    for path in (PACKAGE / "include").rglob("*"):
        assert path.is_dir() or len(path.read_text().splitlines()) <= 400, path
