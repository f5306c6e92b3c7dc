"""`--resume` as a user says it: which run, with what changed, and what is told where it cannot be."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, run, start
from training.checkpoint.storage import load

SMALL = {
    "title": "Small",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 640, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "schedule": "cosine",
    "training": {"epochs": 2},
    "logging": {"every_steps": 5},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a config and a run that came to its end; tests that change it take a copy."""
    place = tmp_path_factory.mktemp("resume")
    (place / "small.json").write_text(json.dumps(SMALL))
    assert run(place, "-c", "small.json")[0] == 0
    return place


@pytest.fixture
def place(finished, tmp_path):
    subprocess.run(["cp", "-a", f"{finished}/.", str(tmp_path)], check=True)
    return tmp_path


def only_run(place, title="Small"):
    (folder,) = (place / "saved" / title).iterdir()
    return folder


def test_a_finished_run_says_so_and_more_epochs_go_on_in_the_same_folder(place):
    folder = only_run(place)
    code, out, _ = run(place, "--resume", folder)
    assert code == 0
    assert "has its 2 epochs, and training.epochs is 2; raise it to go on" in out
    assert (
        "has its 2 epochs, and training.epochs is 1; raise it to go on"
        in run(place, "--resume", folder, "training.epochs=1")[1]
    )
    code, out, _ = run(
        place, "--resume", folder, "training.epochs=3", "checkpoint.keep=1", "logging.every_steps=2"
    )
    assert code == 0
    assert "Going on from checkpoint-epoch_2, after step 20" in out
    for line in (
        "training.epochs: 2 -> 3",
        "checkpoint.keep: 5 -> 1",
        "facts.total_steps: 20 -> 30",
    ):
        assert f"Changed: {line}" in out
    assert only_run(place) == folder
    assert json.loads((folder / "config.json").read_text())["training"]["epochs"] == 3
    assert json.loads((folder / "finished.json").read_text())["epochs"] == 3
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if "end_of_epoch" in row] == [1, 2, 3]
    assert [path.name for path in folder.glob("*.params")] == ["checkpoint-epoch_3.params"]


def test_auto_begins_a_new_run_where_none_is_unfinished_and_goes_on_with_the_latest_that_is(place):
    config = {**SMALL, "resume": "auto"}
    (place / "auto.json").write_text(json.dumps(config))
    code, out, _ = run(place, "-c", "auto.json")
    assert code == 0 and "Going on" not in out
    assert (
        "No unfinished run of Small (saved/Small/" in out
        and "is finished): beginning a new one" in out
    )
    _, second = sorted((place / "saved" / "Small").iterdir())
    (second / "finished.json").unlink()
    (second / "checkpoint-epoch_2.params").unlink()
    code, out, _ = run(place, "-c", "auto.json")
    assert code == 0
    assert (
        f"Run folder: {second.relative_to(place)}" in out
        and "Going on from checkpoint-epoch_1" in out
    )
    assert len(list((place / "saved" / "Small").iterdir())) == 2


def test_a_changed_config_is_refused_with_its_differences_unless_one_insists(place):
    folder = only_run(place)
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    changes = [
        "-c",
        "small.json",
        "training.epochs=3",
        "optimizer.args.lr=0.5",
        "loader.shuffle=false",
    ]
    code, _, err = run(place, *changes, "--resume", folder)
    assert code == 2
    assert "optimizer.args.lr: 0.01 -> 0.5" in err and "loader.shuffle: true -> false" in err
    assert "training.epochs: " not in err and "--override" in err
    assert {path.name: path.read_bytes() for path in folder.glob("*.*")} == before
    code, out, _ = run(place, *changes, "--resume", folder, "--override")
    assert code == 0
    assert "Changed: optimizer.args.lr: 0.01 -> 0.5" in out


def test_a_config_that_does_not_fit_the_state_leaves_the_run_as_it_was(place):
    folder = only_run(place)
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    for change in ("model.args.dims=[17]", "optimizer.name=lion", "training.replicas=2"):
        code, _, err = run(place, "--resume", folder, "training.epochs=3", change, "--override")
        assert code == 2, err
    assert {path.name: path.read_bytes() for path in folder.glob("*.*")} == before


def test_a_log_that_is_a_link_is_not_cut(place):
    folder = only_run(place)
    (place / "mine.txt").write_text("mine\n" * 9999)
    (folder / "train.log").unlink()
    (folder / "train.log").symlink_to(place / "mine.txt")
    code, _, err = run(place, "--resume", folder, "training.epochs=3")
    assert code == 2
    assert "train.log: is a link to another file" in err
    assert (place / "mine.txt").read_text() == "mine\n" * 9999


