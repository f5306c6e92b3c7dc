"""Weights & Biases: offline runs read from their files, and runs without a login or network."""

import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from training.watching.trackers.tensorboard import tensorboard
from training.watching.trackers.wandb_run import wandb as wandb_tracker
from utils import UserError

ROOT = Path(__file__).resolve().parents[4]

# One process, since starting wandb takes longest: an offline run that resumes; then online runs
# without a login, without a network, and with a server that stops.
PROGRAM = """
import json, logging, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
import numpy as np
from training.watching.publish import About, Publisher
from training.watching.trackers import wandb_run

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=open("log", "w"))
config = {"seed": 3, "model": {"name": "mlp", "args": {"sizes": [4, 2]}}}

def publisher(folder, step, **arguments):
    Path(folder).mkdir(exist_ok=True)
    about = About(Path(folder).absolute(), "Title", config, step)
    return Publisher([wandb_run.wandb(project="toys", **arguments)], about)

run = publisher("run_a", 0, mode="offline", tags=("small",), group="sizes")
run.scalars(1, {"train_loss": 0.5, "learning_rate": 1e-3})
run.scalars(2, {"train_loss": float("nan")})
run.image(2, "grid", np.zeros((3, 5), np.uint8))
run.histogram(2, "weight", np.array([0.0, 1.0, 1.0]))
run.text(2, "samples", "Once <b>\\n upon")
assert run.close({"test_loss": 0.75})
run = publisher("run_a", 2, mode="offline")
run.scalars(3, {"train_loss": 0.25})
assert run.close({"test_loss": 0.125})
config["run_name"] = "chosen-name"
publisher("run_e", 0, mode="offline").close({})
config["run_name"] = "no id: a/b"
publisher("run_f", 0, mode="offline").close({})
del config["run_name"]
publisher("run_b", 0, mode="disabled", id="mine").close({"test_loss": 1.0})

def online(folder):
    began = time.monotonic()
    run = publisher(folder, 0, mode="online")
    for step in range(10):
        run.scalars(step, {"train_loss": 0.5})
    assert time.monotonic() - began < 1, "the caller had to wait"
    return run

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        project = {"name": "toys", "entity": {"name": "me"}}
        bucket = {"id": "1", "name": request.get("variables", {}).get("name"), "project": project}
        new = "RunResumeStatus" in request.get("query", "")
        data = {"model": None} if new else {"upsertBucket": {"bucket": bucket, "inserted": True}}
        reply = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass

wandb_run.START_SECONDS = wandb_run.FINISH_SECONDS = 1
for key in ("", "k" * 40):
    os.environ["WANDB_API_KEY"] = key
    run = online("run_c")
    run.channels[0].thread.join(30)
    assert run.close({})
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
run = online("run_d")
while not Path("run_d/wandb_id").exists() and run.channels[0].open:
    time.sleep(0.01)
server.shutdown()
server.server_close()
began = time.monotonic()
assert run.close({})
assert time.monotonic() - began < 5
print("end", flush=True)
"""


