"""Write a traced function as an ONNX file."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from inference.lowering.complex_numbers import is_complex_type
from inference.lowering.onnx_ops import LAYERS, PRIMITIVES
from inference.lowering.onnx_ops.target import OnnxTarget, graph_proto
from inference.lowering.onnx_ops.tidy import tidy
from inference.lowering.trace import Traced
from inference.lowering.walk import Walk, located
from inference.quantize_onnx import PRODUCER
from utils import UserError
from utils.files import atomic_write

if TYPE_CHECKING:
    from onnx import ModelProto

OPSETS = range(18, 24)
LARGE = 2**31 - 2**24  # bytes of weights; a protobuf message has less than 2**31, with its nodes


def write_onnx(traced: Traced, path: Path, opset: int = 20) -> None:
    """Write a traced function as an ONNX file that passes ONNX's full check."""
    model = onnx_model(traced, opset)
    if sum(weight.ByteSize() for weight in model.graph.initializer) < LARGE:
        check(model)
        atomic_write(path, model.SerializeToString())
    else:
        write_with_external_data(model, path)


def write_with_external_data(model: "ModelProto", path: Path) -> None:
    """Write the weights as <name>.data beside the file, since protobuf ends at 2 GB."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx") as name:
        folder = Path(name)
        written = folder / path.name
        onnx.save_model(model, written, save_as_external_data=True, location=f"{path.name}.data")
        onnx.checker.check_model(written, full_check=True)
        for file in (f"{path.name}.data", path.name):
            os.replace(folder / file, path.parent / file)


def onnx_model(traced: Traced, opset: int = 20) -> "ModelProto":
    """A traced function as a ModelProto; raises Missing for a primitive without a table entry."""
    from onnx import helper

    check_types(traced)
    target = OnnxTarget(LAYERS, PRIMITIVES, opset, traced.inputs)
    target.taken.update(traced.outputs)
    with located(walk := Walk(target)):
        outputs = walk.outputs(traced, {name: name for name in traced.inputs})
        for name, value in outputs.items():
            target.result(value, name)
    tidy(target)
    opsets = [helper.make_opsetid("", opset)]
    graph = graph_proto(target.scopes[0], "model", target.weights)
    version = helper.find_min_ir_version_for(opsets)  # most runtimes read the oldest version
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=version, producer_name=PRODUCER
    )


def check_types(traced: Traced) -> None:
    for name, aval in traced.inputs.items():
        if is_complex_type(aval.dtype):
            raise UserError(
                f"{name}: ONNX Runtime takes no {aval.dtype}; pass its real and its imaginary part "
                "as two inputs"
            )


def check(model: "ModelProto") -> None:
    """Check every node against its schema, and every shape."""
    import onnx

    onnx.checker.check_model(model, full_check=True)