@pytest.mark.torture
def test_a_child_that_outlives_a_killed_run_does_not_hold_it(place):
    (place / "forks.py").write_text(
        "import os, time\n"
        "class Forks:\n"
        "    def on_epoch_end(self, run):\n"
        "        if run.epoch == 2 and os.fork() == 0:\n"
        "            os.closerange(1, 3); time.sleep(60); os._exit(0)\n"
        "def forks(): return Forks()\n"
    )
    arguments = ["-c", "small.json", "title=Forks", 'callbacks=["forks.forks"]']
    process = start(place, *arguments, "training.epochs=100000")
    for line in process.stdout:
        if "STARTING EPOCH 4" in line:
            break
    process.kill()
    process.communicate()
    assert goes_on(place, *arguments, "training.epochs=100000", "--resume", "auto")


def test_other_data_is_refused(place):
    code, _, err = run(place, "--resume", only_run(place), "training.epochs=3", "data.args.seed=1")
    assert code == 2
    assert "fingerprint of the data.train: " in err and "data.args.seed: 0 -> 1" in err


def test_a_config_that_a_run_left_imports_nothing_unless_it_is_trusted(place):
    code = "print('imported')\nfrom training.schedules import cosine\n"
    (place / "mine.py").write_text(
        f"{code}def flat(total_steps): return cosine(total_steps=total_steps)\n"
    )
    assert run(place, "-c", "small.json", "title=Mine", "schedule=mine.flat")[0] == 0
    folder = only_run(place, "Mine")
    code, out, err = run(place, "--resume", folder, "training.epochs=3")
    assert code == 2
    assert "imported" not in out
    assert (
        "schedule: 'mine.flat' would import code, and this config comes from a run folder or a "
        "checkpoint; pass --trust if you trust it" in err
    )
    code, out, _ = run(place, "--resume", folder, "training.epochs=3", "--trust")
    assert code == 0
    assert "Going on from checkpoint-epoch_2" in out


def test_a_changed_model_is_refused_and_its_copy_is_not_imported(place):
    code = "from model.mlp import mlp\ndef net(input_shape, num_classes): return mlp(input_shape, num_classes, dims=(16,))\n"
    (place / "nets.py").write_text(code)
    assert run(place, "-c", "small.json", "title=Nets", "model=nets.net")[0] == 0
    folder = only_run(place, "Nets")
    (folder / "model" / "mlp.py").write_text("raise SystemExit('the copy was imported')\n")
    (place / "nets.py").write_text(code.replace("(16,))", '(16,), activation="gelu")'))
    code, _, err = run(
        place,
        "-c",
        "small.json",
        "title=Nets",
        "model=nets.net",
        "--resume",
        folder,
        "training.epochs=3",
    )
    assert code == 2
    assert (
        "has changed its meaning" in err
        and f"lies in {folder}/model" in err
        and "say --override" in err
    )
    done = run(
        place,
        "-c",
        "small.json",
        "title=Nets",
        "model=nets.net",
        "--resume",
        folder,
        "training.epochs=3",
        "--override",
    )
    assert done[0] == 0


def goes_on(place, *arguments):
    """Whether a run is gone on with; it is not waited for."""
    process = start(place, *arguments)
    found = any("Going on from" in line for line in iter(process.stdout.readline, ""))
    process.kill()
    process.communicate()
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_but_refused_when_it_is_named(place):
    folder = only_run(place)
    flip(folder / "checkpoint-epoch_2.params")
    code, _, err = run(place, "--resume", folder / "checkpoint-epoch_2.params")
    assert code == 2
    assert "checkpoint-epoch_2.params: is damaged" in err
    (folder / ".checkpoint-epoch_3.params.123.tmp").write_bytes(b"half")
    code, out, _ = run(place, "--resume", folder)
    assert code == 0
    assert "checkpoint-epoch_2.params: is damaged" in out and "passed over" in out
    assert "Going on from checkpoint-epoch_1, after step 10" in out
    assert not list(folder.glob(".*"))
    load(folder / "checkpoint-epoch_2.params")  # it was written again
    for name in ("checkpoint-epoch_1.params", "checkpoint-epoch_2.params"):
        flip(folder / name)
    code, _, err = run(place, "--resume", folder)
    assert code == 2
    assert "no checkpoint of this run can be gone on from" in err


