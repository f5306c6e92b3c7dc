"""`--resume` as a user runs it: which run is resumed, what may change, and what is an error."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.processes import ROOT, call, run, start, wait_for_line
from tests.runs import json_lines
from training.checkpoint.storage import load
from training.checkpoint.trees import restacked

SMALL = processes.SMALL | {
    "title": "Small",
    "schedule": "cosine",
    "training": {"epochs": 2},
    "logging": {"every_steps": 5},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a config and a finished run; tests that change it use the copy `workdir`."""
    workdir = tmp_path_factory.mktemp("resume")
    (workdir / "small.json").write_text(json.dumps(SMALL))
    assert run(workdir, "-c", "small.json")[0] == 0
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    subprocess.run(["cp", "-a", f"{finished}/.", str(tmp_path)], check=True)
    return tmp_path


def only_run(workdir, title="Small"):
    (folder,) = (workdir / "saved" / title).iterdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("change", ["training.epochs=2", "optimizer.args.lr=0.5"])
def test_a_run_that_is_not_resumed_is_not_kept_locked(workdir, change):
    folder = only_run(workdir)
    for _ in range(2):  # from one process: the second call finds the same, and not a locked run
        _, out, err = call(workdir, "--resume", folder, change, "training.epochs=2")
        assert "another process" not in err
        assert "raise it to continue" in out or "optimizer.args.lr" in err


@pytest.mark.slow
def test_a_finished_run_says_so_and_continues_in_the_same_folder_with_more_epochs(workdir):
    folder = only_run(workdir)
    code, out, _ = run(workdir, "--resume", folder)
    assert code == 0
    assert "has completed 2 epochs, and training.epochs is 2; raise it to continue" in out
    _, out, _ = run(workdir, "--resume", folder, "training.epochs=1")
    assert "has completed 2 epochs, and training.epochs is 1; raise it to continue" in out
    changes = ["training.epochs=3", "checkpoint.keep=1", "logging.every_steps=2"]
    shutil.rmtree(folder / "model")  # as after a kill at the moment when it is replaced
    code, out, _ = run(workdir, "--resume", folder, *changes)
    assert code == 0 and (folder / "model" / "mlp.py").is_file()
    assert "Resuming from checkpoint-epoch_2, after step 20" in out
    assert "Changed: training.epochs: 2 -> 3" in out
    assert "Changed: checkpoint.keep: 5 -> 1" in out
    assert "Changed: facts.total_steps: 20 -> 30" in out
    assert only_run(workdir) == folder
    assert json.loads((folder / "config.json").read_text())["training"]["epochs"] == 3
    assert json.loads((folder / "finished.json").read_text())["epochs"] == 3
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["epoch"] for row in rows if "end_of_epoch" in row] == [1, 2, 3]
    assert [path.name for path in folder.glob("*.params")] == ["checkpoint-epoch_3.params"]


