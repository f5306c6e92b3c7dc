"""No mutant of a config, a checkpoint or a data file ends a command in a traceback, hangs it, fills
the memory or runs code: see tests/fuzz/__init__.py.

`make torture` tries thousands; FUZZ=0.1 a tenth of them. A failure names its kind, base and seed,
with which `python -m tests.fuzz` runs it alone.
"""

import os
import sys

import pytest

from tests.fuzz import bench, checkpoints, configs, data, sweeps
from tests.processes import run

SHARE = float(os.environ.get("FUZZ", "1"))
# How many mutants of each base.
COUNTS = {"configs": 2000, "checkpoints": 1000 // 3 + 1, "data": 500 // 10 + 1, "sweeps": 200}
BASES = {"configs": configs.BASES, "checkpoints": tuple(checkpoints.BASES), "data": data.BASES}
BASES["sweeps"] = tuple(sweeps.BASES)
AT_ONCE = 250  # mutants of a test
PARTS = [
    (kind, base, first)
    for kind, count in COUNTS.items()
    for base in BASES[kind]
    for first in range(0, int(count * SHARE), AT_ONCE)
]
needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@needs_proc
@pytest.mark.torture
@pytest.mark.parametrize(("kind", "base", "first"), PARTS)
def test_mutants_end_in_order(tmp_path, kind, base, first):
    runner, faults = bench.Bench(tmp_path), []
    for seed in range(first, min(first + AT_ONCE, int(COUNTS[kind] * SHARE))):
        faults += runner.faults(kind, base, seed)[0]
    runner.close()
    assert not faults, "\n\n".join(faults)


@needs_proc
@pytest.mark.torture
@pytest.mark.parametrize(("kind", "base"), [("configs", "config.json"), ("checkpoints", "plain")])
def test_mutants_end_in_order_in_processes_of_their_own(tmp_path, kind, base):
    module = bench.kinds()[kind]
    for seed in range(10_000, 10_005):
        work = tmp_path / str(seed)
        work.mkdir()
        module.prepare(tmp_path, work)
        for command in [each for each in module.commands(base, seed, work) if each.line]:
            code, out, err = run(work, *command.line)
            assert bench.fault_of(command, work, code, out, err) is None, (seed, command.name)


QUICK = [("configs", "configs/denoising_autoencoder.json", range(12)), ("data", "idx", range(20))]
QUICK += [("data", "npy", range(10)), ("data", "tfrecord", range(1, 10, 2))]
QUICK += [("data", base, range(10)) for base in ("text", "jsonl", "tokens", "csv")]
QUICK += [("sweeps", "finished", range(40))]


@needs_proc
@pytest.mark.parametrize(("kind", "base", "seeds"), QUICK)
def test_a_sample_of_mutants_ends_in_order(tmp_path, kind, base, seeds):
    for seed in seeds:
        for result in bench.results(tmp_path, kind, base, seed, quick=True):
            assert result["fault"] is None, result["fault"]


@pytest.mark.slow
@needs_proc
def test_a_sample_of_runs_ends_in_order(tmp_path):
    for seed in range(12):
        for result in bench.results(tmp_path, "checkpoints", "quick", seed, quick=True):
            assert result["fault"] is None, result["fault"]


@needs_proc
def test_faults_are_found(tmp_path, monkeypatch):
    def judged(call, shows="well"):
        return bench.judged(bench.Command("x", call, shows), tmp_path)[1]

    def traceback():
        raise KeyError("x")

    def prints(code, text):
        print(text, file=sys.stderr)
        return code

    assert "KeyError" in judged(traceback)
    assert "says nothing of its success" in judged(lambda: prints(0, "x: y"))
    assert "names no place" in judged(lambda: prints(2, "wrong"))
    assert "exit code 75" in judged(lambda: prints(75, "x: y"))
    assert "a traceback" in judged(lambda: prints(1, "Traceback (most recent call last):"))
    monkeypatch.setattr(bench, "BYTES", 2**26)
    large = judged(lambda: prints(2, f"x: {len(b'x' * 2**28)}"))
    assert "took" in large and "MiB" in large
    assert "code of the mutant ran" in judged(lambda: open("struck", "w").close() or 2)
    (tmp_path / "struck").unlink()
    assert judged(lambda: print("all is well") or 0) is None


@needs_proc
@pytest.mark.torture
def test_a_process_that_hangs_or_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 2)
    runner = bench.Bench(tmp_path)
    assert "takes too long" in runner.faults("itself", "hangs", 0)[0][0]
    assert "ended the process" in runner.faults("itself", "dies", 0)[0][0]
    assert runner.faults("itself", "works", 0) == ([], [0])
    runner.close()
