"""The build backend of `pip install .`: a wheel in which this project is one package, `rawtree`.

A clone has its folders at the top, where `import model` is short, and where one edits them. In the
wheel they are inside `rawtree/`, and each import of one from another gets `rawtree.` in front. The
names are found in the syntax tree, so nothing else changes, and no line moves. It needs the
standard library alone, so that pip downloads nothing in order to build.
"""

import ast
import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = ("tests", "benchmarks")
# Read by the code, an editor or a type checker; all other files are Python.
DATA = ("*.json", "*.js", "*.css", "*.html", "py.typed")
TOP_DATA = ("config.schema.json", "logger_config.json")
# How messages and docstrings call the programs and the requirements, in a clone and installed.
WORDS = {
    "python train.py": "rawtree train",
    "python sweep.py": "rawtree sweep",
    "python inference/convert_tflite.py": "rawtree convert",
    "python inference/predict.py": "rawtree predict",
    "python -m inference.generate": "rawtree generate",
    "python -m inference.to_torch": "rawtree to_torch",
    "python -m data_loader.tokenize": "rawtree tokenize",
    "python -m wiring.schema": "rawtree schema",
    "pip install -r training/optional.txt": "pip install rawtree[optional]",
    "pip install -r inference/requirements.txt": "pip install rawtree[export]",
}


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel, and return the name of its file."""
    version = setting("version")
    info = f"rawtree-{version}.dist-info"
    files = {f"rawtree/{path.as_posix()}": content(ROOT / file) for path, file in shipped().items()}
    files[f"{info}/METADATA"] = metadata(version).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nrawtree = rawtree.__main__:main\n"
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD").encode()
    name = f"rawtree-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return name


def shipped() -> dict[Path, Path]:
    """{path in the package: path in the clone} of every file. A folder without __init__.py belongs
    to the package only by its data: exports and runs of a clone lie in such folders."""
    found = {Path(path.name): Path(path.name) for path in ROOT.glob("*.py")}
    found |= {Path(name): Path(name) for name in TOP_DATA}
    for path in sorted(ROOT.glob("configs/*.json")):
        found[path.relative_to(ROOT)] = path.relative_to(ROOT)
    for package in sorted(path.parent for path in ROOT.glob("*/__init__.py")):
        if package.name not in NOT_SHIPPED:
            for path in inside(package):
                below = path.relative_to(package if package.name == "rawtree" else ROOT)
                found[below] = path.relative_to(ROOT)
    return found


def inside(package: Path) -> Iterator[Path]:
    """The files of a package and of the packages in it."""
    for pattern in ("*.py", *DATA, "rule_files/*.json", "template/*"):
        yield from sorted(path for path in package.glob(pattern) if path.is_file())
    for inner in sorted(package.glob("*/__init__.py")):
        yield from inside(inner.parent)


def content(path: Path) -> bytes:
    """The bytes of a file as they are in the wheel."""
    if path.suffix != ".py" or path.parent.name == "template":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    for ours, installed in WORDS.items() if path != Path(__file__).resolve() else ():
        text = text.replace(ours, installed)
    return with_prefix(text, path).encode()


def with_prefix(text: str, path: str | Path = "<text>") -> str:
    """The source with `rawtree.` before each name of ours that it imports."""
    ours = {file.stem for file in ROOT.glob("*.py")}
    ours |= {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"rawtree"}
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and ours & {a.name.split(".")[0] for a in node.names}:
            raise SystemExit(f"{path}, line {node.lineno}: write this as `from ... import ...`")
        if isinstance(node, ast.ImportFrom) and f"{node.module}".split(".")[0] in ours:
            line, start = lines[node.lineno - 1], node.col_offset
            changed = re.sub(rb"^from +", rb"from rawtree.", line[start:])
            lines[node.lineno - 1] = line[:start] + changed
    return b"".join(lines).decode()


def setting(name: str) -> str:
    """The value of a line `name = "value"` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(rf'^{name} = "(.*)"$', text, re.MULTILINE)[0]


def metadata(version: str) -> str:
    """What pip and a package index show, with what is required."""
    lines = ["Metadata-Version: 2.4", "Name: rawtree", f"Version: {version}"]
    lines += [f"Summary: {setting('description')}", "License-Expression: Apache-2.0"]
    lines += ["License-File: LICENSE", f"Requires-Python: {setting('requires-python')}"]
    lines += [f"Requires-Dist: {package}" for package in required("training/requirements.txt")]
    for extra, file in {
        "optional": "training/optional",
        "export": "inference/requirements",
    }.items():
        lines.append(f"Provides-Extra: {extra}")
        for package in required(f"{file}.txt"):
            name, _, marker = package.partition("; ")
            condition = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            lines.append(f"Requires-Dist: {name}; {condition}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def required(file: str) -> Iterator[str]:
    """The packages of a requirements file, from the tested versions up; of JAX, whose minor
    versions change what a program computes, the tested minor version."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.partition(";")[0].split("==") for line in lines if "==" in line)
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "-")):
            name, _, marker = line.partition(";")
            how = "~=" if name in ("jax", "jaxlib") else ">="
            yield f"{name}{how}{tested[name]}" + (f";{marker}" if marker else "")


def record(files: dict[str, bytes], own: str) -> str:
    """The table of all files with their hashes."""
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{own},,\n"])
