"""A run, an export or a dataset of a stranger's: without --trust it runs no code, and neither
writes outside of its folder nor contacts a host."""

import json
import logging
import os
import re
import runpy
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import sweep
from data_loader.workers import Context
from inference.load import load
from inference.predictor import read_arrays, read_report
from search.spec import parse_spec
from search.sweep_folder import Sweep
from tests.processes import ROOT, call, captured
from tests.training.report.saved_run import CONFIG, report, save
from tests.wiring.conftest import VALID
from training.checkpoint import run_folder, safetensor_file
from training.checkpoint.keeper import protected
from training.checkpoint.resume import Lock, run_folder_of, unfinished
from training.commands.evaluate import rows
from training.report import read as report_rows
from training.report.page import write_report
from training.report.read import read_metrics
from training.watching.callbacks.gradient_spike_monitor import cut_back
from training.watching.metric_log import epoch_rows
from training.watching.pictures import png
from training.watching.publish import About
from training.watching.trackers.csv_file import csv
from training.watching.trackers.jsonl import jsonl
from training.watching.trackers.wandb_run import Wandb
from utils import RunError, UserError
from utils.files import append, atomic_write, check_links, fresh_folder
from wiring.build import build
from wiring.config import read
from wiring.own_modules import look_in

MARK = "import os\nopen(os.environ['MARK'], 'w').close()\n"


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A file that appears if code of the stranger's runs."""
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


def stranger(folder, **config):
    """The folder of a stranger's run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(VALID | config))
    (folder / "environment.json").write_text("{}")
    return folder


# Code.


def test_the_config_of_a_folder_where_one_stands_imports_nothing(tmp_path, marked):
    run = stranger(tmp_path / "run", model="vast_evil.net")
    (run / "vast_evil.py").write_text(MARK)
    for command in (["--check"], ["--fast-dev-run"], ["--resume", "auto"], []):
        code, _, err = call(run, *command)
        assert code == 2 and "'vast_evil.net' would import code" in err
        assert "pass --trust if you trust it" in err
    assert not marked.exists()
    assert call(run, "--check", "-c", "config.json")[0] == 2  # it has no function `net`
    assert marked.exists()


def test_only_a_folder_that_holds_a_dotted_name_goes_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    before, mine, here = sys.path[:], tmp_path / "mine", stranger(tmp_path / "here")
    mine.mkdir()
    (mine / "vast_loss.py").write_text("import vast_helper\nfrom vast_helper import loss\n")
    (here / "vast_unused.py").write_text("")
    monkeypatch.chdir(here)
    folders = look_in(mine)
    build(VALID, "c", folders=folders)
    build(VALID | {"preprocess": ["jax.numpy.abs"]}, "c", folders=folders)
    assert sys.path == before
    with pytest.raises(UserError, match="No module named 'vast_helper'"):
        build(VALID | {"loss": "vast_loss.loss"}, "c", folders=folders)
    assert sys.path == [*before, str(mine)]
    (here / "vast_helper.py").write_text("def loss(output, target):\n    return output\n")
    build(VALID | {"loss": "vast_loss.loss"}, "c", folders=folders)
    assert sys.path == [*before, str(mine), str(here)]


@pytest.mark.torture
@pytest.mark.parametrize("config", [VALID, VALID | {"loss": "vast_loss.loss"}])
def test_jax_imports_nothing_from_the_folder_where_one_stands(tmp_path, marked, config):
    run = stranger(tmp_path / "run")
    for name in ("jax_plugins/evil.py", "zstandard.py", "filelock.py", "libtpu.py", "etils.py"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(MARK)
    (run / "vast_loss.py").write_text("def loss(output, target):\n    return output.sum()\n")
    (tmp_path / "mine.json").write_text(json.dumps(config | {"training": {"epochs": 1}}))
    command = [sys.executable, str(ROOT / "train.py"), "-c", str(tmp_path / "mine.json")]
    process = subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert not marked.exists()


def test_a_worker_process_imports_nothing_from_the_folder_where_one_stands(
    tmp_path, marked, monkeypatch
):
    """multiprocessing starts `python -c`, which looks for modules in the working folder first."""
    (tmp_path / "multiprocessing.py").write_text(MARK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    worker = Context().Process(target=time.sleep, args=(0,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0 and not marked.exists()
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize("program", ["convert_tflite", "predict"])
def test_a_program_imports_nothing_from_its_own_folder(monkeypatch, program):
    """An export of a stranger's config is written there, in a folder named by its title."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "inference"), *sys.path])
    runpy.run_path(str(ROOT / "inference" / f"{program}.py"), run_name="imported")
    assert sys.path[0] == str(ROOT) and str(ROOT / "inference") not in sys.path


