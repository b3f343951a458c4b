"""Plants ten bugs, one at a time, and names the test that finds each: `make planted-bugs`.

Each bug is an edit that must fit exactly one place in its file. A C++ bug is compiled. The tests of its rooms run until
the first failure. The working tree must be clean, and is restored after each bug. The script fails where an edit does
not fit, where the sources with the bug do not compile, and where no test fails.
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


BUGS = ()


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
    """Return whether a test fails with the bug, and print which one."""
    path = ROOT / bug.file
    text = path.read_text()
    is_compiled = path.suffix != ".py"
    start = time.monotonic()
    try:
        path.write_text(text.replace(bug.right, bug.wrong))
        if is_compiled:
            build(bug.name)
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-m", "not exhaustive", *bug.tests]
        tests = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        path.write_text(text)
        if is_compiled:
            build("the sources as they were")
    failed = [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if tests.returncode not in (0, 1) and not failed:  # a bug may end the process
        failed = [f"pytest ended with {tests.returncode}: {(tests.stderr or tests.stdout).strip()[-200:]}"]
    found = failed[0].split(" - ")[0] if failed else "NOT FOUND"
    print(f"{bug.name}: {found} ({time.monotonic() - start:.0f} s)", flush=True)
    return bool(failed)


def build(what: str) -> None:
    """Compile the operator library in place, as far as sources have changed."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"planted_bugs: {what} does not compile:\n{built.stdout[-2000:]}{built.stderr[-2000:]}")


if __name__ == "__main__":
    main()
