"""Several TFLite files as one file with a signature for each, which shares their weights."""

from inference.metadata import add_metadata
from utils import RunError


def write_merged(path, files, inputs, facts, call):
    """Write several TFLite files, {signature: path}, as one file with these metadata. `call` runs
    `check_signatures`, which compares it with them on the `inputs`, in another process."""
    path.write_bytes(merged({name: file.read_bytes() for name, file in files.items()}))
    add_metadata(path, facts)
    call("comparing the signatures", check_signatures, path, files, inputs)


def merged(files):
    """The bytes of one TFLite file with the graphs of several, {signature: bytes of a file}."""
    from tensorflow.lite.tools import flatbuffer_utils

    models = [
        flatbuffer_utils.convert_bytearray_to_object(bytearray(data)) for data in files.values()
    ]
    whole = flatbuffer_utils.convert_bytearray_to_object(bytearray(next(iter(files.values()))))
    empty = next(buffer for buffer in whole.buffers if buffer.data is None)
    whole.subgraphs, whole.signatureDefs, whole.metadata = [], [], []
    whole.operatorCodes, whole.buffers = [], [empty]
    buffers, codes = {b"": 0}, {}  # {content: index in the file}
    for name, model in zip(files, models, strict=True):
        first = len(whole.subgraphs)
        new_codes = [
            index_of(code, str(sorted(vars(code).items())), codes, whole.operatorCodes)
            for code in model.operatorCodes
        ]
        for number, graph in enumerate(model.subgraphs):
            graph.name = name if number == 0 else f"{name}/{number}"
            for tensor in graph.tensors:
                buffer = model.buffers[tensor.buffer]
                tensor.buffer = index_of(buffer, content(buffer), buffers, whole.buffers)
            for op in graph.operators:
                op.opcodeIndex = new_codes[op.opcodeIndex]
                move_subgraphs(op.builtinOptions, first)
        (signature,) = model.signatureDefs
        signature.signatureKey, signature.subgraphIndex = name, signature.subgraphIndex + first
        whole.signatureDefs.append(signature)
        whole.subgraphs += model.subgraphs
    return bytes(flatbuffer_utils.convert_object_to_bytearray(whole))


def content(buffer):
    return b"" if buffer.data is None else bytes(buffer.data)


def index_of(item, key, indices, items):
    """The index of an item in the file, to which it is added if none has its content."""
    if key not in indices:
        indices[key] = len(items)
        items.append(item)
    return indices[key]


def move_subgraphs(options, first):
    """Add `first` to the graphs that a loop or a branch calls."""
    for key, value in vars(options or object).items():
        if key.lower().endswith("subgraphindex"):
            setattr(options, key, value + first)


def check_signatures(path, files, inputs):
    """Raise unless each signature computes bit for bit what its original file computes.

    `files` are {signature: path}, `inputs` {signature: {input: array}}.
    """
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    from inference.packages import quiet

    for name, file in files.items():
        with quiet():
            both = [
                Interpreter(str(each), num_threads=1).get_signature_runner(key)(**inputs[name])
                for each, key in ((path, name), (file, None))
            ]
        if any(
            not np.array_equal(*pair, equal_nan=True)
            for pair in zip(*map(ordered, both), strict=True)
        ):
            raise RunError(f"{path.name}: the signature {name} computes something else")


def ordered(outputs):
    return [outputs[name] for name in sorted(outputs)]