def git(folder, *words):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=b@c.d", *words]
    command[3:3] = ["-c", "core.fsmonitor=false"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_strangers_folder_is_read_without_its_programs(tmp_path, marked):
    """From a branch, from packed references, in another worktree and without a branch.
    Here, as in a clone that was unpacked in the stranger's folder, the `root` has no .git."""
    repository, worktree = stranger(tmp_path / "theirs"), tmp_path / "worktree"
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(repository, *words)
    git(repository, "worktree", "add", "-q", "-b", "topic/x", worktree)
    git(worktree, "commit", "-qm", "2", "--allow-empty")
    git(repository, "config", "core.fsmonitor", f"touch {marked} #")
    (repository / "clone").mkdir()
    (worktree / "clone").mkdir()
    head, topic = git(repository, "rev-parse", "HEAD"), git(worktree, "rev-parse", "HEAD")
    for change in (["status"], ["pack-refs", "--all"], ["checkout", "-q", "--detach"]):
        git(repository, *change)
        assert run_folder.git_commit(repository / "clone") == head
        assert run_folder.git_commit(worktree / "clone") == topic != head
    assert not marked.exists()
    (tmp_path / "secret").write_text("password")
    (repository / ".git" / "HEAD").write_text("ref: ../../secret")
    assert run_folder.git_commit(repository) is None


# What is printed.


EVIL, SHOWN = "\x1b[2Jcat\r\x9b31m\u202e", r"\x1b[2Jcat\r\x9b31m\u202e"


def test_no_name_from_a_file_steers_the_terminal(tmp_path, caplog):
    """In a message of the command line, in one that Python prints, and in a log line."""
    run = stranger(tmp_path / "run", optimizer={"name": "adamw", "args": {EVIL: 1}})
    code, _, err = call(run, "--check")
    assert code == 2 and f"optimizer.args.{SHOWN}: adamw has no such argument" in err
    assert str(RunError(f"{EVIL}: two\nlines")) == f"{SHOWN}: two\nlines"
    with caplog.at_level(logging.INFO, "main"):
        logging.getLogger("main").info("Class %s: %d", EVIL, 3)
    assert caplog.messages == [f"Class {SHOWN}: 3"]


# Files.


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ({"name": "jsonl", "args": {"file": "OUTSIDE"}}, "is written outside the run's folder"),
        ("wandb", "null sends the run away"),
        ({"name": "wandb", "args": {"mode": "online"}}, '"online" sends the run away'),
        ({"name": "mlflow", "args": {"uri": "file:OUTSIDE"}}, "sends the run away"),
        ("trackio", "null writes to Trackio's folder or sends the run away"),
    ],
)
def test_a_run_of_a_strangers_reaches_nothing_beyond_its_folder(
    tmp_path, monkeypatch, tracker, message
):
    name = tracker if isinstance(tracker, str) else tracker["name"]
    if name in ("mlflow", "trackio"):
        pytest.importorskip(name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    outside = str(tmp_path / "profile")
    tracker = json.loads(json.dumps(tracker).replace("OUTSIDE", outside))
    logging_section = {"trackers": ["console", tracker]}
    run = stranger(tmp_path / "run", logging=logging_section, title="$(touch x)")
    code, _, err = call(tmp_path, "--resume", run)
    assert code == 2 and "logging.trackers.1.args." in err and message in err
    assert "pass --trust if you trust it" in err
    assert not os.path.exists(outside)
    config = read(run / "config.json")
    assert not build(config, "c").beyond  # with -c or --trust, and where nothing is trained
    assert len(build(config, "c", trusted=False).beyond) == 1


def test_what_stays_in_the_folder_needs_no_trust(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = ["jsonl", "wandb", {"name": "jsonl", "args": {"file": "logs/all.jsonl"}}, "csv"]
    assert not build(VALID | {"logging": {"trackers": trackers}}, "c", trusted=False).beyond


@pytest.mark.parametrize(
    ("checkpoint", "link"),
    [
        ({"dir": "OUTSIDE"}, None),
        ({"dir": "~/elsewhere"}, None),
        ({"dir": "~"}, None),
        ({"dir": "../outside"}, None),
        ({"dir": "a/../../outside"}, None),
        ({"dir": "a"}, "a"),
        ({}, "saved"),
        ({}, "saved/Valid"),
    ],
)
def test_a_config_of_a_strangers_makes_no_run_outside_of_its_folder(
    tmp_path, monkeypatch, checkpoint, link
):
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("HOME", str(outside))
    checkpoint = json.loads(json.dumps(checkpoint).replace("OUTSIDE", str(outside / "x")))
    here = stranger(tmp_path / "here", checkpoint=checkpoint, title="Valid")
    if link:
        (here / link).parent.mkdir(exist_ok=True)
        (here / link).symlink_to(outside)
    for command in ([], ["--find-lr"], ["--resume", "auto"], ["--fast-dev-run"], ["keep=1"]):
        code, _, err = call(here, *command)
        assert code == 2 and "config.json: checkpoint.dir: its runs would be written to " in err
        assert "name the config with -c, or pass --trust if you trust it" in err
    assert not list(outside.iterdir())


def test_a_run_of_a_strangers_makes_no_new_one_beside_itself(tmp_path):
    """Its own folder is the one that its config names."""
    saved = {"checkpoint": {"dir": str(tmp_path)}, "title": "T", "run_name": "run"}
    code, _, err = call(stranger(tmp_path / "T" / "run", **saved), "--find-lr")
    assert code == 2 and "config.json: checkpoint.dir: its runs would be written to " in err
    assert os.listdir(tmp_path / "T") == ["run"]


def test_whose_checkpoint_dir_is_used(tmp_path):
    """The user's own override, a config named with -c, and a run that is resumed where it lies."""
    elsewhere = str(tmp_path / "elsewhere")
    here = stranger(tmp_path / "here", checkpoint={"dir": elsewhere}, optimizer="no_such")
    (here / "checkpoint-epoch_1.params").write_bytes(b"")
    for command in (
        ["checkpoint.dir=mine"],
        [f"checkpoint.dir={elsewhere}"],
        ['checkpoint={"keep": 2}'],
        ["-c", "config.json"],
        ["--trust"],
        ["--resume", "."],
        ["--resume", "checkpoint-epoch_1.params"],
        ["--evaluate", "checkpoint-epoch_1.params"],
    ):
        code, _, err = call(here, *command)
        assert code == 2 and "no_such" in err and "checkpoint.dir" not in err
    assert call(here, "--check")[2].startswith("config.json: checkpoint.dir: ")


def test_a_run_of_a_strangers_names_no_hosts(tmp_path, monkeypatch):
    contacted = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: contacted.append(given))
    keys = {"coordinator": "evil.invalid:1", "num_processes": 2, "process_id": 1}
    run = stranger(tmp_path / "run", distributed=keys)
    for command in ("--resume", "--evaluate", "--watch"):
        code, _, err = call(tmp_path, command, run)
        assert code == 2 and "distributed: a config that is not known to be your own does" in err
    assert not contacted
    (run / "config.json").write_text(json.dumps(CONFIG))
    override = f"distributed={json.dumps(keys)}"  # the user's own words
    assert read(run / "config.json", [override], trusted=False)["distributed"] == keys


def linked(path, outside, exists):
    """Make a link to a file or a folder outside, which may not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(outside)
    if exists and "." in path.name:
        outside.write_text("before")
    elif exists:
        outside.mkdir()


def unchanged(outside, exists):
    if not exists:
        return not os.path.lexists(outside)
    return outside.read_text() == "before" if outside.is_file() else not os.listdir(outside)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        *("train.log", "metrics.jsonl", "pictures", "profile", "tables/deep", "model/mlp.py"),
        *("model", "user_modules/my.py", "wandb", "mlruns/0/1/params/loss", "former_1"),
        *("checkpoint-epoch_1.orbax/arrays", "wandb/x/logs/debug-folder.log/a"),
    ],
)
def test_a_run_with_a_link_that_leads_out_of_it_is_not_resumed(tmp_path, name, exists):
    run, outside = stranger(tmp_path / "run"), tmp_path / "outside"
    linked(run / name, outside, exists)
    for command in (["--resume", run], ["-c", run / "config.json", "--resume", run]):
        code, _, err = call(tmp_path, *command)
        assert code == 2 and f"{run / name}: is a link that leads out of {run}" in err
    assert unchanged(outside, exists)
    with pytest.raises(UserError, match="is a link that leads out of"):
        Lock(run)  # as `fit` takes it


def test_links_that_stay_inside_and_those_of_wandb_are_allowed(tmp_path):
    logs = tmp_path / "run" / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("offline-run-1")
    (tmp_path / "run" / "circular").symlink_to("circular")
    (logs / "debug-core.log").symlink_to(tmp_path / "core-debug.log")
    check_links(tmp_path / "run")
    (logs / "debug-folder.log").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"debug-folder\.log: is a link that leads out of"):
        check_links(tmp_path / "run")


def stored_sweep(folder, **changes):
    """A sweep of two trials that have not begun."""
    folder.mkdir(parents=True)
    keys = {"keys": {"loader.batch_size": [32, 64]}}
    about = "mine.json", "test_loss", 1, 1
    sweep = Sweep(folder, parse_spec(keys, "grid", folder.name), VALID, *about)
    sweep.save()
    content = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize(
    "name", ["claims", "trial_000", "trial_001/config.json", "comparison.html"]
)
def test_a_sweep_with_a_link_that_leads_out_of_it_is_not_resumed(tmp_path, name):
    outside = tmp_path / "outside"
    folder = stored_sweep(tmp_path / "grid", form="program")
    linked(folder / name, outside, exists=True)
    for command in (["--resume", folder], ["--report", folder]):
        code, out, err = captured(tmp_path, lambda c=command: sweep.main([*map(str, c)]))
        assert code or command[0] == "--report", out
        assert "is a link" in err or (code == 0 and name != "trial_000")
        assert unchanged(outside, exists=True)


def test_a_sweep_of_a_strangers_config_stays_in_the_folder_of_that_config(tmp_path):
    here, outside = stranger(tmp_path / "here", title="T"), tmp_path / "outside"
    linked(here / "saved" / "T" / "grid", outside, exists=True)
    (tmp_path / "grid.json").write_text(json.dumps({"keys": {"seed": [0, 1]}}))
    code, _, err = captured(here, lambda: sweep.main([str(tmp_path / "grid.json")]))
    assert code == 2 and f"its runs would be written to {outside}" in err
    assert unchanged(outside, exists=True)


def test_a_run_that_is_a_link_is_not_found_by_auto(tmp_path):
    mine = stranger(tmp_path / "mine")
    here = stranger(tmp_path / "here", title="T")
    (here / "saved" / "T").mkdir(parents=True)
    (here / "saved" / "T" / "run").symlink_to(mine)
    assert unfinished(here / "saved", "T") == (None, "No run of T to resume")


def test_a_file_is_replaced_or_refused_where_it_is_a_link(tmp_path):
    """By every function that writes files."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("before")
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(outside / "file")
    (tmp_path / "c").symlink_to(outside)
    atomic_write(tmp_path / "a", b"new")
    with pytest.raises(OSError, match="is a link, which is not followed; remove it"):
        append(tmp_path / "b", "new")
    with fresh_folder(tmp_path / "c") as fresh:
        (fresh / "file").write_text("new")
    assert (tmp_path / "a").read_text() == (tmp_path / "c" / "file").read_text() == "new"
    assert (outside / "file").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "outside"]


