"""train.py when something interrupts it or is missing: signals, a full disk, no network."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, TWO_EPOCHS, start, wait_for_line


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(TWO_EPOCHS))
    return tmp_path


def run_code(folder, code, *arguments):
    """Run Python code that calls train.main with these arguments."""
    command = [sys.executable, "-c", code, "-c", "small.json", *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_exits_with_75(small, number):
    epochs = ["training.epochs=100000", "checkpoint.every_epochs=100000"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = start(small, "-c", "small.json", *epochs, "checkpoint.monitor=null")
    signal.signal(signal.SIGHUP, before)
    wait_for_line(process, "STARTING EPOCH 3")
    process.send_signal(number)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert time.monotonic() - sent < 20
    (folder,) = (small / "saved" / "Small").iterdir()
    assert list(folder.glob("checkpoint-*.params"))


@pytest.mark.slow
def test_a_run_under_nohup_survives_the_end_of_its_terminal(small):
    arguments = ["-c", "small.json", "training.epochs=100000", "checkpoint.every_epochs=100000"]
    command = ["nohup", sys.executable, str(ROOT / "train.py"), *arguments]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=small, text=True, **pipes)
    wait_for_line(process, "STARTING EPOCH 3")
    process.send_signal(signal.SIGHUP)
    wait_for_line(process, "STARTING EPOCH 5")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "Stopped by SIGTERM" in out


@pytest.mark.slow
def test_a_signal_during_the_first_compilation_ends_the_process_at_once(small, monkeypatch):
    """The exit code says that the same command can start the run, so its folder is gone."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    model = ["model.name=convnext", "model.args={}"]
    process = start(small, "-c", "small.json", "title=Early", "run_name=one", *model)
    wait_for_line(process, "steps per epoch")  # the loop has begun
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 3
    assert err.endswith("Interrupted; nothing was saved\n")  # XLA may warn of a slow compilation
    assert process.returncode == 75
    assert not (small / "saved" / "Early" / "one").exists()


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(small):
    process = start(small, "-c", "small.json", "title=Twice", "training.epochs=100000")
    wait_for_line(process, "STARTING EPOCH 3")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert time.monotonic() - sent < 3
    assert process.returncode == 75


def test_a_signal_ends_a_fast_dev_run_and_leaves_no_folder(small):
    code = """
import os, pathlib, signal, sys, tempfile
import train
tempfile.tempdir = str(pathlib.Path("temporary").absolute())
os.mkdir(tempfile.tempdir)
build = train.build
def interrupted(*arguments, **keywords):
    if os.listdir(tempfile.tempdir):
        os.kill(os.getpid(), signal.SIGTERM)
    return build(*arguments, **keywords)
train.build = interrupted
sys.exit(train.main())
"""
    process = run_code(small, code, "--fast-dev-run")
    assert process.returncode == 75 and "nothing was saved" in process.stderr, process.stderr
    assert not list((small / "temporary").iterdir())


@pytest.mark.slow
def test_a_signal_while_the_report_is_written_leaves_no_part_of_it(small):
    code = """
import os, signal, sys
import train
from training.report import page
def interrupted(folders):
    (folders[0] / f".report.html.{os.getpid()}.tmp").write_text("half")
    os.kill(os.getpid(), signal.SIGTERM)
page.write_report = interrupted
sys.exit(train.main())
"""
    process = run_code(small, code)
    assert process.returncode == 75 and "can be resumed" in process.stderr, process.stderr
    (folder,) = (small / "saved" / "Small").iterdir()
    assert not list(folder.glob(".*"))


@pytest.mark.torture
def test_two_runs_of_one_title_in_the_same_second_get_two_folders(small):
    arguments = ["-c", "small.json", "title=Twins", "training.epochs=1"]
    processes = [start(small, *arguments) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    folders = list((small / "saved" / "Twins").iterdir())
    assert len(folders) == 2
    assert all((folder / "finished.json").exists() for folder in folders)


@pytest.mark.slow
def test_a_full_disk_exits_with_1_and_one_message(small):
    """A limit on the size of files simulates the full disk; no partial checkpoint is left."""
    limited = (
        "import resource, sys, train\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    done = run_code(small, limited)
    assert done.returncode == 1, done.stderr
    assert "checkpoint-epoch_1.params: cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (folder,) = (small / "saved" / "Small").iterdir()
    assert not list(folder.glob("*.params")) and not list(folder.glob(".*"))


@pytest.mark.slow
def test_without_a_network_drawn_digits_replace_mnist_or_the_run_fails(small):
    """The test makes every host name unknown, so the result does not depend on the machine."""
    offline = (
        "import socket, sys, train\n"
        "def no(*a, **k): raise socket.gaierror(-2, 'no network')\n"
        "socket.getaddrinfo = no\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )

    def attempt(mode):
        data = json.dumps({"name": "mnist", "args": {"dir": "nothing", "offline": mode}})
        return run_code(small, offline, f"data={data}", "training.epochs=1")

    with_digits = attempt("digits")
    assert with_digits.returncode == 0, with_digits.stderr
    assert "NOT MNIST" in with_digits.stdout
    (folder,) = (small / "saved" / "Small").iterdir()
    environment = json.loads((folder / "environment.json").read_text())
    assert "stand-in for mnist" in environment["data"]["train"]["source"]
    assert "stand-in for mnist" in (folder / "train.log").read_text()
    before = time.monotonic()
    failed = attempt("error")
    assert failed.returncode == 1
    assert time.monotonic() - before < 15
    assert "Put the files" in failed.stderr
    assert len(list((small / "saved" / "Small").iterdir())) == 1  # no folder for the failed run
    assert "Traceback" not in failed.stderr


CLOSINGS = ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"]


@pytest.mark.torture
@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_run_trains_with_closed_streams(small, closing):
    shell = ["sh", "-c", f'exec "$0" "$@" {closing}', sys.executable, str(ROOT / "train.py")]
    environment = os.environ | {"XDG_CACHE_HOME": str(small / "cache")}
    done = subprocess.run(
        [*shell, "-c", "small.json"],
        cwd=small, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (small / "saved" / "Small").iterdir()
    assert (folder / "finished.json").exists() and (folder / "report.html").exists()
