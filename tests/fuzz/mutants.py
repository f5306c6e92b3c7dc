"""Damage values, JSON text and bytes at random, always from a seeded generator."""

import copy
import json

# Text that json.dumps cannot write: it is put in place of these strings afterwards.
RAW = {
    "@digits@": "9" * 5000,
    "@overflow@": "1e999",
    "@list@": "[" * 20_000 + "]" * 20_000,
    "@object@": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "@half@": r'"\ud800"',
}
NUMBERS = (0, 1, 2, 3, 7, -1, -7, 1000, 10**5, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64)
NUMBERS += (10**30, -(2**63), 0.5, -0.5, 1.5, -0.0, 1e-30, 1e-320, 1e30, 1e300, -1e30)
NUMBERS += (float("nan"), float("inf"), float("-inf"))
STRINGS = ("", " ", ".", "..", "../x", "/", "/proc/1/x", "/dev/null", "~", "~/x", "a/b", "a\0b")
STRINGS += ("x" * 300, "y" * 5000, "ü" * 200, "\n", "a\nb", "\x1b[31m", "\u202e", "null", "auto")
STRINGS += ("(", "(a+)+$", ".*", "[a", "%s", "{}", "{0.__class__}", "-1", "nan", "true", "1e3")
STRINGS += ("CON", "train_loss", "test_loss", "loss", "checkpoint-epoch_1", "con:x", "é", "'\"")
DOTTED = ("builtins.dict", "builtins.print", "builtins.int", "builtins.type", "builtins.object")
DOTTED += ("functools.partial", "functools.reduce", "sys.exit", "os.getpid", "builtins.vars")
DOTTED += ("os.getcwd", "math.sqrt", "jax.numpy.zeros", "jax.jit", "numpy.array", "json.loads")
DOTTED += ("os.path", "no.such", "a..b", ".a", "a.", "canary.strike", "builtins.max", "re.compile")
DOTTED += ("optax.adam", "operator.itemgetter", "collections.Counter", "builtins.StopIteration")
OTHERS = (None, True, False, [], {}, [[]], [None], {"": 0}, {"name": None}, {"args": {}}, [{}])


def scalar(rng):
    """A value that does not belong anywhere in particular."""
    pool = rng.choices((NUMBERS, STRINGS, DOTTED, OTHERS, tuple(RAW)), (6, 5, 2, 3, 1))[0]
    return copy.deepcopy(rng.choice(pool))


def places(value, path=()):
    """The path of every value inside another."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value, path):
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def mutated(value, rng, times=None, known=()):
    """A damaged copy of a JSON value. `known` are (path, [values]) that fit a config, so that also
    what the value does not mention is tried."""
    value = copy.deepcopy(value)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        paths = list(places(value))
        if not paths or (known and rng.random() < 0.35):
            if known:
                add_known(value, rng, known)
            continue
        damage(value, rng.choice(paths), rng, paths)
    return value


def add_known(value, rng, known):
    """Set a key that a config may have, to a value that may fit."""
    (*keys, last), candidates = rng.choice(known)
    for key in keys:
        inner = value.get(key) if isinstance(value, dict) else None
        if isinstance(inner, str):
            value[key] = {"name": inner}
        elif not isinstance(inner, dict) and isinstance(value, dict):
            value[key] = {}
        elif not isinstance(value, dict):
            return
        value = value[key]
    if isinstance(value, dict):
        value[last] = scalar(rng) if rng.random() < 0.4 else copy.deepcopy(rng.choice(candidates))


def damage(root, path, rng, paths):
    """Damage the value at a path in place."""
    parent, key = at(root, path[:-1]), path[-1]
    kind = rng.choice(("set", "set", "set", "delete", "swap", "wrap", "key", "near", "repeat"))
    if kind == "delete":
        del parent[key]
    elif kind == "swap":
        parent[key] = copy.deepcopy(at(root, rng.choice(paths)))
    elif kind == "wrap":
        parent[key] = rng.choice(([parent[key]], {"name": parent[key]}, {"args": parent[key]}))
    elif kind == "key" and isinstance(parent, dict):
        new = rng.choice((f"{key}x", f"{key}"[:-1], scalar(rng)))
        parent[new if isinstance(new, str) else json.dumps(new)] = parent.pop(key)
    elif kind == "near" and isinstance(parent[key], int | float):
        parent[key] = rng.choice((-parent[key], parent[key] * 1000, parent[key] + 0.5, 0))
    elif kind == "repeat" and isinstance(parent[key], list):
        parent[key] = parent[key] * rng.choice((2, 6))
    elif kind == "repeat" and isinstance(parent[key], str):
        parent[key] = parent[key] * rng.choice((2, 2000))
    else:
        parent[key] = scalar(rng)


def as_text(value):
    """JSON text with what json.dumps cannot write."""
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text


def mutated_text(text, rng):
    """Damaged text."""
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    kind = rng.choice(("cut", "drop", "insert", "twice", "bytes", "empty", "nest"))
    if kind == "cut":
        return text[:i].encode()
    if kind == "drop":
        return (text[:i] + text[j:]).encode()
    if kind == "twice":
        return (text[:j] + text[i:]).encode()
    if kind == "bytes":
        return text[:i].encode() + rng.randbytes(rng.choice((1, 4))) + text[i:].encode()
    if kind == "empty":
        return rng.choice((b"", b"\0" * 9, b"\xff\xfe{\0}\0", b"null", b"[]", b"\xef\xbb\xbf"))
    if kind == "nest":
        return text.replace(rng.choice((":", ",")), rng.choice(("::", ",,", ":[")), 1).encode()
    return (text[:i] + rng.choice("{}[],:\"\\'/#\0\x7fé") + text[i:]).encode()


def mutated_bytes(data, rng):
    """Damaged bytes."""
    data, kind = (
        bytearray(data),
        rng.choice(("flip", "flip", "cut", "drop", "insert", "long", "set")),
    )
    at = rng.randrange(min(len(data), rng.choice((64, 512, 10**9))) or 1)
    if kind == "cut":
        return bytes(data[:at])
    if kind == "drop":
        del data[at : at + rng.choice((1, 8, 300))]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.choice((1, 8, 300)))
    elif kind == "long":
        data += rng.choice((b"\0", bytes(data[:300]), rng.randbytes(40)))
    elif kind == "set":
        count = rng.choice((1, 4, 8))
        data[at : at + count] = rng.choice((b"\0", b"\xff", b"\x7f")) * count
    else:
        for _ in range(rng.choice((1, 1, 3, 20))):
            at = rng.randrange(min(len(data), rng.choice((64, 512, 10**9))) or 1)
            data[at : at + 1] = bytes([(data[at] if data else 0) ^ 1 << rng.randrange(8)])
    return bytes(data)
