"""train.py in two processes on this machine: it gives the numbers of one process, only process 0
logs, and all processes end together whatever happens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from inference.load import load_to_export
from tests.processes import ROOT, finished, marked, start_all
from tests.runs import rows_of
from training.checkpoint import storage

pytestmark = pytest.mark.skipif(
    sys.platform != "linux",
    reason="JAX has Gloo's collectives, for processes on the CPU, only on Linux",
)

CONFIG = {
    "title": "two",
    "model": {"name": "mlp", "args": {"dims": [64], "dropout": 0.1}},
    "data": {"name": "digits", "args": {"train_size": 150, "test_size": 50}},
    "loader": {"batch_size": 16},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": "adamw",
    "training": {"epochs": 4, "ema": 0.9},
    "mesh": {"fsdp": -1},
    "logging": {"every_steps": 3, "report": False},
    "callbacks": ["at.At"],
}
AT = """
import os
import time
import jax

class At:
    '''Sends a signal to its own process; the variable AT holds the process, epoch and signal.'''
    def on_row(self, run, row):
        process, epoch, number = map(int, os.environ.get("AT", "-1 0 0").split())
        if (jax.process_index(), run.epoch) == (process, epoch):
            os.kill(os.getpid(), number)
        if epoch and run.epoch >= epoch:
            time.sleep(0.7)  # JAX looks for signals once a second

class Full:
    '''Simulates a disk that is full for process 0 alone, at the second epoch.'''
    def on_row(self, run, row):
        from training.checkpoint import orbax_folder
        original = getattr(Full, "original", orbax_folder.seal)
        def seal(folder, note):
            if "epoch_2" in folder.name:
                raise OSError(28, "No space left on device")
            original(folder, note)
        Full.original, orbax_folder.seal = original, seal

class EveryFifth:
    '''Sees the run at every fifth step, in process 0 alone.'''
    late, every = True, {"steps": 5}
    def on_steps(self, run):
        print("step", run.step)
"""
MARK = "RAWTREE_TEST_OF_SEVERAL"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("several")
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    (workdir / "at.py").write_text(AT)
    return workdir


def train(workdir, *arguments, code=0, at=""):
    """(stdout, stderr) of train.py with `arguments`, in float64; all of its processes must end."""
    environment = os.environ | {"JAX_ENABLE_X64": "1", MARK: str(workdir)}
    environment |= {"XDG_CACHE_HOME": str(workdir / "cache")} | ({"AT": at} if at else {})
    command = [sys.executable, str(ROOT / "train.py"), "-c", "config.json", *arguments]
    done = subprocess.run(
        command, cwd=workdir, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert not running(workdir)
    return done.stdout, done.stderr


def running(workdir):
    """The ids of this test's processes that still run."""
    return marked(f"{MARK}={workdir}")


def rows(workdir, folder):
    """The logged rows of a run without its times."""
    [run_dir] = (workdir / folder).glob("two/*")
    return rows_of(run_dir)


def last_arrays(workdir, folder):
    [run_dir] = (workdir / folder).glob("two/*")
    return storage.newest(run_dir)[0].arrays[0]


@pytest.mark.torture
def test_two_processes_match_one_and_resume_to_the_same_bits_however_they_ended(workdir):
    """One test, since all of it uses the same run."""
    out, _ = train(workdir, "--processes", "2", "checkpoint.dir=two")
    check_that_process_0_logs_the_numbers_of_one_process(workdir, out)
    check_that_one_process_loads_and_resumes_the_run(workdir)
    check_that_the_run_resumes_to_the_same_bits_after_a_signal_and_a_kill(workdir)


def check_that_process_0_logs_the_numbers_of_one_process(workdir, out):
    assert "[0] [main INFO]" in out and "2 x cpu (fsdp 2), in 2 processes" in out
    assert all(line.startswith("[0] ") for line in out.splitlines())
    train(workdir, "checkpoint.dir=one")
    one, several = rows(workdir, "one"), rows(workdir, "two")
    # In each of 4 epochs: rows after steps 3, 6 and 9 of 10, and one at the end.
    assert len(one) == len(several) == 4 * (3 + 1)
    for a, b in zip(one, several, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([b[k] for k in a], [a[k] for k in a], rtol=1e-9)


def check_that_one_process_loads_and_resumes_the_run(workdir):
    [original] = (workdir / "two").glob("two/*")
    run_dir = shutil.copytree(original, workdir / "moved")
    path = run_dir / "checkpoint-epoch_4.orbax"
    arrays, stored = storage.load(path)[0], load_to_export(None, path, overrides=["callbacks=[]"])
    np.testing.assert_array_equal(
        stored.weights["params"]["head"]["weight"], arrays["ema/head/weight"].astype(np.float32)
    )
    train(workdir, "checkpoint.dir=one", "training.epochs=5", "title=further")
    train(workdir, "--resume", str(run_dir), "--trust", "training.epochs=5", "mesh.data=1")
    [uninterrupted] = (workdir / "one").glob("further/*")
    expected = storage.newest(uninterrupted)[0].arrays[0]
    for name, array in storage.newest(run_dir)[0].arrays[0].items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-7, atol=1e-9, err_msg=name)