@pytest.mark.slow
def test_a_run_whose_budget_is_used_up_is_finished_and_continues_with_a_larger_one(workdir):
    whole = only_run(workdir)
    by_steps = ["training.max_steps=13", "training.epochs=null"]
    code, out, _ = run(workdir, "-c", "small.json", "title=Budget", *by_steps)
    assert code == 0
    assert "10 steps per epoch, 13 in all" in out
    assert "Stopped by training.max_steps after step 13" in out
    folder = only_run(workdir, "Budget")
    finished = json.loads((folder / "finished.json").read_text())
    assert (
        finished["steps"] == 13 and finished["epochs"] == 1 and "test_loss" in finished["metrics"]
    )
    assert (folder / "report.html").exists()
    assert (folder / "checkpoint-step_13.params").exists()
    _, out, _ = run(workdir, "--resume", folder)
    assert "has completed 13 steps, and training.max_steps is 13; raise it to continue" in out
    code, out, _ = run(workdir, "--resume", folder, "training.max_steps=20")
    assert code == 0
    assert "Changed: facts.total_steps: 13 -> 20" in out
    assert "Stopped by training.max_steps after step 20" in out
    one, other = (load(path / "checkpoint-epoch_2.params")[0] for path in (whole, folder))
    assert [*one] == [*other] and not all(np.array_equal(one[k], other[k]) for k in one)
    budget = ["training.epochs=null", "training.max_seconds=1e-6"]
    code, _, err = call(workdir, "-c", "small.json", *budget)  # the length of cosine is unknown
    assert code == 2 and "steps: not given, and total_steps is unknown" in err
    budget = ["schedule.name=cosine", "schedule.args.steps=20", "training.max_seconds=1e-6"]
    _, out, _ = run(workdir, "-c", "small.json", "title=Seconds", *budget)
    assert "Stopped by training.max_seconds (1e-06 s) after step" in out
    folder = only_run(workdir, "Seconds")
    _, out, _ = run(workdir, "--resume", folder)
    assert "s, and training.max_seconds is 1e-06; raise it to continue" in out
    assert run(workdir, "--resume", folder, "training.max_seconds=null")[0] == 0
    other = load(folder / "checkpoint-epoch_2.params")[0]
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_auto_resumes_the_latest_unfinished_run_or_starts_a_new_one(workdir):
    config = {**SMALL, "resume": "auto"}
    (workdir / "auto.json").write_text(json.dumps(config))
    code, out, _ = run(workdir, "-c", "auto.json")
    assert code == 0 and "Resuming" not in out
    assert "No unfinished run of Small (saved/Small/" in out
    assert "is finished): beginning a new one" in out
    _, second = sorted((workdir / "saved" / "Small").iterdir())
    (second / "finished.json").unlink()
    (second / "checkpoint-epoch_2.params").unlink()
    code, out, _ = run(workdir, "-c", "auto.json")
    assert code == 0
    assert f"Run folder: {second.relative_to(workdir)}" in out
    assert "Resuming from checkpoint-epoch_1" in out
    assert len(list((workdir / "saved" / "Small").iterdir())) == 2


@pytest.mark.slow
def test_a_changed_config_is_refused_with_its_differences_without_override(workdir):
    folder = only_run(workdir)
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    changes = ["training.epochs=3", "optimizer.args.lr=0.5", "loader.shuffle=false"]
    changes = ["-c", "small.json", "title=Renamed", *changes]
    code, _, err = run(workdir, *changes, "--resume", folder)
    assert code == 2 and "title" not in err
    assert "optimizer.args.lr: 0.01 -> 0.5" in err and "loader.shuffle: true -> false" in err
    assert "training.epochs: " not in err and "--override" in err
    assert {path.name: path.read_bytes() for path in folder.glob("*.*")} == before
    code, out, _ = run(workdir, *changes, "--resume", folder, "--override")
    assert code == 0
    assert "Changed: optimizer.args.lr: 0.01 -> 0.5" in out


