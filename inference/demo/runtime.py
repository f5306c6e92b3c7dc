"""ONNX Runtime for browsers: two files of npm's onnxruntime-web, kept in the user's cache.

`python -m inference.demo.runtime` downloads them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from utils import BAD_INPUT, DONE, RunError, UserError
from utils.files import atomic_write

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
SCRIPT, PROGRAM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
DIGESTS = {  # SHA-256, so that a page always contains the files that were tested
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    PROGRAM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
MOST_BYTES = 2**28  # read of each file; a longer one has another digest


def runtime() -> dict[str, bytes]:
    """{name: bytes} of the script and the program, downloaded with npm if they are not cached."""
    return cached() or download()


def cached() -> dict[str, bytes] | None:
    """The cached files; None if one is missing or damaged."""
    files = {name: cache_folder() / name for name in DIGESTS}
    if not all(file.is_file() for file in files.values()):
        return None
    contents = {name: file.read_bytes() for name, file in files.items()}
    return contents if all(intact(name, content) for name, content in contents.items()) else None


def download() -> dict[str, bytes]:
    """Download the package with npm and cache the files that a page needs."""
    npm = shutil.which("npm")
    if npm is None:
        raise unavailable("npm is not installed", "install Node.js, which includes npm")
    with tempfile.TemporaryDirectory() as folder:
        contents = unpack(pack(npm, Path(folder)))
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{cache_folder()}: cannot be created: {error.strerror}; "
            "set XDG_CACHE_HOME to another cache"
        ) from error
    for name, content in contents.items():
        atomic_write(cache_folder() / name, content)
    return contents


def pack(npm: str, folder: Path) -> Path:
    """Download the package's archive; npm compares it with the registry's checksum."""
    options = ["--pack-destination", str(folder), "--ignore-scripts", "--fetch-retries=1"]
    process = subprocess.run(
        [npm, "pack", f"{PACKAGE}@{VERSION}", *options],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
    )
    archive = next(folder.glob("*.tgz"), None)
    if process.returncode or archive is None:
        errors = re.findall(r"^npm (?:error|ERR!) +(.+)", process.stderr, re.MULTILINE)
        why = "; ".join(errors[:4]) or f"exit code {process.returncode}"
        raise unavailable(f"npm could not download it ({why})", "fix that")
    return archive


def unpack(archive: Path) -> dict[str, bytes]:
    """{name: bytes} of the archive's files that a page needs."""
    with tarfile.open(archive) as package:
        files = {name: package.extractfile(f"package/dist/{name}") for name in DIGESTS}
        contents = {name: file.read(MOST_BYTES) for name, file in files.items() if file}
    for name, content in contents.items():
        if not intact(name, content):
            raise unavailable(
                f"the {name} that npm downloaded is not the one of {VERSION}",
                "check which registry npm uses",
            )
    return contents


def intact(name: str, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == DIGESTS[name]


def cache_folder() -> Path:
    """The folder of this version in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rawtree" / f"{PACKAGE}-{VERSION}"


def unavailable(why: str, fix: str) -> UserError:
    return UserError(
        f"a page that runs the model needs {PACKAGE} {VERSION}, but {why}; {fix}, "
        f"or copy {SCRIPT} and {PROGRAM} from the package's dist folder to {cache_folder()}"
    )


def main() -> int:
    try:
        runtime()
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(cache_folder())
    return DONE


if __name__ == "__main__":
    sys.exit(main())
