"""Downloads: the first good mirror is used, every error is named, no partial file or long wait."""

import gzip
import hashlib
import io
import subprocess
import sys
import threading
import time

import pytest

from data_loader.download import Unreachable, fetch
from utils import RunError

CONTENT = bytes(range(256)) * 400
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PACKED = gzip.compress(CONTENT)


@pytest.mark.parametrize("digest", [MD5, SHA256, None])
@pytest.mark.parametrize("served", [CONTENT, PACKED], ids=["plain", "gz"])
def test_a_file_is_saved_as_received_and_checked_unpacked(mirror, tmp_path, served, digest):
    mirror.pages["/file"] = served
    fetch([mirror.url + "file"], tmp_path / "new" / "file", digest)
    assert (tmp_path / "new" / "file").read_bytes() == served


def test_the_next_mirror_is_tried_after_a_404_and_wrong_content(mirror, tmp_path):
    mirror.pages |= {"/wrong": b"<html>log in first</html>", "/good": CONTENT}
    fetch([mirror.url + "none", mirror.url + "wrong", mirror.url + "good"], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert mirror.requests == ["/none", "/wrong", "/good"]


def test_a_broken_connection_is_retried(mirror, tmp_path):
    def fails_once(handler):
        mirror.pages["/file"] = CONTENT
        mirror.send(handler, CONTENT[:1000], length=len(CONTENT))

    mirror.pages["/file"] = fails_once
    fetch([mirror.url + "file"], tmp_path / "file", MD5, timeout=1)
    assert (tmp_path / "file").read_bytes() == CONTENT and len(mirror.requests) == 2


def serve(data, length=None, then_hang=False):
    def page(mirror, handler):
        mirror.send(handler, data, length)
        if then_hang:
            mirror.stop.wait(10)

    return page


@pytest.mark.parametrize(
    ("page", "kind", "message"),
    [
        (None, Unreachable, "404"),
        (serve(CONTENT[:1000], length=len(CONTENT)), Unreachable, "1000 of 102400 bytes"),
        (serve(b"other"), RunError, f"expected {MD5}"),
        (serve(PACKED[:-20]), RunError, "damaged gzip"),
        (serve(PACKED[:50] + b"?" * 60 + PACKED[110:]), RunError, "damaged gzip"),
        (lambda mirror, handler: mirror.stop.wait(10), Unreachable, "no response in 0.3 s"),
        (serve(CONTENT[:9], length=99, then_hang=True), Unreachable, "timed out"),
    ],
    ids=["404", "truncated", "wrong", "short gz", "corrupt gz", "silent", "stalled"],
)
def test_every_mirror_is_named_with_its_error_and_no_file_is_left(
    mirror, tmp_path, page, kind, message
):
    if page:
        mirror.pages["/a"] = mirror.pages["/b"] = lambda handler: page(mirror, handler)
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        fetch([mirror.url + "a", mirror.url + "b"], tmp_path / "file", MD5, timeout=0.3)
    assert time.monotonic() - start < 4
    assert type(caught.value) is kind  # only Unreachable may be replaced by a stand-in
    first, a, b = str(caught.value).splitlines()
    assert first.startswith("file could not be downloaded")
    assert mirror.url + "a" in a and message in a
    assert mirror.url + "b" in b and message in b
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_end_is_given_up(mirror, tmp_path):
    def endless(handler):
        mirror.send(handler, b"", length=2**50)
        while not mirror.stop.wait(0):
            handler.wfile.write(bytes(10_000))

    mirror.pages["/file"] = endless
    with pytest.raises(RunError, match=r"returned more than 97\.7 KiB"):
        fetch([mirror.url + "file"], tmp_path / "file", MD5, most=100_000)


def test_gzip_data_that_unpacks_to_too_much_is_given_up(mirror, tmp_path):
    mirror.pages |= {"/bomb": gzip.compress(bytes(2**24)), "/good": PACKED}
    fetch([mirror.url + "bomb", mirror.url + "good"], tmp_path / "file", MD5, most=200_000)
    assert (tmp_path / "file").read_bytes() == PACKED
    with pytest.raises(RunError, match=r"returned gzip data of more than 195\.3 KiB"):
        fetch([mirror.url + "bomb"], tmp_path / "other", MD5, most=200_000)


def test_a_server_that_sends_too_slowly_is_given_up(mirror, tmp_path):
    def slow(handler):
        mirror.send(handler, b"", length=10**6)
        while not mirror.stop.wait(0.02):
            handler.wfile.write(b"x")

    mirror.pages["/file"] = slow
    with pytest.raises(Unreachable, match="too slow"):
        fetch([mirror.url + "file"], tmp_path / "file", MD5, timeout=0.3)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(mirror, tmp_path, monkeypatch, terminal):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    mirror.pages["/file"] = CONTENT
    fetch([mirror.url + "file"], tmp_path / "file")
    assert ("102k/102k" in screen.getvalue()) is terminal
    assert terminal or screen.getvalue() == ""


def test_a_kill_during_a_download_leaves_no_file(mirror, tmp_path):
    half_sent = threading.Event()

    def half(handler):
        mirror.send(handler, CONTENT[:5000], length=len(CONTENT))
        half_sent.set()
        mirror.stop.wait(20)

    mirror.pages["/file"] = half
    arguments = f"[{mirror.url + 'file'!r}], {str(tmp_path / 'file')!r}, timeout=20"
    code = f"from data_loader.download import fetch; fetch({arguments})"
    child = subprocess.Popen([sys.executable, "-c", code])
    assert half_sent.wait(20)
    time.sleep(0.1)
    child.kill()
    child.wait()
    assert list(tmp_path.iterdir()) == []