def test_a_jsonl_file_that_runs_share_may_be_a_link_of_the_users(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    tracker = jsonl(str(tmp_path / "link.jsonl"))
    tracker.start(About(tmp_path, "T", {}, 0))
    tracker.scalars(1, {"a": 1.0})
    assert json.loads((tmp_path / "real.jsonl").read_text())["step"] == 1


def test_the_temporary_file_of_a_write_is_not_followed_if_it_is_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("before")
    (tmp_path / f".config.json.{os.getpid()}.tmp").symlink_to(outside)
    atomic_write(tmp_path / "config.json", b"new")
    assert outside.read_text() == "before"
    assert (tmp_path / "config.json").read_bytes() == b"new"


def test_a_command_that_is_printed_to_be_copied_is_quoted(tmp_path):
    folder = tmp_path / "$(touch x)"
    folder.mkdir()
    for name in ("config.json", "environment.json"):
        (folder / name).write_text("{}")
    (folder / "checkpoint-epoch_1.params").write_text("")
    with pytest.raises(UserError, match=r"--resume '.*/\$\(touch x\)'$"):
        run_folder.named_folder(folder)
    for search in (load, write_report, run_folder_of):
        with pytest.raises(UserError, match=r"did you mean '.*/\$\(touch x\)'\?"):
            search(tmp_path)
    tracker = Wandb(None, None, None, None, (), None, "allow", "offline")
    tracker.run = SimpleNamespace(dir=f"{folder}/files")
    assert tracker.sync_command() == f"wandb sync '{folder}'"


# Sizes.


@pytest.fixture
def run(tmp_path):
    return save(tmp_path / "run")


def huge(path, size=2**40):
    """A sparse file, which takes a few KiB on the disk, and of which an archive says its size."""
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "why"), [(pipe, "it is a pipe or a device"), (huge, "it has 1024.0 GiB, and at most")]
)
def test_pipes_and_huge_files_are_not_read(run, make, why):
    """Each command names the file and the reason, and neither waits nor fills the memory."""
    sound = {name: (run / name).read_bytes() for name in ("config.json", "metrics.jsonl")}
    for name, read_it in {
        "config.json": lambda: read(run / "config.json"),
        "metrics.jsonl": lambda: epoch_rows(run, 1),
        "evaluations.jsonl": lambda: rows(run / "evaluations.jsonl"),
        "verification.json": lambda: read_report(run / "verification.json"),
        "metrics.csv": lambda: start_again(csv("metrics.csv"), run),
        "tracked.jsonl": lambda: start_again(jsonl(), run),
        "gradient_spikes.jsonl": lambda: cut_back(
            SimpleNamespace(folder=run), "gradient_spikes.jsonl", 1
        ),
        "x.npz": lambda: read_arrays(run / "x.npz", "x", SimpleNamespace(inputs={"x": None})),
    }.items():
        if (make, name) == (huge, "x.npz"):
            continue  # a large file of arrays is mapped into memory
        make(run / name)
        with pytest.raises((UserError, RunError, OSError)) as caught:
            read_it()
        assert why in str(caught.value)
        assert (
            name in str(caught.value)
            or name in ("metrics.csv", "tracked.jsonl")
            or (name == "gradient_spikes.jsonl")
        )
        (run / name).unlink()
    for name, content in sound.items():
        (run / name).write_bytes(content)
    make(run / "environment.json")
    [line] = run_folder.changes_of_environment(run, ROOT)
    assert "cannot be read, so what has changed since is unknown" in line
    make(run / "evaluator.json")
    assert protected(run, {"checkpoint-epoch_1"}) == {"checkpoint-epoch_1"}
    make(run / "wandb_id")
    with pytest.raises(OSError, match=why):
        Wandb(None, None, None, None, (), None, "allow", "offline").saved_id(run / "wandb_id")


