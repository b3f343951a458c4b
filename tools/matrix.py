"""Run the tests that fit the torch of this environment, and note the result for the table of docs/limits.md.

With a CPU build of torch, that is every behaviour; with a CUDA build, which no CPU build stands in for, the operators
on the CPU. Arguments name other tests. With --programs, the extra of that name is installed after them, and its tests
run, none of which is skipped then.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import write_documents


class Counts(dict[str, int]):
    """A plugin of pytest that keeps how many tests passed, failed and were skipped."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = terminalreporter.stats
        for column, outcomes in {"passed": ["passed"], "skipped": ["skipped"], "failed": ["failed", "error"]}.items():
            self[column] = self.get(column, 0) + sum(len(found.get(outcome, [])) for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=["test/ops" if torch.version.cuda else "test"])
    parser.add_argument("--programs", action="store_true", help="then the tests of real programs, and their packages")
    arguments = parser.parse_args()
    counts, label = Counts(), [*arguments.tests]
    options = ["--numprocesses", "2", "--dist", "worksteal"]
    failed = pytest.main([*arguments.tests, *options, "-m", "not exhaustive and not programs"], plugins=[counts])
    if arguments.programs:
        label.append("-m programs")
        install = [sys.executable, Path(__file__).with_name("requirements.py"), "programs"]
        failed |= subprocess.run(install).returncode
        os.environ["TORCH_NHWC_REQUIRE_PROGRAMS"] = "1"
        failed |= pytest.main([*options, "-m", "programs"], plugins=[counts])
    row = {
        "torch": torch.__version__,
        "tests": ", ".join(f"`{each}`" for each in label),
        **counts,
        "Python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    others = [each for each in json.loads(write_documents.VERSIONS.read_text()) if each["torch"] != row["torch"]]
    rows = sorted([*others, row], key=lambda each: each["torch"])
    write_documents.VERSIONS.write_text(json.dumps(rows, indent=2) + "\n")
    write_documents.main()
    sys.exit(failed)


if __name__ == "__main__":
    main()
