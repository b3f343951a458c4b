"""Rooms import only rooms below them, and nothing imports in a circle: read from the sources."""

import ast
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_nhwc"
# A room is a file or a folder. It imports only rooms before it, and itself.
ROOMS = [
    *("rendering", "serialization", "ops", "cpp_extension", "layout", "running", "functional", "nn", "sites"),
    *("planning", "converting", "training", "checkpoint"),
    *("tracing", "tuning", "verifying", "data", "integrations"),
    *("__init__", "cli", "__main__"),
]
# The same holds for the folders of csrc, by the headers that they include.
FOLDERS = ["layout", "cpu", "cuda", "no_cuda", "batch", "in_place", "ops"]
# And for the rooms of these folders, which are files without their endings, or folders; `*` are all others.
FLOORS = {
    "cpu": ["work", "*kernels", "isa", "dispatch", "*"],
    "ops/convolution": ["call", "faults", "rewrites", "choice", "passes", "fused", "operators"],
}


def files_of(room):
    """Return the Python files of a room."""
    return sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]


def imported(path):
    """Return the names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports of ours are absolute"
            # `from package import name` names a module or something in the package's __init__.
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def imports_of(path):
    """Return the modules of ours that a file imports, by their names without the package's."""
    ours = (name for name in imported(path) if name.split(".")[0] == "torch_nhwc")
    return {name.partition(".")[2] or "__init__" for name in ours}


def test_every_room_is_in_the_list():
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert rooms == set(ROOMS)


def test_a_room_imports_only_rooms_below_it():
    for room in ROOMS:
        above = ROOMS[ROOMS.index(room) + 1 :]
        for path in files_of(room):
            climbs = [name for name in imports_of(path) if name.split(".")[0] in above]
            assert not climbs, f"{path.relative_to(PACKAGE)} imports {climbs}, above {room}"


def test_a_folder_of_csrc_includes_only_folders_below_it():
    for folder in FOLDERS:
        above = FOLDERS[FOLDERS.index(folder) + 1 :]
        for path in (path for path in (ROOT / "csrc" / folder).rglob("*") if path.is_file()):
            included = re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
            assert not set(included) & set(above), f"{path.relative_to(ROOT)} includes {included}, above {folder}"
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(FOLDERS)


def floor_of(name, floors):
    """Return the number of the floor of a file or a header, by its path in its folder."""
    room = name.split("/")[0].split(".")[0]
    found = [at for at, pattern in enumerate(floors) if fnmatch(room, pattern)]
    assert found, f"{name} is in no room"
    return found[0]


@pytest.mark.parametrize("folder", FLOORS)
def test_a_file_of_csrc_includes_no_header_of_a_room_above_it_within_its_folder(folder):
    within = ROOT / "csrc" / folder
    for path in (path for path in within.rglob("*") if path.is_file()):
        own = floor_of(path.relative_to(within).as_posix(), FLOORS[folder])
        included = re.findall(rf'^#include "{folder}/(.+)"', path.read_text(), re.MULTILINE)
        climbs = [name for name in included if floor_of(name, FLOORS[folder]) > own]
        assert not climbs, f"{path.relative_to(ROOT)} includes {climbs}, above it"


def test_no_files_import_each_other_in_a_circle():
    package = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        package[name.removesuffix(".__init__")] = imports_of(path)
    benchmarks = {path.stem: imported(path) for path in (ROOT / "benchmarks").glob("*.py")}
    for waiting in (package, benchmarks):
        while waiting:
            free = [name for name, imports in waiting.items() if not imports & waiting.keys() - {name}]
            assert free, f"these import each other: {sorted(waiting)}"
            for name in free:
                del waiting[name]


def test_a_file_name_exists_once_in_the_package():
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_folder_says_what_lives_there():
    for path in PACKAGE.glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