def records(folder):
    """All records of an offline run's file, which has blocks of 32 KiB, as in LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])  # after a checksum
        fragment = data[at + 7 : at + 7 + length]
        assert len(fragment) == length
        record += fragment
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last fragment
            yield Record.FromString(record)
            record = b""


def contents(folder):
    """(the run's record, its config, the rows of its history, its summary)"""
    messages = list(records(folder))
    run = next(record.run for record in messages if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    history = [values(record.history.item) for record in messages if record.HasField("history")]
    summary = {}
    for record in messages:
        summary |= values(record.summary.update)
    return run, config, history, summary


def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which PROGRAM ran, on a terminal, without a login and without a server."""
    folder = tmp_path_factory.mktemp("wandb")
    environment = {k: value for k, value in os.environ.items() if not k.startswith("WANDB_")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment |= {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "TERM": "xterm",
    }
    terminal, end = os.openpty()
    command = [sys.executable, "-c", PROGRAM, port]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=end, stdout=end, stderr=end
    )
    assert process.wait(60) == 0, os.read(terminal, 10000).decode()
    os.close(end)
    (folder / "output").write_bytes(os.read(terminal, 10000))
    return folder


def offline_runs(folder):
    return sorted((folder / "run_a" / "wandb").glob("offline-run-*"), key=os.path.getmtime)


@pytest.mark.slow
def test_an_offline_run_holds_values_config_and_pictures(folder):
    run, config, history, summary = contents(offline_runs(folder)[0])
    assert (run.project, run.display_name, run.run_group) == ("toys", "run_a", "sizes")
    assert list(run.tags) == ["small"]
    assert {name: value for name, value in config.items() if name != "_wandb"} == {
        "seed": 3,
        "model/name": "mlp",
        "model/args/sizes": "[4, 2]",
    }
    assert [row["step"] for row in history] == [1, 2, 2, 2, 2]
    assert (history[0]["train_loss"], history[0]["learning_rate"]) == (0.5, 1e-3)
    assert math.isnan(history[1]["train_loss"])
    image = [history[2][f"grid/{key}"] for key in ("_type", "width", "height")]
    assert image == ["image-file", 5, 3]
    path = offline_runs(folder)[0] / "files" / history[2]["grid/path"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert history[3]["weight/_type"] == "histogram" and sum(history[3]["weight/values"]) == 3
    assert history[4]["samples/_type"] == "html-file"
    path = offline_runs(folder)[0] / "files" / history[4]["samples/path"]
    assert "Once &lt;b&gt;\n upon" in path.read_text()
    assert summary["test_loss"] == 0.75


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_at_weights_and_biases(folder):
    first, second = offline_runs(folder)
    ids = [contents(each)[0].run_id for each in (first, second)]
    assert ids == 2 * [(folder / "run_a" / "wandb_id").read_text().strip()]
    _, _, history, summary = contents(second)
    assert [(row["step"], row["train_loss"]) for row in history] == [(3, 0.25)]
    assert summary["test_loss"] == 0.125


@pytest.mark.slow
def test_a_chosen_name_of_a_run_is_its_id_where_it_can_be_one(folder):
    ids = [(folder / run / "wandb_id").read_text().strip() for run in ("run_e", "run_f")]
    assert ids[0] == "chosen-name"
    assert re.fullmatch(r"\w{8}", ids[1])  # drawn by wandb


def test_a_disabled_run_leaves_nothing_behind(folder):
    assert list((folder / "run_b").iterdir()) == []


def test_there_is_no_prompt_and_no_output(folder):
    assert (folder / "output").read_text().split() == ["end"]


def test_without_login_or_network_the_tracker_is_dropped_once(folder):
    lines = [line for line in (folder / "log").read_text().splitlines() if "dropped" in line]
    assert len(lines) == 3
    dropped = "tracker wandb: dropped at step 0: "
    login = "there is no login: run `wandb login`, or set mode to offline"
    assert lines[0].startswith(dropped + login)
    assert lines[1].startswith(dropped + "CommError: ")
    rest = "not everything was sent within 1 s; send it with: wandb sync"
    assert re.search(rf"dropped at step 9: {rest} .*/run_d/wandb/run-\S+;", lines[2])
    command = lines[2].split(": ")[-1].split(";")[0]
    history = contents(Path(command.removeprefix("wandb sync ")))[2]
    assert [row["step"] for row in history] == list(range(10))  # nothing is lost


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"id": "a/b"}, "id: must be"),
        ({"id": ""}, "id: must be"),
        ({"resume": "must"}, "resume: .* give its id"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        wandb_tracker(**arguments)


def test_a_missing_package_is_refused_at_once(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as any offline run leaves behind
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "tensorboardX"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    install = r"pip install -r training/optional\.txt$"
    with pytest.raises(UserError, match=f"^wandb: needs the package wandb: {install}"):
        wandb_tracker()
    with pytest.raises(UserError, match=f"^tensorboard: needs the package tensorboardX: {install}"):
        tensorboard()
