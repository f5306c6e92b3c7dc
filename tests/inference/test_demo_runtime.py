"""How the runtime of the browser's page comes from npm, by an npm that only plays one: no test asks a network."""

import stat
import tarfile

import pytest

from inference.demo import runtime
from utils import UserError


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """An empty cache, and an npm that does what a test writes into it."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def write(text):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return write


def test_without_npm_it_says_what_to_do(npm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime.main() == 2
    told = capsys.readouterr().err
    assert (
        "npm is not installed; install Node.js" in told
        and str(tmp_path / "cache") in told
        and runtime.PROGRAM in told
    )


def test_a_failed_download_says_what_npm_said(npm):
    npm("echo npm warn old >&2; echo npm error network no way to the registry >&2; exit 1")
    with pytest.raises(
        UserError, match=r"npm could not download it \(network no way to the registry\)"
    ):
        runtime.runtime()


def test_what_was_downloaded_is_kept_and_checked(npm, tmp_path, monkeypatch):
    contents = {runtime.SCRIPT: b"script", runtime.PROGRAM: b"program"}
    (tmp_path / "package" / "dist").mkdir(parents=True)
    for name, content in contents.items():
        (tmp_path / "package" / "dist" / name).write_bytes(content)
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    npm(f"cp {tmp_path / 'p.tgz'} .")
    with pytest.raises(UserError, match="is not that of"):
        runtime.runtime()
    monkeypatch.setattr(runtime, "intact", lambda name, content: content == contents[name])
    assert runtime.runtime() == contents
    npm("exit 1")
    assert runtime.runtime() == contents  # of the cache
    (runtime.place() / runtime.SCRIPT).write_bytes(b"scr")
    with pytest.raises(UserError, match="exit code 1"):  # what is damaged is fetched again
        runtime.runtime()
