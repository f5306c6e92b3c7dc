"""What a run has logged, and whether two runs ended with the same bits."""

import json

import jax
import numpy as np

from training.run import TIMES


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(run_dir):
    """The rows of metrics.jsonl without times and rates."""
    rows = json_lines(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def assert_same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)
