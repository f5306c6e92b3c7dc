"""Mutants of the configs of this project, on the command line."""

import json
import random

import numpy as np

from data_loader.digits import draw
from tests.fuzz.bench import of_train
from tests.fuzz.mutants import DOTTED, RAW, STRINGS, as_text, mutated, mutated_text, scalar
from tests.processes import ROOT
from wiring.config import read

BASES = ["config.json", *sorted(f"configs/{p.name}" for p in (ROOT / "configs").glob("*.json"))]


def config_of(base):
    """A config of this project, with its data in the folder of the fuzz."""
    config = read(ROOT / base)
    for key in ("$schema", "extends"):
        config.pop(key, None)
    if config["data"]["name"] == "cifar10":
        config["data"] = {"name": "arrays", "args": {"train": "color.npz", "test": "color.npz"}}
    if config["data"]["name"] == "tokens":
        config["data"] = {"name": "stories", "args": {"count": 400, "length": 64}}
        config["model"]["args"] |= {"dim": 16, "depth": 2, "heads": 2, "vocab_size": 256}
        config["schedule"]["args"]["warmup_steps"] = 1
    return config


def known_keys():
    """[(path, [values])]: every key that the schema of a config knows, and values for it."""
    schema, keys = whole(json.loads((ROOT / "config.schema.json").read_text())), []
    schema |= schema["else"]  # of a config that extends no other
    for name, section in schema["properties"].items():
        for key, value in section.get("properties", {}).items():
            keys.append(((name, key), samples(value)))
    for name, kind in schema["$defs"].items():
        if name not in schema["properties"] or "anyOf" not in kind:
            continue
        parts = [rule for choice in kind["anyOf"] for rule in choice.get("allOf", ())]
        names = [rule["if"]["properties"]["name"]["const"] for rule in parts]
        keys.append(((name,), [[n] for n in names] if kind_is_list(schema, name) else names))
        for part, rule in zip(names, parts, strict=True):
            for key, value in rule["then"]["properties"]["args"].get("properties", {}).items():
                nodes = [{"name": part, "args": {key: each}} for each in samples(value)]
                listed = kind_is_list(schema, name)
                keys.append(((name,), [[node] for node in nodes] if listed else nodes))
    return keys


def whole(schema):
    """A schema with what it refers to in place of the references, but for those to parts."""

    def put_in(value):
        if isinstance(value, list):
            return [put_in(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" not in value:
            return {key: put_in(each) for key, each in value.items()}
        found = schema
        for step in value["$ref"].removeprefix("#/").split("/"):
            found = found[int(step) if isinstance(found, list) else step]
        return value if "allOf" in json.dumps(found) else put_in(found)

    return put_in(schema)


def kind_is_list(schema, name):
    return schema["properties"][name].get("type") == "array"


def samples(value):
    """Values that fit a schema, or nearly."""
    found = [value[key] for key in ("default", "minimum", "maximum", "const") if key in value]
    found += value.get("enum", [])
    for choice in value.get("anyOf", ()):
        found += samples(choice)
    if value.get("type") == "array":
        found += [[], [1], [1, 2, 3], ["x"], [[1]], [0.5]]
    plain = {"integer": [1, 2, 5], "number": [0.1, 1.0, 3.0], "boolean": [True, False]}
    plain |= {"string": ["x", ".*"], "null": [None], "object": [{}]}
    kinds = value.get("type", ())
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        found += plain.get(kind, [])
    return found or [None, 1, "x", []]


KNOWN = known_keys()
KINDS = ("model", "data", "preprocess", "augment", "loss", "metrics", "objective", "optimizer")
KINDS += ("schedule", "update", "callbacks")
LISTS = ("preprocess", "augment", "metrics", "callbacks")
TRAINED = 5  # of so many mutants that are valid, one is trained


def prepare(folder, work):
    """Put small data into the folder of a mutant."""
    x, y = draw(0, 96)
    (work / "data").mkdir()
    for name, rows in (("train", slice(0, 64)), ("t10k", slice(64, 96))):
        (work / "data" / f"{name}-images-idx3-ubyte").write_bytes(idx(x[rows, ..., 0]))
        (work / "data" / f"{name}-labels-idx1-ubyte").write_bytes(idx(y[rows]))
    color = np.repeat(np.pad(x[:64], ((0, 0), (2, 2), (2, 2), (0, 0))), 3, axis=-1)
    np.savez(work / "color.npz", x=color, y=y[:64])


def idx(array):
    """An IDX file."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def written(base, seed, file):
    """Write a mutant; returns the overrides that belong to it."""
    rng, config = random.Random(f"{base} {seed}"), config_of(base)
    form = rng.random()
    if form < 0.12:
        file.write_bytes(mutated_text(json.dumps(config, indent=1), rng))
        return []
    if form > 0.25:
        config = mutated(config, rng, known=KNOWN)
        if rng.random() < 0.2 and isinstance(config, dict):  # dotted names are the user's own code
            kind, name = rng.choice(KINDS), rng.choice(DOTTED)
            node = rng.choice((name, {"name": name, "args": {rng.choice(STRINGS): scalar(rng)}}))
            config[kind] = [node] if kind in LISTS or rng.random() < 0.1 else node
        file.write_text(as_text(config))
        return []
    file.write_text(json.dumps(config))
    keys, values = rng.choice(KNOWN)
    keys = [*keys, *rng.choice(((), (), ("args",), ("name",), ("0",), ("x", "y"), ("",)))]
    value = scalar(rng) if rng.random() < 0.7 else rng.choice(values)
    value = RAW.get(value, value) if isinstance(value, str) else as_text(value)
    return [f"{'.'.join(keys)}={value}"]


def commands(base, seed, work):
    """Write a mutant; yields the commands to try. What is valid is also trained for two steps."""
    overrides = written(base, seed, work / "mutant.json")
    start = ["-c", "mutant.json", *overrides]
    name = f"{overrides} {(work / 'mutant.json').read_bytes()[:1500]}"
    yield of_train(f"--check {name}", [*start, "--check"], '"model"', quick=True)
    if seed % TRAINED == 0 and "distributed" not in name:
        shows = "Two steps of everything went well"
        yield of_train(f"--fast-dev-run {name}", [*start, "--fast-dev-run"], shows)
