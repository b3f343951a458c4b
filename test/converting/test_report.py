"""Reports: what was done, why, and how it reads."""

import json

import pytest
import torch
from snapshots import network, refused_view
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Outcome


class TestReport:
    """What was done, and why."""

    def test_has_the_outcome_of_every_site(self):
        model = network()
        held = model["volume"].weight.detach()
        model["blocks"].share_memory()
        report = nhwc.convert_(model)
        assert report.outcomes == (
            Outcome.REUSED,
            Outcome.RESTRIDED,
            Outcome.FRESH_SHARED,
            Outcome.FRESH_HELD,
        )
        assert report.new_bytes == model["blocks"][1].weight.nbytes + held.nbytes
        assert report.seconds > 0
        assert held.stride() == (18, 9, 9, 3, 1)
        assert set(nhwc.convert_(model).outcomes) == {Outcome.KEPT}

    def test_becomes_json(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        report = nhwc.convert_(model, optimizer=optimizer)
        read = json.loads(report.to_json())
        assert read["digest"] == report.plan.digest
        assert [(row["path"], row["action"], row["outcome"]) for row in read["rows"]] == [
            ("0", "convert", "REUSED"),
            ("1", "restride", "RESTRIDED"),
        ]
        assert read["companions"][0] == {"site": "0.weight", "label": "grad", "outcome": "REUSED", "reason": None}
        assert {each["label"] for each in read["companions"]} == {"grad", "momentum_buffer"}
        assert (read["new_bytes"], read["dry_run"], read["remarks"]) == (0, False, [])

    def test_reads_well(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        model = nn.ModuleDict(
            {"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1)), "view": refused_view()}
        )
        with pytest.warns(UserWarning, match="1 of 3"):
            report = nhwc.convert_(model)
        lines = str(report).splitlines()
        assert lines[:5] == [
            "Report: 3 sites of float32 to channels-last: 1 convert, 1 restride, 1 refuse; 37.6 kB moved",
            "site     layer   shape      action    storage   reason",
            "stem     Conv2d  64x3x7x7   convert   in place",
            "block.0  Conv2d  64x64x1x1  restride",
            "view     Conv2d  4x3x3x3    refuse              PART_OF_LARGER_STORAGE",
        ]
        assert " ".join(lines[5:]).startswith("PART_OF_LARGER_STORAGE: it is part of a larger storage (a view,")
        assert "weights: 1 restrided, 1 permuted in place" in lines
        assert lines[-1].startswith("0.0 kB of new storage, ")

    @pytest.mark.parametrize("columns", [60, 80, 120])
    def test_fits_the_terminal(self, columns, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        model = nn.Sequential()
        part = model
        for name in ("encoder", "stages_of_the_encoder", "0", "shortcut_of_the_residual_block"):
            part.add_module(name, nn.Sequential(nn.Conv2d(512, 512, 1, device="meta"), refused_view()))
            part = part.get_submodule(name)
        part.add_module("norm", parametrizations.weight_norm(nn.Conv2d(3, 4, 3).half()))
        part.add_module("lazy", nn.LazyConvTranspose3d(4, 3))
        plan = nhwc.plan(model)
        with pytest.warns(UserWarning, match="stay as they are"):
            report = nhwc.convert_(model, optimizer=torch.optim.SGD([part.norm.bias], lr=0.1))
        for text in (str(plan), str(report)):
            assert max(map(len, text.splitlines())) <= columns

    def test_shows_what_deserves_a_look_first_where_there_are_many_sites(self):
        model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(99)), refused_view())
        lines = str(nhwc.plan(model)).splitlines()
        assert len(lines) < 50
        assert any(line.startswith("99 ") and "PART_OF" in line for line in lines)
        assert "... and 60 more, in .rows" in lines

    def test_of_a_model_without_convolutions(self):
        model = nn.Linear(3, 3)
        report = nhwc.convert_(model)
        assert str(report).startswith("Report: no convolution was found. Layers that call torch.nn.functional.conv2d")
        report.revert()
