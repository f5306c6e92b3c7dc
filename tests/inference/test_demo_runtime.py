"""How ONNX Runtime Web is downloaded and cached, with a fake npm instead of a network."""

import stat
import tarfile

import pytest

from inference.demo import runtime
from utils import UserError


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """npm(text) makes a fake npm of this shell script; the cache is empty."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def write(text):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return write


def test_without_npm_the_error_says_what_to_install(npm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime.main() == 2
    error = capsys.readouterr().err
    assert "npm is not installed; install Node.js" in error
    assert str(tmp_path / "cache") in error and runtime.PROGRAM in error


def test_a_failed_download_reports_npms_error(npm):
    npm("echo npm warn old >&2; echo npm error network no way to the registry >&2; exit 1")
    message = r"npm could not download it \(network no way to the registry\)"
    with pytest.raises(UserError, match=message):
        runtime.runtime()


def test_a_download_is_checked_and_cached(npm, tmp_path, monkeypatch):
    contents = {runtime.SCRIPT: b"script", runtime.PROGRAM: b"program"}
    (tmp_path / "package" / "dist").mkdir(parents=True)
    for name, content in contents.items():
        (tmp_path / "package" / "dist" / name).write_bytes(content)
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    npm(f"cp {tmp_path / 'p.tgz'} .")
    with pytest.raises(UserError, match="is not the one of"):
        runtime.runtime()
    monkeypatch.setattr(runtime, "intact", lambda name, content: content == contents[name])
    assert runtime.runtime() == contents
    npm("exit 1")
    assert runtime.runtime() == contents  # from the cache
    (runtime.cache_folder() / runtime.SCRIPT).write_bytes(b"scr")
    with pytest.raises(UserError, match="exit code 1"):  # a damaged file is downloaded again
        runtime.runtime()
