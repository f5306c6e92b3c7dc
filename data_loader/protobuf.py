"""A decoder for tf.train.Example: the part of the protocol buffer wire format that it uses.

Bytes that are not such a message raise ValueError or TypeError.
"""

import numpy as np

BYTES, FLOATS, INTS = 1, 2, 3  # the field numbers of a Feature's lists
FIXED = {1: 8, 5: 4}  # wire types of fixed width: their number of bytes


def features(record):
    """{name: encoded Feature} of a serialized Example."""
    encoded_features = {}
    for message in numbered(1, memoryview(record)):
        for entry in numbered(1, message):
            pair = {number: value for number, _, value in fields(entry)}
            encoded_features[str(pair.get(1, b""), "utf-8")] = pair.get(2, b"")
    return encoded_features


def values(feature):
    """A list of bytes, or an array of float32 or int64; None if the feature is empty."""
    result = None
    for kind, _, content in fields(feature):
        if kind == BYTES:
            result = [bytes(value) for value in numbered(1, content)]
        elif kind == FLOATS:  # packed or not, the bytes are those of the numbers in order
            result = np.frombuffer(b"".join(numbered(1, content)), "<f4")
        elif kind == INTS:
            packed = [
                value if wire == 2 else encoded(value)
                for number, wire, value in fields(content)
                if number == 1
            ]
            result = varints(b"".join(packed))
    return result


def numbered(wanted, data):
    """The values of all fields with one field number."""
    return [value for number, _, value in fields(data) if number == wanted]


def fields(data):
    """Yield (number, wire type, value) of each field; the value is an int (varint) or bytes."""
    offset = 0
    while offset < len(data):
        key, offset = varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = varint(data, offset)
        elif wire == 2 or wire in FIXED:
            size, offset = varint(data, offset) if wire == 2 else (FIXED[wire], offset)
            value, offset = data[offset : offset + size], offset + size
            if offset > len(data):
                raise ValueError(f"a field of {size} bytes is cut off")
        else:
            raise ValueError(f"wire type {wire} is unknown")
        yield number, wire, value


def varint(data, offset):
    """(an unsigned number, the offset after it): seven bits per byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            break
        byte, offset = data[offset], offset + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
    raise ValueError("a number does not end")


def encoded(number):
    """The bytes from which `varint` reads the number."""
    shifts = range(0, max(number.bit_length(), 1), 7)
    return bytes((number >> shift & 127) | (128 if number >> shift + 7 else 0) for shift in shifts)


def varints(data):
    """The int64 numbers of a packed list; vectorized, since on tokens a loop dominates the time."""
    data = np.frombuffer(data, np.uint8)
    if not len(data):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(data < 128) + 1
    sizes = np.diff(ends, prepend=0)
    if not len(ends) or ends[-1] != len(data) or sizes.max() > 10:
        raise ValueError("a number does not end")
    starts = ends - sizes
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, sizes)).astype(np.uint64)
    return np.add.reduceat((data & 127).astype(np.uint64) << shifts, starts).view(np.int64)
