"""ONNX Runtime for browsers: of npm's package onnxruntime-web the script and the program, kept in the user's cache.

`python -m inference.demo.runtime` fetches it.
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

from utils import BAD_INPUT, DONE, RunError, UserError, atomic_write

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
SCRIPT, PROGRAM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
DIGESTS = {  # sha256: what a page carries to others is what was tested, whoever served it
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    PROGRAM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}


def runtime():
    """{name: bytes} of the script and the program, fetched with npm where the cache lacks them."""
    return kept() or fetch()


def kept():
    """The files in the cache; None where one is missing or is not what was fetched."""
    files = {name: place() / name for name in DIGESTS}
    if not all(file.is_file() for file in files.values()):
        return None
    contents = {name: file.read_bytes() for name, file in files.items()}
    return contents if all(intact(name, content) for name, content in contents.items()) else None


def fetch():
    """Have npm download the package, and keep what a page needs of it."""
    npm = shutil.which("npm")
    if npm is None:
        raise missing("npm is not installed", "install Node.js, which brings npm")
    with tempfile.TemporaryDirectory() as folder:
        contents = unpack(download(npm, Path(folder)))
    try:
        place().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{place()}: cannot be made: {error.strerror}; XDG_CACHE_HOME names another cache"
        ) from error
    for name, content in contents.items():
        atomic_write(place() / name, content)
    return contents


def download(npm, folder):
    """The package's archive, which npm has compared with the registry's checksum."""
    options = ["--pack-destination", str(folder), "--ignore-scripts", "--fetch-retries=1"]
    told = subprocess.run(
        [npm, "pack", f"{PACKAGE}@{VERSION}", *options], cwd=folder, capture_output=True, text=True
    )
    archive = next(folder.glob("*.tgz"), None)
    if told.returncode or archive is None:
        errors = re.findall(r"^npm (?:error|ERR!) +(.+)", told.stderr, re.MULTILINE)
        why = "; ".join(errors[:4]) or f"exit code {told.returncode}"
        raise missing(f"npm could not download it ({why})", "mend that")
    return archive


def unpack(archive):
    """{name: bytes} of the archive's files that a page needs."""
    with tarfile.open(archive) as package:
        contents = {name: package.extractfile(f"package/dist/{name}").read() for name in DIGESTS}
    for name, content in contents.items():
        if not intact(name, content):
            raise missing(
                f"the {name} that npm downloaded is not that of {VERSION}",
                "see which registry npm asks",
            )
    return contents


def intact(name, content):
    return hashlib.sha256(content).hexdigest() == DIGESTS[name]


def place():
    """The folder of this version in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rawtree" / f"{PACKAGE}-{VERSION}"


def missing(why, mend):
    return UserError(
        f"a page that runs the model needs {PACKAGE} {VERSION}, and {why}; {mend}, "
        f"or put {SCRIPT} and {PROGRAM} from the package's folder dist into {place()}"
    )


def main():
    try:
        runtime()
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(place())
    return DONE


if __name__ == "__main__":
    sys.exit(main())