def test_a_report_shows_nothing_that_links_lead_to(run, tmp_path):
    """The page may be passed on, and a link in a stranger's run would add a file of the user's."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "xyzzy"}')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "worst-a.json").write_text('{"examples": [{"label": "xyzzy"}]}')
    (tmp_path / "elsewhere" / "a.png").write_bytes(png(np.zeros((8, 8), np.uint8)))
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    (run / "pictures").symlink_to(tmp_path / "elsewhere")
    (run / "circular").symlink_to(run / "circular")
    page = report(run)
    assert not page.all("img")
    assert not {"xyzzy", "worst-a", "a.png"} & set(re.findall(r"[\w.-]+", page.source))
    assert page.source.count("is a link, which is not followed") == 4


def test_a_line_without_end_and_too_many_names_are_bounded(run, monkeypatch):
    monkeypatch.setattr("utils.files.LONGEST_LINE", 1000)
    monkeypatch.setattr(report_rows, "MOST_NAMES", 20)
    names = {f"name_{i}": 1.0 for i in range(30)}
    row = {"epoch": 1, "step": 3}
    long = json.dumps(row | {"x" * 5000: 1})
    text = "".join(f"{line}\n" for line in [long, json.dumps(row | names), json.dumps(row)])
    (run / "metrics.jsonl").write_text(text)
    metrics = read_metrics(run / "metrics.jsonl")
    assert metrics.problem == "1 line of metrics.jsonl cannot be read and is left out"
    assert len(metrics.within) <= 50 and not any(name.startswith("xxx") for name in metrics.within)
    (run / "metrics.jsonl").write_text(
        text + "".join(f'{{"epoch": 1, "step": 4, "n{i}": 1}}\n' for i in range(90))
    )
    assert len(read_metrics(run / "metrics.jsonl").within) == len(metrics.within)
    last = {"end_of_epoch": True, "test_loss": 0.5}  # bounded on its own
    (run / "metrics.jsonl").write_text(f"{json.dumps(row | names)}\n{json.dumps(row | last)}\n")
    assert set(read_metrics(run / "metrics.jsonl").epochs) == {"test_loss"}
    (run / "metrics.jsonl").write_text(text)
    monkeypatch.setattr(report_rows, "MOST_BYTES", 100)
    problem = read_metrics(run / "metrics.jsonl").problem
    assert problem == "metrics.jsonl is too large; only its beginning is shown"


def test_a_checkpoint_larger_than_the_memory_is_refused_with_the_reason(tmp_path):
    path, size = tmp_path / "checkpoint-epoch_1.params", 2**43
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"a": entry}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(
        UserError, match=r"epoch_1\.params: would need 8192\.0 GiB, and this machine"
    ):
        safetensor_file.read(path)


def test_arrays_for_predict_that_unpack_to_more_than_the_memory_are_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1000, 1000)))
    monkeypatch.setattr("utils.main_memory", lambda: 2**20)
    with pytest.raises(UserError, match=r"x\.npz: x: would need 7\.6 MiB, and this machine has 1"):
        read_arrays(tmp_path / "x.npz", "x", SimpleNamespace(inputs={"image": None}))


def test_a_checkpoint_of_an_evaluators_file_is_neither_a_pattern_nor_elsewhere(run):
    names = ["../../x", "**/x", "checkpoint-*", 3, None, "checkpoint-epoch_1/../x"]
    names += ["checkpoint-epoch_1", "checkpoint-step_20"]
    text = "".join(f"{json.dumps({'checkpoint': name, 'metrics': {}})}\n" for name in names)
    (run / "evaluations.jsonl").write_text(f"[]\n{text}torn")
    assert [row["checkpoint"] for row in rows(run / "evaluations.jsonl")] == names[-2:]
    assert (run / "evaluations.jsonl").read_text().endswith("torn\n")


def start_again(tracker, run):
    tracker.start(About(run, "T", {}, 5))
