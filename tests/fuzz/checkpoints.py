"""Mutants of checkpoints and of the other files of a run, which may be a stranger's: some with a
correct SHA-256, some without."""

import hashlib
import json
import random
import re
import shutil

import numpy as np

import train
from data_loader.digits import draw
from inference import convert_tflite, predict
from inference.load import load
from tests.fuzz.bench import Command, of_train
from tests.fuzz.mutants import DOTTED, as_text, damage, mutated, mutated_bytes, mutated_text, places
from tests.processes import captured
from training.checkpoint import safetensor_file

CONFIG = {
    "title": "Fuzzed",
    "seed": 3,
    "model": {"name": "mlp", "args": {"dims": [4]}},
    "data": {"name": "digits", "args": {"train_size": 40, "test_size": 16}},
    "loader": {"batch_size": 16},
    "preprocess": ["to_unit", "normalize"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "schedule": "cosine",
    "training": {"epochs": 2, "ema": 0.9},
    "checkpoint": {"every_steps": 2, "keep": 3, "save_top_k": 2, "monitor": "test_loss"},
    "logging": {"every_steps": 1, "log_all": True, "report": False},
    "callbacks": [{"name": "early_stopping", "args": {"patience": 3}}],
}
# {base: overrides}; each is trained once, and then copied for every mutant.
BASES = {"plain": [], "replicas": ["training.replicas=2"], "stopped": ["training.epochs=1"]}
QUICK = ("--resume", "--resume --check", "--report")
OVERRIDES = BASES | {"quick": ["training.epochs=1", "training.ema=null"]}  # not exported
CANARY = "open('struck', 'w').write('x')\ndef strike(*args, **keywords):\n    open('struck', 'w')\n"
OTHERS = ("config.json", "environment.json", "metrics.jsonl", "train.log", "finished.json")
OTHERS += ("evaluations.jsonl", "evaluator.json")


def prepare(folder, work):
    """Put what the commands of every base need into the folder of a mutant."""
    (work / "base.json").write_text(json.dumps(CONFIG))
    (work / "canary.py").write_text(CANARY)
    x, y = draw(0, 8)
    np.savez(work / "x.npz", x=x, y=y)


def put_run(base, folder, work):
    """Put the run of a base into the folder of a mutant: trained once, evaluated and exported."""
    made = folder / "runs" / base
    if not made.exists():
        made.mkdir(parents=True)
        (made / "base.json").write_text(json.dumps(CONFIG))
        arguments = ["-c", "base.json", *OVERRIDES[base], "run_name=run", "checkpoint.dir=."]
        code, out, err = captured(made, lambda: train.main(arguments))
        assert code == 0, out + err
        run = made / "Fuzzed" / "run"
        shutil.copytree(run, made / "Fuzzed" / "good")
        if base in BASES:
            captured(made, lambda: train.main(["--watch", str(run)]))
            captured(made, lambda: export(newest(run), made))
    shutil.copytree(made, work / base)


def export(checkpoint, out):
    return convert_tflite.main(
        ["-w", str(checkpoint), "--formats", "onnx", "--name", "exported", "--out", str(out)]
    )


def newest(run):
    """A file of the last checkpoint of a run."""
    return max(run.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)


def signed(header, data):
    """A safetensors file with a correct SHA-256, of the text of its header."""
    header = re.sub(r'("sha256": ?")[^"]*"', lambda m: m[1] + "0" * 64 + '"', header, count=1)
    raw = header.encode("utf-8", "surrogatepass")
    start = len(raw).to_bytes(8, "little") + raw
    digest = hashlib.sha256(start + data).hexdigest().encode()
    return start.replace(b"0" * 64, digest, 1) + data


def mutate(path, rng):
    """Replace a checkpoint by a mutant; returns what was done."""
    raw, kind = path.read_bytes(), rng.choice(("record", "record", "config", "header", "arrays"))
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    record = json.loads(header["__metadata__"]["rawtree"])
    if rng.random() < 0.25:
        path.write_bytes(mutated_bytes(raw, rng))
        return "bytes"
    if kind in ("record", "config"):
        if kind == "record":
            paths = [each for each in places(record) if each[0] != "config"]
            damage(record, rng.choice(paths), rng, paths)
        else:
            record["config"] = mutated(record["config"], rng)
            if rng.random() < 0.3:
                part = rng.choice(("model", "loss", "schedule", "optimizer", "data"))
                record["config"][part] = rng.choice(("canary.strike", rng.choice(DOTTED)))
        header["__metadata__"]["rawtree"] = as_text(record)
        text = json.dumps(header, separators=(",", ":"))
    elif kind == "header":
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        if rng.random() < 0.2:
            text = mutated_text(json.dumps(header, separators=(",", ":")), rng)
            text = text.decode(errors="replace")
        else:
            head = {"__metadata__": header["__metadata__"]}
            text = as_text(head | mutated(entries, rng)).replace('": {"sha256": "', '":{"sha256":"')
            text = text.replace('", "rawtree"', '","rawtree"', 1)
    else:
        arrays, record = safetensor_file.read(path)
        name = rng.choice(list(arrays))
        change = rng.choice(("nan", "shape", "type", "drop", "name", "scalar", "huge"))
        array = arrays.pop(name)
        if change != "drop":
            arrays[name + "x" * (change == "name")] = {
                "nan": lambda: np.full_like(array, np.nan if array.dtype.kind == "f" else 77),
                "shape": lambda: array.reshape(1, *array.shape),
                "type": lambda: array.astype(
                    rng.choice((np.float16, np.int64, np.bool_, np.uint8))
                ),
                "name": lambda: array,
                "scalar": lambda: np.resize(array, ()),
                "huge": lambda: np.full_like(
                    array, 2**31 - 1 if array.dtype.kind in "iu" else 1e38
                ),
            }[change]()
        safetensor_file.write(path, arrays, record)
        return f"{change} of {name}"
    path.write_bytes(signed(text, data))
    return f"{kind} {text[:3000]}"


def mutate_other(run, rng):
    """Replace another file of a run by a mutant; returns what was done."""
    path = run / rng.choice(OTHERS)
    text = path.read_text() if path.exists() else '{"best": [["checkpoint-epoch_1", 0.5]]}\n'
    if path.suffix == ".log" or rng.random() < 0.3:
        path.write_bytes(mutated_text(text, rng))
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        i = rng.randrange(len(lines))
        lines[i] = as_text(mutated(json.loads(lines[i]), rng))
        path.write_text("\n".join(lines) + "\n")
    else:
        value = mutated(json.loads(text), rng)
        if path.name == "config.json" and rng.random() < 0.3:
            value["loss"] = "canary.strike"
        path.write_text(as_text(value))
    return f"{path.name}: {path.read_bytes()[:1500]}"


def commands(base, seed, work):
    """Change a run, and yield every command that reads one; each gets a copy."""
    put_run(base, work.parent, work)
    rng, run = random.Random(f"{base} {seed}"), work / base / "Fuzzed" / "run"
    paths = sorted(run.glob("checkpoint-*"))
    if rng.random() < 0.7:
        done = " and ".join(mutate(path, rng) for path in paths)
    else:
        done = mutate_other(run, rng)
    report = work / base / "exported" / "verification.json"
    if report.exists():
        report.write_text(as_text(mutated(json.loads(report.read_text()), rng)))
    checkpoint = rng.choice(paths).relative_to(work)
    run, good = run.relative_to(work), run.with_name("good").relative_to(work)
    pristine = shutil.copytree(work, work.with_name(f"{work.name}-copy"))
    config = ["-c", "base.json", *OVERRIDES[base], f"checkpoint.dir={base}"]
    lines = {
        "--resume": ["--resume", str(run)],
        "--resume more": [*config, "--resume", str(run), "training.epochs=3", "--override"],
        "--resume auto": [*config, "--resume", "auto", "run_name=run"],
        "--resume --check": ["--resume", str(run), "--check"],
        "--evaluate": ["--evaluate", str(checkpoint)],
        "--evaluate -c": [*config, "--evaluate", str(checkpoint)],
        "--watch": ["--watch", str(run)],
        "--report": ["--report", str(run)],
        "--report two": ["--report", str(run), str(good)],
        "--check": [*config, "--check", f"training.pretrained={checkpoint}"],
    }
    if seed % 4 == 0:
        pretrained = f'{{"path": "{checkpoint}", "fresh": ["out/.*"]}}'
        lines["pretrained"] = [*config, "--fast-dev-run", f"training.pretrained={pretrained}"]
    found = [of_train(name, line, quick=name in QUICK) for name, line in lines.items()]
    exported = f"{base}/exported/exported.onnx"
    found.append(Command("predict", lambda: predict.main([str(checkpoint), "x.npz"])))
    found.append(Command("predict of an export", lambda: predict.main([exported, "x.npz"])))
    found.append(Command("load", lambda: loaded(run)))
    if seed % 10 == 0:
        found.append(Command("export", lambda: export(checkpoint, "out")))
    if base == "quick":
        found = [command for command in found if command.quick]
    try:
        for command in found:
            shutil.rmtree(work)
            shutil.copytree(pristine, work)
            yield command._replace(name=f"{command.name} {checkpoint.name} {done}")
    finally:
        shutil.rmtree(pristine)


def loaded(run):
    """Load a model and use it, as a user's script does."""
    import sys

    from utils import RunError, UserError

    try:
        load(run).predict(np.load("x.npz")["x"])
    except (UserError, RunError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