def check_that_the_run_resumes_to_the_same_bits_after_a_signal_and_a_kill(workdir):
    folder = next((workdir / "two").glob("two/*"))
    expected = storage.read(folder, "checkpoint-epoch_4").arrays[0]
    run = ("--processes", "2", "checkpoint.dir=ended", "--resume", "auto")
    out, _ = train(workdir, *run, code=75, at=f"1 1 {signal.SIGTERM:d}")
    assert "SIGTERM, or Ctrl-C, to one of the processes" in out
    assert "Stopped by SIGTERM after step" in out
    start = time.monotonic()
    out, err = train(workdir, *run, code=1, at=f"1 3 {signal.SIGKILL:d}")
    assert time.monotonic() - start < 60
    assert "Resuming from checkpoint-" in out
    assert "Process 1 was ended by SIGKILL, so all are ended. --resume auto continues" in err
    train(workdir, *run)
    assert rows(workdir, "ended") == rows(workdir, "two")
    for name, array in last_arrays(workdir, "ended").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.slow
def test_a_budget_of_steps_ends_two_processes_and_a_larger_one_continues_to_the_same_bits(workdir):
    stopping = {"name": "early_stopping", "args": {"monitor": "test_loss", "restore_best": True}}
    several = ["--processes", "2", f"callbacks={json.dumps([stopping])}", "training.epochs=2"]
    several += ["checkpoint.monitor=test_loss"]
    train(workdir, *several, "checkpoint.dir=whole")
    out, _ = train(workdir, *several, "checkpoint.dir=budget", "training.max_steps=7")
    assert "Stopped by training.max_steps after step 7" in out
    [run_dir] = (workdir / "budget").glob("two/*")
    finished = json.loads((run_dir / "finished.json").read_text())
    assert "The run ends with the weights of checkpoint-" in out
    last = rows(workdir, "budget")[-1]
    assert last["final"] == "the last weights"
    assert finished["best"]["name"] == finished["weights_from"] == "checkpoint-step_7"
    assert finished["best"]["value"] == finished["metrics"]["test_loss"] == last["test_loss"]
    train(workdir, *several, "--resume", str(run_dir), "training.max_steps=null")
    assert rows(workdir, "budget") == rows(workdir, "whole")
    for name, array in last_arrays(workdir, "whole").items():
        np.testing.assert_array_equal(last_arrays(workdir, "budget")[name], array, err_msg=name)


@pytest.mark.torture
@pytest.mark.parametrize("killed", [0, 1])
def test_without_the_launcher_the_other_process_ends_soon_and_says_why(workdir, killed):
    start = time.monotonic()
    arguments = ["-c", "config.json", f"checkpoint.dir=alone_{killed}"]
    environment = {"AT": f"{killed} 2 {signal.SIGKILL:d}", MARK: str(workdir)}
    environment["PLACE"] = str(workdir)
    started = start_all(str(ROOT / "train.py"), *arguments, by_config=killed == 0, **environment)
    outputs = finished(started, timeout=90, code=None)
    assert time.monotonic() - start < 80  # 60 of them after the kill
    err = outputs[1 - killed][1]
    assert (
        "has lost another process, or the connection to it" in err
        or "JAX distributed service detected fatal errors" in err
    )
    assert not running(workdir)


@pytest.mark.torture
def test_when_process_0_cannot_write_all_continue_without_that_checkpoint(workdir):
    more = ["checkpoint.on_write_error=go_on", "checkpoint.monitor=test_loss"]
    more += ["checkpoint.save_top_k=2", 'callbacks=["at.Full"]']
    out, _ = train(workdir, "--processes", "2", "checkpoint.dir=full", *more)
    assert (
        "checkpoint-epoch_2.orbax: cannot be written: No space left on device; "
        "continuing without it"
    ) in out
    [run_dir] = (workdir / "full").glob("two/*")
    names = {path.name for path in run_dir.glob("*.orbax")}
    assert names == {f"checkpoint-epoch_{i}.orbax" for i in (1, 3, 4)}


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["stop", "rollback"])
def test_all_find_a_step_that_is_not_finite_even_when_one_sees_the_run_more_often(workdir, mode):
    more = ["optimizer.args.lr=1e30", f"training.on_nonfinite={mode}", "training.rollbacks=2"]
    more += ["logging.every_steps=100", 'callbacks=["at.EveryFifth"]']
    _, err = train(workdir, "--processes", "2", "checkpoint.dir=spoilt", *more, code=1)
    assert "was NaN or infinite" in err and "lost" not in err


