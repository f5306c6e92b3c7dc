"""train.py in two processes on this machine: the numbers of one process, one voice, and an end in order, whatever happens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from inference.load import load
from tests.processes import ROOT, finished, marked, start_all
from training.checkpoint import storage

pytestmark = pytest.mark.skipif(
    sys.platform != "linux",
    reason="JAX has Gloo's collectives, for processes on CPU, on Linux alone",
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
    '''Ends a process by a signal, as the environment says: who, when, and by which.'''
    def on_epoch_end(self, run):
        who, epoch, number = map(int, os.environ.get("AT", "-1 0 0").split())
        if (jax.process_index(), run.epoch) == (who, epoch):
            os.kill(os.getpid(), number)
        if epoch and run.epoch >= epoch:
            time.sleep(0.7)  # JAX looks for signals once a second

class Full:
    '''A disk that is full for process 0 alone, at the second epoch.'''
    def on_epoch_end(self, run):
        from training.checkpoint import orbax_folder
        sound = getattr(Full, "sound", orbax_folder.seal)
        def seal(folder, note):
            if "epoch_2" in folder.name:
                raise OSError(28, "No space left on device")
            sound(folder, note)
        Full.sound, orbax_folder.seal = sound, seal

class Asks:
    '''Asks for every fifth step, in process 0.'''
    observer = True
    def steps_left(self, step):
        return 5 - step % 5
    def on_step_end(self, run):
        print("asked for", run.step)
"""
MARK = "RAWTREE_TEST_OF_SEVERAL"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "at.py").write_text(AT)
    return folder


def train(place, *arguments, code=0, at=""):
    """(what it said, complaints) of a training with `arguments`, in float64; none of its processes may be left."""
    environment = os.environ | {
        "JAX_ENABLE_X64": "1",
        "XDG_CACHE_HOME": str(place / "cache"),
        MARK: str(place),
    }
    environment |= {"AT": at} if at else {}
    command = [sys.executable, str(ROOT / "train.py"), "-c", "config.json", *arguments]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert not left_over(place)
    return done.stdout, done.stderr


def left_over(place):
    """The processes that still have this test's mark."""
    return marked(f"{MARK}={place}")


def rows(place, folder):
    """The rows of a run without its times."""
    [path] = (place / folder).glob("two/*/metrics.jsonl")
    times = ("seconds", "compile_seconds", "steps_per_second", "examples_per_second", "waiting")
    return [
        {k: v for k, v in json.loads(line).items() if k not in times}
        for line in path.read_text().splitlines()
    ]


def last_arrays(place, folder):
    [run] = (place / folder).glob("two/*")
    return storage.newest(run)[0].arrays[0]


def test_two_processes_give_the_numbers_of_one_and_go_on_to_the_same_bits_whatever_ends_them(place):
    """One test, since all of it is about the same run."""
    said, _ = train(place, "--processes", "2", "checkpoint.dir=two")
    speaks_with_one_voice_and_the_numbers_of_one(place, said)
    is_loaded_and_gone_on_with_by_one(place)
    goes_on_to_the_same_bits_after_a_signal_to_any_and_a_kill(place)


def speaks_with_one_voice_and_the_numbers_of_one(place, said):
    assert "[0] [main INFO]" in said and "2 x cpu (fsdp 2), in 2 processes" in said
    assert all(line.startswith("[0] ") for line in said.splitlines())
    train(place, "checkpoint.dir=one")
    one, several = rows(place, "one"), rows(place, "two")
    assert (
        len(one) == len(several) == 4 * (3 + 1)
    )  # lines after 3, 6 and 9 of 10 steps, and one that ends the epoch
    for a, b in zip(one, several, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([b[k] for k in a], [a[k] for k in a], rtol=1e-9)


def is_loaded_and_gone_on_with_by_one(place):
    [left] = (place / "two").glob("two/*")
    run = shutil.copytree(left, place / "moved")
    path = run / "checkpoint-epoch_4.orbax"
    arrays, stored = storage.load(path)[0], load(None, path, overrides=["callbacks=[]"])
    np.testing.assert_array_equal(
        stored.weights["params"]["head"]["weight"], arrays["ema/head/weight"].astype(np.float32)
    )
    train(place, "checkpoint.dir=one", "training.epochs=5", "title=further")
    train(place, "--resume", str(run), "--trust", "training.epochs=5", "mesh.data=1")
    [straight] = (place / "one").glob("further/*")
    expected = storage.newest(straight)[0].arrays[0]
    for name, array in storage.newest(run)[0].arrays[0].items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-7, atol=1e-9, err_msg=name)


def goes_on_to_the_same_bits_after_a_signal_to_any_and_a_kill(place):
    expected = storage.read_all(
        "epoch 4", storage.files(next((place / "two").glob("two/*")), "checkpoint-epoch_4")
    ).arrays[0]
    run = ("--processes", "2", "checkpoint.dir=ended", "--resume", "auto")
    said, _ = train(place, *run, code=75, at=f"1 1 {signal.SIGTERM:d}")
    assert (
        "SIGTERM, or Ctrl-C, to one of the processes" in said
        and "Stopped by SIGTERM after step" in said
    )
    before = time.monotonic()
    said, complaint = train(place, *run, code=1, at=f"1 3 {signal.SIGKILL:d}")
    assert time.monotonic() - before < 60
    assert "Going on from checkpoint-" in said
    assert "Process 1 was ended by SIGKILL, so all are ended. --resume auto continues" in complaint
    train(place, *run)
    assert rows(place, "ended") == rows(place, "two")
    for name, array in last_arrays(place, "ended").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.torture
