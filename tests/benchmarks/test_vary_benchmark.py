"""Many learning rates in three ways: whether the benchmark runs to its end."""

import re

import pytest

from benchmarks import vary


@pytest.mark.slow
def test_a_tiny_one_runs_to_its_end_and_writes_no_results(capsys):
    vary.main("--tiny")
    table = capsys.readouterr().out
    for name in vary.WAYS:
        assert re.search(rf"\| {name} \| [\d.]+ \(.* \| [\d.]+ \(.* \| [\d.]+ \(", table)