@pytest.mark.torture
def test_an_earlier_checkpoint_may_be_named_once_the_later_ones_are_out_of_the_way(place):
    folder = only_run(place)
    code, _, err = run(place, "--resume", folder / "checkpoint-epoch_1.params")
    assert code == 2
    assert "later checkpoints; move them away first: checkpoint-epoch_2" in err
    (folder / "checkpoint-epoch_2.params").rename(place / "kept.params")
    code, out, _ = run(place, "--resume", folder / "checkpoint-epoch_1.params")
    assert code == 0
    assert "Going on from checkpoint-epoch_1" in out
    again, wanted = load(folder / "checkpoint-epoch_2.params")[0], load(place / "kept.params")[0]
    assert all((again[name] == wanted[name]).all() for name in wanted)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nowhere", "there is no such folder"),
        ("saved", "is not the folder of a run"),
        ("saved/Small", "did you mean saved/Small/2"),
        ("small.json", "is not the folder of a run"),
    ],
)
def test_what_is_no_run_is_told(finished, named, message):
    code, _, err = run(finished, "--resume", named)
    assert code == 2
    assert message in err


def test_a_run_in_progress_is_not_gone_on_with_by_another_process(place):
    process = start(place, "-c", "small.json", "title=Busy", "training.epochs=100000")
    for line in process.stdout:
        if "STARTING EPOCH 3" in line:
            break
    code, _, err = run(place, "--resume", only_run(place, "Busy"), "training.epochs=100000")
    assert code == 1
    assert "another process is training this run" in err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert goes_on(place, "--resume", only_run(place, "Busy"))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.torture)]
)
def test_a_signal_while_the_first_program_is_compiled_ends_the_process_at_once(place, number):
    process = start(
        place, "-c", "small.json", "title=Early", "model.name=convnext", "model.args={}"
    )
    for line in process.stdout:
        if "Run folder" in line:
            break
    time.sleep(0.3)
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 3
    assert err == "Interrupted; nothing was saved\n"
    assert process.returncode == 1


def test_a_second_signal_ends_a_run_at_once(place):
    process = start(place, "-c", "small.json", "title=Twice", "training.epochs=100000")
    for line in process.stdout:
        if "STARTING EPOCH 3" in line:
            break
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert time.monotonic() - began < 3
    assert process.returncode in (1, 75)  # the second may come after all is done


@pytest.mark.torture
def test_two_runs_of_one_title_in_the_same_second_get_two_folders(place):
    processes = [
        start(place, "-c", "small.json", "title=Twins", "training.epochs=1") for _ in range(2)
    ]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    folders = list((place / "saved" / "Twins").iterdir())
    assert len(folders) == 2
    assert all((folder / "finished.json").exists() for folder in folders)


LIMITED = "import resource, sys, train; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); sys.exit(train.main())"


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["stop", "go_on"])
def test_a_full_disk_stops_the_run_or_not_as_configured(place, mode):
    """A limit on the size of files stands for the disk; the earlier checkpoint stays, and is gone on from later."""
    folder = only_run(place)
    before = (folder / "checkpoint-epoch_2.params").read_bytes()
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "--resume",
        folder,
        "training.epochs=8",
        f"checkpoint.on_write_error={mode}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(place / "cache")}
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert (
        "checkpoint-epoch_3.params: cannot be written: File too large" in done.stdout + done.stderr
    )
    assert (folder / "checkpoint-epoch_2.params").read_bytes() == before
    assert sorted(path.name for path in folder.glob("*.params")) == [
        "checkpoint-epoch_1.params",
        "checkpoint-epoch_2.params",
    ]
    assert not list(folder.glob(".*"))
    assert ("Epoch 8 took" in done.stdout) == (mode == "go_on")
    assert done.returncode == 1  # at the latest when the last state cannot be saved
    assert not (folder / "finished.json").exists()
    assert run(place, "--resume", folder, "training.epochs=4")[0] == 0
    assert (folder / "checkpoint-epoch_4.params").exists()


@pytest.mark.torture
def test_the_same_run_on_other_devices_says_so_and_goes_on(place):
    code, out, _ = run(place, "--resume", only_run(place), "training.epochs=3", devices=4)
    assert code == 0
    assert "The devices.3 was 'another', is now 'cpu: cpu': the bits may differ" in out