@pytest.mark.torture
def test_pretrained_weights_may_be_sharded_too(workdir):
    train(workdir, "--processes", "2", "checkpoint.dir=first", "training.epochs=1", "callbacks=[]")
    [weights] = (workdir / "first").glob("two/*/checkpoint-epoch_1.orbax")
    later = [f"training.pretrained={weights}", "training.epochs=1", "optimizer.args.lr=1e-12"]
    train(workdir, "--processes", "2", "checkpoint.dir=second", *later, "callbacks=[]")
    [[before], [after]] = [
        [r for r in rows(workdir, name) if "end_of_epoch" in r] for name in ("first", "second")
    ]
    assert before["test_loss"] == pytest.approx(after["test_loss"], rel=1e-6)


@pytest.mark.torture
def test_a_language_model_that_is_sharded_writes_as_in_one_process_and_only_once(workdir):
    options = {"prompts": ["Once", ""], "tokens": 20, "every": {"steps": 3, "epochs": 1}}
    config = CONFIG | {
        "model": {"name": "gpt", "args": {"dim": 16, "depth": 1, "heads": 2}},
        "data": {"name": "stories", "args": {"length": 16, "count": 30}},
        "preprocess": [],
        "training": {"epochs": 1, "limit_batches": 6},
        "callbacks": [{"name": "sample_text", "args": options}],
    }
    (workdir / "text.json").write_text(json.dumps(config))
    texts = []
    for processes in ("1", "2"):
        folder = f"text_{processes}"
        train(workdir, "-c", "text.json", "--processes", processes, f"checkpoint.dir={folder}")
        [path] = (workdir / folder).glob("two/*/samples.jsonl")
        texts.append(path.read_text())
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 4


@pytest.mark.torture
def test_different_configs_are_an_error(workdir):
    arguments = [str(ROOT / "train.py"), "-c", "config.json", "checkpoint.dir=other"]
    (workdir / "seeds.py").write_text(
        "import os, runpy, sys\n"
        f"sys.argv = {arguments} + ['seed=' + os.environ['JAX_PROCESS_ID']]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    environment = {MARK: str(workdir), "PLACE": str(workdir), "PYTHONPATH": str(ROOT)}
    started = start_all(str(workdir / "seeds.py"), **environment)
    outputs = finished(started, timeout=60, code=None)
    assert [process.returncode for process in started] == [1, 2]
    assert "seed: is 1 in process 1, but different in process 0" in outputs[1][1]
    assert "process 1 failed and has printed the reason" in outputs[0][1]


@pytest.mark.slow
def test_a_mistake_is_reported_once_before_any_process_is_started(workdir):
    out, err = train(workdir, "--processes", "2", "loader.batch_size=-1", code=2)
    assert out == ""
    assert err == "config.json: loader.batch_size: must be at least 1, got -1\n"


@pytest.mark.slow
def test_a_missing_library_is_reported_before_any_process_is_started(workdir, monkeypatch):
    (workdir / "sitecustomize.py").write_text("import sys\nsys.modules['orbax'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(workdir))
    out, err = train(workdir, "--processes", "2", code=2)
    assert out == ""
    fix = "run `pip install -r training/optional.txt`"
    assert err == f"checkpoint.format: Orbax is not installed: {fix}\n"


@pytest.mark.slow
def test_a_mistake_that_only_the_processes_find_ends_all_of_them(workdir):
    """Both processes find it, and each prints its error; when one ends first, JAX may report this
    in the other, before or after the mistake."""
    _, err = train(workdir, "--processes", "2", "loader.batch_size=15", code=2)
    message = (
        "config.json: loader.batch_size: 15 examples do not divide over 2 devices; use a multiple"
    )
    lines = err.splitlines()
    assert sum(line[4:].startswith(message) for line in lines) in (1, 2)
    endings = [f"Process {i} ended with exit code 2, so all are ended" for i in (0, 1)]
    assert sum(line in endings for line in lines) == 1
