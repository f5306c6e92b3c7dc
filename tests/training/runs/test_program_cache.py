"""Compiled programs in the user's cache folder: found again, bounded, and never a reason to fail."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax.experimental import serialize_executable

from training.runs import program_cache

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
from collections import Counter
import jax, jax.numpy as jnp
from training.runs.program_cache import keep_programs
keep_programs()
seen = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
total = jax.jit(lambda x: jnp.sin(x).sum())(jnp.arange(8.0))
print(float(total), seen["cache_hits"], seen["cache_misses"], jax.config.jax_compilation_cache_dir)
"""
JAX = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)


def compiled(home, **settings):
    """(sum, programs found, programs made, their folder) of a process of its own, which says nothing more."""
    environment = {key: value for key, value in os.environ.items() if key not in JAX} | {
        "XDG_CACHE_HOME": str(home)
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    total, hits, misses, folder = run.stdout.split()
    return float(total), int(hits), int(misses), Path(folder)


def test_a_second_process_finds_what_the_first_compiled_and_mends_what_is_damaged(tmp_path):
    total, hits, misses, folder = compiled(tmp_path)
    assert hits == 0 < misses and folder.parent == tmp_path / "rawtree" / "programs"
    assert compiled(tmp_path) == (total, misses, 0, folder)
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:-9])
    assert compiled(tmp_path) == (total, 0, misses, folder)
    assert compiled(tmp_path) == (total, misses, 0, folder)


def test_where_nothing_can_be_kept_all_goes_on_without(tmp_path):
    _, _, _, folder = compiled(tmp_path)
    (folder / program_cache.VERDICT).write_text(
        "False"
    )  # as on a CPU whose programs XLA does not take back
    for home in (tmp_path, tmp_path / "file"):
        (tmp_path / "file").touch()
        assert compiled(home)[1:] == (0, 0, Path("None"))


def test_jax_s_own_variables_come_first(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert compiled(tmp_path, JAX_COMPILATION_CACHE_DIR=str(elsewhere))[3] == elsewhere
    assert compiled(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[1:] == (0, 0, Path("None"))
    assert not (tmp_path / "rawtree").exists()


def complains(*_):
    os.write(2, b"the machine type does not match")


def refuses(*_):
    raise RuntimeError("no")


@pytest.mark.parametrize("load", [complains, refuses])
def test_a_cpu_that_takes_nothing_back_is_found_out_in_silence(monkeypatch, capfd, load):
    assert program_cache.reads_back()
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", load)
    assert not program_cache.reads_back()
    assert capfd.readouterr().err == ""


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "ROOM", 100)
    folders = [tmp_path / "now", tmp_path / "another jaxlib"]
    for folder in folders:
        folder.mkdir()
        (folder / program_cache.VERDICT).write_text("True")
    for age in range(12):
        path = folders[age % 2] / f"{age}-cache"
        path.write_bytes(10 * b"x")
        then = time.time() - 100 * age - 100
        os.utime(path, (then, then))
    program_cache.tidy(folders[0])
    assert {path.name for path in tmp_path.glob("*/*-cache")} == {
        f"{age}-cache" for age in range(5)
    }


def test_programs_for_other_cores_lie_elsewhere(monkeypatch):
    here = program_cache.kind_of_machine()
    assert here == program_cache.kind_of_machine()
    monkeypatch.setenv("NPROC", "64")
    assert program_cache.kind_of_machine() != here
