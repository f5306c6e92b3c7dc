"""The cache of compiled programs: it is reused, has a size limit, and never makes a run fail."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax.experimental import serialize_executable

from training.devices import program_cache

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
from collections import Counter
import jax, jax.numpy as jnp
from training.devices.program_cache import keep_programs
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
    """(sum, cache hits, cache misses, cache folder) of a new process, which logs nothing."""
    environment = {key: value for key, value in os.environ.items() if key not in JAX}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(home)} | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    total, hits, misses, folder = run.stdout.split()
    return float(total), int(hits), int(misses), Path(folder)


@pytest.mark.slow
def test_a_second_process_uses_what_the_first_compiled_and_replaces_damaged_files(tmp_path):
    total, hits, misses, folder = compiled(tmp_path)
    assert hits == 0 < misses and folder.parent == tmp_path / "rawtree" / "programs"
    assert compiled(tmp_path) == (total, misses, 0, folder)
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:-9])
    assert compiled(tmp_path) == (total, 0, misses, folder)
    assert compiled(tmp_path) == (total, misses, 0, folder)


@pytest.mark.slow
def test_a_run_works_without_the_cache_if_it_is_unusable(tmp_path):
    _, _, _, folder = compiled(tmp_path)
    # As on a CPU where XLA cannot load its own programs.
    (folder / program_cache.VERDICT).write_text("False")
    for home in (tmp_path, tmp_path / "file"):
        (tmp_path / "file").touch()
        assert compiled(home)[1:] == (0, 0, Path("None"))


@pytest.mark.slow
def test_jaxs_own_variables_take_precedence(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert compiled(tmp_path, JAX_COMPILATION_CACHE_DIR=str(elsewhere))[3] == elsewhere
    assert compiled(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[1:] == (0, 0, Path("None"))
    assert not (tmp_path / "rawtree").exists()


def complains(*_):
    os.write(2, b"the machine type does not match")


def refuses(*_):
    raise RuntimeError("no")


@pytest.mark.parametrize("load", [complains, refuses])
def test_a_cpu_that_cannot_load_programs_is_detected_without_output(monkeypatch, capfd, load):
    assert program_cache.reads_back()
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", load)
    assert not program_cache.reads_back()
    assert capfd.readouterr().err == ""


def test_the_least_recently_used_programs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "ROOM", 100)
    folders = [tmp_path / "now", tmp_path / "another jaxlib"]
    for folder in folders:
        folder.mkdir()
        (folder / program_cache.VERDICT).write_text("True")
    for age in range(12):
        path = folders[age % 2] / f"{age}-cache"
        path.write_bytes(10 * b"x")
        last_use = time.time() - 100 * age - 100
        os.utime(path, (last_use, last_use))
    program_cache.tidy(folders[0])
    left = {path.name for path in tmp_path.glob("*/*-cache")}
    assert left == {f"{age}-cache" for age in range(5)}


def test_programs_for_another_number_of_cores_have_another_folder(monkeypatch):
    here = program_cache.kind_of_machine()
    assert here == program_cache.kind_of_machine()
    monkeypatch.setenv("NPROC", "64")
    assert program_cache.kind_of_machine() != here
