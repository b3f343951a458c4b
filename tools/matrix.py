"""Run the tests that fit the torch of this environment, and note the result for the table of docs/limits.md.

With a CPU build of torch, that is every behaviour; with a CUDA build, which no CPU build stands in for, the operators
on the CPU. Arguments name other tests.
"""

import datetime
import json
import platform
import sys

import pytest
import torch
import write_documents


class Counts(dict[str, int]):
    """A plugin of pytest that keeps how many tests passed, failed and were skipped."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
        self["passed"], self["skipped"] = found.get("passed", 0), found.get("skipped", 0)
        self["failed"] = found.get("failed", 0) + found.get("error", 0)


def main() -> None:
    tests = sys.argv[1:] or ["test/ops" if torch.version.cuda else "test"]
    counts = Counts()
    options = ["--numprocesses", "2", "--dist", "worksteal", "-m", "not exhaustive"]
    code = pytest.main([*tests, *options], plugins=[counts])
    row = {
        "torch": torch.__version__,
        "tests": ", ".join(f"`{each}`" for each in tests),
        **counts,
        "Python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    others = [each for each in json.loads(write_documents.VERSIONS.read_text()) if each["torch"] != row["torch"]]
    rows = sorted([*others, row], key=lambda each: each["torch"])
    write_documents.VERSIONS.write_text(json.dumps(rows, indent=2) + "\n")
    write_documents.main()
    sys.exit(code)


if __name__ == "__main__":
    main()
