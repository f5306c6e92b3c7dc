"""The metadata of an exported file: title, classes, preprocessing, code.

ONNX has them as `metadata_props`. TFLite has them in the form that MediaPipe and Android's Task
Library read, with the class names in `labels.txt`; the file is a zip archive as well, which holds
`labels.txt` and `metadata.json`.
"""

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.packages import Flat, quiet, read_tflite, tflite_bytes
from utils.files import atomic_write, parse_json, read_file

if TYPE_CHECKING:
    from flatbuffers import Builder

    from inference.load import Exportable
    from inference.lowering.trace import Traced


STANDARD, IDENTIFIER = "TFLITE_METADATA", b"M001"  # the entry in the file, and its schema
LABELS = "labels.txt"
AXIS_LABELS = 2  # AssociatedFileType.TENSOR_AXIS_LABELS


def facts_of(
    exportable: "Exportable", title: str, source: str | None, commit: str | None
) -> dict[str, Any]:
    """The metadata of a file, {key: value}."""
    return {
        "title": title,
        "source": source,
        "code_commit": commit,
        "input_layout": exportable.form.layout,
        "preprocess": [] if exportable.form.preprocess else exportable.config.get("preprocess", []),
        "outputs_are": exportable.output_kind,
        "classes": list(map(str, exportable.classes or [])),
        # Of a table: a category is its place in the list, from 1; 0 is any other.
        "columns": exportable.parts.facts.get("columns"),
    }


def commit_of(checkpoint: str | Path) -> str | None:
    """The git commit of the code that trained a checkpoint, as its run recorded it; else None."""
    file = Path(checkpoint).parent / "environment.json"
    try:
        commit = parse_json(read_file(file)).get("git_commit")
    except (OSError, ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None


def known(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that are not empty."""
    return {key: value for key, value in facts.items() if value not in (None, [], {})}


def as_texts(facts: dict[str, Any]) -> dict[str, str]:
    """The known facts as texts."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in known(facts).items()
    }


def add_metadata(path: Path, facts: dict[str, Any]) -> None:
    """Store the facts in a file, as its format stores metadata."""
    if path.suffix == ".onnx":
        add_to_onnx(path, facts)
    elif path.suffix == ".tflite":
        add_to_tflite(path, facts)


def add_to_onnx(path: Path, facts: dict[str, Any]) -> None:
    import onnx
    from onnx import helper

    model = onnx.load(path, load_external_data=False)
    helper.set_model_props(model, as_texts(facts))
    model.graph.name = facts["title"]
    atomic_write(path, model.SerializeToString())


def add_to_tflite(path: Path, facts: dict[str, Any]) -> None:
    from tensorflow.lite.python import schema_py_generated as schema

    with quiet():
        model = read_tflite(path.read_bytes())
        buffer: Flat = schema.BufferT()
        entry = schema.MetadataT()
        buffer.data = standard_metadata(facts, model.signatureDefs or [])
        entry.name, entry.buffer = STANDARD, len(model.buffers)
        model.buffers.append(buffer)
        model.metadata = [*(model.metadata or []), entry]
        atomic_write(path, tflite_bytes(model))
    with zipfile.ZipFile(path, "a") as archive:  # the runtimes ignore what follows the model
        archive.writestr("metadata.json", json.dumps(known(facts), indent=2, default=str))
        if facts["classes"]:
            archive.writestr(LABELS, "\n".join(facts["classes"]) + "\n")


def standard_metadata(facts: dict[str, Any], signatures: list[Any]) -> list[int]:
    """The bytes of a ModelMetadata table of metadata_schema.fbs."""
    import flatbuffers

    builder = flatbuffers.Builder()

    def tensors(described: list[Any], is_output: bool) -> list[int]:
        tables = []
        for tensor in described:
            name = tensor.name.decode()
            fields = {0: name, 2: list(map(str, facts["sizes"].get(name, [])))}
            if is_output and facts["classes"]:
                fields[6] = [table(builder, {0: LABELS}, {2: AXIS_LABELS})]
            tables.append(table(builder, fields))
        return tables

    graphs = [
        table(
            builder, {0: s.signatureKey, 2: tensors(s.inputs, False), 3: tensors(s.outputs, True)}
        )
        for s in sorted(signatures, key=lambda signature: signature.subgraphIndex)
    ]
    texts = as_texts(facts)
    about = "; ".join(f"{key}: {value}" for key, value in texts.items() if key != "title")
    fields = {0: facts["title"], 1: about, 2: facts["code_commit"], 3: graphs}
    builder.Finish(table(builder, fields), IDENTIFIER)
    return list(builder.Output())


def table(builder: "Builder", fields: dict[int, Any], small: dict[int, int] | None = None) -> int:
    """The offset of a table, {number of a field: text, or list of texts or tables}.

    `small` are its fields of one byte.
    """
    offsets = {
        number: offset_of(builder, value) for number, value in fields.items() if value is not None
    }
    builder.StartObject(10)
    for number, offset in offsets.items():
        builder.PrependUOffsetTRelativeSlot(number, offset, 0)
    for number, value in (small or {}).items():
        builder.PrependInt8Slot(number, value, 0)
    return builder.EndObject()


def offset_of(builder: "Builder", value: Any) -> int:
    """The offset of a text, or of a list of texts or tables."""
    if isinstance(value, str | bytes):
        return builder.CreateString(value)
    offsets = [builder.CreateString(x) if isinstance(x, str) else x for x in value]
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def size_names(traced: "Traced") -> dict[str, list[str]]:
    """{input or output: its sizes as texts}, in which the free ones have names."""
    return {
        name: [str(size) for size in aval.shape]
        for avals in (traced.inputs, traced.outputs)
        for name, aval in avals.items()
    }
