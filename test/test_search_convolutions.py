import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import search_convolutions as search  # noqa: E402

PLAIN = search.Case(
    transposed=False,
    batch=1,
    groups=1,
    in_channels=8,
    out_channels=8,
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    output_padding=(0, 0),
    size=(5, 5),
    bias=True,
    dtype="float32",
)
VOLUME = PLAIN._replace(
    kernel=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1), output_padding=(0, 0, 0), size=(5, 5, 5)
)
WHOLE, POINTWISE, ONE_CHANNEL = search.RULES


@pytest.mark.parametrize(
    ("case", "flagged"),
    [
        (PLAIN, []),
        (PLAIN._replace(size=(3, 3)), []),
        (PLAIN._replace(size=(3, 2)), [WHOLE]),
        (PLAIN._replace(size=(2, 2), padding=(0, 0), kernel=(2, 2)), []),
        (VOLUME, []),
        (VOLUME._replace(size=(2, 5, 5)), [WHOLE]),
        # The whole kernel would be seen at position 1, which a stride of 2 skips.
        (PLAIN._replace(size=(3, 5), stride=(2, 1)), [WHOLE]),
        (PLAIN._replace(size=(4, 5), stride=(2, 1), padding=(2, 1)), []),
        (PLAIN._replace(size=(6, 6), dilation=(3, 3), padding=(3, 3)), [WHOLE]),
        (PLAIN._replace(size=(7, 7), dilation=(3, 3), padding=(3, 3)), []),
        # The roles are exchanged: the outputs are 2, and 4 by 4.
        (PLAIN._replace(transposed=True, size=(2, 2)), [WHOLE]),
        (PLAIN._replace(transposed=True, size=(4, 4)), []),
        (PLAIN._replace(transposed=True, size=(3, 3), stride=(2, 2)), []),
        (PLAIN._replace(transposed=True, size=(1, 2), stride=(2, 2), output_padding=(1, 1)), [WHOLE]),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(2, 2), in_channels=15), [POINTWISE]),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(1, 2), in_channels=30, groups=2), [POINTWISE]),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(2, 2), in_channels=16), []),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), in_channels=7), []),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(2, 2), transposed=True, in_channels=16), [POINTWISE]),
        (PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(2, 2), transposed=True, out_channels=16), []),
        (PLAIN._replace(kernel=(3, 5), padding=(0, 0), stride=(1, 2), in_channels=1), [ONE_CHANNEL]),
        (PLAIN._replace(kernel=(3, 5), padding=(0, 0), stride=(1, 2), groups=8), [ONE_CHANNEL]),
        (PLAIN._replace(kernel=(3, 5), padding=(0, 0), stride=(1, 2)), []),
    ],
)
def test_rules_flag_the_convolutions_that_they_are_about(case, flagged):
    assert search.flags(case) == flagged


@pytest.mark.parametrize("index", range(200))
def test_the_rule_agrees_with_counting_every_tap_of_every_position(index):
    case = search.draw(1, index)
    sizes, positions = (case.output, case.size) if case.transposed else (case.size, case.output)
    sees_all = [
        any(all(0 <= position * s - p + tap * d < size for tap in range(k)) for position in range(count))
        for size, count, k, s, p, d in zip(sizes, positions, case.kernel, case.stride, case.padding, case.dilation)
    ]
    assert search.no_whole_kernel(case) == (not all(sees_all))


def test_a_case_that_ends_its_process_is_named_and_the_others_are_computed(monkeypatch):
    monkeypatch.setattr(search, "draw", lambda seed, index: PLAIN)
    monkeypatch.setattr(search.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(
        search, "errors", lambda case, layout, way: search.os.kill(search.os.getpid(), 9) if layout == "bad" else {}
    )
    runs = [(0, "good"), (1, "bad"), (2, "bad"), (3, "good")]
    found = list(search.results_of(runs, {"threads": 1, "seed": 0, "way": "plain"}))
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert [each.get("died", 0) for each in found] == [0, 9, 9, 0]


def test_the_search_runs_and_writes_its_counts(tmp_path):
    out, cases = tmp_path / "out.json", tmp_path / "cases.jsonl"
    options = ["--shapes", "20", "--threads", "1", "--isa", "AVX2", "--safe", "functional", "--out", out]
    command = [sys.executable, ROOT / "tools/search_convolutions.py", *options, "--cases", cases]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"\| all \| \d+ of 20 \| 0 \(0\) \| 0 \| 0 \(0\) \| 0 \|", ran.stdout)
    assert "Raised an error: 0." in ran.stdout
    (run,) = json.loads(out.read_text())["results"]
    assert [run["way"], run["ONEDNN_MAX_CPU_ISA"], run["threads"], run["shapes"]] == ["functional", "AVX2", 1, 20]
    for layout in search.FORMATS:
        assert sum(row[layout]["cases"] for row in run["counts"].values()) == 20
    assert cases.read_text() == ""
