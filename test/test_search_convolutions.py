import json
import re
import subprocess
import sys
from pathlib import Path

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

OURS = "kernels", "kernels_in_part"  # of which more are on a CPU without AVX-512


def test_faults_of_this_machine_are_flagged_and_faster_ways_are_not():
    pointwise = PLAIN._replace(kernel=(1, 1), padding=(0, 0), stride=(2, 2))
    assert search.way_of(PLAIN, "channels-last") in (*search.SOUND, *OURS)
    assert search.way_of(pointwise, "channels-last") == "sliced"
    assert search.way_of(pointwise, "contiguous") in search.SOUND
    transposed = pointwise._replace(transposed=True, output_padding=(1, 1))
    assert search.way_of(transposed, "channels-last") == "extended"
    voxels = VOLUME._replace(kernel=(1, 1, 1), padding=(0, 0, 0))
    assert search.way_of(voxels, "channels-last") in search.SOUND


def test_the_draw_reaches_every_known_fault():
    cases = [search.draw(0, index) for index in range(2000)]
    assert {each.dtype for each in cases} == {*search.LIMITS}
    for is_drawn in (
        lambda each: any(stride > kernel for stride, kernel in zip(each.stride, each.kernel)),
        lambda each: each.padding[-1] > each.output[-1] and each.stride[-1] > 1,
        lambda each: "2D depthwise" in each.kind and max(each.dilation) > 1 and each.size[-1] >= 29,
        lambda each: each.groups == 1 and each.kernel[-1] % 4 == each.stride[-1] % 4 == each.padding[-1] == 0,
        lambda each: len(each.size) == 3 and any(more > p for more, p in zip(each.output_padding, each.padding)),
    ):
        assert any(map(is_drawn, cases))


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
