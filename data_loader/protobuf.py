"""tf.train.Example by hand: the wire format of protocol buffers, as far as this one message needs it.

Bytes that are no such message are a ValueError or a TypeError.
"""

import numpy as np

BYTES, FLOATS, INTS = 1, 2, 3  # the numbers of a Feature's lists
FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed width


def features(record):
    """{name: its Feature, not yet decoded} of a serialized Example."""
    found = {}
    for whole in numbered(1, memoryview(record)):
        for entry in numbered(1, whole):
            pair = {number: value for number, _, value in fields(entry)}
            found[str(pair.get(1, b""), "utf-8")] = pair.get(2, b"")
    return found


def values(feature):
    """A list of bytes, or an array of float32 or int64; None where nothing is set."""
    found = None
    for kind, _, inner in fields(feature):
        if kind == BYTES:
            found = [bytes(value) for value in numbered(1, inner)]
        elif kind == FLOATS:  # packed or not, their bytes lie in a row
            found = np.frombuffer(b"".join(numbered(1, inner)), "<f4")
        elif kind == INTS:
            packed = [
                value if wire == 2 else encoded(value)
                for number, wire, value in fields(inner)
                if number == 1
            ]
            found = varints(b"".join(packed))
    return found


def numbered(wanted, data):
    """The values of the fields of one number."""
    return [value for number, _, value in fields(data) if number == wanted]


def fields(data):
    """(number, wire type, value) of each field of a message: an int of a varint, else the bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 2 or wire in FIXED:
            size, at = varint(data, at) if wire == 2 else (FIXED[wire], at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError(f"a field of {size} bytes goes beyond its end")
        else:
            raise ValueError(f"wire type {wire} is not in use")
        yield number, wire, value


def varint(data, at):
    """(an unsigned number, seven bits a byte, the lowest first; where it ends)"""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")


def encoded(number):
    """The bytes of a number, as varint reads them."""
    shifts = range(0, max(number.bit_length(), 1), 7)
    return bytes((number >> shift & 127) | (128 if number >> shift + 7 else 0) for shift in shifts)


def varints(data):
    """The int64 numbers of a packed list, all at once: over a row of tokens a loop would take longer than all else."""
    data = np.frombuffer(data, np.uint8)
    if not len(data):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(data < 128) + 1
    sizes = np.diff(ends, prepend=0)
    if not len(ends) or ends[-1] != len(data) or sizes.max() > 10:
        raise ValueError("a number does not end")
    starts = ends - sizes
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, sizes))
    return np.add.reduceat((data & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).view(
        np.int64
    )
