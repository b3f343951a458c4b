"""Plants ten bugs, one at a time, and names the test that finds each: `make planted-bugs`.

Each bug is an edit that must fit exactly one place in its file. A C++ bug is compiled. The tests of its rooms run until
the first failure, and that test must pass without the bug. The working tree must be clean, and is restored after each
bug. The script fails where an edit does not fit, where the sources with the bug do not compile, where no test fails,
and where the test that fails does so without the bug as well.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Bug(NamedTuple):
    """A bug to plant."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    """The tests of the rooms that it concerns."""


BUGS = (
    Bug(
        "a wrong tail in a kernel",
        "torch_nhwc/include/torch_nhwc/cpu/matrix_transpose.h",
        "if (begin > length - Tile::elements) begin = length - Tile::elements;",
        "if (begin > length - Tile::elements) break;",
        ("test/ops", "test/cpp"),
    ),
    Bug(
        "an off-by-one offset",
        "csrc/cpu/filter_batch.cpp",
        "entry.source + first * size",
        "entry.source + (first == 0 ? 0 : first - 1) * size",
        ("test/ops",),
    ),
    Bug(
        "a swapped stride of size 1",
        "csrc/layout/memory_format.cpp",
        "stride *= size[d--]) strides[d] = stride;",
        "stride *= size[d--]) strides[d] = size[d] == 1 ? 1 : stride;",
        ("test/ops",),
    ),
    Bug(
        "a format not restored by a preserved layer",
        "csrc/ops/composition.cpp",
        "return with_channels_last_grad(to_channels_last(output));",
        "return with_channels_last_grad(output);",
        ("test/ops", "test/nn", "test/test_functional.py"),
    ),
    Bug(
        "a dropped .grad",
        "torch_nhwc/planning/companions.py",
        "weight.tensor.grad",
        "None",
        ("test/planning", "test/converting"),
    ),
    Bug(
        "an optimizer's state left behind",
        "torch_nhwc/planning/companions.py",
        "for optimizer in sources.optimizers:",
        "for optimizer in sources.optimizers[:1]:",
        ("test/planning", "test/converting"),
    ),
    Bug(
        "a missed alias",
        "torch_nhwc/layout.py",
        "len({_alias_key(tensor) for _, _, tensor in group}) <= 1",
        "True",
        ("test/test_layout.py", "test/planning", "test/converting"),
    ),
    Bug(
        "a wrong group count",
        "torch_nhwc/sites/finding.py",
        'getattr(module, "groups", 0)',
        'min(getattr(module, "groups", 0), 1)',
        ("test/sites", "test/planning", "test/converting"),
    ),
    Bug(
        "a lost undo entry",
        "torch_nhwc/converting/edits.py",
        "reversed(self.edits)",
        "reversed(self.edits[1:])",
        ("test/converting",),
    ),
    Bug(
        "a plan's digest that ignores a field",
        "torch_nhwc/planning/plans.py",
        "row.dtype, row.target_strides,",
        "row.dtype,",
        ("test/planning", "test/test_training.py"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="plant only bugs whose name contains one of these")
    names = parser.parse_args().names
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT).returncode:
        sys.exit("planted_bugs: the working tree has changes: commit them first")
    wanted = [bug for bug in BUGS if not names or any(name in bug.name for name in names)]
    for bug in wanted:
        count = (ROOT / bug.file).read_text().count(bug.right)
        if count != 1:
            sys.exit(f"planted_bugs: {bug.name}: the edit fits {count} places in {bug.file}, expected 1")
    missed = [bug.name for bug in wanted if not plant(bug)]
    if missed:
        sys.exit(f"planted_bugs: no test found {', '.join(missed)}")
    print(f"{len(wanted)} of {len(wanted)} planted bugs were found")


def plant(bug: Bug) -> bool:
    """Return whether a test fails with the bug and passes without it, and print which one."""
    path = ROOT / bug.file
    text = path.read_text()
    is_compiled = path.suffix != ".py"
    start = time.monotonic()
    try:
        path.write_text(text.replace(bug.right, bug.wrong))
        if is_compiled:
            build(bug.name)
        tests = run_tests("-x", *bug.tests)
    finally:
        path.write_text(text)
        if is_compiled:
            build("the sources as they were")
    failed = [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    found = "NOT FOUND"
    if failed:
        found = failed[0].split(" - ")[0].split(maxsplit=1)[1]
        if run_tests(found).returncode != 0:  # it says nothing about the bug
            sys.exit(f"planted_bugs: {bug.name}: {found} fails without the bug as well: mend it first")
    elif tests.returncode < 0:  # a bug may end the process by a signal
        found = f"pytest ended with signal {-tests.returncode}"
    elif tests.returncode != 0:
        sys.exit(f"planted_bugs: {bug.name}: pytest could not run {' '.join(bug.tests)}:\n{tests.stderr[-2000:]}")
    print(f"{bug.name}: {found} ({time.monotonic() - start:.0f} s)", flush=True)
    return found != "NOT FOUND"


def run_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests by pytest, other than the exhaustive ones."""
    command = [sys.executable, "-m", "pytest", "--tb=no", "-m", "not exhaustive", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def build(what: str) -> None:
    """Compile the operator library in place, as far as sources have changed."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"planted_bugs: {what} does not compile:\n{built.stdout[-2000:]}{built.stderr[-2000:]}")


if __name__ == "__main__":
    main()
