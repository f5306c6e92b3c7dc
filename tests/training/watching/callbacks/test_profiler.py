"""profiler: which steps a trace holds, counted in the file itself."""

import gzip
import json
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from tests.training.watching.callbacks.fake import view
from training.observers import steps_left
from training.watching.callbacks.profiler import profiler
from utils import UserError


@jax.jit
def train(weights, count):
    return jax.lax.fori_loop(0, count, lambda i, w: jnp.tanh(w @ w), weights)


def drive(callback, folder, epochs=1, steps=40, start=0, chunk=4):
    """A loop like the real one: chunks end where the callback is due."""
    step, weights = start, jnp.eye(8)
    callback.on_start(view(folder=folder, step=start))
    for epoch in range(1, epochs + 1):
        position = 0
        while position < steps:
            left = steps_left(callback.every, step, position)
            taken = min(chunk, steps - position, left)
            weights = train(weights, taken).block_until_ready()
            position, step = position + taken, step + taken
            if taken == left or "seconds" in callback.every:
                seen = view(folder=folder, step=step, epoch=epoch, position=position, steps=steps)
                callback.on_steps(seen)
    callback.on_end(view(folder=folder, step=step))


def traces(folder):
    """{subfolder: steps in its trace}; each step computes one tanh."""
    steps = {}
    for path in sorted(folder.glob("profile/*/plugins/profile/*/perfetto_trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = Counter(event.get("name") or "" for event in events)
        assert list(path.parent.glob("*.xplane.pb"))
        counts = [n for name, n in names.items() if "tanh" in name and "end:" not in name]
        steps[path.parents[3].name] = max(counts, default=0)
    return steps


@pytest.mark.slow
def test_a_trace_holds_exactly_its_steps(tmp_path):
    drive(profiler(first_step=10, n_steps=5), tmp_path)
    assert traces(tmp_path) == {"step_10": 5}


def test_steps_count_from_where_the_run_resumes(tmp_path):
    drive(profiler(first_step=3, n_steps=9), tmp_path, start=100)
    assert traces(tmp_path) == {"step_103": 9}


def test_a_trace_continues_into_the_next_epoch(tmp_path):
    drive(profiler(first_step=10, n_steps=5), tmp_path, epochs=3, steps=12)
    assert traces(tmp_path) == {"step_10": 5}


def test_the_end_of_the_run_ends_a_trace(tmp_path):
    drive(profiler(first_step=10, n_steps=5), tmp_path, steps=12)
    assert traces(tmp_path) == {"step_10": 2}


def test_a_run_that_is_too_short_is_reported(tmp_path, caplog):
    drive(profiler(first_step=100), tmp_path)
    assert "lower first_step, which is 100" in caplog.text
    assert traces(tmp_path) == {}


def test_a_trace_that_other_code_opened_is_left_alone(tmp_path, caplog):
    with jax.profiler.trace(tmp_path / "other"):
        drive(profiler(first_step=2, n_steps=3), tmp_path)
    (record,) = caplog.records
    assert "step 2 is not traced: Profile has already been started" in record.getMessage()
    assert not (tmp_path / "profile").exists()
    assert list((tmp_path / "other").rglob("*.xplane.pb"))


def test_it_needs_a_folder():
    with pytest.raises(UserError, match="profiler: there is no run folder"):
        profiler().on_start(view())
