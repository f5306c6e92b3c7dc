"""Many learning rates in three ways: whether the benchmark runs to its end."""

import re
import sys

import pytest

from benchmarks import vary


@pytest.mark.torture
def test_a_tiny_one_runs_to_its_end(tmp_path, monkeypatch):
    path = tmp_path / "results.md"
    monkeypatch.setattr(sys, "argv", ["vary", "--tiny", "--rounds", "1", "--out", str(path)])
    vary.main()
    for name in (vary.ONE_BY_ONE, vary.TOGETHER, vary.SWEEP):
        row = rf"\| {name} \| [\d.]+ \(.* \| [\d.]+ \(.* \| [\d.]+ \("
        assert re.search(row, path.read_text())