@pytest.mark.parametrize("who", [0, 1])
def test_without_the_launcher_the_others_end_soon_and_say_why(place, who):
    before = time.monotonic()
    arguments = ["-c", "config.json", f"checkpoint.dir=alone_{who}"]
    environment = {"AT": f"{who} 2 {signal.SIGKILL:d}", MARK: str(place), "PLACE": str(place)}
    started = start_all(str(ROOT / "train.py"), *arguments, by_config=who == 0, **environment)
    said = finished(started, timeout=90, code=None)
    assert time.monotonic() - before < 80  # 60 of them after the kill
    complaint = said[1 - who][1]
    assert (
        "has lost another process, or the connection to it" in complaint
        or "JAX distributed service detected fatal errors" in complaint
    )
    assert not left_over(place)


@pytest.mark.torture
def test_where_process_0_cannot_write_all_go_on_without_that_checkpoint(place):
    more = [
        "checkpoint.on_write_error=go_on",
        "checkpoint.monitor=test_loss",
        "checkpoint.save_top_k=2",
    ]
    said, _ = train(
        place, "--processes", "2", "checkpoint.dir=full", 'callbacks=["at.Full"]', *more
    )
    assert (
        "checkpoint-epoch_2.orbax: cannot be written: No space left on device; going on without it"
        in said
    )
    [run] = (place / "full").glob("two/*")
    assert {path.name for path in run.glob("*.orbax")} == {
        f"checkpoint-epoch_{i}.orbax" for i in (1, 3, 4)
    }


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["stop", "rollback"])
def test_a_step_that_is_not_finite_is_found_by_all_at_once_also_where_one_is_asked_more_often(
    place, mode
):
    more = [
        "optimizer.args.lr=1e30",
        f"training.on_nonfinite={mode}",
        "training.rollbacks=2",
        "logging.every_steps=100",
    ]
    _, complaint = train(
        place, "--processes", "2", "checkpoint.dir=spoilt", 'callbacks=["at.Asks"]', *more, code=1
    )
    assert "was not finite" in complaint and "lost" not in complaint


@pytest.mark.torture
def test_weights_to_start_from_may_be_cut_too(place):
    train(place, "--processes", "2", "checkpoint.dir=first", "training.epochs=1", "callbacks=[]")
    [weights] = (place / "first").glob("two/*/checkpoint-epoch_1.orbax")
    later = [
        f"training.pretrained={weights}",
        "training.epochs=1",
        "optimizer.args.lr=1e-12",
        "callbacks=[]",
    ]
    train(place, "--processes", "2", "checkpoint.dir=second", *later)
    [[before], [after]] = [
        [r for r in rows(place, name) if "end_of_epoch" in r] for name in ("first", "second")
    ]
    assert before["test_loss"] == pytest.approx(after["test_loss"], rel=1e-6)


@pytest.mark.torture
def test_another_config_is_told(place):
    arguments = [str(ROOT / "train.py"), "-c", "config.json", "checkpoint.dir=other"]
    (place / "seeds.py").write_text(
        "import os, runpy, sys\n"
        f"sys.argv = {arguments} + ['seed=' + os.environ['JAX_PROCESS_ID']]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    started = start_all(
        str(place / "seeds.py"), **{MARK: str(place), "PLACE": str(place), "PYTHONPATH": str(ROOT)}
    )
    said = finished(started, timeout=60, code=None)
    assert [process.returncode for process in started] == [1, 2]
    assert "seed: is 1 in process 1, but different in process 0" in said[1][1]
    assert "process 1 failed and has printed the reason" in said[0][1]


def test_a_mistake_is_told_once_before_anything_is_started(place):
    said, complaint = train(place, "--processes", "2", "loader.batch_size=-1", code=2)
    assert said == ""
    assert complaint == "config.json: loader.batch_size: must be at least 1, got -1\n"


def test_a_missing_library_is_told_before_anything_is_started(place, monkeypatch):
    (place / "sitecustomize.py").write_text("import sys\nsys.modules['orbax'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(place))
    said, complaint = train(place, "--processes", "2", code=2)
    assert said == ""
    assert (
        complaint
        == "checkpoint.format: Orbax is not installed: run `pip install -r training/requirements.txt`\n"
    )


def test_a_mistake_that_only_the_processes_find_ends_all_of_them(place):
    _, complaint = train(place, "--processes", "2", "loader.batch_size=15", code=2)
    said = (
        complaint.splitlines()
    )  # both found it; where one ends first, JAX may complain of that in the other, before or after
    wanted = (
        "config.json: loader.batch_size: 15 examples do not divide over 2 devices; take a multiple"
    )
    assert sum(line[4:].startswith(wanted) for line in said) == 1
    assert (
        sum(
            line in [f"Process {i} ended with exit code 2, so all are ended" for i in (0, 1)]
            for line in said
        )
        == 1
    )
