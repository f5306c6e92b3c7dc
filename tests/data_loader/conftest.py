"""What the data tests share: a local web server, small IDX files, captured warnings, a cache."""

import gzip
import logging
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data_loader.base import Arrays
from data_loader.digits import draw
from data_loader.records import write_records


class Mirror:
    """A local web server; `pages` maps a path to bytes or to a function of the request handler."""

    def __init__(self):
        self.pages = {}
        self.requests = []  # the requested paths, in order
        self.stop = threading.Event()  # ends the pages that hang
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                mirror.requests.append(self.path)
                page = mirror.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                elif callable(page):
                    page(self)
                else:
                    mirror.send(self, page)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def send(self, handler, data, length=None):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)


@pytest.fixture
def mirror():
    mirror = Mirror()
    thread = threading.Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.stop.set()
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder in place of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rawtree"


@pytest.fixture
def warnings_seen(monkeypatch):
    """The messages that are logged as warnings to the logger `main`."""
    texts = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("main"), Keep(logging.WARNING)
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


def idx_bytes(array):
    """An IDX file: two zeros, 8 for uint8, the rank, each length as big-endian int32, the bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_files():
    """({file: unpacked bytes}, {file: array}) of 30 training and 20 test images."""
    random = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": random.integers(0, 256, (30, 28, 28)),
        "train-labels-idx1-ubyte": np.arange(30) % 10,
        "t10k-images-idx3-ubyte": random.integers(0, 256, (20, 28, 28)),
        "t10k-labels-idx1-ubyte": np.arange(20) % 10,
    }
    return {file: idx_bytes(array) for file, array in arrays.items()}, arrays


@pytest.fixture
def idx_folder(tmp_path, idx_files):
    """A folder with the four IDX files, two of them compressed."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for i, (file, data) in enumerate(idx_files[0].items()):
        (folder / (file + ".gz" * (i % 2))).write_bytes(gzip.compress(data) if i % 2 else data)
    return folder


@pytest.fixture(scope="session")
def tf_folder(tmp_path_factory):
    """A folder of TFRecord files written by TensorFlow, and .npz files with what they contain.

    500 training and 100 test digits (digits.npz), and records with varied features (varied.npz).
    """
    folder = tmp_path_factory.mktemp("records")
    x, y = draw(0, 600)
    np.savez(folder / "digits.npz", x=x, y=y)
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("tfrecords.py")), str(folder)]
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def record_folder(tmp_path_factory):
    """ArrayRecord files: 500 training digits in three files, 100 test digits in one."""
    folder = tmp_path_factory.mktemp("array_records")
    x, y = draw(0, 600)
    write_records(folder / "train", Arrays(x[:500], y[:500]), shards=3)
    write_records(folder / "test", Arrays(x[500:], y[500:]))
    return folder


def wait_until(condition):
    """Whether a condition becomes true within 10 seconds."""
    deadline = time.monotonic() + 10
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


@pytest.fixture
def no_shared_memory_left():
    """Fails a test after which more folders of workers exist in shared memory than before."""

    def folders():
        return set(Path("/dev/shm").glob("rawtree-*"))

    before = folders()
    yield
    assert wait_until(lambda: not folders() - before)