@pytest.mark.torture
@pytest.mark.parametrize("before", [False, True])
def test_a_run_is_resumed_with_scan_switched(before, tmp_path):
    """With the optimizer's state, so that it ends as if nothing had been switched."""
    model = {"dim": 8, "depth": 2, "heads": 2, "patch": 14, "scan": before}
    model = {"name": "vit", "args": model}
    config = SMALL | {"model": model, "optimizer": "muon", "schedule": "constant"}
    (tmp_path / "scan.json").write_text(json.dumps(config))
    assert run(tmp_path, "-c", "scan.json", "training.epochs=1")[0] == 0
    whole = only_run(tmp_path)
    switched = tmp_path / "switched"
    subprocess.run(["cp", "-a", str(whole), str(switched)], check=True)
    assert run(tmp_path, "--resume", whole, "training.epochs=2")[0] == 0
    old, new = json.dumps(before), json.dumps(not before)
    changes = ["training.epochs=2", f"model.args.scan={new}"]
    code, out, err = run(tmp_path, "--resume", switched, *changes)
    assert code == 0 and f"Changed: model.args.scan: {old} -> {new}" in out, err
    expected, _ = load(whole / "checkpoint-epoch_2.params")
    arrays, _ = load(switched / "checkpoint-epoch_2.params")
    one, other = (expected, arrays) if before else (arrays, expected)
    assert one["params/blocks/0-1/expand/weight"].shape == (2, 8, 32)
    assert other["params/blocks/1/expand/weight"].shape == (8, 32)
    arrays = restacked(arrays, expected)
    assert arrays.keys() == expected.keys()
    for name in [name for name in expected if name.startswith(("params/", "opt/"))]:
        np.testing.assert_allclose(arrays[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_config_that_does_not_fit_the_state_leaves_the_run_unchanged(workdir):
    folder = only_run(workdir)
    before = files_of(folder)
    changes = ("model.args.dims=[17]", "optimizer.name=lion", "training.replicas=2", "mesh.data=2")
    for change in changes:
        code, _, err = run(workdir, "--resume", folder, "training.epochs=3", change, "--override")
        assert code == 2, err
    assert files_of(folder) == before


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


@pytest.mark.slow
def test_values_that_are_not_those_of_the_run_are_refused_until_they_are_moved_away(workdir):
    folder = only_run(workdir)
    rows = (folder / "metrics.jsonl").read_bytes()
    end = rows.index(b"\n") + 1  # the second line is damaged
    (folder / "metrics.jsonl").write_bytes(rows[:end] + b"x" * (len(rows) - end - 1) + b"\n")
    before = files_of(folder)
    code, _, err = run(workdir, "--resume", folder, "training.epochs=3")
    assert code == 2
    assert "metrics.jsonl, line 2: cannot be read: it is not a JSON object; restore the file" in err
    assert files_of(folder) == before
    (folder / "metrics.jsonl").rename(workdir / "metrics.jsonl")
    code, _, err = run(workdir, "--resume", folder, "training.epochs=3")
    assert code == 0 and "metrics.jsonl: is shorter than when the checkpoint was taken" in err


@pytest.mark.torture
def test_a_child_process_that_outlives_a_killed_run_does_not_lock_it(workdir):
    (workdir / "forks.py").write_text(
        "import os, time\n"
        "class Forks:\n"
        "    def on_row(self, run, row):\n"
        "        if run.epoch == 2 and os.fork() == 0:\n"
        "            os.closerange(1, 3); time.sleep(60); os._exit(0)\n"
        "def forks(): return Forks()\n"
    )
    arguments = ["-c", "small.json", "title=Forks", 'callbacks=["forks.forks"]']
    process = start(workdir, *arguments, "training.epochs=100000")
    wait_for_line(process, "STARTING EPOCH 4")
    process.kill()
    process.communicate()
    assert resumes(workdir, *arguments, "training.epochs=100000", "--resume", "auto")


@pytest.mark.slow
def test_other_data_is_refused(workdir):
    code, _, err = call(
        workdir, "--resume", only_run(workdir), "training.epochs=3", "data.args.seed=1"
    )
    assert code == 2
    assert "fingerprint of the data.train: " in err and "data.args.seed: 0 -> 1" in err


@pytest.mark.slow
def test_the_config_of_a_run_imports_nothing_unless_it_is_trusted(workdir):
    code = "print('imported')\nfrom training.schedules import cosine\n"
    code += "def flat(total_steps): return cosine(total_steps=total_steps)\n"
    (workdir / "mine.py").write_text(code)
    assert run(workdir, "-c", "small.json", "title=Mine", "schedule=mine.flat")[0] == 0
    folder = only_run(workdir, "Mine")
    code, out, err = call(workdir, "--resume", folder, "training.epochs=3")
    assert code == 2
    assert "imported" not in out
    assert (
        "schedule: 'mine.flat' would import code, and this config was not named with -c, but comes "
        "from a run folder, a checkpoint or the working folder; pass --trust if you trust it"
    ) in err
    code, out, _ = run(workdir, "--resume", folder, "training.epochs=3", "--trust")
    assert code == 0
    assert "Resuming from checkpoint-epoch_2" in out


@pytest.mark.slow
def test_a_changed_model_is_refused_and_its_copy_is_not_imported(workdir):
    code = "from model.mlp import mlp\ndef net(input_shape, num_classes):\n"
    code += "    return mlp(input_shape, num_classes, dims=(16,))\n"
    (workdir / "nets.py").write_text(code)
    arguments = ["-c", "small.json", "title=Nets", "model=nets.net"]
    assert run(workdir, *arguments)[0] == 0
    folder = only_run(workdir, "Nets")
    (folder / "model" / "mlp.py").write_text("raise SystemExit('the copy was imported')\n")
    (workdir / "nets.py").write_text(code.replace("(16,))", '(16,), activation="gelu")'))
    arguments += ["--resume", folder, "training.epochs=3"]
    before = files_of(folder)
    code, _, err = call(workdir, *arguments)
    assert code == 2 and files_of(folder) == before
    assert "has changed its meaning" in err and f"the original model is in {folder}/model" in err
    assert "add --override" in err
    (folder / "model" / "gone.py").write_text("")  # of an earlier version
    assert run(workdir, *arguments, "--override")[0] == 0
    assert not (folder / "model" / "gone.py").exists()
    assert (folder / "user_modules" / "nets.py").read_text() == (workdir / "nets.py").read_text()
    assert (folder / "model" / "mlp.py").read_bytes() == (ROOT / "model" / "mlp.py").read_bytes()


@pytest.mark.slow
def test_the_copies_of_a_runs_code_are_those_that_trained_it_last(workdir):
    """Evaluations and exports import them."""
    code = "class Stops:\n    def on_start(self, view):\n        FIRST\n"
    code += "def stops() -> 'Callback':\n    return Stops()\n"
    copy = only_run(workdir).parents[1] / "Own" / "one" / "user_modules" / "stops.py"
    arguments = ["-c", "small.json", "title=Own", "run_name=one", "--resume", "auto"]
    arguments += ['callbacks=["stops.stops"]']
    seen = []
    for line, epochs, expected in (
        ("raise ValueError('not yet')", 1, 1),
        ("pass", 1, 0),  # there is no checkpoint, so it starts over
        ("print('other')", 2, 0),
        ("print('other')", 3, 0),
    ):
        (workdir / "stops.py").write_text(code.replace("FIRST", line))
        code_of_exit, out, err = run(workdir, *arguments, f"training.epochs={epochs}")
        assert code_of_exit == expected, err
        assert copy.read_text() == (workdir / "stops.py").read_text()
        seen.append("Your code has changed since the checkpoint: stops.py" in out + err)
    assert seen == [False, False, True, False]


def resumes(workdir, *arguments):
    """Whether a run is resumed; kills it as soon as it is."""
    process = start(workdir, *arguments)
    is_resumed = any("Resuming from" in line for line in iter(process.stdout.readline, ""))
    process.kill()
    process.communicate()
    return is_resumed


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_but_refused_when_it_is_named(workdir):
    folder = only_run(workdir)
    flip(folder / "checkpoint-epoch_2.params")
    code, _, err = call(workdir, "--resume", folder / "checkpoint-epoch_2.params")
    assert code == 2
    assert "checkpoint-epoch_2.params: is damaged" in err
    (folder / ".checkpoint-epoch_3.params.123.tmp").write_bytes(b"half")
    code, out, _ = run(workdir, "--resume", folder)
    assert code == 0
    assert "checkpoint-epoch_2.params: is damaged" in out and "skipped" in out
    assert "Resuming from checkpoint-epoch_1, after step 10" in out
    assert not list(folder.glob(".*"))
    load(folder / "checkpoint-epoch_2.params")  # written again, so not damaged
    for name in ("checkpoint-epoch_1.params", "checkpoint-epoch_2.params"):
        flip(folder / name)
    code, _, err = call(workdir, "--resume", folder)
    assert code == 2
    assert "no checkpoint of this run can be resumed" in err


@pytest.mark.slow
@pytest.mark.parametrize("auto", [True, False])
def test_a_finished_run_that_lost_its_checkpoints_is_not_started_over(workdir, auto):
    folder = only_run(workdir)
    for path in folder.glob("*.params"):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    named = ["auto", f"run_name={folder.name}", "-c", "small.json"] if auto else [folder]
    code, _, err = call(workdir, "--resume", *named, "training.epochs=3")
    assert code == 2
    assert "no checkpoint of this run can be resumed" in err
    assert "finished.json is there, so there was a checkpoint" in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_new_run_begins_from_an_earlier_checkpoint_or_under_another_name(workdir):
    first, saved = only_run(workdir), workdir / "saved" / "Small"
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    earlier = first / "checkpoint-epoch_1.params"
    code, _, err = call(workdir, "--resume", earlier, "optimizer.args.lr=0.5")
    assert code == 2 and "optimizer.args.lr" in err
    assert list(saved.iterdir()) == [first]  # a mistake leaves no folder
    code, out, _ = run(workdir, "--resume", earlier)
    assert code == 0
    assert "Resuming from checkpoint-epoch_1, after step 10" in out
    [second] = set(saved.iterdir()) - {first}
    assert f"A new run begins from {earlier}" in (second / "train.log").read_text()
    one, other = (load(run / "checkpoint-epoch_2.params") for run in (first, second))
    assert all(np.array_equal(one[0][name], other[0][name]) for name in one[0])
    assert {name for name in one[0] if name.startswith("opt/")}
    assert [name for name, _ in one[1]["best"]] == [name for name, _ in other[1]["best"]]

    # The newest checkpoint continues its run, unless another name is given.
    newest = second / "checkpoint-epoch_2.params"
    code, out, _ = call(workdir, "--resume", newest)
    assert code == 0 and "has completed 2 epochs" in out
    more = ["training.epochs=3", "run_name=longer"]
    assert run(workdir, "--resume", newest, *more)[0] == 0
    rows = json_lines(saved / "longer/metrics.jsonl")
    assert [row["epoch"] for row in rows if "end_of_epoch" in row] == [1, 2, 3]
    assert json.loads((saved / "longer/config.json").read_text())["run_name"] == "longer"
    code, _, err = call(workdir, "--resume", earlier, *more)
    assert code == 2 and "run_name: saved/Small/longer exists already" in err
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert sorted(saved.iterdir()) == sorted([first, second, saved / "longer"])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nowhere", "there is no such folder"),
        ("saved", "is not the folder of a run"),
        ("saved/Small", "did you mean saved/Small/2"),
        ("small.json", "is not the folder of a run"),
    ],
)
def test_a_path_that_is_not_a_run_is_an_error(finished, named, message):
    code, _, err = call(finished, "--resume", named)
    assert code == 2
    assert message in err


@pytest.mark.slow
def test_a_run_in_progress_is_not_resumed_by_another_process(workdir):
    process = start(workdir, "-c", "small.json", "title=Busy", "training.epochs=100000")
    wait_for_line(process, "STARTING EPOCH 3")
    code, _, err = call(workdir, "--resume", only_run(workdir, "Busy"), "training.epochs=100000")
    assert code == 1
    assert "another process is training this run" in err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert resumes(workdir, "--resume", only_run(workdir, "Busy"))


LIMITED = (
    "import resource, sys, train\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
    "sys.exit(train.main())"
)


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["stop", "go_on"])
def test_a_full_disk_stops_the_run_or_not_as_configured(workdir, mode):
    """A limit on the size of files simulates the full disk; the earlier checkpoint is kept, and the
    run is resumed from it later."""
    folder = only_run(workdir)
    before = (folder / "checkpoint-epoch_2.params").read_bytes()
    command = [sys.executable, "-c", LIMITED, "--resume", folder, "training.epochs=8"]
    command.append(f"checkpoint.on_write_error={mode}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(workdir / "cache")}
    done = subprocess.run(
        command, cwd=workdir, env=environment, capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "checkpoint-epoch_3.params: cannot be written: File too large" in output
    assert (folder / "checkpoint-epoch_2.params").read_bytes() == before
    names = sorted(path.name for path in folder.glob("*.params"))
    assert names == ["checkpoint-epoch_1.params", "checkpoint-epoch_2.params"]
    assert not list(folder.glob(".*"))
    assert ("Epoch 8 took" in done.stdout) == (mode == "go_on")
    assert done.returncode == 1  # with go_on too, since the last state cannot be saved
    assert not (folder / "finished.json").exists()
    assert run(workdir, "--resume", folder, "training.epochs=4")[0] == 0
    assert (folder / "checkpoint-epoch_4.params").exists()


@pytest.mark.torture
def test_a_run_resumed_on_other_devices_warns_and_continues(workdir):
    code, out, _ = run(workdir, "--resume", only_run(workdir), "training.epochs=3", devices=4)
    assert code == 0
    assert "The devices.3 was 'another', is now 'cpu: cpu': the bits may differ" in out
